#!/usr/bin/env bash
# An sdist and a wheel into dist/, with the given Python or python3, for that Python and the torch that it has. It needs
# setuptools, pybind11, cmake and ninja, and no network. All GPU architectures, unless ZEROFP4_CUDA_ARCHS says otherwise.
#
# The wheel is tagged linux_<machine> and takes the C++ and OpenMP runtime of the system. To publish it, build in a
# manylinux image and run auditwheel repair.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export ZEROFP4_CUDA_ARCHS=${ZEROFP4_CUDA_ARCHS:-all} PIP_DISABLE_PIP_VERSION_CHECK=1
python=${1:-python3}

rm -rf build/lib.* build/bdist.* # else a wheel would have modules that are gone since the last one
"$python" setup.py --quiet sdist --dist-dir dist
"$python" -m pip wheel --no-build-isolation --no-deps --wheel-dir dist --verbose .
ls -l dist
