#!/bin/sh
# Runs a command in surroundings that no test may depend on: a wide window, an encoding without
# umlauts, a language, a zone, proxies, a home that cannot be written, settings of other programs,
# closed stdin, ignored signals, few descriptors, private files.
# usage: scripts/hostile.sh COMMAND...
blanks=$(mktemp -d "${TMPDIR:-/tmp}/a folder with blanks.XXXXXX") || exit 1
umask 077
ulimit -Sn 256
trap "" HUP INT TERM PIPE USR1   # dash does not ignore CHLD
exec <&-
unset TERM USER LOGNAME
env --ignore-signal=CHLD TMPDIR="$blanks" \
    COLUMNS=140 LINES=7 FORCE_COLOR=1 NO_COLOR=1 \
    LC_ALL=POSIX LANG=de_DE LANGUAGE=de PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 TZ=Pacific/Apia \
    PYTHONWARNINGS=error PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    http_proxy=http://127.0.0.1:9 https_proxy=http://127.0.0.1:9 no_proxy=example.com \
    HTTP_PROXY=http://127.0.0.1:9 HTTPS_PROXY=http://127.0.0.1:9 ALL_PROXY=socks5://127.0.0.1:9 \
    HOME=/proc SHELL=/bin/false EDITOR=/bin/false BASH_ENV=/dev/full ENV=/dev/full \
    XDG_CONFIG_HOME=/proc XDG_STATE_HOME=/proc XDG_DATA_HOME=/proc XDG_CACHE_HOME=/proc \
    XDG_RUNTIME_DIR=/proc SSL_CERT_FILE=/dev/null \
    EXEC_SERVER_TARGET=nowhere EXEC_SERVER_URL=nonsense EXEC_SERVER_LOG=loud \
    EXEC_SERVER_API_KEY=secret EXEC_SERVER_EXIT_ON_STDIN_CLOSE=1 \
    CODEX_HOME=/nonexistent CODEX_EXEC_SERVER_URL=ws://127.0.0.1:9 OPENAI_API_KEY=secret \
    MAKEFLAGS=w MAKELEVEL=3 CDPATH=/ GREP_OPTIONS=-v POSIXLY_CORRECT=1 \
    GIT_DIR=/nonexistent GIT_CONFIG_GLOBAL=/nonexistent \
    "$@"
status=$?
rm -rf "$blanks"
exit $status
