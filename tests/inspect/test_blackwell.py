"""zerofp4 blackwell-check, by the exact backend, which runs everywhere."""

import json
import subprocess
import sys

import pytest
import torch
from cases.fp4_cores import MXFP8, NVFP4, fp4_cores
from early import waits_for

from zerofp4 import blackwell_check
from zerofp4.inspect import main

GROUPS = [
    "one-hot products",
    "random products",
    "transformed products",
    "quantized bytes",
    "layers",
]


@pytest.fixture
def few_shapes(monkeypatch):
    names = ("ragged", "one pair")
    monkeypatch.setattr(blackwell_check, "SHAPES", {name: blackwell_check.SHAPES[name] for name in names})


def checked(capsys, folder, *arguments) -> tuple[bool, list[str], dict]:
    """Whether all passed, which status and last line say, the lines before that, and the report."""
    code = main(["blackwell-check", *arguments, "--json", str(folder / "report.json")])
    *lines, last = capsys.readouterr().out.splitlines()
    report = json.loads((folder / "report.json").read_text())
    assert (code, last) in ((0, "BLACKWELL CHECK PASSED"), (1, "BLACKWELL CHECK FAILED"))
    assert report["passed"] == (code == 0)
    return code == 0, lines, report


def run_module(_) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "zerofp4", "blackwell-check", "--backend", "exact", "--device", "cpu"]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.nightly
@waits_for(run_module)
def test_the_module_passes(early):
    run = early(run_module)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1] == "BLACKWELL CHECK PASSED"


def test_every_check_on_a_device(device, capsys, tmp_path, few_shapes):
    passed, lines, found = checked(capsys, tmp_path, "--backend", "exact", "--device", str(device))
    assert passed and [line.partition(":")[0] for line in lines] == GROUPS, lines
    assert found["reason"] is None and found["backend"] == "exact"
    assert found["device"]["type"] == device.type and found["versions"]["torch"] == torch.__version__
    assert {each["check"] for each in found["checks"]} == set(GROUPS)
    assert all(each["passed"] and each["message"] is None for each in found["checks"])


def test_without_the_hardware_it_fails_and_says_why(capsys, tmp_path):
    passed, lines, found = checked(capsys, tmp_path, "--device", "cpu")
    assert not passed and found["checks"] == []
    assert "needs FP4 tensor cores" in lines[0] and "needs FP4 tensor cores" in found["reason"]


def one_wrong_element(monkeypatch):
    """As if one scale or element had been looked for where it is not."""
    right = blackwell_check.gemm

    def gemm(a, b, *, accumulate_into=None, **options):
        out = right(a, b, accumulate_into=accumulate_into, **options)
        out[-1, -1] += 1
        return out

    monkeypatch.setattr(blackwell_check, "gemm", gemm)


def other_bytes_at_times(monkeypatch):
    right, calls = blackwell_check.quantize, []

    def quantize(x, **options):
        tensor = right(x, **options)
        calls.append(tensor)
        tensor.record.rowwise.data[-1, -1] ^= len(calls) % 2
        return tensor

    monkeypatch.setattr(blackwell_check, "quantize", quantize)


def no_tolerance(monkeypatch):
    monkeypatch.setattr(blackwell_check, "LAYER_TOLERANCE", -1.0)


@pytest.mark.parametrize(
    ("defect", "groups"),
    [
        (one_wrong_element, {"one-hot products", "random products", "transformed products"}),
        (other_bytes_at_times, {"quantized bytes"}),
        (no_tolerance, {"layers"}),
    ],
)
def test_a_defect_is_found(monkeypatch, capsys, tmp_path, few_shapes, defect, groups):
    defect(monkeypatch)
    passed, lines, report = checked(capsys, tmp_path, "--backend", "exact", "--device", "cpu")
    failed = [each for each in report["checks"] if not each["passed"]]
    assert not passed
    assert {each["check"] for each in failed} == groups
    for each in failed:
        assert f"  {each['case']}: {each['message']}" in lines


def test_what_a_check_raises_is_reported(monkeypatch, capsys, tmp_path, few_shapes):
    def gemm(*_, **__):
        raise RuntimeError("cublasLtMatmul: CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(blackwell_check, "gemm", gemm)
    passed, lines, _ = checked(capsys, tmp_path, "--backend", "exact", "--device", "cpu")
    assert not passed
    assert any(line.endswith("RuntimeError: cublasLtMatmul: CUBLAS_STATUS_NOT_SUPPORTED") for line in lines)


@pytest.mark.parametrize("arguments", [["--backend", "auto"], ["--device", "tpu7"], ["--j", "x"]], ids=str)
def test_a_wrong_command_line(arguments):
    with pytest.raises(SystemExit) as ended:
        main(["blackwell-check", *arguments])
    assert ended.value.code == 2


def test_the_native_backend_passes(monkeypatch, capsys, tmp_path):
    """With a cuBLASLt of the tests' own."""
    names = ("ragged", "one block")
    monkeypatch.setattr(blackwell_check, "SHAPES", {name: blackwell_check.SHAPES[name] for name in names})
    with fp4_cores() as cublaslt:
        passed, lines, _ = checked(capsys, tmp_path, "--backend", "native", "--device", "cpu")
    assert passed, lines
    assert {(p.inputs, p.has_bias, p.accumulate) for p in cublaslt.ran} == {
        (inputs, *how) for inputs in (NVFP4, MXFP8) for how in ((False, False), (True, False), (False, True))
    }


def test_rounding_before_the_bias_is_found(monkeypatch, capsys, tmp_path, few_shapes):
    right = blackwell_check.gemm

    def gemm(a, b, *, bias=None, **options):
        out = right(a, b, **options)
        return out if bias is None else out + bias

    monkeypatch.setattr(blackwell_check, "gemm", gemm)
    _, lines, report = checked(capsys, tmp_path, "--backend", "exact", "--device", "cpu")
    failed = [each["message"] for each in report["checks"] if not each["passed"]]
    assert any(message.startswith("torch.bfloat16 with a bias") for message in failed), lines
