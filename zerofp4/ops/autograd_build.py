"""How zerofp4._autograd is compiled, and how it is compiled on first use, into a cache.

setup.py runs this file by its path, where there may be neither torch nor zerofp4: it needs the standard
library only.
"""

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from sysconfig import get_config_var, get_path

NAME = "zerofp4._autograd"
VARIABLE = "ZEROFP4_AUTOGRAD"
COMPILERS = ("g++", "c++", "clang++")
# Bit-exactness: no contraction into fused multiply-adds.
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wextra")
FLAGS += ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
TOGETHER = {
    "all_layers.cpp": (
        "grouped_passes.cpp",
        "layer.cpp",
        "layer_passes.cpp",
        "quantization.cpp",
    ),
    "all_products.cpp": ("linear.cpp", "lists.cpp", "module.cpp", "operators.cpp"),
}
"""What is compiled, here and by setup.py: each file includes these sources of csrc/autograd, because reading
torch's headers takes longer than compiling any of them.
"""
LIBRARIES = ("-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10", "-lgcc_s", "-lgcc", "-lm", "-lc")

_PACKAGE = Path(__file__).resolve().parents[1]
_SECONDS_OF_SILENCE = 5
_SECONDS = 240
"""The limit for a compilation, and for a wait for another process. The other ranks of a job may be in a
collective meanwhile: both together stay below the timeout of NCCL, 600 s by default.
"""
_SECONDS_OF_SCRATCH = 24 * 3600
"""A scratch folder that is older was left by a process that was killed."""


@dataclass(frozen=True)
class Torch:
    """A torch to build against. build: what tells it from others of the same version."""

    folder: Path
    version: str
    build: str = ""


def source_files(csrc: Path) -> list[Path]:
    """All that the extension is compiled of, and the headers of what it calls."""
    return sorted([*(csrc / "autograd").glob("*.cpp"), *csrc.rglob("*.h")])


def compile_flags(csrc: Path, torch: Torch) -> list[str]:
    of_torch = torch.folder / "include"
    includes = [of_torch, of_torch / "torch/csrc/api/include", get_path("include")]
    flags = [*FLAGS, f"-I{csrc}", f'-DZEROFP4_TORCH_VERSION="{torch.version}"']
    return [*flags, *(f"-isystem{path}" for path in includes)]  # their warnings are not ours


def link_flags(torch: Torch) -> list[str]:
    """Without a path to torch's libraries: whoever imports the extension has loaded them, and libstdc++ with
    them. Where the compiler finds only a static libstdc++, streams of that second copy fail or crash.
    """
    folder = f"-L{torch.folder / 'lib'}"
    return ["-shared", "-s", "-nodefaultlibs", folder, "-Wl,--no-as-needed", *LIBRARIES]


class _Failure(Exception):
    """Why it was not compiled: a line, and what the compiler said."""


