#!/usr/bin/env bash
# scripts/test.sh [--help] [--torch VERSION] [--quick | --nightly | --sanitize] [pytest's arguments]
#
# Set up an environment and run every check: ruff, clang-format, then pytest. Ends with TESTS PASSED, or with TESTS
# FAILED and a status other than 0, also when it is killed. Uses GPUs where there are some. With CI=true and no GPU,
# every branch of the GPU code is compiled once, and hardly optimized (ZEROFP4_CUDA_OPTIMIZE=0); --nightly compiles it
# for every architecture, and optimizes.
#
#   (nothing)     every test but those marked nightly or slow; of a test with more than 4 cases on a device, cases
#                 in which every two values of its parameters meet: under 20 minutes on 2 cores, the build included.
#                 With a GPU and 16 cores or more, a process for every 4 cores, 16 at most.
#   --quick       the lane for while you work, under 30 seconds on 2 cores once the extension is built: of each test
#                 function the middle one of its cases on each device, hypothesis with 3 examples. Left out are the
#                 tests marked heavy (they compile, or start Python), those of the benchmarks' tooling, and worlds
#                 other than 2 ranks under torchrun. Run everything before a change lands.
#   --nightly     all of these cases, and what is marked nightly: whole runs of scripts, a rank that fails in each
#                 stage of a step, further world sizes, the CPU's other instruction sets
#   --sanitize    pytest alone, under AddressSanitizer and UndefinedBehaviorSanitizer: the CPU side is built with them
#                 into build/sanitized, and the rooms that call it are tested, with every instruction set. What they
#                 find ends the run. Needs g++ and its libraries of sanitizers, and uses no GPU.
#   --torch VERSION   first, before the others: with that torch, as pip finds it, in a virtual environment that is
#                 removed at the end; `--torch 2.11.0 --quick`
#   -m slow       the conversions on all 2^32 floats and tensors of more than 2^31 elements: a minute on a GPU with
#                 70 GB of free memory
#   -m bench      the tooling of the benchmarks only; -m 'not bench and not slow' leaves it out
#   -k WORD, tests/cast, --durations=20, ...     anything else goes to pytest as it is
set -euo pipefail
if [[ ${1-} == --help || ${1-} == -h ]]; then
    sed -n '2,/^set /{/^set /d; s/^#\( \|$\)//; p}' "${BASH_SOURCE[0]}"
    exit
fi
. "$(dirname "${BASH_SOURCE[0]}")/verdict.sh"
verdict TESTS
# CI without a GPU sees that GPU code compiles, and runs none of it. What differs between architectures in the sources
# is seen by the least that ZEROFP4_CUDA_ARCHS can name.
if [[ ${CI-} == true && " $* " != *" --nightly "* ]] && ! nvidia-smi -L >/dev/null 2>&1; then
    export ZEROFP4_CUDA_OPTIMIZE=${ZEROFP4_CUDA_OPTIMIZE-0} ZEROFP4_CUDA_ARCHS=${ZEROFP4_CUDA_ARCHS-branches}
fi
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
if [[ ${1-} == --torch ]]; then
    setup_throw_away "${2?--torch needs a version}"
    shift 2
else
    setup_environment test
fi
cd "$ROOT"

if [[ ${1-} == --sanitize ]]; then
    . scripts/sanitize.sh
    test_sanitized "${@:2}"
    passed
    exit
fi
# test_in_parts N: all tests, in N processes. One alone keeps a core busy, and the GPU mostly idle. Of several GPUs
# each process takes another one first.
test_in_parts() {
    local part gpus pids=()
    mkdir -p build/tests
    say "in $1 parts, whose output is in build/tests/, and here once they end"
    IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES-$(seq -s, 0 $(($(nvidia-smi -L | wc -l) - 1)))}"
    for ((part = 1; part <= $1; part++)); do
        CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${gpus[*]}") \
            "$PYTHON" -m pytest --part "$part/$1" >"build/tests/$part.log" 2>&1 &
        pids+=($!)
        gpus=("${gpus[@]:1}" "${gpus[0]}")
    done
    for ((part = 1; part <= $1; part++)); do
        wait "${pids[part - 1]}" || failed+=("pytest --part $part/$1")
        cat "build/tests/$part.log"
    done
}

failed=()
if has "$PYTHON" ruff; then
    say "ruff"
    "$PYTHON" -m ruff check . || failed+=(ruff)
else
    say "ruff is not here: not run"
fi
if command -v clang-format >/dev/null; then
    say "clang-format"
    find csrc tests/native \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
        xargs -0 clang-format --dry-run -Werror || failed+=(clang-format)
else
    say "clang-format is not here: not run"
fi
say "pytest"
if (($# == 0 && $(nproc) >= 16)) && nvidia-smi -L >/dev/null 2>&1; then
    test_in_parts $(($(nproc) < 64 ? $(nproc) / 4 : 16))
else
    "$PYTHON" -m pytest "$@" || failed+=(pytest)
fi
((${#failed[@]} == 0)) || fail "failed: ${failed[*]}"
passed
