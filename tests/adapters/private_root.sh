#!/bin/sh
# Runs a command in a root directory of its own: the directories of this machine are there, and new
# ones in / are in memory and vanish with the command. Harbor works in /logs, /tests and /solution.
# usage: private_root.sh EMPTY_DIRECTORY COMMAND...
if [ "$PRIVATE_ROOT" != inside ]; then
    [ "$(id -u)" = 0 ] || user="--user --map-root-user"
    PRIVATE_ROOT=inside exec unshare $user --mount sh "$0" "$@"
fi
new=$1
shift
mount -t tmpfs tmpfs "$new" || exit 1
for each in /*; do
    if [ -L "$each" ]; then
        cp -P "$each" "$new$each"
    elif [ -d "$each" ]; then
        mkdir "$new$each" && mount --rbind "$each" "$new$each" || exit 1
    fi
done
unset PRIVATE_ROOT
exec chroot "$new" "$@"
