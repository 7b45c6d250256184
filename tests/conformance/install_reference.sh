#!/bin/sh
# Puts the reference server where the conformance tests and the benchmark look for it.
# Does nothing when EXEC_SERVER_REFERENCE names one or the right version is there already.
set -eu

version=0.169.0
cache="${XDG_CACHE_HOME:-$HOME/.cache}/exec-server-reference"

if [ -n "${EXEC_SERVER_REFERENCE:-}" ]; then
    echo "using $EXEC_SERVER_REFERENCE"
    exit 0
fi

mkdir -p "$cache/codex-home"
manifest="$cache/node_modules/@openai/codex/package.json"
if [ -f "$manifest" ] && grep -q "\"version\": \"$version\"" "$manifest"; then
    echo "the reference $version is in $cache"
    exit 0
fi

command -v npm >/dev/null || { echo "npm is needed to install the reference" >&2; exit 1; }
npm install --prefix "$cache" --no-fund --no-audit --loglevel=error "@openai/codex@$version"
echo "installed the reference $version in $cache"
