#!/bin/sh
# Prints one interpreter for each supported Python version of this machine, oldest first.
# Looks on PATH and where pyenv keeps its versions.
{
    for minor in 11 12 13 14; do
        command -v "python3.$minor"
    done
    command -v python3
    ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3 2>/dev/null
} | while read -r candidate; do
    "$candidate" -c '
import sys, sysconfig
supported = (3, 11) <= sys.version_info < (3, 15) and sys.version_info.releaselevel == "final"
if supported and not sysconfig.get_config_var("Py_GIL_DISABLED"):
    print("%d.%02d" % sys.version_info[:2], sys.executable)
' 2>/dev/null
done | sort -u -k1,1 | cut -d' ' -f2-
