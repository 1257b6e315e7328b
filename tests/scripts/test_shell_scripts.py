"""demo.sh and test.sh: what they say last however they end, and whose zerofp4 they take."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
VERDICTS = {"demo.sh": "DEMO", "test.sh": "TESTS"}

# In place of setup_env.sh: nothing is set up, and the Python is the one below.
SETUP = """
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
say() { printf -- '-- %s\\n' "$*"; }
fail() { printf 'error: %s\\n' "$*" >&2; exit 1; }
has() { false; }
setup_environment() { PYTHON=$ROOT/python; PATH=$ROOT:$PATH; }
setup_throw_away() { setup_environment; THROW_AWAY=$ROOT/thrown; mkdir "$THROW_AWAY"; say "torch $1"; }
"""

# The command that takes long (pytest, torchrun) leaves its pid, and runs until `done` says how it ends.
PYTHON = """#!/usr/bin/env bash
cd "$(dirname "${BASH_SOURCE[0]}")"
[[ $1 == -m ]] || { echo "2 0"; exit; }
trap 'exit 2' INT
printf '%s\\n' "$@" >arguments
echo "${LD_PRELOAD-}" >preload
echo "${ZEROFP4_CUDA_OPTIMIZE-} ${ZEROFP4_CUDA_ARCHS-}" >build
echo $$ >draft && mv draft pid
until [[ -e done ]]; do sleep 0.05; done
exit "$(cat done)"
"""


def heed_signals() -> None:
    """What a shell found ignored it cannot trap: nohup ignores HUP, and `&` in a script INT."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_DFL)


