"""The arms of the fidelity benchmark: what each changes in the training of one model."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import zerofp4
from benchmarks.flash import Flash
from zerofp4 import ops
from zerofp4.nn import MXFP8Recipe, NVFP4Recipe
from zerofp4.optim import Communication

Values = dict[str, torch.Tensor]
"""By the name of a parameter."""
FIRST_AND_LAST = ("first", "last")
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def doubled_codes(weight: zerofp4.NVFP4Tensor) -> torch.Tensor:
    """int8, twice the E2M1 value of each element."""
    packed = weight.rowwise_data
    table = torch.tensor([*GRID, *(-each for each in GRID)], device=packed.device).mul(2).to(torch.int8)
    return table[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()]


# Weights that the library cannot make: bfloat16 parameters that get other values after each step


class Rounding:
    """What plain bfloat16 parameters hold instead of their masters.

    kept: what the next step needs, which a checkpoint has, too.
    """

    def __init__(self, block: tuple[int, int] = (16, 16), **options: Any):
        self.block, self.options = block, options
        self.kept: Values = {}

    def __call__(self, name: str, master: torch.Tensor, step: int) -> torch.Tensor:
        """The values for a parameter. master: its FP32 master, which may be written to. step: 1, 2, ...

        A cast of the library rounds masters to the weight's dtype first, too.
        """
        return zerofp4.quantize_dequantize(master.bfloat16(), block=self.block, **self.options)

    def change_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Of the step that begins, before clipping. gradient: of the values that the last call returned."""

    def codes(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """int8, twice the E2M1 value of each element. values: what the last call returned, in bfloat16."""
        return doubled_codes(zerofp4.quantize(values, block=self.block))

    def scales(self, master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(values that quantize gives, the scale of each element), both FP32."""
        quantized = zerofp4.quantize(master.bfloat16(), block=self.block, **self.options)
        ratio = quantized.amax / (6.0 * 448.0)
        expanded = quantized.expanded_scale().float()[: len(master)].repeat_interleave(16, 1)
        return quantized.dequantize(torch.float32), expanded[:, : master.shape[1]] * ratio


class Control(Rounding):
    """Masters are rounded, too: an update that moves no code is lost."""

    def __call__(self, name: str, master: torch.Tensor, step: int) -> torch.Tensor:
        return master.copy_(super().__call__(name, master, step))


class Hysteresis(Rounding):
    """A code changes only if its master has passed the middle between two values by a share of half of their
    distance.
    """

    def __init__(self, margin: float, **own: Any):
        super().__init__(**own)
        self.margin = margin

    def __call__(self, name: str, master: torch.Tensor, step: int) -> torch.Tensor:
        values, scale = self.scales(master)
        scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
        x, code = master / scale, (values / scale).mul_(2).round_().div_(2)  # as E2M1
        if name in self.kept:
            old = self.kept[name].float() / 2
            stays = (x - old).abs() - (x - code).abs() < self.margin * (code - old).abs()
            code = torch.where(stays, old, code)
        self.kept[name] = (2 * code).to(torch.int8)
        return code * scale

    def codes(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return self.kept[name]


class Averaged(Rounding):
    """Rounds an exponential average of the master."""

    def __init__(self, decay: float, **own: Any):
        super().__init__(**own)
        self.decay = decay

    def __call__(self, name: str, master: torch.Tensor, step: int) -> torch.Tensor:
        average = self.kept.setdefault(name, master.clone())
        average.lerp_(master, 1 - self.decay)
        return super().__call__(name, average, step)


class HeldScales(Rounding):
    """Scales are those of the last of every so many steps; larger values saturate."""

    def __init__(self, steps: int, **own: Any):
        super().__init__(**own)
        self.steps = steps

    def __call__(self, name: str, master: torch.Tensor, step: int) -> torch.Tensor:
        if name not in self.kept or step % self.steps == 0:
            self.kept[name] = self.scales(master)[1].clamp_(min=torch.finfo(torch.float32).tiny)
        scale = self.kept[name]
        grid, middles = (torch.tensor(each, device=master.device) for each in (GRID, MIDDLES))
        x = master / scale
        return grid[torch.bucketize(x.abs(), middles)].copysign(x) * scale

    def codes(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return (2 * values / self.kept[name]).round().to(torch.int8)


class Damped(Rounding):
    """Each step moves a master a little towards its rounded value."""

    def __init__(self, share: float, **own: Any):
        super().__init__(**own)
        self.share = share

    def __call__(self, name: str, master: torch.Tensor, step: int) -> torch.Tensor:
        values = super().__call__(name, master, step)
        master.lerp_(values.float(), self.share)
        return values


class Masked(Rounding):
    """Elements that rounding cut off get no gradient: those beyond 6 scales, or those that became zero."""

    def __init__(self, saturated: bool = False, flushed: bool = False, **own: Any):
        super().__init__(**own)
        self.saturated, self.flushed = saturated, flushed

    def __call__(self, name: str, master: torch.Tensor, step: int) -> torch.Tensor:
        values, scale = self.scales(master)
        x = master.bfloat16().float()
        self.kept[name] = (self.saturated & (x.abs() > 6 * scale)) | (self.flushed & (values == 0) & (x != 0))
        return values

    def change_gradient(self, name: str, gradient: torch.Tensor) -> None:
        gradient.masked_fill_(self.kept[name], 0.0)


# Gradients in few bits


def travel(
    format: str, gradients: Sequence[torch.Tensor], numbers: Sequence[int], *, step: int, host: int
) -> list[torch.Tensor]:
    """What other hosts receive of gradients, float32 [R, C], by ZeroFP4Optimizer's between_hosts=format.

    numbers: of the parameters. step: of the update. host: that sends.
    """
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    layout = _layout(format, tuple(gradient.shape for gradient in gradients), tuple(numbers), flat.device)
    message = torch.zeros(1, layout.nbytes, dtype=torch.uint8, device=flat.device)
    ops.round_means(flat[None], message, layout, step=step, host=host)
    if layout.is_decoded:
        ops.average_means(message, flat, layout, 0)
    else:
        flat = message.view(torch.bfloat16).flatten().float()
    pieces = flat.split([gradient.numel() for gradient in gradients])
    return [piece.view(gradient.shape) for piece, gradient in zip(pieces, gradients, strict=True)]


@functools.cache
def _layout(
    format: str, shapes: tuple[torch.Size, ...], numbers: tuple[int, ...], device: torch.device
) -> ops.MeansLayout:
    ends = list(itertools.accumulate(shape.numel() for shape in shapes))
    pieces = [
        ops.MeansPiece(end - shape.numel(), shape.numel(), 0, number, shape[1])
        for end, shape, number in zip(ends, shapes, numbers, strict=True)
    ]
    return ops.MeansLayout(format, ends[-1], [pieces], sum(piece.strips for piece in pieces), device)


def without_transform(gradients: Sequence[torch.Tensor], *_: Any, **__: int) -> list[torch.Tensor]:
    """NVFP4 with one amax, scales to nearest and no transform."""
    rounded = partial(zerofp4.quantize, block=(1, 16), stochastic_rounding=True)
    return [rounded(gradient).dequantize(torch.float32) for gradient in gradients]


# Arms


@dataclasses.dataclass(frozen=True)
class Arm:
    """What an arm changes. Without any change it is bf16 with FP32 masters."""

    words: str
    convert: dict[str, Any] | None = None  # arguments of convert_model; None converts nothing
    leaves_out: tuple[str, ...] = ()  # of the converted weights: FIRST_AND_LAST blocks, or names of layers
    recipe: NVFP4Recipe | MXFP8Recipe | None = None  # of the layers
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)  # arguments of ZeroFP4Optimizer
    other_optimizer: Callable[..., Any] | None = None  # of the model, groups, lr and betas
    rounding: Callable[[], Rounding] | None = None  # of plain parameters; the filter is the same
    until: float = 1.0  # the share of the steps in which weights are NVFP4
    hosts: Callable[..., Sequence[torch.Tensor]] | None = None  # what 8 hosts send, rounded as by travel()
    clip: bool = True
    one_micro_batch: bool = False
    lr: float = 1.0  # times the protocol's
    beside: str = "bf16"  # the arm that differs from it in one thing

    def takes(self, name: str, layers: int) -> bool:
        """Whether a weight is NVFP4. name: of its module, blocks.<number>.<layer>."""
        if not name.startswith("blocks."):
            return False
        _, number, layer = name.split(".")
        ends = {"first": 0, "last": layers - 1}
        return layer not in self.leaves_out and int(number) not in [
            ends.get(each) for each in self.leaves_out
        ]


SQUARES = {"block": (16, 16)}
ROWS = {"block": (1, 16)}
ROWS_46 = {"block": (1, 16), "four_over_six": zerofp4.FourOverSix()}
FORWARD = {"stochastic_rounding": False, "hadamard": False, "backward": "dequantized"}
COMPACT = {"state": "compact"}
of_squares, of_rows = partial(Arm, beside="w16x16"), partial(Arm, beside="w1x16")
UPDATE = {"communication": Communication(overlap="update")}

ARMS = {
    "bf16": Arm("bf16, FP32 masters"),
    "forward-16x16": Arm(
        "weights and activations in the forward pass, 16x16",
        SQUARES | {"layers": True},
        recipe=NVFP4Recipe(**FORWARD),
    ),
    "w16x16": Arm("weights 16x16", SQUARES),
    "w1x16": of_squares("weights 1x16", ROWS),
    "w1x16-46": of_squares("weights 1x16, four over six", ROWS_46),
    "full": Arm("full recipe: all three products", SQUARES | {"layers": True}, recipe=NVFP4Recipe()),
    "compact": Arm("compact state, bf16 weights", optimizer=COMPACT),
    "compact-w1x16-46": Arm(
        "compact state, weights 1x16, four over six", ROWS_46, optimizer=COMPACT, beside="w1x16-46"
    ),
    "flash": Arm("FlashAdamW, bf16 weights", other_optimizer=Flash, beside="compact"),
    "ends-w16x16": of_squares("weights 16x16, first and last block in bf16", SQUARES, FIRST_AND_LAST),
    "ends-w1x16-46": Arm(
        "weights 1x16, four over six, first and last block in bf16",
        ROWS_46,
        FIRST_AND_LAST,
        beside="w1x16-46",
    ),
    "unclipped": Arm("bf16, no clipping", clip=False, one_micro_batch=True),
    "update": Arm(
        'bf16, no clipping, overlap="update"',
        optimizer=UPDATE,
        clip=False,
        one_micro_batch=True,
        beside="unclipped",
    ),
    "control": Arm("control: masters rounded to 16x16 after each step", rounding=Control, beside="w16x16"),
    "hosts-fp32": Arm("FP32 gradients between 8 hosts", hosts=lambda gradients, *_, **__: gradients),
    "hosts-bf16": Arm("bf16 gradients between 8 hosts", hosts=partial(travel, "bf16"), beside="hosts-fp32"),
    "hosts-mxfp8": Arm(
        "MXFP8 gradients between 8 hosts", hosts=partial(travel, "mxfp8"), beside="hosts-fp32"
    ),
    "hosts-nvfp4": Arm(
        "NVFP4 gradients between 8 hosts", hosts=partial(travel, "nvfp4"), beside="hosts-fp32"
    ),
    "hosts-nvfp4-plain": Arm(
        "NVFP4 between hosts, no transform, scales to nearest",
        hosts=without_transform,
        beside="hosts-nvfp4",
    ),
    # What could bring the gap of weights to nothing
    "first-w16x16": of_squares("weights 16x16, first block in bf16", SQUARES, ("first",)),
    "last-w16x16": of_squares("weights 16x16, last block in bf16", SQUARES, ("last",)),
    "down-o-w16x16": of_squares("weights 16x16, down and o in bf16", SQUARES, ("down", "o")),
    "qk-w16x16": of_squares("weights 16x16, q and k in bf16", SQUARES, ("q", "k")),
    "vo-w16x16": of_squares("weights 16x16, v and o in bf16", SQUARES, ("v", "o")),
    "mlp-bf16-w16x16": of_squares("weights 16x16, MLP in bf16", SQUARES, ("gate", "up", "down")),
    "until-90-w16x16": of_squares("weights 16x16 until 90% of the steps", SQUARES, until=0.9),
    "until-80-w16x16": of_squares("weights 16x16 until 80% of the steps", SQUARES, until=0.8),
    "until-90-w1x16-46": Arm(
        "weights 1x16, four over six, until 90% of the steps", ROWS_46, until=0.9, beside="w1x16-46"
    ),
    "until-80-w1x16-46": Arm(
        "weights 1x16, four over six, until 80% of the steps", ROWS_46, until=0.8, beside="w1x16-46"
    ),
    "ends-until-90-w1x16-46": Arm(
        "weights 1x16, four over six, until 90%, first and last block in bf16",
        ROWS_46,
        FIRST_AND_LAST,
        until=0.9,
        beside="ends-w1x16-46",
    ),
    "until-80-w1x16": of_rows("weights 1x16 until 80% of the steps", ROWS, until=0.8),
    "first-w1x16": of_rows("weights 1x16, first block in bf16", ROWS, ("first",)),
    "last-w1x16": of_rows("weights 1x16, last block in bf16", ROWS, ("last",)),
    "first-until-80-w1x16": Arm(
        "weights 1x16 until 80%, first block in bf16", ROWS, ("first",), until=0.8, beside="until-80-w1x16"
    ),
    "last-until-80-w1x16": Arm(
        "weights 1x16 until 80%, last block in bf16", ROWS, ("last",), until=0.8, beside="until-80-w1x16"
    ),
    "hysteresis-25": of_squares(
        "16x16, codes stay within 1/4 past the middle", rounding=lambda: Hysteresis(0.25)
    ),
    "hysteresis-50": of_squares(
        "16x16, codes stay within 1/2 past the middle", rounding=lambda: Hysteresis(0.5)
    ),
    "averaged-90": of_squares("16x16 of masters averaged over 10 steps", rounding=lambda: Averaged(0.9)),
    "averaged-99": of_squares("16x16 of masters averaged over 100 steps", rounding=lambda: Averaged(0.99)),
    "scales-20": of_squares("16x16, scales kept for 20 steps", rounding=lambda: HeldScales(20)),
    "scales-100": of_squares("16x16, scales kept for 100 steps", rounding=lambda: HeldScales(100)),
    "damped": of_squares("16x16, masters pulled to codes by 1e-3 in a step", rounding=lambda: Damped(1e-3)),
    "masked-saturated": of_squares(
        "16x16, no gradients of saturated elements", rounding=lambda: Masked(saturated=True)
    ),
    "masked-flushed": of_squares(
        "16x16, no gradients of elements that became 0", rounding=lambda: Masked(flushed=True)
    ),
    "stochastic": of_squares(
        "16x16, stochastic rounding", rounding=lambda: Rounding(stochastic_rounding=True)
    ),
    "lr-70-bf16": Arm("bf16, 0.7 of the learning rate", lr=0.7),
    "lr-140-bf16": Arm("bf16, 1.4 times the learning rate", lr=1.4),
    "lr-70-w16x16": Arm("weights 16x16, 0.7 of the learning rate", SQUARES, lr=0.7, beside="lr-70-bf16"),
    "lr-140-w16x16": Arm("weights 16x16, 1.4 times the learning rate", SQUARES, lr=1.4, beside="lr-140-bf16"),
}
