"""Tokens in groups, options of quantize_grouped, and what every byte of a storage must be."""

import functools

import torch
from helpers import assert_bytes_equal

from cases.ops import draw_values
from zerofp4 import reference
from zerofp4.layout import ceil_div, round_up
from zerofp4.ops import grouped_shapes
from zerofp4.storage import BUFFERS

OPTIONS = [{}, {"columnwise": True}] + [
    {"columnwise": True, "hadamard": True, "random_signs": signs, "rowwise": rowwise}
    for signs in (True, False)
    for rowwise in (True, False)
]


def values(splits, cols, device, dtype=torch.bfloat16, kind="normal", seed=0):
    """Groups of different sizes of values, so that no amax fits another group."""
    rows = sum(splits)
    x = draw_values(seed, rows * cols, kind).view(rows, cols)
    scale = torch.cat([torch.full((n, 1), 2.0 ** (g % 7)) for g, n in enumerate(splits)])
    return (x * scale).to(dtype).to(device)


def padded_data(data: torch.Tensor, rows: int) -> torch.Tensor:
    """That of a columnwise copy, to a multiple of 16 rows."""
    padded = data.new_zeros((len(data), ceil_div(rows, 16) * 8))
    padded[:, : data.shape[1]] = data
    return padded


def quantized_alone(x, hadamard, random_signs) -> reference.Quantized:
    """By the specification, which has no columnwise copy of an odd number of rows: a row of zeros more."""
    q = reference.quantize(x, 1, hadamard=hadamard, random_signs=random_signs)
    if q.columnwise_data is not None:
        return q
    more = reference.quantize(torch.cat([x, x.new_zeros(1, x.shape[1])]), 1, q.amax)
    return more._replace(rowwise_data=q.rowwise_data, rowwise_scale=q.rowwise_scale)


def expected_storage(x, splits, hadamard=False, random_signs=True) -> dict[str, torch.Tensor]:
    """What every buffer should hold, of the specification's bytes of every group."""
    tokens, cols = x.shape
    shapes = grouped_shapes(tokens, len(splits), cols)
    expected = {name: torch.zeros(shape, dtype=torch.uint8) for name, shape in shapes.items()}
    amaxes = {name: torch.zeros(len(splits)) for name in ("amax", "columnwise_amax")}
    first = data_row = scale_row = 0
    for group, rows in enumerate(splits):
        if rows and cols:
            part = x[first : first + rows].cpu()
            q = quantized_alone(part, hadamard, random_signs)
            amaxes["amax"][group] = q.amax
            amaxes["columnwise_amax"][group] = q.columnwise_amax
            expected["rowwise_data"][data_row : data_row + rows] = q.rowwise_data
            expected["rowwise_scale"][data_row : data_row + rows] = q.rowwise_scale.view(torch.uint8)
            for name, value, begin in (
                ("columnwise_data", padded_data(q.columnwise_data, rows), cols * data_row // 2),
                ("columnwise_scale", q.columnwise_scale, cols * data_row // 16),
            ):
                flat = value.view(torch.uint8).flatten()
                expected[name][begin : begin + flat.numel()] = flat
            for name, value in q.buffers((rows, cols), 1).items():
                if name.endswith(("_expanded", "_swizzled")):
                    is_rowwise, value = name.startswith("rowwise"), value.view(torch.uint8)
                    begin = scale_row if is_rowwise else round_up(cols, 128) * scale_row // 16
                    value = value if is_rowwise else value.flatten()
                    expected[name][begin : begin + value.shape[0]] = value
        first, data_row = first + rows, data_row + round_up(rows, 16)
        scale_row += round_up(rows, 128)
    return expected | amaxes


@functools.cache
def expected_of_values(splits: tuple[int, ...], cols: int, hadamard: bool, random_signs: bool):
    """expected_storage of values(splits, cols, ...), for every device and choice of copies."""
    return expected_storage(values(splits, cols, "cpu"), splits, hadamard, random_signs)


def assert_storage(grouped, x, splits, what: str) -> None:
    assert_buffers(grouped, expected_storage(x, splits, grouped.hadamard, grouped.random_signs), what)


def assert_buffers(grouped, expected: dict[str, torch.Tensor], what: str) -> None:
    expected = dict(expected)
    if grouped.rowwise_data is None and grouped.hadamard:
        expected["amax"] = expected["columnwise_amax"]
    if not grouped.hadamard:
        expected["columnwise_amax"] = expected["amax"]
    for name in BUFFERS:
        buffer = getattr(grouped, name)
        if buffer is not None:
            buffer = buffer if "amax" in name else buffer.view(torch.uint8)
            assert_bytes_equal(buffer, expected[name].to(buffer.device), f"{what}: {name}")
    assert grouped.error.item() == 0, what
