"""What setup.py decides: architectures, compilers, commands, what is current. Nothing is compiled here."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("setuptools")
pytest.importorskip("pybind11")

from build_tools import ROOT, BuildError, architectures, commands, compilers, objects, torch_extension

NEW = SimpleNamespace(version=(13, 0), bases=frozenset("75 80 86 89 90 100 103 110 120 121".split()))
OLD = SimpleNamespace(version=(12, 4), bases=frozenset("52 75 80 86 89 90".split()))


def choose(wanted, toolkit=NEW, gpus=()):
    return architectures.choose(wanted, toolkit, lambda: list(gpus))


# Architectures


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("90", ["90"]),
        ("90;80;100f", ["80", "90", "100f"]),
        ("80, 90 120f", ["80", "90", "120f"]),
        ("90;90", ["90"]),
        ("90a;103", ["90a", "103"]),
        ("all", ["80", "90", "100f", "120f"]),
        ("branches", ["80", "100f"]),
        ("compute_80", ["compute_80"]),
    ],
)
def test_given_architectures(wanted, expected):
    assert choose(wanted, gpus=[(9, 0)]) == expected


@pytest.mark.parametrize("wanted", ["", "native"])
@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([(9, 0)] * 8, ["90"]),
        ([(10, 0), (10, 3)], ["100f"]),
        ([(12, 1), (8, 9)], ["89", "120f"]),
        ([(9, 0), (7, 5)], ["90"]),
        ([(15, 0)], []),  # not known to this nvcc: by the PTX
    ],
)
def test_architectures_of_the_gpus_here(wanted, gpus, expected):
    assert choose(wanted, gpus=gpus) == expected


def test_an_old_nvcc_has_no_families():
    assert choose("all", OLD) == ["80", "90"]
    assert choose("branches", OLD) == ["80"]
    assert choose("", OLD, [(10, 0)]) == []


def test_branches_are_all_branches_of_the_sources():
    archs = [*choose("branches"), architectures.PTX_ARCHITECTURE]
    built = [10 * architectures.number(arch) for arch in archs]
    files = [path for path in (ROOT / commands.CSRC).rglob("*") if path.suffix in (".h", ".cuh", ".cu")]
    found = re.findall(r"__CUDA_ARCH_\w* (?:>=|<) (\d+)", "".join(path.read_text() for path in files))
    assert set(found) == {"860", "890", "900", "1000"}
    assert all(min(built) < int(bound) <= max(built) for bound in found)


@pytest.mark.parametrize("gpus", [[], [(7, 5)]])
def test_no_usable_gpu(gpus):
    assert choose("", gpus=gpus) == choose("all")
    with pytest.raises(BuildError, match=r"names no GPU of compute capability 8\.0"):
        choose("native", gpus=gpus)


@pytest.mark.parametrize(
    ("wanted", "toolkit", "message"),
    [
        ("9.0", NEW, "ZEROFP4_CUDA_ARCHS='9.0': '9.0' is no architecture"),
        ("80;hopper", NEW, "'hopper' is no architecture; give all, native, branches, or a list"),
        ("75", NEW, "'75' is too old: the kernels need compute capability 8.0"),
        ("99", NEW, "'99' is unknown to nvcc 13.0, which knows 75, 80, 86"),
        ("100f", OLD, "'100f' is unknown to nvcc 12.4"),
        ("90f", NEW, "'90f' is no family"),
        ("80a", NEW, "'80a' has no variant"),
        ("compute_75", NEW, "'75' is too old"),
        ("compute_80;90", NEW, "'80;90' is no architecture; .*, or compute_80"),
        ("90;compute_80", NEW, "'compute_80' is no architecture"),
    ],
)
def test_bad_architectures(wanted, toolkit, message):
    with pytest.raises(BuildError, match=message):
        choose(wanted, toolkit)


def test_machine_code_and_ptx_of_one_architecture_are_one_compilation():
    assert architectures.nvcc_flags(["80", "90"]) == [
        "-gencode=arch=compute_80,code=[sm_80]",
        "-gencode=arch=compute_90,code=[sm_90,compute_90]",
    ]
    assert architectures.nvcc_flags([]) == ["-gencode=arch=compute_90,code=[compute_90]"]
    assert architectures.names(["80"]) == ["sm_80", "compute_90"]


def test_ptx_alone():
    """Else the PTX that is always there would run on a GPU that is newer."""
    assert architectures.nvcc_flags(["compute_80"]) == ["-gencode=arch=compute_80,code=[compute_80]"]
    assert architectures.names(["compute_80"]) == ["compute_80"]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 9.0; echo 12.1", [(9, 0), (12, 1)]),
        ("echo '[N/A]'", []),
        ("echo NVIDIA-SMI has failed; exit 9", []),
    ],
)
def test_gpus_are_asked_of_the_driver(tmp_path, monkeypatch, script, expected):
    program(tmp_path / "nvidia-smi", script)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert architectures.gpus_of_this_machine() == expected


# Compilers


def program(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


CXX = compilers.Compiler(("g++",), "g++ 12")
TORCH = torch_extension.Torch(Path("torch"), "2.10.0")


def test_no_cxx_compiler(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler on the PATH: apt-get install g\+\+"):
        compilers.find_cxx()
    monkeypatch.setenv("CXX", "g++-99")
    with pytest.raises(BuildError, match=r"CXX='g\+\+-99': there is no such program"):
        compilers.find_cxx()


def test_no_openmp(tmp_path, monkeypatch):
    monkeypatch.setattr(compilers, "get_path", lambda name: str(tmp_path))
    (tmp_path / "Python.h").touch()
    cxx = program(tmp_path / "cxx", 'case "$*" in *-fopenmp*) echo omp.h: not found >&2; exit 1;; esac')
    with pytest.raises(BuildError, match=r"(?s)omp\.h: not found.*has no OpenMP: apt-get.*libomp-dev"):
        compilers.try_out(compilers.Compiler((cxx,), ""), None)


def test_no_python_headers(tmp_path, monkeypatch):
    monkeypatch.setattr(compilers, "get_path", lambda name: str(tmp_path))
    with pytest.raises(BuildError, match=r"no Python\.h for Python 3.*: apt-get install python3.*-dev"):
        compilers.try_out(CXX, None)


def test_no_nvcc(tmp_path, monkeypatch):
    monkeypatch.delenv("ZEROFP4_CUDA", raising=False)
    monkeypatch.delenv("NVCC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compilers.find_nvcc(CXX) is None
    monkeypatch.setenv("NVCC", "/nowhere/nvcc")
    with pytest.raises(BuildError, match="NVCC='/nowhere/nvcc': there is no such program: apt-get"):
        compilers.find_nvcc(CXX)
    monkeypatch.setenv("ZEROFP4_CUDA", "0")
    assert compilers.find_nvcc(CXX) is None


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo no libraries >&2; exit 1", "(?s)nvcc --version failed: no libraries.*cuda-toolkit"),
        ("echo hello", "names no release: 'hello'"),
        ("echo release 11.2, V11.2.67", "is release 11.2, 11.8 is needed"),
    ],
)
def test_a_broken_nvcc(tmp_path, monkeypatch, script, message):
    monkeypatch.delenv("ZEROFP4_CUDA", raising=False)
    monkeypatch.setenv("NVCC", program(tmp_path / "nvcc", script))
    with pytest.raises(BuildError, match=message):
        compilers.find_nvcc(CXX)


def test_an_nvcc(tmp_path, monkeypatch):
    monkeypatch.delenv("ZEROFP4_CUDA", raising=False)
    script = "case $1 in --version) echo release 12.9, V12.9.41;; *) echo compute_90; echo compute_100;; esac"
    path = program(tmp_path / "nvcc", script)
    monkeypatch.setenv("NVCC", path)
    found = compilers.find_nvcc(CXX)
    assert (found.command, found.version, found.bases) == ((path,), (12, 9), {"90", "100"})
    clang = compilers.find_nvcc(compilers.Compiler(("clang++",), "clang"))
    assert clang.command == (path, "-ccbin=clang++")
    assert clang.identity != found.identity
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    assert compilers.find_nvcc(CXX).identity != found.identity


# Commands


def toolkit(version=(13, 0), identity="nvcc"):
    return compilers.Toolkit(("nvcc",), identity, version, NEW.bases)


def jobs(nvcc=None, archs=("90",), cxx=CXX):
    return {job.label: job for job in commands.all_jobs(cxx, nvcc, list(archs))}


def test_every_source_is_compiled():
    both = [*jobs(toolkit()).values(), *torch_extension.jobs(CXX, TORCH)]
    compiled = [name for source in {job.source for job in both} for name in parts(source)]
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.c*") if path.suffix != ".cuh"}
    assert set(compiled) == wanted and len(compiled) == len(wanted)


def parts(source):
    """The sources that it includes, if it is one that the build wrote, or itself."""
    if not source.name.startswith("all_"):
        return [str(source)]
    return ["csrc/" + line.split('"')[1] for line in (ROOT / source).read_text().splitlines()]


def test_small_cuda_sources_are_compiled_as_one():
    (small,) = [job for job in jobs(toolkit()).values() if job.name == "all_small.cu"]
    assert {name.removeprefix("csrc/") for name in parts(small.source)} == commands.TOGETHER


def test_a_build_without_cuda_has_no_cuda_sources():
    assert not [label for label in jobs() if label.endswith(".cu")]
    assert not [flag for job in jobs().values() for flag in job.flags if "CUDA" in flag]


def test_cpu_operations_are_compiled_per_instruction_set():
    labels = [label for label in jobs() if label.startswith("cpu/") and "/table.cpp" in label]
    assert labels == [f"cpu/table.cpp ({isa})" for isa in commands.ISA_FLAGS]
    assert "cpu/select.cpp" in jobs()


def test_what_was_compiled_for_is_what_build_info_says():
    built = jobs(toolkit(), ["80", "100f"])
    assert '-DZEROFP4_CUDA_ARCHITECTURES="sm_80 sm_100f compute_90"' in built["all_bindings.cpp"].flags
    assert '-DZEROFP4_CUDA_VERSION="13.0"' in built["all_bindings.cpp"].flags
    for job in built.values():
        gencodes = [flag for flag in job.flags if flag.startswith("-gencode")]
        assert bool(gencodes) == (job.source.suffix == ".cu")
        assert gencodes in ([], architectures.nvcc_flags(["80", "100f"]))


def cuda_keys(*args):
    return {job.key for job in jobs(*args).values() if job.source.suffix == ".cu"}


def test_other_compilers_and_flags_have_other_objects():
    base = cuda_keys(toolkit())
    assert base == cuda_keys(toolkit())
    assert not base & cuda_keys(toolkit(identity="another nvcc"))
    assert not base & cuda_keys(toolkit(), ["80"])
    host = {job.key for job in jobs().values()}
    assert not host & {job.key for job in jobs(cxx=compilers.Compiler(("g++",), "g++ 13")).values()}


def test_only_the_bindings_depend_on_python(monkeypatch):
    before = jobs(toolkit())
    monkeypatch.setattr(commands, "get_path", lambda name: "/another/include")
    after = jobs(toolkit())
    assert [label for label in before if before[label].key != after[label].key] == ["all_bindings.cpp"]


def test_sanitizers_are_part_of_every_command_and_key(monkeypatch):
    before = {job.key for job in jobs().values()}
    linked = commands.link(CXX, None)
    monkeypatch.setenv("ZEROFP4_SANITIZE", "1")
    after = jobs().values()
    assert all(
        job.flags[-len(commands.SANITIZER_FLAGS) :] == tuple(commands.SANITIZER_FLAGS) for job in after
    )
    assert not before & {job.key for job in after}
    assert set(commands.SANITIZER_FLAGS) <= set(commands.link(CXX, None))
    assert "-s" in linked and "-s" not in commands.link(CXX, None)
    monkeypatch.setenv("ZEROFP4_SANITIZE", "0")
    assert before == {job.key for job in jobs().values()} and linked == commands.link(CXX, None)


def test_sanitizers_are_for_the_cpu_side(monkeypatch):
    monkeypatch.setenv("ZEROFP4_SANITIZE", "1")
    with pytest.raises(BuildError, match="ZEROFP4_SANITIZE=1 is for the CPU side only: add ZEROFP4_CUDA=0"):
        jobs(toolkit())
    monkeypatch.setenv("ZEROFP4_SANITIZE", "yes")
    with pytest.raises(BuildError, match="ZEROFP4_SANITIZE='yes': it is 0 or 1"):
        jobs()


def test_gpu_code_that_is_hardly_optimized(monkeypatch):
    monkeypatch.delenv("ZEROFP4_CUDA_OPTIMIZE", raising=False)
    before = jobs(toolkit())
    monkeypatch.setenv("ZEROFP4_CUDA_OPTIMIZE", "0")
    after = jobs(toolkit())
    changed = {after[label] for label in before if before[label].key != after[label].key}
    assert changed == {job for job in after.values() if job.source.suffix == ".cu"}
    assert all("--Ofast-compile=max" in job.flags for job in changed)
    assert commands.optimization(toolkit((12, 8))) == []
    monkeypatch.setenv("ZEROFP4_CUDA_OPTIMIZE", "no")
    with pytest.raises(BuildError, match="ZEROFP4_CUDA_OPTIMIZE='no': it is 0 or 1"):
        jobs(toolkit())


def test_compression_needs_a_new_nvcc():
    assert commands.compression(toolkit((12, 8))) == ["--compress-mode=size"]
    assert commands.compression(toolkit((12, 6))) == []


def test_longest_first():
    order = [job.seconds for job in objects.longest_first(jobs(toolkit()).values())]
    assert order == sorted(order, reverse=True)
    assert order[0] > 4


def test_durations_are_of_files_that_exist():
    both = [*jobs(toolkit()).values(), *torch_extension.jobs(CXX, TORCH)]
    assert set(commands.SECONDS) <= {job.name for job in both}


# The extension that is built against torch


@pytest.fixture
def torch(tmp_path, monkeypatch):
    """A folder that looks like an installed torch, which would fail to be imported."""
    folder = tmp_path / "torch"
    (folder / "include" / "torch" / "csrc").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError")
    (folder / "version.py").write_text("__version__ = '2.99.0+cpu'")
    found = SimpleNamespace(origin=str(folder / "__init__.py"))
    monkeypatch.setattr(torch_extension.importlib.util, "find_spec", {"torch": found}.get)
    monkeypatch.delenv("ZEROFP4_AUTOGRAD", raising=False)
    monkeypatch.delenv("ZEROFP4_SANITIZE", raising=False)
    return folder


def test_the_torch_that_is_installed(torch):
    found = torch_extension.find_torch()
    assert found == torch_extension.Torch(torch, "2.99.0+cpu")
    others = jobs(toolkit())
    of_torch = {job.label: job for job in torch_extension.jobs(CXX, found)}
    assert of_torch.keys() == torch_extension.TOGETHER.keys() and not of_torch.keys() & others.keys()
    for job in of_torch.values():
        assert '-DZEROFP4_TORCH_VERSION="2.99.0+cpu"' in job.flags
        assert f"-isystem{torch / 'include'}" in job.flags
    assert f"-L{torch / 'lib'}" in torch_extension.link(CXX, found)


def test_no_torch_to_build_against(torch, monkeypatch):
    for variable, value in (("ZEROFP4_AUTOGRAD", "0"), ("ZEROFP4_SANITIZE", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            assert torch_extension.find_torch() is None
    (torch / "include" / "torch" / "csrc").rmdir()  # a torch without headers
    assert torch_extension.find_torch() is None
    monkeypatch.setattr(torch_extension.importlib.util, "find_spec", lambda name: None)
    assert torch_extension.find_torch() is None


def test_a_wrong_wish_for_the_extension_of_torch(torch, monkeypatch):
    monkeypatch.setenv("ZEROFP4_AUTOGRAD", "off")
    with pytest.raises(BuildError, match="ZEROFP4_AUTOGRAD='off': it is 0 or 1"):
        torch_extension.find_torch()


# Objects


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one source and a compiler that copies it, and counts how often."""
    monkeypatch.setattr(objects, "ROOT", tmp_path)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "a.h").write_text("1")
    (tmp_path / "csrc" / "a.cpp").write_text("2")
    script = 'echo x >>runs; echo "x.o: csrc/a.cpp \\\\\n csrc/a.h" >$3; cat csrc/a.cpp csrc/a.h >$7'
    cc = compilers.Compiler((program(tmp_path / "cc", script),), "cc 1")
    return SimpleNamespace(root=tmp_path, compiler=cc, job=commands.Job(Path("csrc/a.cpp"), cc, ()))


