"""What tests of the native operations share: shapes, values of every kind of difficulty, poisoned records."""

import numpy as np
import pytest
import torch
from helpers import assert_bytes_equal

from zerofp4 import reference
from zerofp4.format import BLOCK
from zerofp4.layout import ceil_div, scale_shape
from zerofp4.storage import NVFP4Storage, Scheme

POISON = 0xA5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# Shapes at every kind of edge: tiles, 64 and 128 columns, 128 rows, several swizzle atoms.
SHAPES = [
    (1, 2),
    (2, 2),
    (16, 16),
    (17, 30),
    (32, 288),
    (130, 144),
    (96, 272),
    (257, 66),
    (256, 512),
    (34, 1030),
]


def marked(mark: str, values: list, *chosen) -> list:
    """The values as parameters of a test; the chosen ones have a mark."""
    assert all(value in values for value in chosen)
    mark = getattr(pytest.mark, mark)
    return [pytest.param(value, marks=mark) if value in chosen else value for value in values]


def draw_values(seed: int, numel: int, kind: str) -> torch.Tensor:
    """float32 [numel] of one kind of difficulty."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(numel).astype(np.float32)
    if kind == "zeros":
        return torch.from_numpy(np.where(rng.random(numel) < 0.5, np.float32(0), np.float32(-0.0)))
    if kind == "ties":
        grid = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.5, -5.0, 0.0], np.float32)
        return torch.from_numpy(rng.choice(grid, numel))
    if kind == "spread":
        return torch.from_numpy((normal * 10.0 ** rng.uniform(-30, 30, numel)).astype(np.float32))
    if kind == "denormal":
        return torch.from_numpy(normal * np.float32(1e-39))
    if kind == "nonfinite":
        normal[rng.integers(0, numel, max(1, numel // 300))] = rng.choice([np.nan, -np.nan, np.inf, -np.inf])
    if kind == "bits":
        return torch.from_numpy(rng.integers(0, 2**32, numel, dtype=np.uint32).view(np.float32))
    return torch.from_numpy(normal)


KINDS = ["normal", "zeros", "ties", "spread", "denormal", "nonfinite", "bits"]


def allocate(shape, *, dtype, device, columnwise=True, **options) -> NVFP4Storage:
    return Scheme.checked(columnwise=columnwise, **options).allocate(shape, dtype, device)


def poisoned(record: NVFP4Storage) -> NVFP4Storage:
    for _, buffer in record.buffers():
        buffer.view(torch.uint8).fill_(POISON)
    return record


def poisoned_like(shape, dtype, device, block=(BLOCK, BLOCK), **kwargs) -> NVFP4Storage:
    columnwise = kwargs.pop("columnwise", shape[0] % 2 == 0 or kwargs.get("hadamard", False))
    return poisoned(allocate(shape, dtype=dtype, device=device, block=block, columnwise=columnwise, **kwargs))


def assert_record_equals(record: NVFP4Storage, q: reference.Quantized, what: str) -> None:
    expected = q.buffers(record.matrix, record.block[0])
    if record.amax is record.columnwise_amax:  # of the only copy, or of both
        expected["amax"] = q.columnwise_amax
    for name, buffer in record.buffers():
        assert_bytes_equal(buffer, expected[name].to(buffer.device), f"{what}: {name}")


def random_bytes(shape, seed: int, largest: int = 0xFF) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(largest + 1, shape, dtype=torch.uint8, generator=generator)


def in_layout(compact: torch.Tensor, rows: int, cols: int, block_rows: int, layout: str) -> torch.Tensor:
    """Compact scale bytes in a layout, with 0xFF as padding."""
    if layout == "compact":
        return compact
    expanded = torch.full(scale_shape(rows, cols, block_rows, layout), 0xFF, dtype=torch.uint8)
    real = reference.expand_scale(compact, rows, cols, block_rows)
    columns = ceil_div(cols, BLOCK)
    expanded[:rows, :columns] = real[:rows, :columns]
    return expanded if layout == "expanded" else reference.swizzle_scale(expanded)
