"""The subcommand `blackwell-check`: whether a GPU multiplies and quantizes as it must."""

import argparse
import json
from pathlib import Path

import torch

from zerofp4.gemm import BACKENDS

SUMMARY = "check products and quantization on this GPU"
DESCRIPTION = """\
Check the products and the quantization of this GPU, in every class of shapes: one-hot operands, whose
products are known exactly, random ones against float64, every byte of quantize against the CPU, native
products and layers against exact ones. The last line is BLACKWELL CHECK PASSED or BLACKWELL CHECK FAILED.
"""


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(str(error).splitlines()[0]) from None


def add_options(parser: argparse.ArgumentParser) -> None:
    backends = [backend for backend in BACKENDS if backend != "auto"]
    parser.add_argument("--backend", choices=backends, default="native", help="of zerofp4.gemm (native)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=_device, default=device, help="cpu or cuda:N (%(default)s here)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a report for programs")


def run(options: argparse.Namespace) -> int:
    from zerofp4 import blackwell_check  # with the oracle, which nothing else needs

    report = blackwell_check.check(blackwell_check.Setting(options.device, options.backend))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    print(f"BLACKWELL CHECK {'PASSED' if report['passed'] else 'FAILED'}")
    return 0 if report["passed"] else 1