class FirstUse:
    """The extension in the cache, for one torch, this Python and these sources.

    One process compiles it in a scratch folder of its own and moves it into the cache; the others wait for a
    lock, which the kernel releases if that process dies. On a file system where hosts do not see each other's
    locks, each host compiles, and the first library stays. A failure of the compiler is kept in a file, so
    that no process compiles again what does not compile, unless it is told to. A process that is killed
    leaves only its scratch folder: the next one compiles.
    """

    def __init__(self, torch: Torch):
        self.torch = torch
        self._csrc = _find_sources()
        suffix = get_config_var("EXT_SUFFIX")
        self.folder = _cache() / f"torch-{torch.version}-{self._digest(suffix)}"
        self.library = self.folder / f"_autograd{suffix}"
        self._failed = self.folder / "failed"

    def _digest(self, suffix: str) -> str:
        """Of all that the library depends on, but for the compiler."""
        words = [self.torch.version, self.torch.build, suffix, platform.machine(), *FLAGS]
        found = hashlib.sha256("\0".join(words).encode())
        for file in source_files(self._csrc) if self._csrc else []:
            found.update(file.read_bytes())
        return found.hexdigest()[:16]

    def why_not(self) -> str | None:
        """Why there is no library and make() would make none, as far as one can tell without trying. None
        where there is one, or make() would try.
        """
        if self.library.exists():
            return None
        return self._why_impossible() or self._why_failed()

    def _why_impossible(self) -> str | None:
        if self._csrc is None:
            return "its sources were not installed"
        if not (self.torch.folder / "include" / "torch" / "csrc").is_dir():
            return "this torch has no headers"
        if not Path(get_path("include"), "Python.h").exists():
            return "there is no Python.h: install python3-dev"
        command = _compiler()
        if not command:
            return f"there is no C++ compiler ({', '.join(COMPILERS)}) to compile it"
        if shutil.which(command[0]) is None:
            return f"there is no C++ compiler {command[0]!r}, which CXX names"
        parent = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        if not os.access(parent, os.W_OK):
            return f"nothing can be written to the cache, {parent}: set XDG_CACHE_HOME"
        return None

    def _why_failed(self, since: float = 0) -> str | None:
        """Why the compiler failed. None where it did not, or before `since`, in seconds of the epoch."""
        try:
            if self._failed.stat().st_mtime < since:
                return None
            line = self._failed.read_text().splitlines()[0]
        except (OSError, IndexError):
            return None
        return f"{line} (see {self._failed}; {VARIABLE}=build tries again)"

    def make(self, retry: bool = False) -> str | None:
        """Compile the library, unless it is there, or compiling failed before. Returns why there is none
        after that.

        retry: compile although it failed before, unless that was while this process waited.
        """
        asked = time.time()
        reason = None if self.library.exists() else self._why_impossible()
        if reason is not None or self.library.exists():
            return reason
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "lock", "a") as lock:
                reason = _wait_for(lock)
                return reason or self._make_alone(asked if retry else 0)
        except OSError as error:
            return f"the cache {self.folder} cannot be used: {error}"

    def _make_alone(self, since: float) -> str | None:
        """make(), by the one process that has the lock. A failure not older than `since` is final."""
        if self.library.exists():
            return None
        reason = self._why_failed(since)
        if reason is not None:
            return reason
        self._failed.unlink(missing_ok=True)
        self._remove_old_scratch()
        try:
            self._compile()
        except _Failure as failure:
            self._failed.write_text("\n".join(failure.args))
        return None if self.library.exists() else self._why_failed()

    def _remove_old_scratch(self) -> None:
        """Newer scratch may belong to another host, which does not see this lock."""
        for scratch in self.folder.glob("scratch-*"):
            with suppress(FileNotFoundError):  # another host may remove it as well
                if time.time() - scratch.stat().st_mtime > _SECONDS_OF_SCRATCH:
                    shutil.rmtree(scratch, ignore_errors=True)

    def _compile(self) -> None:
        command, began = _compiler(), time.monotonic()
        say(
            f"compiling {NAME} for torch {self.torch.version} with {command[0]}: once, for about a minute; "
            f"{VARIABLE}=0 goes without"
        )
        csrc = self._csrc
        assert csrc is not None
        with tempfile.TemporaryDirectory(prefix="scratch-", dir=self.folder) as name:
            scratch = Path(name)
            flags = [*command, *compile_flags(csrc, self.torch)]
            sources = [scratch / name for name in TOGETHER]
            for source in sources:
                source.write_text("".join(f'#include "autograd/{part}"\n' for part in TOGETHER[source.name]))
            objects = [source.with_suffix(".o") for source in sources]
            pairs = zip(sources, objects, strict=True)
            deadline = began + _SECONDS
            compiling = [[*flags, "-c", str(source), "-o", str(target)] for source, target in pairs]
            _run(compiling, scratch, deadline)
            library = scratch / self.library.name
            linking = [*command, *map(str, objects), *link_flags(self.torch), "-o", str(library)]
            _run([linking], scratch, deadline)
            if not self.library.exists():  # another host may have loaded it, over NFS: it is not replaced
                os.replace(library, self.library)  # atomic
        say(f"compiled in {time.monotonic() - began:.0f} s, kept in {self.folder}")


def _find_sources() -> Path | None:
    """csrc, in the package if it was installed, beside it in a checkout."""
    folders = (_PACKAGE / "csrc", _PACKAGE.parent / "csrc")
    return next((folder for folder in folders if (folder / "autograd").is_dir()), None)


def _cache() -> Path:
    """Where torch keeps what it compiles, if one has said so, else among the caches of the user."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given:
        return Path(given, "zerofp4").absolute()
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(caches, "zerofp4").absolute()


def _compiler() -> list[str]:
    """$CXX, else the first of COMPILERS; empty where there is none."""
    given = os.environ.get("CXX")
    return shlex.split(given) if given else [name for name in COMPILERS if shutil.which(name)][:1]


def say(text: str) -> None:
    print(f"zerofp4: {text}", file=sys.stderr, flush=True)


def say_once_a_host(text: str) -> None:
    """What all ranks of a host would say, said by the first of them."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        say(text)


def _wait_for(lock) -> str | None:
    """Until this process has the lock, which goes with it. Returns why it has not got it."""
    began, said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            pass
        waited = time.monotonic() - began
        if waited > _SECONDS:
            return f"another process has had {lock.name} for {_SECONDS // 60} minutes"
        if waited > _SECONDS_OF_SILENCE and not said:
            said = True
            say_once_a_host(f"waiting for another process that compiles {NAME}")
        time.sleep(0.1)


def _run(commands: list[list[str]], scratch: Path, deadline: float) -> None:
    """Run them at the same time. Raises _Failure for the first that fails or still runs at the deadline."""
    with _started(commands, scratch) as running:
        for command, process, output in running:
            try:
                status = process.wait(deadline - time.monotonic())
            except subprocess.TimeoutExpired:
                raise _Failure(f"{command[0]} took more than {_SECONDS // 60} minutes") from None
            if status:
                said = output.read_text(errors="replace")
                errors = [line for line in said.splitlines() if "error" in line]
                why = (errors or [*said.splitlines(), f"status {status}"])[0].strip()[:200]
                raise _Failure(f"{command[0]} failed: {why}", shlex.join(command), said)


@contextmanager
def _started(commands: list[list[str]], scratch: Path) -> Iterator[list]:
    """(command, process, file with its output) of each; what still runs at the end is killed."""
    running: list[tuple[list[str], subprocess.Popen, Path]] = []
    try:
        for i, command in enumerate(commands):
            output = scratch / f"{i}.log"
            with open(output, "w") as log:
                process = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, cwd=scratch, start_new_session=True
                )
            running.append((command, process, output))
        yield running
    finally:
        for _, process, _ in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with what the compiler has started
                process.wait()
