"""The checks of `zerofp4 blackwell-check`: whether this GPU multiplies and quantizes as it must.

The native backend of zerofp4.gemm needs FP4 tensor cores, on which it was never run by those who wrote it.
Products with one-hot operands, known exactly, name any element or scale that is not where they look for it.
"""

from __future__ import annotations

import dataclasses
import itertools
import platform
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from zerofp4 import nn, ops, reference
from zerofp4.format import BLOCK, SCALE_LAYOUTS, WEIGHT_DTYPES, FourOverSix
from zerofp4.gemm import Operand, chosen_backend, gemm
from zerofp4.storage import SIDES
from zerofp4.tensors import quantize, quantize_mxfp8
from zerofp4.testing import first_difference
from zerofp4.version import VERSION

# (rows of a, rows of b, contraction)
SHAPES = {
    "one atom": (128, 128, 128),
    "several atoms": (256, 384, 512),
    "rows beyond an atom": (130, 144, 256),
    "padded contraction": (64, 48, 80),
    "padded rows of b": (64, 40, 96),
    "ragged": (34, 18, 50),
    "one block": (16, 16, 16),
    "one pair": (2, 2, 2),
    "long contraction": (32, 64, 4096),
}
NEUTRAL_AMAX = 2688.0  # with it a block that ends at 6 has scale 1
STRETCH = 613 / 512  # of alpha, which then has more bits than the elements
TOLERANCE = 3e-5  # of float32 sums in another order, which tensor cores cut off, relative to their norm
LAYER_TOLERANCE = 2e-2  # of bfloat16 results that are quantized again on the way


class Wrong(Exception):
    """What a check found."""


@dataclasses.dataclass(frozen=True)
class Setting:
    device: torch.device
    backend: str

    def gemm(self, a: Operand, b: Operand, **options: Any) -> torch.Tensor:
        return gemm(a, b, backend=self.backend, **options)


def expect_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    difference = first_difference(actual.cpu(), expected.cpu())
    if difference is not None:
        raise Wrong(f"{what}: {difference}")


def expect_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    actual, expected = actual.double().cpu(), expected.double().cpu()
    error = float((actual - expected).norm() / expected.norm().clamp_min(1e-300))
    if not error <= tolerance:
        raise Wrong(f"{what}: relative error {error:.3g}, at most {tolerance:g} is right")


# Operands

FORMATS: dict[str, Callable[..., Any]] = {
    "1x16": partial(quantize, block=(1, BLOCK)),
    "16x16": quantize,
    "mxfp8": lambda x, amax=None, **options: quantize_mxfp8(x, **options),
}


def operand(matrix: torch.Tensor, side: str, format: str, **options: Any) -> Operand:
    """The matrix [rows, contraction], from the copy of that side."""
    x = matrix if side == "rowwise" else matrix.t().contiguous()
    copies = {"rowwise": side == "rowwise", "columnwise": side == "columnwise"}
    return Operand(FORMATS[format](x, **copies, **options), columnwise=side == "columnwise")


def specified(each: Operand) -> torch.Tensor:
    """float64 values of an operand without its global scale, from its bytes."""
    data, scale = each.copy.data.cpu(), each.copy.scales["compact"].cpu()
    if each.is_nvfp4:
        return reference.nvfp4_operand(data, scale, each.record.block[0])
    if each.side == "columnwise":
        data, scale = (t.view(torch.uint8).t().contiguous().view(t.dtype) for t in (data, scale))
    return reference.mxfp8_operand(data, scale)


def alpha(a: Operand, b: Operand) -> torch.Tensor | None:
    """float32 [1], on the CPU; None of MXFP8."""
    if not a.is_nvfp4:
        return None
    maxima = (a.record.e4m3_max, b.record.e4m3_max)
    return reference.gemm_alpha(a.copy.amax.cpu(), b.copy.amax.cpu(), *maxima)


def product_of(a: Operand, b: Operand, bias: torch.Tensor | None = None) -> torch.Tensor:
    """In float64."""
    bias = None if bias is None else bias.cpu()
    return reference.gemm(specified(a), specified(b), alpha(a, b), bias)