class StandIn:
    """A copy of a script in a repository of its own, at work; `folder` is that repository. more: programs in
    place of those that are found.
    """

    def __init__(self, folder: Path, script: str, *arguments: str, more: dict[str, str] | None = None):
        self.folder, self.verdict = folder, VERDICTS[script]
        (folder / "scripts").mkdir()
        (folder / "csrc").mkdir()
        (folder / "tests" / "native").mkdir(parents=True)
        for name in (script, "verdict.sh", "sanitize.sh"):
            shutil.copy(SCRIPTS / name, folder / "scripts" / name)
        (folder / "scripts" / "setup_env.sh").write_text(SETUP)
        programs = {"python": PYTHON, "clang-format": "#!/bin/sh\n", "nvidia-smi": "#!/bin/sh\nexit 1\n"}
        for name, text in (programs | (more or {})).items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.process = subprocess.Popen(
            ["bash", str(folder / "scripts" / script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # A shell without job control starts what runs beside it, and all below that, with INT ignored.
            preexec_fn=heed_signals,
        )

    def child(self) -> int:
        """The pid of the command it waits for."""
        path = self.folder / "pid"
        deadline = time.monotonic() + 20
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return int(path.read_text())

    def end_child(self, status: int) -> None:
        (self.folder / "draft").write_text(str(status))
        (self.folder / "draft").rename(self.folder / "done")

    def end(self) -> tuple[int, str]:
        """Its status, and the last line it printed."""
        self.output, _ = self.process.communicate(timeout=20)
        return self.process.returncode, (self.output.splitlines() or [""])[-1]

    def has_failed(self) -> bool:
        code, last = self.end()
        return code != 0 and last == f"{self.verdict} FAILED"


@pytest.fixture(params=VERDICTS)
def stand_in(request, tmp_path):
    made = StandIn(tmp_path, request.param)
    yield made
    made.end_child(1)
    made.process.kill()
    made.process.communicate(timeout=20)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # dead, and not yet waited for


@pytest.mark.parametrize("status", [0, 3])
def test_the_last_line_and_the_status_are_those_of_the_command(stand_in, status):
    stand_in.end_child(status)
    code, last = stand_in.end()
    assert (code == 0, last) == (status == 0, f"{stand_in.verdict} {'FAILED' if status else 'PASSED'}")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_killed_script_has_not_passed_and_ends_what_it_started(stand_in, name):
    child = stand_in.child()
    stand_in.process.send_signal(getattr(signal, name))
    assert stand_in.has_failed()
    deadline = time.monotonic() + 5
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(child)


def test_an_interrupted_script_has_not_passed_even_if_its_command_has(stand_in):
    stand_in.child()
    stand_in.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    stand_in.end_child(0)
    assert stand_in.end() == (130, f"{stand_in.verdict} FAILED")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_a_killed_command_has_not_passed(stand_in, name):
    os.kill(stand_in.child(), getattr(signal, name))
    assert stand_in.has_failed()


def test_an_interrupt_from_the_terminal_ends_both(stand_in):
    stand_in.child()
    os.killpg(stand_in.process.pid, signal.SIGINT)
    assert stand_in.has_failed()


@pytest.mark.parametrize(
    ("ci", "gpu", "lane", "build"),
    [
        ("true", False, "--quick", "0 branches"),
        ("true", True, "--quick", " "),
        ("true", False, "--nightly", " "),
        ("", False, "--quick", " "),
    ],
)
def test_only_ci_without_a_gpu_compiles_gpu_code_to_see_that_it_compiles(
    tmp_path, monkeypatch, ci, gpu, lane, build
):
    """All other arguments go to pytest."""
    monkeypatch.setenv("CI", ci)
    for name in ("ZEROFP4_CUDA_OPTIMIZE", "ZEROFP4_CUDA_ARCHS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    programs = {"nvidia-smi": f"#!/bin/sh\nexit {0 if gpu else 1}\n"}
    made = StandIn(tmp_path, "test.sh", lane, "-k", "a word", more=programs)
    made.child()
    assert (tmp_path / "arguments").read_text().splitlines() == ["-m", "pytest", lane, "-k", "a word"]
    assert (tmp_path / "build").read_text() == f"{build}\n"
    made.end_child(0)
    assert made.end() == (0, "TESTS PASSED")


@pytest.mark.parametrize("is_killed", [False, True])
def test_another_torch_is_in_an_environment_that_is_gone_afterwards(tmp_path, is_killed):
    late = "trap 'sleep 0.3; mkdir -p thrown/late; exit 1' TERM"  # it still writes when it is told to end
    python = PYTHON.replace("trap 'exit 2' INT", late)
    arguments = ("--torch", "2.11.0", "--quick", "-k", "word")
    made = StandIn(tmp_path, "test.sh", *arguments, more={"python": python})
    made.child()
    assert (tmp_path / "arguments").read_text().splitlines() == ["-m", "pytest", "--quick", "-k", "word"]
    assert (tmp_path / "thrown").exists()
    if is_killed:
        made.process.send_signal(signal.SIGTERM)
    else:
        made.end_child(0)
    assert made.has_failed() == is_killed
    assert made.output.startswith("-- torch 2.11.0\n")
    assert not (tmp_path / "thrown").exists()


@pytest.mark.parametrize("failing", ["none", "3/4"])
def test_parts_share_the_tests_on_a_gpu(tmp_path, monkeypatch, failing):
    """Each says something and begins with another GPU, and the status is that of all."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    python = f"""#!/bin/sh
[ "$1" = -m ] || {{ echo "2 0"; exit; }}
echo "runs $* on $CUDA_VISIBLE_DEVICES"
[ "$4" != {failing} ]
"""
    three = "#!/bin/sh\nprintf '0\\n1\\n2\\n'"
    gpus = {"python": python, "nvidia-smi": three, "nproc": "#!/bin/sh\necho 16\n"}
    made = StandIn(tmp_path, "test.sh", more=gpus)
    assert made.has_failed() == (failing != "none")
    for part, gpus in enumerate(("0,1,2", "1,2,0", "2,0,1", "0,1,2"), start=1):
        assert f"runs -m pytest --part {part}/4 on {gpus}\n" in made.output
    assert ("failed: pytest --part 3/4" in made.output) == (failing != "none")


def test_sanitizers_that_find_something_end_the_run(tmp_path):
    made = StandIn(tmp_path, "test.sh", "--sanitize", "-k", "a word")
    made.child()
    arguments = (tmp_path / "arguments").read_text().splitlines()
    preload = (tmp_path / "preload").read_text()
    assert arguments == ["-m", "pytest", "-k", "a word"]
    assert "libasan.so" in preload and "libubsan.so" in preload
    made.end_child(1)
    assert made.has_failed()


def test_help_says_what_there_is_and_runs_nothing():
    run = subprocess.run(
        ["bash", str(SCRIPTS / "test.sh"), "--help"], capture_output=True, text=True, timeout=20
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("scripts/test.sh [--help] [--torch VERSION] [--quick | --nightly | --san")
    assert "under 30 seconds" in run.stdout and "PASSED, or" in run.stdout and "set -e" not in run.stdout


# What is installed, and what cannot be


STUBS = """
has_torch() { true; }; is_virtual() { true; }; build_in_place() { true; }; fetch_megatron() { :; }
package_is_ours() { true; }
requirements() { printf "%s\\n" no-such-tool==1 pip; }
"""


@pytest.mark.heavy
@pytest.mark.parametrize("ci", ["true", ""])
def test_ci_fails_where_a_tool_cannot_be_installed(tmp_path, ci):
    (tmp_path / "zerofp4.py").write_text("__path__ = []")
    command = f'. "{SCRIPTS}/setup_env.sh"; {STUBS}set -euo pipefail; setup_environment test'
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PIP_NO_INDEX": "1", "CI": ci, "PATH": path, "PYTHONPATH": str(tmp_path)}
    command = ["bash", "-c", command]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if ci:
        assert run.returncode != 0
        assert "error: no-such-tool==1 could not be installed, and CI needs it" in run.stderr
    else:
        assert run.returncode == 0, run.stderr
        assert "no-such-tool==1 could not be installed: what needs it is skipped" in run.stdout
        assert "installing what is missing of pip" in run.stdout, "the next one is installed all the same"