def build(checkout, job=None):
    """How often the compiler ran, and the fingerprints."""
    runs = checkout.root / "runs"
    runs.unlink(missing_ok=True)
    built = objects.compile_all([job or checkout.job], 1, lambda: None)
    return len(runs.read_text().splitlines()) if runs.exists() else 0, built


def test_nothing_changed(checkout):
    runs, first = build(checkout)
    assert runs == 1
    assert build(checkout) == (0, first)


def test_a_touched_file_is_not_a_change(checkout):
    _, first = build(checkout)
    os.utime(checkout.root / "csrc" / "a.h", (1, 1))
    assert build(checkout) == (0, first)


def test_a_changed_header_is_compiled_whatever_its_time(checkout):
    _, first = build(checkout)
    (checkout.root / "csrc" / "a.h").write_text("33")
    os.utime(checkout.root / "csrc" / "a.h", (1, 1))
    runs, second = build(checkout)
    assert runs == 1
    assert second != first


@pytest.mark.parametrize("lost", ["csrc/a.h", "object", "record"])
def test_a_lost_file_is_compiled(checkout, lost):
    build(checkout)
    path = {"object": checkout.job.object, "record": objects.record_path(checkout.job)}.get(lost, lost)
    (checkout.root / path).unlink()
    if lost == "csrc/a.h":
        assert objects.find_current([checkout.job]) == {}
    else:
        assert build(checkout)[0] == 1


