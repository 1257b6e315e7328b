"""zerofp4._autograd compiled on first use: by one process, once, and what does not compile is not tried
again. With compilers that are scripts, in a cache of the test, and where a process matters without torch.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from zerofp4.ops import autograd, autograd_build
from zerofp4.ops.autograd_build import FirstUse, Torch

FILE = autograd_build.__file__
SOURCES = list(autograd_build.TOGETHER)
LINK = 'while [ "$1" != "-o" ]; do shift; done; echo library >"$2"'

MAKE = """
import fcntl, pathlib, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in the background without
file, folder, retry, locks = sys.argv[1:]
if locks == "False":
    fcntl.flock = lambda *arguments: None
found = runpy.run_path(file)
torch = found["Torch"](pathlib.Path(folder), "2.99.0")
print(found["FirstUse"](torch).make(retry == "True"))
"""


class World:
    """A cache, a torch and a compiler of the test. `runs` says how often that was called."""

    def __init__(self, path: Path, monkeypatch):
        self.path, self._patch = path, monkeypatch
        headers = path / "torch" / "include" / "torch" / "csrc"
        headers.mkdir(parents=True)
        monkeypatch.setenv("XDG_CACHE_HOME", str(path / "cache"))
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        self.compiler(LINK)

    def compiler(self, script: str) -> None:
        file = self.path / "cc"
        file.unlink(missing_ok=True)  # a shell may still read it
        file.write_text(f'#!/bin/sh\necho $$ >>{self.path}/pids\necho "$@" >>{self.path}/runs\n{script}\n')
        file.chmod(0o755)
        self._patch.setenv("CXX", str(file))

    def first_use(self, version: str = "2.99.0") -> FirstUse:
        return FirstUse(Torch(self.path / "torch", version))

    def end_compilers(self) -> None:
        """Those that nobody waits for any more."""
        for pid in (self.path / "pids").read_text().split():
            os.kill(int(pid), signal.SIGKILL)

    @property
    def runs(self) -> list[str]:
        file = self.path / "runs"
        return file.read_text().splitlines() if file.exists() else []

    @property
    def links(self) -> int:
        return sum("-shared" in run for run in self.runs)

    def start(self, retry: bool = False, locks: bool = True) -> subprocess.Popen:
        """make() in a process of its own, without torch. Without locks: as on a host that sees no other's."""
        command = [sys.executable, "-c", MAKE, FILE, str(self.path / "torch"), str(retry), str(locks)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_for(self, count: int) -> None:
        """Until the compiler was called so often."""
        deadline = time.monotonic() + 60
        while len(self.runs) < count and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(self.runs) >= count


@pytest.fixture
def world(tmp_path, monkeypatch) -> World:
    return World(tmp_path, monkeypatch)


def test_compiled_once_and_said(world, capsys):
    use = world.first_use()
    assert use.why_not() is None and not use.library.exists()
    assert use.make() is None and use.library.read_text() == "library\n"
    assert len(world.runs) == len(SOURCES) + 1 and world.links == 1
    for source in SOURCES:
        (run,) = [run for run in world.runs if f"/{source} " in run]
        assert '-DZEROFP4_TORCH_VERSION="2.99.0"' in run and f"-isystem{world.path}/torch/include " in run
    said = capsys.readouterr()
    assert said.out == ""
    first, last = said.err.splitlines()
    assert first.startswith("zerofp4: compiling zerofp4._autograd for torch 2.99.0 with ")
    assert first.endswith("ZEROFP4_AUTOGRAD=0 goes without")
    assert last.startswith("zerofp4: compiled in ") and str(use.folder) in last
    again = world.first_use()
    assert again.why_not() is None and again.make(retry=True) is None
    assert world.links == 1 and capsys.readouterr().err == ""
    assert {file.name for file in use.folder.iterdir()} == {"lock", use.library.name}


def test_another_torch_has_its_own(world):
    use, other = world.first_use(), world.first_use("2.98.0")
    rebuilt = FirstUse(Torch(world.path / "torch", "2.99.0", "of another commit"))
    assert use.make() is None
    assert len({each.library for each in (use, other, rebuilt)}) == 3
    assert not other.library.exists() and not rebuilt.library.exists()
    assert other.make() is None and world.links == 2


def test_what_does_not_compile_is_not_tried_again(world):
    world.compiler("echo 'a.cpp:1: error: no concepts here'; exit 1")
    use = world.first_use()
    reason = use.make()
    advice = r"\(see .*/failed; ZEROFP4_AUTOGRAD=build tries again\)"
    assert re.fullmatch(r".*/cc failed: a.cpp:1: error: no concepts here " + advice, reason)
    assert "-c " in (use.folder / "failed").read_text()  # the command, for who wants to see more
    count = len(world.runs)
    assert world.first_use().why_not() == world.first_use().make() == reason
    assert len(world.runs) == count


def test_a_failure_that_could_not_be_written(world):
    """As on a full disk: it is no reason to go without the library and say nothing."""
    use = world.first_use()
    use.folder.mkdir(parents=True)
    (use.folder / "failed").touch()
    assert use.make() is None and use.library.exists()


def test_a_failure_is_tried_again_when_asked(world):
    world.compiler("exit 1")
    assert "failed: status 1" in world.first_use().make()
    world.compiler(LINK)
    assert world.first_use().make() is not None
    use = world.first_use()
    assert use.make(retry=True) is None and use.why_not() is None


def test_no_compiler(world, monkeypatch):
    monkeypatch.setenv("PATH", str(world.path))
    monkeypatch.delenv("CXX")
    reason = "there is no C++ compiler (g++, c++, clang++) to compile it"
    assert world.first_use().why_not() == world.first_use().make() == reason
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    assert "'no-such-compiler', which CXX names" in world.first_use().why_not()
    assert not (world.path / "cache").exists()


def test_no_headers(world):
    shutil.rmtree(world.path / "torch")
    assert world.first_use().why_not() == world.first_use().make() == "this torch has no headers"


def test_no_sources(world, monkeypatch):
    monkeypatch.setattr(autograd_build, "_PACKAGE", world.path)
    assert world.first_use().why_not() == "its sources were not installed"


def test_a_cache_that_is_a_file(world, monkeypatch):
    (world.path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(world.path / "file"))
    assert re.match(r"the cache .*/file/zerofp4/.* cannot be used: ", world.first_use().make())
    assert world.runs == []


def test_a_cache_that_is_read_only(world, monkeypatch):
    """As root no folder is, so the question is answered for it."""

    def access(path, mode, original=os.access, **options):
        return mode != os.W_OK and original(path, mode, **options)

    with monkeypatch.context() as patch:
        patch.setattr(autograd_build.os, "access", access)
        reason = f"nothing can be written to the cache, {world.path}: set XDG_CACHE_HOME"
        assert world.first_use().why_not() == world.first_use().make() == reason
    assert world.first_use().make() is None
    monkeypatch.setattr(autograd_build.os, "access", access)
    assert world.first_use().why_not() is None  # what is there can be read


def test_where_the_cache_is(world, monkeypatch):
    assert world.first_use().folder.parent == world.path / "cache" / "zerofp4"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(world.path / "extensions"))
    assert world.first_use().folder.parent == world.path / "extensions" / "zerofp4"
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(world.path / "home"))
    assert world.first_use().folder.parent == world.path / "home" / ".cache" / "zerofp4"


