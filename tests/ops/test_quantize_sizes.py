"""zerofp4::quantize of matrices with several bands of tiles, of one copy with whole strips, and of more rows
than a dimension of a CUDA grid.
"""

import pytest
import torch
from cases.ops import DTYPES, draw_values
from cases.quantize import MODES, check

pytestmark = pytest.mark.threads  # each band has one


def normal(*shape: int) -> torch.Tensor:
    return draw_values(4, shape[0] * shape[1], "normal").view(shape)


@pytest.mark.parametrize("mode", ["1d", "2d", "hadamard"])
@pytest.mark.parametrize("shape", [(2304, 300), (4098, 258)])
def test_several_bands(device, shape, mode):
    check(normal(*shape).bfloat16().to(device), MODES[mode], f"{shape} {mode}")


@pytest.mark.parametrize("mode", ["1d", "2d"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 256), (130, 288), (2304, 384)])
def test_rows_alone(device, shape, dtype, mode):
    check(normal(*shape).to(dtype).to(device), MODES[mode], f"{shape} {dtype} {mode}", columnwise=False)


def test_more_rows_than_a_grid_dimension(device):
    if device.type == "cpu":
        pytest.skip("grids are CUDA's")
    rows = 65535 * 256 + 16
    x = normal(4096, 2).bfloat16().to(device).repeat(-(-rows // 4096), 1)[:rows]
    check(x, MODES["1d"], f"{rows} rows", scale_layouts=("compact",), columnwise=False)