def randoms(rows: int, cols: int, device: torch.device, seed: int) -> torch.Tensor:
    """float32 values that are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, dtype=torch.float32, device="cpu", generator=generator).to(device)


# Checks


def one_hot_products(setting: Setting, shape: tuple[int, int, int], side: str, format: str) -> None:
    """Each element of a pattern, taken out by a one-hot operand, as the left and as the right one; in every
    dtype, with and without a bias, and added to a matrix. All products are exact in float32, but not in
    bfloat16: what is rounded before the bias is added ends in other bytes.
    """
    rows, _, size = shape
    # Alpha is 4 * 0.5.
    amaxes = NEUTRAL_AMAX * torch.tensor([[4], [0.5]], dtype=torch.float32, device=setting.device)
    hot, dense = reference.one_hot(size), reference.pattern(rows, size)
    a, b = (
        operand(each.to(setting.device), side, format, amax=amax)
        for each, amax in zip((hot, dense), amaxes, strict=True)
    )
    expected = hot @ dense.t()
    if a.is_nvfp4:
        a.copy.amax = a.copy.amax * STRETCH
        expected *= STRETCH
    for left, right, known in ((a, b, expected), (b, a, expected.t().contiguous())):
        bias = randoms(1, known.shape[1], torch.device("cpu"), 9)[0]
        for dtype in WEIGHT_DTYPES:
            found = setting.gemm(left, right, out_dtype=dtype)
            # A sum of zeros has either sign.
            expect_equal(found + 0.0, known.to(dtype) + 0.0, f"{dtype}")
            own = bias.to(dtype)
            found = setting.gemm(left, right, out_dtype=dtype, bias=own.to(setting.device))
            expect_equal(found, (known + own).to(dtype), f"{dtype} with a bias")
        into = randoms(*known.shape, torch.device("cpu"), 10)
        found = setting.gemm(left, right, accumulate_into=into.to(setting.device, copy=True))
        expect_equal(found, into + known, "accumulation")


def random_products(setting: Setting, shape: tuple[int, int, int], sides: str, format: str) -> None:
    """Against float64, and with backend native against the exact one."""
    m, n, k = shape
    a, b = (
        operand(randoms(rows, k, setting.device, seed), side, format)
        for seed, (rows, side) in enumerate(zip((m, n), sides.split(" x "), strict=True))
    )
    found = setting.gemm(a, b, out_dtype=torch.float32)
    expect_close(found, product_of(a, b), TOLERANCE, "against float64")
    exact = gemm(a, b, out_dtype=torch.float32, backend="exact")
    expect_close(found, exact, TOLERANCE, "against the exact backend")


def transformed_products(setting: Setting, shape: tuple[int, int, int]) -> None:
    """Of operands of the Hadamard transform and of four over six, with a bias and accumulation."""
    (m, n, k), device = shape, setting.device
    options = {"hadamard": True, "four_over_six": FourOverSix()}
    a, b = (
        operand(randoms(rows, k, device, seed), "columnwise", "1x16", **options)
        for seed, rows in enumerate((m, n))
    )
    bias, into = randoms(1, n, device, 3)[0], randoms(m, n, device, 4)
    expected = product_of(a, b, bias) + into.double().cpu()
    setting.gemm(a, b, bias=bias, accumulate_into=into)
    expect_close(into, expected, TOLERANCE, "accumulation")


def quantized_bytes(setting: Setting, shape: tuple[int, int, int], format: str, dtype: torch.dtype) -> None:
    """Every buffer that quantize writes here, against the CPU's."""
    rows, _, cols = shape
    x = randoms(rows, cols, torch.device("cpu"), 5).to(dtype)
    records = []
    for device in (setting.device, x.device):
        options = {"columnwise": True, **QUANTIZED.get(format, {})}
        if format == "stochastic":
            options["generator"] = torch.Generator().manual_seed(7)
        if format == "mxfp8":
            records.append(quantize_mxfp8(x.to(device), **options).record)
        else:
            records.append(quantize(x.to(device), scale_layouts=SCALE_LAYOUTS, **options).record)
    for (buffer, here), (_, there) in zip(*(r.buffers() for r in records), strict=True):
        expect_equal(here, there, buffer)


