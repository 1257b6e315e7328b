# Sourced by test.sh. test_sanitized runs pytest on an extension that was built with sanitizers.

SANITIZED=build/sanitized
ROOMS=(tests/{ops,cast,tensors,optim,gemm,nn,reference,storage})

# library NAME: where the compiler of the extension has it.
library() {
    local path
    path=$(${CXX:-g++} -print-file-name="$1")
    [[ $path == /* ]] || fail "${CXX:-g++} has no $1: apt-get install g++ brings it"
    printf '%s' "$path"
}

# A whole package in a folder of its own, so that the extension for daily use stays.
build_sanitized() {
    rm -rf "$SANITIZED"
    ZEROFP4_CUDA=0 ZEROFP4_SANITIZE=1 "$PYTHON" setup.py --quiet \
        build_py --build-lib "$SANITIZED" build_ext --build-lib "$SANITIZED" || fail "the extension did not build"
}

# with_sanitizers COMMAND...: their libraries come first, since the interpreter does not bring them. libstdc++ is there
# for its exceptions, which AddressSanitizer looks up when it starts. Python keeps memory at its end: no leaks.
# pytest leaves file descriptor 2 alone, which reports are written to.
with_sanitizers() {
    local preload
    preload=$(library libasan.so):$(library libubsan.so):$(library libstdc++.so)
    env LD_PRELOAD="$preload" PYTHONPATH="$ROOT/$SANITIZED" \
        ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
        PYTEST_ADDOPTS="-o 'pythonpath=$SANITIZED . tests' --capture=sys" "$@"
}

# test_sanitized [PYTEST'S ARGUMENTS]: those in place of the rooms and of the other instruction sets.
test_sanitized() {
    say "building $SANITIZED"
    build_sanitized
    say "pytest with sanitizers"
    if (($#)); then
        with_sanitizers "$PYTHON" -m pytest "$@" || fail "failed: pytest with sanitizers"
        return
    fi
    with_sanitizers "$PYTHON" -m pytest "${ROOMS[@]}" -m 'not heavy and not bench and not slow' ||
        fail "failed: pytest with sanitizers"
    say "the other instruction sets"
    with_sanitizers "$PYTHON" -m pytest --nightly tests/test_instruction_sets.py || fail "failed: another instruction set"
}
