"""Tokens in groups, options of quantize_grouped, and what every byte of a storage must be."""

import functools

import torch
from helpers import assert_bytes_equal

from cases.ops import draw_values
from zerofp4 import reference
from zerofp4.format import SCALE_LAYOUTS
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


def columnwise_matrix(q: reference.Quantized, rows: int, cols: int):
    """Data and compact scale of the columnwise copy, data padded to a multiple of 16 rows."""
    data, scale = q.columnwise_data, q.columnwise_scale
    padded = data.new_zeros((cols, ceil_div(rows, 16) * 8))
    padded[:, : data.shape[1]] = data
    return padded, scale


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
            data, scale = columnwise_matrix(q, rows, cols)
            for name, value, begin in (
                ("columnwise_data", data, cols * data_row // 2),
                ("columnwise_scale", scale, cols * data_row // 16),
            ):
                flat = value.view(torch.uint8).flatten()
                expected[name][begin : begin + flat.numel()] = flat
            for side, compact, m, k in (
                ("rowwise", q.rowwise_scale, rows, cols),
                ("columnwise", scale, cols, rows),
            ):
                begin = scale_row if side == "rowwise" else round_up(cols, 128) * scale_row // 16
                padded = reference.expand_scale(compact, m, k, 1)
                for layout in SCALE_LAYOUTS[1:]:
                    value = padded if layout == "expanded" else reference.swizzle_scale(padded)
                    value = value.view(torch.uint8)
                    value = value if side == "rowwise" else value.flatten()
                    expected[f"{side}_scale_{layout}"][begin : begin + value.shape[0]] = value
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
