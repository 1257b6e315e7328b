"""quantization_error: how far a model's NVFP4 weights are from their high-precision values."""

import dataclasses
import math
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zerofp4.format import BLOCK
from zerofp4.inspect.table import plain_table
from zerofp4.layout import ceil_div
from zerofp4.optim import ZeroFP4Optimizer, gather_masters
from zerofp4.storage import Side
from zerofp4.tensors import NVFP4Tensor

SHOWN = 100
"""How many matrices repr() of a report shows, those with the lowest SQNR."""


@dataclasses.dataclass(frozen=True, repr=False)
class QuantizationReport:
    """What quantization_error returns. repr() is a table.

    records: a dict for each matrix, in the model's order, with None for what could not be computed. An expert
        of a weight [E, N, K] is a matrix of its own, called name[e].

    - name, shape: of the matrix
    - compared_with: "master", "initial value", or None
    - sqnr_db: 20 log10(|x| / |x - w|), with w the matrix, x what it is compared with and | | the 2-norm
    - relative_error: |x - w| / |x|, the same ratio
    - zeros, saturated: the shares of codes with the smallest magnitude, 0, and with the largest, 6
    - underflows: the number of nonzero blocks with a scale of 0 or the smallest subnormal, 2**-9
    - amax: the weight's, so that of its amax group
    - flipped: the share of the 4-bit codes that differ from those of `previous`

    other_parameters: the number of parameters that are not NVFP4.
    codes: the packed codes of each weight by name, on the CPU; empty without keep_codes.
    """

    records: list[dict[str, Any]]
    other_parameters: int
    codes: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        if not self.records:
            return f"no NVFP4 weight ({self.other_parameters} other parameters)"
        shown = self.records
        if len(shown) > SHOWN:
            worst = sorted(shown, key=lambda r: math.inf if r["sqnr_db"] is None else r["sqnr_db"])
            shown = worst[:SHOWN]
        rows = [[head for head, _, _ in COLUMNS.values()]]
        rows += [[_shown(record[name], form) for name, (_, form, _) in COLUMNS.items()] for record in shown]
        lines = plain_table(rows, [align for _, _, align in COLUMNS.values()])
        if len(self.records) > SHOWN:
            lines.append(f"and {len(self.records) - SHOWN} more, none with a lower SQNR")
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike) -> None:
        """Write a picture: the SQNR of each matrix, and its shares of zero, saturated and flipped codes.

        path: the file, whose suffix chooses the format.

        Raises ImportError without matplotlib, ValueError for a report without matrices.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("plot() draws with matplotlib: pip install matplotlib") from error
        if not self.records:
            raise ValueError(f"there is nothing to plot: {self}")
        width = min(40, 4 + 0.15 * len(self.records))
        figure = Figure(figsize=(max(6, width), 7), layout="constrained")
        errors, shares = figure.subplots(2, sharex=True)
        names = [record["name"] for record in self.records]
        for axes, fields in ((errors, ["sqnr_db"]), (shares, ["zeros", "saturated", "flipped"])):
            for field in fields:
                values = [math.nan if record[field] is None else record[field] for record in self.records]
                axes.plot(range(len(names)), values, ".-", label=COLUMNS[field][0])
            axes.grid(alpha=0.3)
        errors.set_ylabel("SQNR (dB)")
        shares.set_ylabel("share of codes")
        shares.legend()
        step = ceil_div(len(names), 200)  # more labels cannot be read
        shares.set_xticks(range(0, len(names), step), names[::step], rotation=90, fontsize=6)
        figure.savefig(path)


COLUMNS = {
    "name": ("weight", "s", "<"),
    "shape": ("shape", "", ">"),
    "sqnr_db": ("SQNR dB", ".2f", ">"),
    "relative_error": ("rel. error", ".4f", ">"),
    "zeros": ("zeros", ".2%", ">"),
    "saturated": ("saturated", ".2%", ">"),
    "underflows": ("underflows", "d", ">"),
    "amax": ("amax", ".4g", ">"),
    "flipped": ("flipped", ".3%", ">"),
    "compared_with": ("compared with", "s", "<"),
}
"""By key of a record, its head in the table, format and alignment."""


def _shown(value: Any, form: str) -> str:
    if isinstance(value, tuple):
        return " x ".join(map(str, value))
    return "-" if value is None else f"{value:{form}}"


def quantization_error(
    model: nn.Module,
    optimizer: ZeroFP4Optimizer | None = None,
    *,
    previous: QuantizationReport | None = None,
    keep_codes: bool = False,
) -> QuantizationReport:
    """Measure each NVFP4 weight of a model: error, zeros, saturation, underflow and flipped codes.

    model: the module; an unquantized one gives an empty report.
    optimizer: the ZeroFP4Optimizer of the weights.
    previous: an earlier report of the same weights, made with keep_codes=True, to count flipped codes.
    keep_codes: keep a copy of all codes in the report, half a byte of CPU memory per element. In a loop, pass
        it in each call, and each report as the next one's `previous`.

    Examples:
        >>> report = zerofp4.quantization_error(model, optimizer)
        >>> print(report)

    A weight is compared with its FP32 master, else with its initial value (get_high_precision_init_val()), if
    it still keeps that; without either only the error is left out. Weights of FSDP2 are measured while they
    are gathered as codes. Changes nothing. With an optimizer every rank of its process group must call it,
    with memory for two FP32 copies of its largest weight. Without one it is local.

    Before any collective, raises TypeError for a wrong type; ValueError for a `previous` without the codes of
    a weight, or with another shape; RuntimeError for an optimizer that is `broken`, or superseded.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    parameters = dict(model.named_parameters())
    weights = {name: p for name, p in parameters.items() if isinstance(p, NVFP4Tensor)}
    if previous is not None:
        _check_previous(previous, weights)
    masters: Iterable[torch.Tensor | None] = [None] * len(weights)
    if optimizer is not None:
        masters = gather_masters(optimizer, list(weights.values()))
    report = QuantizationReport([], len(parameters) - len(weights))
    with torch.no_grad():
        for (name, weight), master in zip(weights.items(), masters, strict=True):
            earlier = None if previous is None else previous.codes[name]
            report.records.extend(_measure(name, weight, master, earlier))
            if keep_codes:
                report.codes[name] = _side(weight).data.to("cpu", copy=True)
    return report