@pytest.mark.parametrize("retry", [False, True])
@pytest.mark.parametrize("works", [True, False])
def test_one_process_compiles_and_the_others_wait(world, works, retry):
    """Also where it fails while they wait."""
    world.compiler("sleep 0.5; " + (LINK if works else "exit 1"))
    processes = [world.start(retry) for _ in range(3)]
    answers = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert len(answers) == 1 and ("None" in answers) == works
    assert len(world.runs) == len(SOURCES) + works


def test_a_process_that_was_killed(world, capsys):
    """The next one compiles, and says so. It removes the scratch folder of the first after a day."""
    world.compiler("exec sleep 100")
    process = world.start()
    world.wait_for(len(SOURCES))
    process.terminate()
    process.wait()
    world.end_compilers()
    world.compiler(LINK)
    use = world.first_use()
    (scratch,) = use.folder.glob("scratch-*")
    assert use.why_not() is None and use.make() is None and use.library.exists()
    assert "zerofp4: compiling zerofp4._autograd for torch 2.99.0" in capsys.readouterr().err
    assert scratch.exists()  # as far as one can tell another host compiles in it
    use.library.unlink()
    os.utime(scratch, (time.time() - 25 * 3600,) * 2)
    assert use.make() is None
    assert {file.name for file in use.folder.iterdir()} == {"lock", use.library.name}


