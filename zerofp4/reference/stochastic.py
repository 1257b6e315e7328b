"""Stochastic rounding to E2M1 with counter-based random bytes."""

from collections.abc import Sequence

import torch

from zerofp4.format import E2M1_MAX

ROWWISE_STREAM, COLUMNWISE_STREAM = 0, 1
"""The last counter word: the two copies of a tensor are rounded independently."""

LOW = 0xFFFFFFFF


def _multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(high, low) words of the 64-bit product of 32-bit numbers, in halves of b: int64 never overflows."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def philox(counter: Sequence[torch.Tensor], key: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10: four words from four counter words and two key words, all int64 tensors of 32-bit
    numbers that broadcast against each other.

    Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return c0, c1, c2, c3


def philox_bytes(counter: Sequence[torch.Tensor], key: Sequence[torch.Tensor]) -> torch.Tensor:
    """uint8: the 16 bytes of each block, little endian, one block after another."""
    words = torch.stack(philox(counter, key), dim=-1)
    shifts = torch.tensor([0, 8, 16, 24], dtype=torch.int64, device=words.device)
    return (words.unsqueeze(-1) >> shifts & 0xFF).to(torch.uint8).flatten()


def random_bytes(rng_state: torch.Tensor, shape: Sequence[int], stream: int) -> torch.Tensor:
    """uint8 of `shape`, of rng_state int64 [2] = (seed, offset), the offset's low 32 bits. A Philox block has
    16 neighbours in row-major order.
    """
    numel = torch.Size(shape).numel()
    seed, offset = rng_state.unbind()
    group = torch.arange(-(-numel // 16), dtype=torch.int64, device=rng_state.device)
    counter = (group & LOW, group >> 32, offset & LOW, torch.full_like(offset, stream))
    return philox_bytes(counter, (seed & LOW, seed >> 32 & LOW))[:numel].view(torch.Size(shape))


def float_to_e2m1_stochastic(y: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 of float32 values with a random byte each: (r + 1/2) / 256 of a grid step is added
    to |y| and the sum rounded down on its own step, saturating at 6. NaN gives code 7.

    A fraction f of a step is rounded up by 256 f of the 256 bytes, that number rounded half up. This is exact
    from |y| = 1/4 on, where the sums that decide are floats; below, |y| may count as up to 2^-26 greater.
    """
    a = y.abs()
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    t = (a + ((r.float() + 0.5) * (1 / 256)) * step).clamp(max=E2M1_MAX)
    t = torch.where(y.isnan(), E2M1_MAX, t)
    code = torch.where(t < 2, (t * 2).floor(), torch.where(t < 4, t.floor() + 2, (t * 0.5).floor() + 4))
    return code.to(torch.uint8) | (y.signbit() & ~y.isnan()).to(torch.uint8) << 3
