"""quantize in every mode: options, records to write to, and whether they hold what the specification says."""

import torch

from cases.ops import assert_record_equals, poisoned_like
from zerofp4 import FourOverSix, ops, reference
from zerofp4.format import BLOCK, SCALE_LAYOUTS

CHOICES = [FourOverSix(e4m3_max, error) for e4m3_max in (448, 256) for error in ("mae", "mse")]
MODES = {
    "1d": {"block_rows": 1},
    "2d": {"block_rows": 16},
    "hadamard": {"block_rows": 1, "hadamard": True},
    "hadamard, no signs": {"block_rows": 1, "hadamard": True, "random_signs": False},
    "hadamard, four over six": {"block_rows": 1, "hadamard": True, "four_over_six": FourOverSix()},
    "stochastic 1d": {"block_rows": 1, "rng_state": (0x123456789ABCDEF, 77)},
    "stochastic 2d": {"block_rows": 16, "rng_state": (2**63 - 2, 2**62)},
    "stochastic, hadamard": {"block_rows": 1, "hadamard": True, "rng_state": (5, 2**31 + 1)},
}
MODES |= {f"1d, {choice}": {"block_rows": 1, "four_over_six": choice} for choice in CHOICES}
MODES |= {f"2d, {choice}": {"block_rows": 16, "four_over_six": choice} for choice in CHOICES}


def make_record(x, mode, **kwargs):
    """A poisoned record for x [M, K] with the options of a mode."""
    names = ("hadamard", "random_signs", "four_over_six")
    options = {name: mode[name] for name in names if name in mode} | kwargs
    options.setdefault("scale_layouts", SCALE_LAYOUTS)
    return poisoned_like(x.shape, x.dtype, x.device, (mode["block_rows"], BLOCK), **options)


def with_state(mode, device) -> dict:
    """Options of the reference; the state of the random numbers as a tensor."""
    state = mode.get("rng_state")
    return mode | ({} if state is None else {"rng_state": torch.tensor(state, device=device)})


def check(x, mode, what: str, amaxes=(None, None), **kwargs):
    """Quantize x into a record that is made with kwargs, and compare it with the specification."""
    options = with_state(mode, x.device)
    record = make_record(x, mode, **kwargs)
    given = dict(zip(("amax", "columnwise_amax"), amaxes, strict=True))
    if record.buffer("rowwise_data") is None and record.hadamard:
        del given["amax"]
    ops.quantize_into(x, record, rng_state=options.get("rng_state"), **given)
    assert_record_equals(
        record, reference.quantize(x, amax=amaxes[0], columnwise_amax=amaxes[1], **options), what
    )
    return record