@pytest.mark.parametrize("other_fails", [False, True])
def test_hosts_that_do_not_see_the_locks_of_each_other(world, other_fails):
    """Both compile, and both end with the library that was there first, also where one cannot compile."""
    go = world.path / "go"
    wait = f"until [ -e {go} ]; do sleep 0.02; done; "
    world.compiler(wait + ("exit 1" if other_fails else LINK))
    other = world.start(locks=False)
    world.wait_for(len(SOURCES))
    world.compiler(LINK)
    one = world.start(locks=False)
    assert one.communicate(timeout=60)[0].strip() == "None"
    use = world.first_use()
    first = use.library.stat().st_ino
    go.touch()
    assert other.communicate(timeout=60)[0].strip() == "None"
    assert use.library.stat().st_ino == first and use.why_not() is None
    assert list(use.folder.glob("scratch-*")) == []


def test_an_interrupted_process_is_followed_by_another(world):
    """Ctrl-C is no failure of the compiler."""
    world.compiler("exec sleep 100")
    process = world.start()
    world.wait_for(len(SOURCES))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in said
    world.compiler(LINK)
    assert world.first_use().make() is None


def test_a_compiler_that_hangs(world, monkeypatch):
    world.compiler("exec sleep 100")
    monkeypatch.setattr(autograd_build, "_SECONDS", 0)
    assert "cc took more than 0 minutes" in world.first_use().make()


def test_limits_are_below_the_timeout_of_a_collective(world, monkeypatch):
    """A process may wait for another, which is killed, and then compile, while other ranks are in a
    collective of NCCL, for 600 s by default. All commands of a compilation have one deadline.
    """
    deadlines = []

    def run(commands, scratch, deadline, original=autograd_build._run):
        deadlines.append(deadline)
        original(commands, scratch, deadline)

    monkeypatch.setattr(autograd_build, "_run", run)
    before = time.monotonic()
    assert world.first_use().make() is None
    assert len(deadlines) == 2 and len(set(deadlines)) == 1
    assert before <= deadlines[0] - autograd_build._SECONDS <= time.monotonic()
    assert 2 * autograd_build._SECONDS < 600


def test_a_lock_that_is_never_free(world, monkeypatch):
    world.compiler("exec sleep 100")
    process = world.start()
    world.wait_for(len(SOURCES))
    monkeypatch.setattr(autograd_build, "_SECONDS", 0)
    use = world.first_use()
    assert use.make() == f"another process has had {use.folder}/lock for 0 minutes"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