def test_objects_of_other_flags_are_kept(checkout):
    other = commands.Job(Path("csrc/a.cpp"), checkout.compiler, ("-DX",))
    assert build(checkout)[0] == 1
    assert objects.find_current([other]) == {}
    assert build(checkout)[0] == 0


def test_a_file_written_while_compiling_is_compiled_again(checkout, monkeypatch):
    monkeypatch.setattr(objects.time, "time_ns", lambda: 0)
    assert build(checkout)[0] == 1
    assert build(checkout)[0] == 1


def test_a_failure_shows_the_command_and_what_was_said(checkout):
    program(checkout.root / "cc", "echo a.cpp:1: error; exit 1")
    with pytest.raises(BuildError, match=r"(?s)a.cpp did not compile:.*/cc -MMD.*a.cpp:1: error"):
        build(checkout)


def test_an_error_beside_is_raised_where_it_belongs(checkout):
    (checkout.root / "csrc" / "b.cpp").write_text("4")
    script = 'case $5 in csrc/b.cpp) exit 1;; esac; echo "x.o: csrc/a.cpp" >$3; cat csrc/a.cpp >$7'
    program(checkout.root / "cc", script)
    beside = [commands.Job(Path("csrc/b.cpp"), checkout.compiler, ())]
    built = objects.compile_all([checkout.job], 2, lambda: None, beside)
    assert built == objects.compile_all([checkout.job], 2, lambda: None)
    with pytest.raises(BuildError, match=r"b.cpp did not compile"):
        objects.compile_all(beside, 2, lambda: None)


