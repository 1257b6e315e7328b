# Sourced by test.sh and demo.sh. setup_environment EXTRA builds this checkout's zerofp4 in place, and leaves in $PYTHON an
# interpreter that imports it in $ROOT, has what that extra names, and has its programs on the PATH. That is python3 where
# it is a virtual environment with torch, else .venv in the repository, which sees the torch of python3 where there is
# one. For `test` the checkout is installed, too: some tests start in other folders. With CI=true a requirement that cannot
# be installed ends the script.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TORCH=torch==2.13.0
MEGATRON=megatron-core==0.19.2
BUILD_TOOLS=('setuptools>=77' 'pybind11>=2.13' 'cmake>=3.24' ninja)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_COMPILE=0 # compiling what is never imported takes pip as long as the rest

say() { printf -- '-- %s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# has PYTHON MODULE: is it installed?
has() {
    "$1" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$2') is None)" 2>/dev/null
}

has_torch() {
    "$1" -c 'import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)' 2>/dev/null
}

is_virtual() {
    "$1" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'
}

# package_is_ours PYTHON: does zerofp4 come from this checkout? Asked from another folder, because Python imports from
# the working directory whatever is installed.
package_is_ours() {
    local find='import importlib.util; print(importlib.util.find_spec("zerofp4").origin)'
    [[ $(cd / && "$1" -c "$find" 2>/dev/null) == "$ROOT/zerofp4/__init__.py" ]]
}

# requirements EXTRA: what pyproject.toml requires, for that extra too.
requirements() {
    "$PYTHON" - "$ROOT/pyproject.toml" "$1" <<'EOF'
import sys

try:
    import tomllib
except ImportError:  # before Python 3.11
    from pip._vendor import tomli as tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
print(*project["dependencies"], *project["optional-dependencies"][sys.argv[2]], sep="\n")
EOF
}

# get REQUIREMENT...: those that are not there, all at once, or, where that fails, one by one, so that what cannot be had
# takes nothing else along. CI must not pass with less than it should; elsewhere what needs it is skipped, with a reason.
get() {
    local requirement
    say "installing what is missing of $*"
    if "$PYTHON" -m pip install -qq --retries 1 --timeout 15 "$@"; then
        return
    elif (($# > 1)); then
        for requirement; do
            get "$requirement"
        done
    else
        do_without "$1"
    fi
}

do_without() {
    [[ ${CI-} != true ]] || fail "$1 could not be installed, and CI needs it"
    say "$1 could not be installed: what needs it is skipped"
}

# fetch_megatron: Megatron-Core for its tests, into build/megatron: 2.4 MB, a second. Its wheels want Python 3.12, and
# what they require they do not need for what is tested.
fetch_megatron() {
    local folder=$ROOT/build/megatron
    [[ ! -d $folder/megatron/core ]] || return 0
    say "fetching $MEGATRON"
    rm -rf "$folder" && mkdir -p "$folder"
    "$PYTHON" -m pip download -qq --retries 1 --timeout 15 --no-deps --only-binary=:all: --python-version 3.12 \
        --dest "$folder" "$MEGATRON" && "$PYTHON" -m zipfile -e "$folder"/*.whl "$folder" && rm "$folder"/*.whl ||
        do_without "$MEGATRON"
}

# make_venv FOLDER [OPTION]: with python3.
make_venv() {
    say "making $1 with $(python3 -V)"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "Python 3.10 is needed, this is $(python3 -V)"
    python3 -m venv --clear "$@" || fail "no virtual environment: Debian and Ubuntu need python3-venv for it"
}

setup_environment() {
    PYTHON=$(command -v python3) || fail "there is no python3 on the PATH"
    if ! has_torch "$PYTHON"; then
        use_venv
    elif ! is_virtual "$PYTHON"; then
        use_venv --system-site-packages
    fi
    complete "$1"
}

use_venv() {
    PYTHON=$ROOT/.venv/bin/python
    "$PYTHON" -c '' 2>/dev/null || make_venv "$ROOT/.venv" "$@"
}

# setup_throw_away VERSION: the same for tests, with that torch, in a virtual environment in the folder $THROW_AWAY,
# which the verdict removes.
setup_throw_away() {
    TORCH=torch==$1 THROW_AWAY=$(mktemp -d)
    PYTHON=$THROW_AWAY/bin/python
    make_venv "$THROW_AWAY"
    complete test
}

# complete EXTRA: installs into the environment of $PYTHON what it lacks.
complete() {
    local extra=$1 wanted
    if ! has_torch "$PYTHON"; then
        say "installing $TORCH"
        "$PYTHON" -m pip install --quiet "$TORCH" || fail "$TORCH could not be installed"
    fi
    build_in_place
    if [[ $extra == test ]] && ! package_is_ours "$PYTHON"; then
        "$PYTHON" -m pip install --quiet --no-build-isolation --no-deps --editable "$ROOT" ||
            fail "zerofp4 could not be installed"
    fi
    mapfile -t wanted < <(requirements "$extra")
    get "${wanted[@]}"
    [[ $extra != test ]] || fetch_megatron
    export PATH=$(dirname "$PYTHON"):$PATH
    say "using $PYTHON and $(cd "$ROOT" && "$PYTHON" -c 'import zerofp4; print(*zerofp4.__path__)')"
}

build_in_place() {
    get "${BUILD_TOOLS[@]}"
    say "building the extensions" # now, since pip shows nothing of a build before it failed
    (cd "$ROOT" && "$PYTHON" setup.py --quiet build_ext --inplace) || fail "the extensions did not build"
}
