"""setup.py and CMakeLists.txt: options, commands, errors in a line, and what an edit compiles again."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("setuptools")
pytest.importorskip("pybind11")

import torch
from cases.builds import ROOT, configure, ninja, setup_page, try_to_configure
from early import waits_for
from setuptools.errors import BaseError

CSRC = ROOT / "csrc"
HOW = "pip install torch 'setuptools>=77' pybind11 cmake ninja, then pip install --no-build-isolation ."

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not all(map(shutil.which, ("cmake", "ninja"))), reason="there is no cmake or ninja"),
]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")


@pytest.fixture(scope="module")
def with_cuda(tmp_path_factory):
    """The folder of one build: CMake looks for compilers once."""
    return tmp_path_factory.mktemp("cuda")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory) -> dict[str, str]:
    return configure(tmp_path_factory.mktemp("cpu"), ZEROFP4_CUDA="0")


def said_by_build_info(commands: dict[str, str], name: str) -> str:
    """The text that the bindings are compiled with."""
    (command,) = (command for name, command in commands.items() if "all_bindings" in name)
    (text,) = re.findall(f'-DZEROFP4_{name}="(.+)"', "\n".join(shlex.split(command)))
    return text


# What setup.py finds, and what it says where it does not


def test_variables_are_options(monkeypatch):
    page = setup_page()
    given = {"CUDA": "0", "CUDA_ARCHS": "80;90", "CUDA_OPTIMIZE": "0", "SANITIZE": "1"}
    given = {f"ZEROFP4_{name}": value for name, value in given.items()}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert given.items() <= page.definitions().items()
    monkeypatch.setenv("ZEROFP4_CUDA", "no")
    with pytest.raises(BaseError, match=r"^ZEROFP4_CUDA='no': it is 0 or 1$"):
        page.definitions()


def test_it_is_built_for_the_torch_that_is_installed():
    defined = setup_page().definitions()
    assert defined["TORCH"] == Path(torch.__file__).parent and defined["TORCH_VERSION"] == torch.__version__


def test_what_is_missing_is_said_in_a_line(tmp_path, monkeypatch):
    """As where pip isolates the build: nothing is compiled, nor anything fetched."""
    page = setup_page()
    monkeypatch.setattr(page.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(page.setuptools, "__version__", "65.5.0")  # as a new environment of 3.11 has
    monkeypatch.setitem(page.check_tools.__globals__, "PATH", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        page.check_tools()
    assert str(ended.value) == f"the build does not find torch, pybind11, cmake, ninja, setuptools>=77: {HOW}"


def test_an_isolated_build_fetches_no_torch():
    required = (ROOT / "pyproject.toml").read_text().partition("[project]")[0]
    assert re.search(r'^requires = \["setuptools>=\d+"\]$', required, re.MULTILINE)


# What CMake makes of it


def test_every_source_is_compiled(on_cpu):
    """By itself, or as part of one that the build wrote."""
    folder = Path(re.search(r"-c (\S+)/all_bindings.cpp", " ".join(on_cpu.values()))[1])
    parts = "".join((folder / name).read_text() for name in ("all_bindings.cpp", "all_autograd.cpp"))
    for path in CSRC.rglob("*.cpp"):
        assert str(path) in parts or any(command.endswith(f"-c {path}") for command in on_cpu.values()), path


def test_flags_of_every_command(on_cpu):
    assert all("-ffp-contract=off" in command and "-O3" in command for command in on_cpu.values())
    assert not [command for command in on_cpu.values() if "ZEROFP4_CUDA" in command or ".cu " in command]


def test_cpu_operations_are_compiled_per_instruction_set(on_cpu):
    found = {name.split(".dir")[0].rpartition("/")[2]: on_cpu[name] for name in on_cpu if "cpu/table" in name}
    assert "baseline" in found
    assert all(f"-DZEROFP4_ISA={isa} " in command for isa, command in found.items())
    assert said_by_build_info(on_cpu, "ISAS") == " ".join(found)
    assert [isa for isa in found if "-mavx512f" in found[isa]] == [isa for isa in found if isa == "avx512"]


def test_only_the_extension_for_torch_includes_torch(on_cpu):
    of_torch = {Path(name).name for name, command in on_cpu.items() if "torch/include" in command}
    assert of_torch == {"all_autograd.cpp.o"}


@pytest.mark.parametrize(("sanitize", "count"), [("0", 0), ("1", 1)])
def test_sanitizers(tmp_path, sanitize, count):
    """In all that is not built against torch."""
    commands = configure(tmp_path, ZEROFP4_CUDA="0", ZEROFP4_SANITIZE=sanitize)
    for name, command in commands.items():
        assert command.count("-fsanitize=address") == (0 if "_autograd.dir" in name else count), name


@needs_nvcc
def test_sanitizers_are_for_the_cpu_side(tmp_path):
    done = try_to_configure(tmp_path, ZEROFP4_SANITIZE="1")
    assert done.returncode != 0
    assert "ZEROFP4_SANITIZE=1 is for the CPU side only: add ZEROFP4_CUDA=0" in done.stdout


# GPU architectures

ALL = "sm_80 sm_90 sm_100f sm_120f compute_90"


@needs_nvcc
@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("90", "sm_90 compute_90"),
        ("80, 90 120f", "sm_80 sm_90 sm_120f compute_90"),
        ("90a;103", "sm_90a sm_103 compute_90"),
        ("all", ALL),
        ("branches", "sm_80 sm_100f compute_90"),
        ("compute_80", "compute_80"),
    ],
)
def test_given_architectures(with_cuda, wanted, expected):
    """What is compiled, and what build_info() says was."""
    commands = configure(with_cuda, ZEROFP4_CUDA_ARCHS=wanted)
    for name, command in commands.items():
        codes = re.findall(r"--generate-code=arch=\S+?,code=\[(\S+?)\]", command)
        assert codes == (expected.split() if name.endswith(".cu.o") else []), name
    assert said_by_build_info(commands, "CUDA_ARCHITECTURES") == expected


@needs_nvcc
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("echo 9.0; echo 9.0", "sm_90 compute_90"),
        ("echo 10.0; echo 10.3; echo 8.9", "sm_100f sm_89 compute_90"),
        ("echo 7.5", ALL),
        ("echo '[N/A]'", ALL),
        ("echo NVIDIA-SMI has failed; exit 9", ALL),
    ],
)
def test_architectures_of_the_gpus_here(with_cuda, tmp_path, said, expected):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{said}\n")
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    commands = configure(with_cuda, PATH=path)
    assert said_by_build_info(commands, "CUDA_ARCHITECTURES") == expected
    if expected == ALL:
        done = try_to_configure(with_cuda, PATH=path, ZEROFP4_CUDA_ARCHS="native")
        assert done.returncode and "nvidia-smi names no GPU of compute capability 8.0" in done.stdout


@needs_nvcc
@pytest.mark.parametrize(("wanted", "named"), [("9.0", "9.0"), ("80;hopper", "hopper"), ("75", "75")])
def test_bad_architectures(with_cuda, wanted, named):
    done = try_to_configure(with_cuda, ZEROFP4_CUDA_ARCHS=wanted)
    assert f"ZEROFP4_CUDA_ARCHS={wanted}: '{named}' is no architecture" in done.stdout
    assert done.returncode and done.stdout.endswith("error: zerofp4 was not built: see above\n")


@needs_nvcc
def test_gpu_code_that_is_hardly_optimized(with_cuda):
    for optimize, expected in (("0", True), ("1", False)):
        commands = configure(with_cuda, ZEROFP4_CUDA_ARCHS="90", ZEROFP4_CUDA_OPTIMIZE=optimize)
        for name, command in commands.items():
            assert ("--Ofast-compile=max" in command) == (expected and name.endswith(".cu.o")), name
            assert ("-fmad=false" in command) == name.endswith(".cu.o"), name


def test_branches_are_all_branches_of_the_sources():
    files = [path for path in CSRC.rglob("*") if path.suffix in (".h", ".cuh", ".cu")]
    found = re.findall(r"__CUDA_ARCH_\w* (?:>=|<) (\d+)", "".join(path.read_text() for path in files))
    # Between 8.0, 9.0 and 10.0; what 12.0 leaves out, 8.0 does too.
    assert set(found) == {"860", "890", "900", "1000", "1200"}


# What is compiled again


def built_three_times(folder: Path) -> list[str]:
    """What ninja did for two CUDA objects: at first, again, and after an edit of one source."""
    for name in ("CMakeLists.txt", "setup.py"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(CSRC, folder / "csrc")
    built = folder / "build"
    configure(built, root=folder, ZEROFP4_CUDA_ARCHS="compute_80", ZEROFP4_CUDA_OPTIMIZE="0")
    objects = [f"CMakeFiles/cuda.dir/{name}" for name in ("csrc/cuda/cast/cast.cu.o", "all_small.cu.o")]
    said = [ninja(built, *objects), ninja(built, *objects)]
    with open(folder / "csrc" / "cuda" / "cast" / "scale.cu", "a") as file:
        file.write("// edited\n")
    return [*said, ninja(built, *objects), ninja(built, "-t", "deps", objects[0])]


@needs_nvcc
@waits_for(built_three_times)
def test_an_edit_compiles_what_includes_it(early):
    first, again, edited, headers = early(built_three_times)
    assert [text.count("Building CUDA object") for text in (first, again, edited)] == [2, 0, 1]
    assert "no work to do" in again and "all_small.cu.o" in edited
    assert "csrc/common/e2m1.h" in headers


# Distribution


def test_the_sdist_has_every_file(tmp_path):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    packed = set((tmp_path / "zerofp4.egg-info" / "SOURCES.txt").read_text().splitlines())
    left = {path for path in tracked.stdout.split() if (ROOT / path).exists()} - packed
    assert not {path for path in left if not path.startswith((".ci/", ".git"))}
