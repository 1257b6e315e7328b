"""Element formats: E2M1 codes and their packing, E4M3."""

import torch

from zerofp4.format import E2M1_VALUES, E4M3_MAX, SCALE_DTYPE


def float_to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 of float32 values: nearest, ties to the even code, saturating at 6, NaN to code 7. At
    the midpoints `>` sends a tie down, `>=` up.
    """
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    code = code + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5.0)
    code = torch.where(x.isnan(), 7, code)
    return (code + 8 * (x.signbit() & ~x.isnan())).to(torch.uint8)


def e2m1_to_float(codes: torch.Tensor) -> torch.Tensor:
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
    return torch.cat([values, -values])[codes.long()]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [..., K] to bytes [..., K/2]; the low nibble is the even column."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(data: torch.Tensor) -> torch.Tensor:
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)


def transpose_packed(data: torch.Tensor) -> torch.Tensor:
    """uint8 [M, K/2] to [K, M/2], M even."""
    return pack(unpack(data).t().contiguous())


def float_to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """E4M3 of float32 values: nearest even, saturating at 448, NaN to 0x7F."""
    byte = x.clamp(-E4M3_MAX, E4M3_MAX).to(SCALE_DTYPE).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, byte).view(SCALE_DTYPE)
