"""What ranks compare of the options of parameter groups."""

import math

import torch

from zerofp4.optim.options import HASH_BITS, host_options, host_options_hash, tensor_options_hash


def groups(*lrs, **options):
    return [{"params": [], "lr": lr, "name": "text", "foreach": None, **options} for lr in lrs]


def test_numbers_and_tensors_are_options(device):
    made = groups(0.5, torch.tensor(0.25, device=device), betas=(0.5, torch.tensor([0.75])), maximize=False)
    assert host_options(made, read_tensors=True) == [
        ("param_groups[0]['betas']", "(0.5, a tensor of [0.75])"),
        ("param_groups[0]['lr']", "0.5"),
        ("param_groups[0]['maximize']", "0.0"),
        ("param_groups[1]['betas']", "(0.5, a tensor of [0.75])"),
        ("param_groups[1]['lr']", "a tensor of 0.25"),
        ("param_groups[1]['maximize']", "0.0"),
    ]
    assert host_options(made)[4] == ("param_groups[1]['lr']", "a tensor of ()")
    assert host_options_hash(groups(0.5)) == host_options_hash(groups(0.5, name="other"))
    assert host_options_hash(groups(1)) == host_options_hash(groups(1.0)) != host_options_hash(groups(2))


def test_the_hash_of_tensors_tells_values_and_places_apart(device):
    """Of any dtype, on any device; equal values have equal hashes, so -0.0 is 0.0."""
    word = lambda *lrs: tensor_options_hash(groups(*lrs), device).item()  # noqa: E731
    tensor = lambda value, **options: torch.tensor(value, device=device, **options)  # noqa: E731
    assert tensor_options_hash(groups(0.5, 1), device) is None
    values = [0.0, 1.0, -1.0, 2.0, 0.1, math.nextafter(0.1, 1), 5e-324, math.inf, math.nan, 1e300]
    words = [word(tensor(value, dtype=torch.float64)) for value in values]
    pairs = [word(tensor(a), tensor(b)) for a in values[:4] for b in values[:4]]
    assert len(set(words)) == len(words) and len(set(pairs)) == len(pairs)
    assert all(w == int(w) and 0 <= w < 2**HASH_BITS for w in words + pairs)
    assert word(tensor(0.0)) == word(tensor(-0.0)) == word(tensor([[0.0]]))
    assert word(tensor(0.5)) == word(torch.tensor(0.5, dtype=torch.bfloat16)) == word(0.5, tensor(0.5))
