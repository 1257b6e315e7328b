# Sourced by test.sh and demo.sh. setup_environment EXTRA PACKAGE leaves in $PYTHON an interpreter that imports zerofp4,
# has what that extra names, and has its programs on the PATH. That is python3 where it has the package already, else
# .venv in the repository, with this checkout installed. torch is installed only where python3 has none. PACKAGE says
# whose zerofp4 it may be: `checkout` for this one's alone, up to date, or `any` for one that was installed from
# elsewhere too. With CI=true a requirement that cannot be installed ends the script.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TORCH=torch==2.13.0
MEGATRON=megatron-core==0.19.2
# What Python never imports it need not compile: that took pip as long as all else it did.
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_COMPILE=0

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

# is_installed PYTHON PACKAGE: has it a zerofp4 from elsewhere, extension and all, where PACKAGE lets it?
is_installed() {
    [[ $2 == any ]] && ! package_is_ours "$1" && (cd / && "$1" -c 'import zerofp4') 2>/dev/null
}

# build_extensions PYTHON: brings them up to date, which takes a second where they are. Flags and architectures count as
# the sources do.
build_extensions() {
    (cd "$ROOT" && "$1" setup.py --quiet build_ext --inplace) || fail "the extensions did not build"
}

# missing PYTHON EXTRA: what pyproject.toml requires, for that extra too, and is not installed. Never torch, which was
# seen to before.
missing() {
    "$1" - "$ROOT/pyproject.toml" "$2" <<'EOF'
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution

try:
    import tomllib
except ImportError:  # before Python 3.11
    from pip._vendor import tomli as tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
for requirement in [*project["dependencies"], *project["optional-dependencies"][sys.argv[2]]]:
    name = re.match(r"[\w.-]+", requirement)[0]
    try:
        distribution(name)
    except PackageNotFoundError:
        if name != "torch":
            print(requirement)
EOF
}

# get PYTHON REQUIREMENT...: all at once, or, where that fails, one by one, so that what cannot be had takes nothing else
# along.
get() {
    local python=$1 requirement
    shift
    say "installing $*"
    if ! "$python" -m pip install -qq --retries 1 --timeout 15 "$@"; then
        (($# > 1)) || { do_without "$1"; return; }
        for requirement; do
            get "$python" "$requirement"
        done
    fi
}

# make_venv PYTHON: a fresh .venv. Where that Python has torch, .venv sees its packages: venv's own
# --system-site-packages would not do, since it looks past a Python that is itself in a virtual environment.
make_venv() {
    say "making $ROOT/.venv with $("$1" -V)"
    if ! has_torch "$1"; then
        "$1" -m venv --clear "$ROOT/.venv" || fail "no virtual environment: Debian and Ubuntu need python3-venv for it"
        renew_pip "$ROOT/.venv/bin/python"
        return
    fi
    local without=
    ! has "$1" pip || without=--without-pip
    "$1" -m venv --clear $without "$ROOT/.venv"
    "$1" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
        >"$("$ROOT/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
}

# renew_pip PYTHON: of an environment of our own. The pip of an older Python takes twice as long to find out what to
# install; it does, where there is no newer one.
renew_pip() {
    "$1" -m pip install --quiet --retries 1 --timeout 15 'pip>=25' || say "pip stays as it is"
}

# get_build_tools PYTHON: what setup.py needs beside torch, and does not find. It stays: it builds again later.
get_build_tools() {
    local wanted=() folder
    folder=$(dirname "$1")
    "$1" -c 'import setuptools; assert int(setuptools.__version__.split(".")[0]) >= 77' 2>/dev/null ||
        wanted+=('setuptools>=77')
    has "$1" pybind11 || wanted+=('pybind11>=2.13')
    PATH=$folder:$PATH command -v cmake >/dev/null || wanted+=('cmake>=3.24')
    PATH=$folder:$PATH command -v ninja >/dev/null || wanted+=(ninja)
    ((${#wanted[@]})) || return 0
    say "installing ${wanted[*]}"
    "$1" -m pip install --quiet "${wanted[@]}" || fail "${wanted[*]} could not be installed"
}

# install PYTHON: the package, editable. It needs no network.
install() {
    say "installing zerofp4"
    "$1" -m pip install --quiet --no-build-isolation --no-deps --editable "$ROOT" ||
        fail "zerofp4 could not be installed"
}

# fetch_megatron PYTHON: Megatron-Core for its tests, into build/megatron: 2.4 MB, a second. Its wheels want Python 3.12,
# and what they require they do not need for what is tested.
fetch_megatron() {
    local folder=$ROOT/build/megatron
    [[ ! -d $folder/megatron/core ]] || return 0
    say "fetching $MEGATRON"
    rm -rf "$folder" && mkdir -p "$folder"
    "$1" -m pip download -qq --retries 1 --timeout 15 --no-deps --only-binary=:all: --python-version 3.12 \
        --dest "$folder" "$MEGATRON" && "$1" -m zipfile -e "$folder"/*.whl "$folder" && rm "$folder"/*.whl ||
        do_without "$MEGATRON"
}

# do_without REQUIREMENT: CI must not pass with less than it should. Elsewhere what needs it is skipped, with a reason.
do_without() {
    [[ ${CI-} != true ]] || fail "$1 could not be installed, and CI needs it"
    say "$1 could not be installed: what needs it is skipped"
}

# find_outer: leaves the Python on the PATH in $OUTER.
find_outer() {
    OUTER=$(command -v python3) || fail "there is no python3 on the PATH"
    "$OUTER" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "Python 3.10 is needed, this is $("$OUTER" -V)"
}

setup_environment() {
    find_outer
    PYTHON=$ROOT/.venv/bin/python
    if has_torch "$OUTER" && { package_is_ours "$OUTER" || is_installed "$OUTER" "$2"; }; then
        PYTHON=$OUTER
    else
        "$PYTHON" -c '' 2>/dev/null || make_venv "$OUTER"
    fi
    complete "$1" "$2"
}

# setup_throw_away VERSION: the same for tests, with that torch, in a virtual environment in the folder $THROW_AWAY,
# which the verdict removes.
setup_throw_away() {
    find_outer
    TORCH=torch==$1 THROW_AWAY=$(mktemp -d)
    "$OUTER" -m venv "$THROW_AWAY" || fail "no virtual environment: Debian and Ubuntu need python3-venv for it"
    PYTHON=$THROW_AWAY/bin/python
    renew_pip "$PYTHON"
    complete test checkout
}

# complete EXTRA PACKAGE: installs into the environment of $PYTHON what it lacks.
complete() {
    local extra=$1 package=$2 wanted build=
    if ! has_torch "$PYTHON"; then
        say "installing $TORCH"
        "$PYTHON" -m pip install --quiet "$TORCH" || fail "$TORCH could not be installed"
    fi
    if ! is_installed "$PYTHON" "$package"; then
        get_build_tools "$PYTHON"
        build_extensions "$PYTHON" & # while pip installs the rest
        build=$!
    fi
    mapfile -t wanted < <(missing "$PYTHON" "$extra")
    ((${#wanted[@]} == 0)) || get "$PYTHON" "${wanted[@]}"
    [[ $extra != test ]] || fetch_megatron "$PYTHON"
    if [[ $build ]]; then
        wait "$build"
        # Now, since pip shows nothing of a build before it failed.
        package_is_ours "$PYTHON" || install "$PYTHON"
    fi
    export PATH=$(dirname "$PYTHON"):$PATH
    say "using $PYTHON and $(cd / && "$PYTHON" -c 'import zerofp4; print(*zerofp4.__path__)')"
}
