# Sourced by test.sh and demo.sh. setup_environment EXTRA PACKAGE leaves in $PYTHON an interpreter that imports zerofp4,
# has what that extra names, and has its programs on the PATH. That is python3 where it has the package already, else
# .venv in the repository, with this checkout installed. torch is installed only where python3 has none. PACKAGE says
# whose zerofp4 it may be: `checkout` for this one's alone, up to date, or `any` for one that was installed from
# elsewhere too.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TORCH=torch==2.13.0

say() { printf -- '-- %s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# has PYTHON DISTRIBUTION...: are they installed?
has() {
    "$1" - "${@:2}" <<'EOF' 2>/dev/null
import sys
from importlib.metadata import distribution
for name in sys.argv[1:]:
    distribution(name)
EOF
}

has_torch() {
    "$1" -c 'import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)' 2>/dev/null
}

# package_is_ours PYTHON: does zerofp4 come from this checkout? Asked from another folder, because Python imports from
# the working directory whatever is installed.
package_is_ours() {
    (cd / && "$1" - "$ROOT") <<'EOF' 2>/dev/null
import importlib.util
import pathlib
import sys

found = pathlib.Path(importlib.util.find_spec("zerofp4").origin)
sys.exit(found.parent != pathlib.Path(sys.argv[1], "zerofp4"))
EOF
}

# imports_package PYTHON: does it import zerofp4, extension and all, wherever from?
imports_package() {
    (cd / && "$1" -c 'import zerofp4') 2>/dev/null
}

# serves PYTHON PACKAGE: can that Python be used as it is?
serves() {
    if package_is_ours "$1"; then
        extension_is_current "$1"
    else
        [[ $2 == any ]] && imports_package "$1"
    fi
}

# extension_is_current PYTHON: is there one for this Python, newer than its sources?
extension_is_current() {
    "$1" - "$ROOT" <<'EOF' 2>/dev/null
import pathlib
import sys
import sysconfig

root = pathlib.Path(sys.argv[1])
built = root / "zerofp4" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
sources = [root / "setup.py", *(path for path in (root / "csrc").rglob("*") if path.is_file())]
sys.exit(built.stat().st_mtime < max(path.stat().st_mtime for path in sources))
EOF
}

# missing PYTHON EXTRA: the requirements of that extra which are not installed.
missing() {
    "$1" - "$2" <<'EOF'
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution, requires

try:
    lines = requires("zerofp4") or []
except PackageNotFoundError:  # it is on PYTHONPATH, and nothing says what it wants
    lines = []
for line in lines:
    requirement, _, marker = line.partition(";")
    extra = re.search(r"extra == ['\"](\w+)['\"]", marker)
    if extra and extra[1] == sys.argv[1]:
        try:
            distribution(re.match(r"[\w.-]+", requirement)[0])
        except PackageNotFoundError:
            print(requirement.strip())
EOF
}

# make_venv PYTHON: a fresh .venv. Where that Python has torch, .venv sees its packages: venv's own
# --system-site-packages would not do, since it looks past a Python that is itself in a virtual environment.
make_venv() {
    say "making $ROOT/.venv with $("$1" -V)"
    if ! has_torch "$1"; then
        "$1" -m venv --clear "$ROOT/.venv" || fail "no virtual environment: Debian and Ubuntu need python3-venv for it"
        return
    fi
    local without=
    ! has "$1" pip || without=--without-pip
    "$1" -m venv --clear $without "$ROOT/.venv"
    "$1" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
        >"$("$ROOT/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
}

# install PYTHON EXTRA: build the package and install it editable. It needs no network where all it takes is here.
install() {
    say "building and installing zerofp4"
    if has "$1" torch setuptools pybind11; then
        "$1" -m pip install --quiet --no-build-isolation --no-deps --editable "$ROOT"
    else
        "$1" -m pip install --quiet --editable "$ROOT[$2]"
    fi || fail "zerofp4 did not build or install"
}

setup_environment() {
    local extra=$1 package=$2 outer wanted
    outer=$(command -v python3) || fail "there is no python3 on the PATH"
    "$outer" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "Python 3.10 is needed, this is $("$outer" -V)"
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    PYTHON=$ROOT/.venv/bin/python
    if has_torch "$outer" && { package_is_ours "$outer" || serves "$outer" "$package"; }; then
        PYTHON=$outer
    else
        "$PYTHON" -c '' 2>/dev/null || make_venv "$outer"
    fi
    if ! has_torch "$PYTHON"; then
        say "installing $TORCH"
        "$PYTHON" -m pip install --quiet "$TORCH" || fail "$TORCH could not be installed"
    fi
    if ! serves "$PYTHON" "$package"; then
        install "$PYTHON" "$extra"
    fi
    mapfile -t wanted < <(missing "$PYTHON" "$extra")
    if ((${#wanted[@]})); then
        say "installing ${wanted[*]}"
        "$PYTHON" -m pip install --quiet --retries 1 --timeout 15 "${wanted[@]}" 2>/dev/null ||
            say "could not be installed, going on without what is missing of: ${wanted[*]}"
    fi
    export PATH=$(dirname "$PYTHON"):$PATH
    say "using $PYTHON and $(cd / && "$PYTHON" -c 'import zerofp4; print(*zerofp4.__path__)')"
}
