"""ExportReport: what an export holds, and which of its values engines compute differently."""

import dataclasses

import torch

from zerofp4.format import E2M1_VALUES, SCALE_DTYPE
from zerofp4.serving.fused import fused_groups

MARLIN_LARGEST = 224.0
"""If no scale of a weight is larger, Marlin shifts them all upward, and keeps the small ones."""

SMALLEST_NORMAL = 2.0**-6
"""Of E4M3. Marlin flushes smaller scales to 0."""

_ROWS = 1024
"""Rows counted at once, since indices take 8 bytes each."""


@dataclasses.dataclass(repr=False)
class ExportReport:
    """What save_pretrained has written, and where engines compute other values. repr() is a table.

    matrices: the number of quantized matrices.
    elements: of these matrices.
    nbytes: of all tensors.
    ties: by module, how many elements engines may round to the other neighbor, one unit of the last place
        away. Modules without any are left out.
    flushed: by module, how many blocks become zeros in Marlin, which engines use on GPUs of SM75 to SM90.
    """

    matrices: int = 0
    elements: int = 0
    nbytes: int = 0
    ties: dict[str, int] = dataclasses.field(default_factory=dict)
    flushed: dict[str, int] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        lines = [f"{self.matrices} matrices in NVFP4, {self.elements} elements; {self.nbytes / 1e9:.3g} GB"]
        count, share = sum(self.ties.values()), sum(self.ties.values()) / max(self.elements, 1)
        lines.append(
            f"  ties     {count} elements of {len(self.ties)} matrices, {share:.2g} of all: engines may "
            "round them by one unit of the last place"
        )
        if self.flushed:
            lines.append(f"  flushed  {self.flushed_blocks()}")
        return "\n".join(lines)

    def flushed_blocks(self) -> str:
        modules = ", ".join([*self.flushed][:3]) + ", ..." * (len(self.flushed) > 3)
        return (
            f"{sum(self.flushed.values())} blocks of {modules} have scales below 2^-6, and become zeros in "
            "Marlin, which engines use on GPUs of SM75 to SM90"
        )


@dataclasses.dataclass
class Comparison:
    """Counts of one matrix. subnormal: blocks with a scale above 0 and below SMALLEST_NORMAL."""

    elements: int
    ties: int
    largest_scale: float
    subnormal: int


def compare(
    codes: torch.Tensor,
    scales: torch.Tensor,
    amax: float,
    most: float,
    global_scale: torch.Tensor,
    dtype: torch.dtype,
) -> Comparison:
    """Count the values of a matrix that engines compute differently.

    codes, scales: uint8 [N, K/2], E4M3 [N, K/16].
    amax, most: dequantize() multiplies by amax * (1 / most).
    global_scale: float32, by which engines multiply block scales.
    dtype: that values are rounded to.
    """
    device, scales = codes.device, scales.view(torch.uint8)
    value = torch.arange(127, dtype=torch.uint8, device=device).view(SCALE_DTYPE).float()  # 127 is NaN
    found = torch.bincount(scales.flatten(), minlength=len(value))
    largest = value[found > 0].amax()
    subnormal = found[(value > 0) & (value < SMALLEST_NORMAL)].sum()
    element = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=device)[:, None]
    ours = (element * ((value * amax) * (1 / most))).to(dtype)
    theirs = (element * (value * global_scale.to(device))).to(dtype)
    is_tie, ties = ours != theirs, 0  # [magnitude of a code, byte of a scale]
    if is_tie[:, found > 0].any():
        for some_codes, some_scales in zip(codes.split(_ROWS), scales.split(_ROWS), strict=True):
            column = some_scales.int().repeat_interleave(8, dim=1)
            ties += sum(int(is_tie[part.int() & 7, column].sum()) for part in (some_codes, some_codes >> 4))
    return Comparison(2 * codes.numel(), ties, largest.item(), int(subnormal))


def make_report(compared: dict[str, Comparison], nbytes: int) -> ExportReport:
    """compared: by module. Engines make one matrix of fused modules, which has one largest scale."""
    report = ExportReport(len(compared), sum(each.elements for each in compared.values()), nbytes)
    report.ties = {name: each.ties for name, each in compared.items() if each.ties}
    largest = {name: each.largest_scale for name, each in compared.items()}
    for group in fused_groups(compared):
        largest |= dict.fromkeys(group, max(largest[name] for name in group))
    report.flushed = {
        name: each.subnormal
        for name, each in compared.items()
        if each.subnormal and largest[name] > MARLIN_LARGEST
    }
    return report
