#!/usr/bin/env bash
# Build the documentation into site/, with every warning as an error. Arguments go to `mkdocs build`. It needs
# mkdocs-material, mkdocstrings-python and ruff (the extra `docs`), but neither torch nor the extension.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export NO_MKDOCS_2_WARNING=1

for python in python3 .venv/bin/python; do
    if "$python" -c 'import material, mkdocs, mkdocstrings_handlers.python' 2>/dev/null; then
        "$python" -m mkdocs build --strict "$@"
        echo "DOCS BUILT"
        exit
    fi
done
echo 'error: the documentation needs mkdocs: pip install mkdocs-material mkdocstrings-python ruff' >&2
exit 1