def layers(setting: Setting, shape: tuple[int, int, int], recipe: str) -> None:
    """Output and gradients of a linear layer, against those by the exact backend."""
    tokens, n, k = shape
    torch.manual_seed(0)
    layer = nn.Linear(k, n, device=setting.device, dtype=torch.bfloat16)
    results = []
    for backend in (setting.backend, "exact"):
        layer.zero_grad()
        x = randoms(tokens, k, setting.device, 7).bfloat16().requires_grad_()
        with nn.autocast(RECIPES[recipe](backend=backend)):
            y = layer(x)
        torch.manual_seed(1)  # of the stochastic rounding of gradients
        y.backward(randoms(tokens, n, setting.device, 8).bfloat16())
        results.append((y.detach(), x.grad, layer.weight.grad, layer.bias.grad))
    names = ("output", "gradient of x", "gradient of the weight", "gradient of the bias")
    for what, *pair in zip(names, *results, strict=True):
        expect_close(*pair, LAYER_TOLERANCE, what)


# Of the products of a layer: of the output, of the input's gradient, of the weight's.
PAIRS_OF_SIDES = ("rowwise x rowwise", "rowwise x columnwise", "columnwise x columnwise")
QUANTIZED: dict[str, dict[str, Any]] = {
    "1x16": {"block": (1, BLOCK)},
    "16x16": {},
    "Hadamard": {"block": (1, BLOCK), "hadamard": True},
    "four over six": {"four_over_six": FourOverSix()},
    "stochastic": {"block": (1, BLOCK), "stochastic_rounding": True},
}
RECIPES = {"nvfp4": nn.NVFP4Recipe, "mxfp8": nn.MXFP8Recipe}
CHECKS: dict[str, tuple[Callable[..., None], list]] = {
    "one-hot products": (one_hot_products, [SIDES, FORMATS]),
    "random products": (random_products, [PAIRS_OF_SIDES, FORMATS]),
    "transformed products": (transformed_products, []),
    "quantized bytes": (quantized_bytes, [[*QUANTIZED, "mxfp8"], WEIGHT_DTYPES]),
    "layers": (layers, [RECIPES]),
}
"""By group, what raises Wrong, and what it is called with: each shape with each combination of these."""


def check(setting: Setting) -> dict[str, Any]:
    """Run all checks, and print what failed. Returns what --json writes."""
    reason, results = _why_not(setting), []
    if reason is not None:
        print(reason)
    for group in CHECKS if reason is None else ():
        own = list(_run(setting, group))
        failed = [each for each in own if not each["passed"]]
        print(f"{group}: {len(own) - len(failed)} of {len(own)} passed", flush=True)
        for each in failed:
            print(f"  {each['case']}: {each['message']}", flush=True)
        results += own
    name, capability = platform.processor() or platform.machine(), None
    if setting.device.type == "cuda":
        name = torch.cuda.get_device_name(setting.device)
        capability = list(torch.cuda.get_device_capability(setting.device))
    return {
        "passed": reason is None and all(each["passed"] for each in results),
        "reason": reason,
        "backend": setting.backend,
        "device": {"type": setting.device.type, "name": name, "capability": capability},
        "versions": {"zerofp4": VERSION, "torch": torch.__version__, "cuda": torch.version.cuda},
        "build": ops.build_info(),
        "checks": results,
    }


def _run(setting: Setting, group: str) -> Iterator[dict[str, Any]]:
    check, axes = CHECKS[group]
    for name, *others in itertools.product(SHAPES, *axes):
        message = None
        try:
            check(setting, SHAPES[name], *others)
        except Exception as error:  # whatever it is, the other checks are still worth running
            message = str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
        case = ", ".join(map(str, (name, *others)))
        yield {"check": group, "case": case, "passed": message is None, "message": message}


def _why_not(setting: Setting) -> str | None:
    """Why nothing can be checked."""
    try:
        chosen_backend(setting.device, setting.backend)
        if setting.device.type == "cuda":
            ops.check_cuda(setting.device.index or 0)
    except RuntimeError as error:
        return str(error)
    return None