def test_a_long_wait_is_said_by_one_rank(world, monkeypatch, capsys):
    held = SimpleNamespace(name="lock")
    refusals = iter([BlockingIOError, BlockingIOError, None] * 2)

    def flock(lock, operation):
        error = next(refusals)
        if error is not None:
            raise error

    monkeypatch.setattr(autograd_build.fcntl, "flock", flock)
    monkeypatch.setattr(autograd_build, "_SECONDS_OF_SILENCE", 0)
    for rank, lines in (("1", 0), ("0", 1)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert autograd_build._wait_for(held) is None
        assert capsys.readouterr().err.count("waiting for another process") == lines


def no_compiler(world, patch):
    patch.setenv("CXX", "no-such-compiler")


def does_not_compile(world, patch):
    world.compiler("exit 1")


def did_not_compile(world, patch):
    world.compiler("exit 1")
    assert autograd._first_use().make() is not None
    world.compiler(LINK)


def cache_is_a_file(world, patch):
    (world.path / "file").touch()
    patch.setenv("XDG_CACHE_HOME", str(world.path / "file"))


def flock_raises(error):
    def prepare(world, patch):
        def flock(lock, operation):
            raise error

        patch.setattr(autograd_build.fcntl, "flock", flock)
        patch.setattr(autograd_build, "_SECONDS", 0)

    return prepare


def is_no_library(world, patch):
    """What LINK writes does not load."""


FALLBACKS = {
    "no compiler": (no_compiler, "there is no C++ compiler 'no-such-compiler'"),
    "does not compile": (does_not_compile, "cc failed: status 1"),
    "did not compile": (did_not_compile, "cc failed: status 1"),
    "a cache that is a file": (cache_is_a_file, "cannot be used: "),
    "no locks": (flock_raises(OSError(errno.ENOLCK, "No locks available")), "No locks available"),
    "a lock held too long": (flock_raises(BlockingIOError()), "another process has had "),
    "not to be loaded": (is_no_library, "cannot be loaded with torch "),
}


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("prepare", "reason"), FALLBACKS.values(), ids=FALLBACKS)
def test_a_fallback_is_said_once_a_host(world, monkeypatch, capsys, prepare, reason, at_once):
    """By the first use, or at once where the variable asks for that; by the first rank of a host."""
    monkeypatch.setitem(sys.modules, autograd.NAME, None)  # as if it had not been built
    monkeypatch.setattr(autograd, "_first_use", world.first_use)
    monkeypatch.setenv("ZEROFP4_AUTOGRAD", "build" if at_once else "1")
    if at_once and prepare is did_not_compile:
        prepare = does_not_compile  # it tries again
    prepare(world, monkeypatch)
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setattr(autograd, "_found", None)
        capsys.readouterr()
        autograd.why_python_autograd()
        said = capsys.readouterr().err.count("is not used, Python does its work")
        assert said == (lines if at_once else 0)
        autograd.compile_on_first_use()
        autograd.compile_on_first_use()
        later = capsys.readouterr().err
        assert said + later.count("is not used, Python does its work") == lines
        assert later.count(reason) == (0 if at_once else lines)
        assert reason in autograd.why_python_autograd()


def test_no_fallback_is_said_where_python_was_asked_for(monkeypatch, capsys):
    monkeypatch.setenv("ZEROFP4_AUTOGRAD", "0")
    monkeypatch.setattr(autograd, "_found", None)
    autograd.compile_on_first_use()
    assert autograd.why_python_autograd() == "ZEROFP4_AUTOGRAD is 0"
    assert capsys.readouterr().err == ""


def test_sources_include_what_is_installed_with_them():
    csrc = Path(FILE).parents[2] / "csrc"
    files = autograd_build.source_files(csrc)
    parts = {part for together in autograd_build.TOGETHER.values() for part in together}
    assert {file.name for file in files} >= {*parts, "dequantize_call.h"}
    for file in (csrc / "autograd").iterdir():
        for name in re.findall(r'#include "([^"]+)"', file.read_text()):
            assert csrc / name in files, name


REAL = """
import sys
sys.modules["zerofp4._autograd"] = None  # as if it had not been built
import torch, zerofp4
from torch.nn import functional as F
assert "the first product with an NVFP4 weight compiles it" in zerofp4.ops.why_python_autograd()
weight = torch.nn.Parameter(zerofp4.quantize(torch.randn(32, 32)))
def run(x): return F.linear(x, weight)
if sys.argv[1] == "compile":
    run = torch.compile(run, fullgraph=True, backend="aot_eager")
if sys.argv[1] == "layer":
    layer = zerofp4.nn.Linear(32, 32)
    def run(x):
        with zerofp4.nn.autocast(zerofp4.nn.NVFP4Recipe()):
            y = layer(x)
        assert not isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction)
        return y
run(torch.ones(16, 32)).sum().backward()
assert zerofp4.ops.why_python_autograd() is None, zerofp4.ops.why_python_autograd()
y = F.linear(torch.ones(1, 32), weight)
assert type(y.grad_fn).__name__ == "LinearBackward"
assert not isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction)
assert torch.equal(torch.ones(1, 32) @ weight.dequantize().t(), y)
print(zerofp4.ops.extension_file())
"""


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("how", ["eager", "compile", "layer"])
def test_the_extension_itself(tmp_path, how):
    """Compiled by a product, by a layer, or while torch.compile traces a product."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    for name in ("CXX", "TORCH_EXTENSIONS_DIR", "ZEROFP4_AUTOGRAD"):
        environment.pop(name, None)
    command = [sys.executable, "-c", REAL, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)
    assert "zerofp4: compiling zerofp4._autograd for torch" in done.stderr
