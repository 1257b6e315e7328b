"""No operation writes beside its outputs, at any alignment, and each writes every byte of them."""

from __future__ import annotations

import pytest
import torch
from cases.every_operation import RUNS, matrix_of
from cases.ops import DTYPES, SHAPES
from guards import check_writes


@pytest.mark.cpu_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_guards(device, run, shape):
    for i, offset in enumerate((0, 1, 2, 4, 8)):
        x = matrix_of(shape, DTYPES[i % len(DTYPES)], device)
        check_writes(lambda guards, x=x: run(guards.place(x), guards), offset, f"{offset} elements off")


# The guards themselves


@pytest.mark.parametrize(("index", "message"), [(-1, "1 bytes before"), (12, "0 bytes past the end of")])
def test_what_is_written_beside_a_tensor_is_found(device, index, message):
    def overrun(guards):
        made = torch.empty(3, device=device).zero_()
        whole = made.view(torch.uint8).as_strided((1,), (1,), 4 * made.storage_offset() + index)
        return [("made", made), ("beside", whole.fill_(1))]

    with pytest.raises(AssertionError, match=f"what: written {message} a tensor of 12 bytes"):
        check_writes(overrun, 1, "what")


def test_what_is_not_written_is_found(device):
    def leaves_the_last(guards):
        made = torch.empty(3, device=device)
        made[:2] = 0
        return [("made", made)]

    with pytest.raises(AssertionError, match="made, by what was there before"):
        check_writes(leaves_the_last, 1, "what")