def _check_previous(previous: QuantizationReport, weights: dict[str, NVFP4Tensor]) -> None:
    if not isinstance(previous, QuantizationReport):
        raise TypeError(f"previous must be what quantization_error returned, got {type(previous).__name__}")
    for name, weight in weights.items():
        codes = previous.codes.get(name)
        if codes is None:
            raise ValueError(f"previous has no codes of {name!r}: make it with keep_codes=True")
        if codes.shape != _side(weight).place.shape:
            shapes = tuple(codes.shape), tuple(_side(weight).place.shape)
            raise ValueError(f"previous has packed codes {shapes[0]} of {name!r}, which now has {shapes[1]}")


def _side(weight: NVFP4Tensor) -> Side:
    """The copy that gives the values."""
    return weight.record.rowwise or weight.record.columnwise


def _measure(
    name: str, weight: NVFP4Tensor, master: torch.Tensor | None, earlier: torch.Tensor | None
) -> list[dict[str, Any]]:
    """The records of a weight's matrices, computed together."""
    record, side = weight.record, _side(weight)
    count, (rows, columns) = record.experts or 1, record.matrix
    data = side.data if record.experts is not None else side.data[None]
    scale = side.scales["compact"].view(torch.uint8).view(count, -1, side.scales["compact"].shape[-1])
    fields = {
        "zeros": _count(data, 0b0111, 0),
        "saturated": _count(data, 0b0111, 0b0111),
        "underflows": _underflows(data, scale, record.block[0]),
        "amax": side.amax,
    }
    if earlier is not None:
        fields["flipped"] = rows * columns - _count(data ^ earlier.to(data.device).view_as(data), 0b1111, 0)
    values, compared_with = master, "master"
    if values is None:
        values, compared_with = weight.get_high_precision_init_val(), "initial value"
    if values is not None:
        values = values.to(data.device, torch.float32).view(count, rows, columns)
        difference = weight.dequantize(torch.float32).view_as(values).sub_(values)
        fields["magnitude"], fields["error"] = _norm(values), _norm(difference)
    found = dict(zip(fields, torch.stack([v.double() for v in fields.values()]).tolist(), strict=True))
    return [
        {
            "name": name if record.experts is None else f"{name}[{e}]",
            "shape": (rows, columns),
            "compared_with": None if values is None else compared_with,
            **_plain({field: each[e] for field, each in found.items()}, max(rows * columns, 1)),
        }
        for e in range(len(found["amax"]))
    ]


def _plain(found: dict[str, float], elements: int) -> dict[str, Any]:
    sqnr, relative = None, None
    if "error" in found:
        error, magnitude = found["error"], found["magnitude"]
        relative = 0.0 if error == 0 else math.inf if magnitude == 0 else error / magnitude
        sqnr = math.inf if relative == 0 else -20 * math.log10(relative)
    return {
        "sqnr_db": sqnr,
        "relative_error": relative,
        "zeros": found["zeros"] / elements,
        "saturated": found["saturated"] / elements,
        "underflows": int(found["underflows"]),
        "amax": found["amax"],
        "flipped": found["flipped"] / elements if "flipped" in found else None,
    }


def _count(data: torch.Tensor, mask: int, bits: int) -> torch.Tensor:
    """By matrix, the codes with these bits under the mask."""
    low, high = (data & mask) == bits, (data & mask << 4) == bits << 4
    return low.sum((1, 2)) + high.sum((1, 2))


def _underflows(data: torch.Tensor, scale: torch.Tensor, block_rows: int) -> torch.Tensor:
    """By matrix, the blocks with nonzero codes and a scale of 0, or with the smallest subnormal."""
    count, rows, columns = scale.shape
    missing = (0, columns * BLOCK // 2 - data.shape[2], 0, rows * block_rows - data.shape[1])
    is_used = nn.functional.pad((data & 0b0111_0111) != 0, missing)
    is_used = is_used.view(count, rows, block_rows, columns, BLOCK // 2).any(4).any(2)
    return ((scale == 1) | ((scale == 0) & is_used)).sum((1, 2))


def _norm(matrices: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(matrices, dim=(1, 2), dtype=torch.float64)
