#!/usr/bin/env bash
# Set up an environment and run every check: ruff, clang-format, then pytest, which takes the arguments given here.
# Uses GPUs where there are some. Ends with TESTS PASSED, or with TESTS FAILED and a status other than 0.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/verdict.sh"
verdict TESTS
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_environment test checkout
cd "$ROOT"

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
"$PYTHON" -m pytest "$@" || failed+=(pytest)
((${#failed[@]} == 0)) || fail "failed: ${failed[*]}"
passed