def test_progress(checkout, capsys):
    build(checkout)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "1 of 1 objects to compile, 1 at a time"
    assert said[1].startswith("[1/1] a.cpp ")


def test_link_only_what_changed(checkout):
    target = checkout.root / "lib.so"
    command = [program(checkout.root / "ld", "echo x >>links; cat a.o >$3")]
    (checkout.root / "a.o").write_text("object")

    def links(fingerprints):
        (checkout.root / "links").unlink(missing_ok=True)
        objects.link(command, ["a.o"], fingerprints, target)
        return (checkout.root / "links").exists()

    (checkout.root / objects.OBJECTS).mkdir(parents=True)
    assert links([["1"]])
    assert not links([["1"]])
    assert links([["2"]])
    target.write_text("of another build")
    assert links([["2"]])


def test_dependency_files():
    text = "a.o : csrc/a.cu \\\n    /x/bin/../include/b.h \\\n csrc/with\\ space.h\n"
    assert objects.dependencies_in(text) == ["csrc/a.cu", "/x/bin/../include/b.h", "csrc/with space.h"]


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


def test_torch_is_not_needed_for_a_build():
    assert "torch" not in (ROOT / "pyproject.toml").read_text().partition("[project]")[0]
    for path in [ROOT / "setup.py", *(ROOT / "build_tools").glob("*.py")]:
        assert "import torch" not in path.read_text()
