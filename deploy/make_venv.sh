#!/bin/sh
# make_venv.sh TORCH READY: makes .venv, installs TORCH and requirements.lock into it, and touches READY when all is there.
set -eu
torch=$1
ready=$2

usable='import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'
if [ ! -x .venv/bin/python ]; then
    for python in python3.11 python3.12 python3.13 python3 none; do
        "$python" -c "$usable" 2>/dev/null && break
    done
    if [ "$python" = none ]; then
        echo "error: no Python 3.11, 3.12 or 3.13 that can make a virtual environment (Debian, Ubuntu: apt-get install python3-venv)" >&2
        exit 2
    fi
    echo "making .venv with $("$python" --version)"
    "$python" -m venv .venv
fi

pip='.venv/bin/python -m pip --disable-pip-version-check'
echo "installing $torch (where pip only has the CUDA build for this Python, several GB; it runs on the CPU too, TORCH= chooses another)"
# $torch may carry options of pip's, so it is split into words.
$pip install $torch
echo "installing the pinned dependencies"
$pip install -r requirements.lock
if nvidia-smi -L >/dev/null 2>&1; then
    echo "installing what the GPU engine needs"
    extra='import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["cuda"])'
    $pip install $(.venv/bin/python -c "$extra")
fi
rm -f .venv/.ready-*
touch "$ready"
