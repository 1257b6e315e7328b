"""Machine code of the kernels, for each architecture: what it takes, what it must not have and what it must.

Needs nvcc and nvdisasm, and no GPU. After a change that is meant: `python -m cases.sass`, in tests/.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable

import pytest
from cases.sass import (
    ARCHITECTURES,
    RESOURCES,
    TABLE,
    TESTS,
    Instruction,
    Kernel,
    all_kernels,
    as_text,
    compiled,
    nvcc_version,
    nvdisasm,
)

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]  # 32 compilations


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> dict[str, dict[str, dict[str, Kernel]]]:
    nvcc_version(), nvdisasm()
    return all_kernels(tmp_path_factory.mktemp("sass"), os.cpu_count() or 1)


def every(kernels) -> list[tuple[str, str, str, Kernel]]:
    """(source, name, architecture, kernel)"""
    return [
        (source, name, architecture, kernel)
        for source, of in kernels.items()
        for name, by_architecture in of.items()
        for architecture, kernel in by_architecture.items()
    ]


def breaches(kernels, what: Callable[[str, str, Kernel], object]) -> list[str]:
    """Of which `what(source, architecture, kernel)` is true."""
    found = [(f"{name} of {arch}", what(source, arch, each)) for source, name, arch, each in every(kernels)]
    return [f"{where}: {said}" for where, said in found if said]


# What it takes


def test_nothing_takes_more(kernels):
    table = json.loads(TABLE.read_text())
    if table.pop("nvcc") != nvcc_version():
        pytest.skip(f"{TABLE.name} is of another nvcc than {nvcc_version()}")
    made = json.loads(as_text(kernels))
    del made["nvcc"]
    grown = []
    for source, of in made.items():
        assert of.keys() == table[source].keys(), f"{source}: python -m cases.sass"
        for name, by_architecture in of.items():
            for architecture, values in by_architecture.items():
                *known, blocks = table[source][name][architecture]
                pairs = zip(RESOURCES, [*known, -blocks], [*values[:-1], -values[-1]], strict=True)
                grown += [
                    f"{name} of {architecture}: {what} {abs(was)} -> {abs(now)}"
                    for what, was, now in pairs
                    if now > was
                ]
    assert grown == []


# What it must not have


def test_nothing_is_contracted(kernels):
    """A product and a sum that become one instruction round once, and end in other bytes. nvcc is told not to
    do it, but fuses pairs of floats. Where sources have fused instructions, the table counts them.
    """

    def fused(source: str, architecture: str, kernel: Kernel) -> int:
        asks = any(re.match(r"(fma|div|sqrt|rcp)\..*f(32|64)$", name) for name in kernel.ptx)
        return 0 if asks else kernel.count("FFMA")

    def pairs(source: str, architecture: str, kernel: Kernel) -> list[str]:
        return [name for name in kernel.ptx if re.match(r"(mul|fma)\..*f32x2", name)]

    assert breaches(kernels, fused) == []
    assert breaches(kernels, pairs) == []
    assert breaches(kernels, lambda *of: of[-1].count("FFMA2")) == []


def test_conversions_are_of_the_fast_kind(kernels):
    """F2F runs in the unit of divisions. Means of ranks and the scalars of a step are float64."""

    def slow(source: str, architecture: str, kernel: Kernel) -> list[str]:
        names = [each.name for each in kernel.instructions if each.name.startswith("F2F.")]
        return [name for name in names if "F64" not in name][1:]  # one is the amax that is left at the end

    assert breaches(kernels, slow) == []


def test_memory_of_other_gpus_is_not_read_as_constant(kernels):
    """Such a read may not see what another GPU has written. Tables of constants are read before the wait."""

    def constant(source: str, architecture: str, kernel: Kernel) -> list[str]:
        names = [each.name for each in kernel.instructions]
        read = names[names.index("ACQBULK") :] if "ACQBULK" in names else []
        return [name for name in read if re.match(r"LDG\..*CONSTANT", name)]

    of_steps = {source: of for source, of in kernels.items() if source.startswith("optim/")}
    assert breaches(of_steps, constant) == []


# What it must have


def test_the_transform_adds_pairs(kernels):
    """Where the hardware does, in half as many instructions."""
    found = {(name, arch) for _, name, arch, kernel in every(kernels) if kernel.count("FADD2")}
    assert {arch for _, arch in found} == {"sm_100f"}
    assert all(re.match(TRANSFORMS, name) for name, _ in found)
    for name in (name for of in kernels.values() for name in of if re.match(TRANSFORMS, name)):
        assert (name, "sm_100f") in found, name


TRANSFORMS = r"quantize_kernel<\w+,false,2,"


def test_e2m1_is_one_instruction_on_blackwell(kernels):
    """Four over six and stochastic rounding find codes in another way."""

    def without(source: str, architecture: str, kernel: Kernel) -> bool:
        encodes = re.match(ENCODERS[source], kernel.name) if source in ENCODERS else None
        return bool(encodes) and architecture in ("sm_100f", "sm_120f") and not kernel.count("F2FP.*E2M1")

    assert breaches(kernels, without) == []


ENCODERS = {"quantize/quantize": r"quantize", "cast/cast": r"partial_cast_kernel<\w+,[01]>"}


GLOBAL = r"(LDG|STG|LD|ST|ATOM|ATOMG|RED|REDG|REDUX\.G|LDGSTS|UBLKCP|UTMA\w*|CCTL\w*)(\.|$)"


def test_every_kernel_waits_for_the_one_before(kernels):
    def first(source: str, architecture: str, kernel: Kernel) -> str:
        names = [each.name for each in kernel.instructions]
        wait = names.index("ACQBULK") if "ACQBULK" in names else len(names)
        early = [name for name in names[:wait] if re.match(GLOBAL, name) and "CONSTANT" not in name]
        return "" if architecture == "sm_80" else ", ".join(early)

    assert breaches(kernels, first) == []


# Roots and reciprocals that are NVIDIA's without the branch


@pytest.fixture(scope="module", params=(*ARCHITECTURES, "sm_89"))
def sequences(request, tmp_path_factory) -> dict[str, Kernel]:
    nvdisasm()
    source = TESTS / "native" / "short_sequences.cu"
    return compiled(source, request.param, tmp_path_factory.mktemp("sequences"))


@pytest.mark.parametrize("name", ["root", "reciprocal"])
def test_short_sequences_are_nvidias(sequences, name):
    """The same operations on the same values, so what NVIDIA's path rounds correctly ours does."""
    ours, theirs = sequences[f"our_{name}"], sequences[f"nvidia_{name}"]
    (own, branches), (expected, guard) = result(ours), result(theirs)
    assert own == expected
    assert branches == [] and guard == GUARDS[name]


