#!/usr/bin/env bash
# An sdist and a wheel for each Python into dist/: the given ones, or those of 3.10 to 3.13 that are on the PATH. A
# Python with setuptools and pybind11 needs no network; for others pip gets them. All GPU architectures, unless
# ZEROFP4_CUDA_ARCHS says otherwise. Only the bindings are compiled for each Python: the rest is compiled once.
#
# They have no zerofp4._autograd, which is for one torch alone, unless ZEROFP4_AUTOGRAD=1 asks for that of the torch here.
#
# The wheels are tagged linux_<machine> and take the C++ and OpenMP runtime of the system. To publish them, build in a
# manylinux image and run auditwheel repair.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export ZEROFP4_CUDA_ARCHS=${ZEROFP4_CUDA_ARCHS:-all} ZEROFP4_AUTOGRAD=${ZEROFP4_AUTOGRAD:-0} PIP_DISABLE_PIP_VERSION_CHECK=1
cd "$ROOT"

say() { printf -- '-- %s\n' "$*"; }

has_tools() {
    "$1" -c '
import pybind11, setuptools
assert int(setuptools.__version__.split(".")[0]) >= 77 and pybind11.version_info >= (2, 13)' 2>/dev/null
}

# pythons: those that run, one of each version. A name on the PATH may belong to a version that is not chosen.
pythons() {
    local version
    for version in 3.10 3.11 3.12 3.13; do
        if "python$version" -c '' 2>/dev/null; then command -v "python$version"; fi
    done
}

if (($# == 0)); then
    mapfile -t found < <(pythons)
    set -- "${found[@]}"
fi
(($#)) || { say "there is no Python of 3.10 to 3.13 on the PATH" && exit 1; }

rm -rf build/lib.* build/bdist.* # else a wheel would have modules that are gone since the last one
failed=()
made_sdist=
for python in "$@"; do
    options=(--no-deps --wheel-dir dist --verbose)
    ! has_tools "$python" || options+=(--no-build-isolation)
    if has_tools "$python" && [[ -z $made_sdist ]]; then
        say "sdist with $("$python" -V)"
        "$python" setup.py --quiet sdist --dist-dir dist && made_sdist=1
    fi
    say "wheel for $("$python" -V)"
    "$python" -m pip wheel "${options[@]}" . || failed+=("$python")
done
ls -l dist
[[ -n $made_sdist ]] || say "no sdist: none of these has setuptools and pybind11"
((${#failed[@]} == 0)) || { say "no wheel for ${failed[*]}" && exit 1; }