GUARDS = {
    # x - 2^-101, as bits, is at most that of the largest float.
    "root": [-0xD000000, 0x727FFFFF],
    # The exponent + 3, without the sign and modulo 256, is more than 3: from 2^-126 to below 2^126.
    "reciprocal": [0x1800000, 0x7F800000, 0x1FFFFFF],
}


def result(kernel: Kernel) -> tuple[object, list[int]]:
    """What is stored, as an expression of what was loaded, and the integers that decide about the fast path,
    which a branch jumps to over a call.
    """
    values: dict[str, object] = {}
    code, guard, at = kernel.code, [], 0
    while True:
        each = code[at]
        at += 1
        if not isinstance(each, Instruction):
            continue
        operation, *modifiers = each.name.split(".")
        if operation in ("IADD3", "VIADD", "LOP3", "ISETP"):
            guard += [int(text, 16) for text in each.operands if re.fullmatch(r"-?0x[0-9a-f]{3,}", text)]
        elif operation == "BRA":
            target = code.index(each.label)
            assert each.predicate and any(
                isinstance(skipped, Instruction) and skipped.name.startswith("CALL")
                for skipped in code[at:target]
            )
            at = target
        elif operation == "LDG":
            values[each.operands[0]] = (1, "x")
        elif operation == "STG":
            return values[each.operands[-1]], guard
        elif operation in ("MUFU", "FMUL", "FFMA", "FADD"):
            # No value that a .FTZ would flush occurs in the range.
            assert set(modifiers) <= {"FTZ", "RCP", "RSQ"}, each
            name = f"MUFU.{modifiers[0]}" if operation == "MUFU" else operation
            target, *given = each.operands
            values[target] = computed(name, [value_of(text, values) for text in given])


def value_of(text: str, values: dict[str, object]) -> tuple:
    """(sign, magnitude)"""
    sign, name = (-1, text[1:]) if text.startswith("-") else (1, text)
    own, value = values.get(name.removesuffix(".reuse"), (1, name))
    return sign * own, value


def computed(name: str, operands: list[tuple]) -> tuple:
    """Rounding is symmetric: signs are moved out of products."""
    if name == "FADD":
        (a, b) = operands
        assert b == (-1, "RZ")  # a - 0
        return a
    if name.startswith("MUFU"):
        return 1, (name, operands[0])
    (sign_a, a), (sign_b, b), *rest = operands
    factors = tuple(sorted((a, b), key=repr))
    sign = sign_a * sign_b
    if not rest:
        return sign, (name, factors)
    ((sign_c, c),) = rest
    return sign, (name, factors, (sign * sign_c, c))
