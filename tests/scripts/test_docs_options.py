"""The table of all options on docs/api.md has each parameter of each public function and method, once."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterator

from cases.docs import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()

NOT_CALLED_BY_USERS = {
    "zerofp4.GroupedNVFP4",
    "zerofp4.MXFP8Tensor",
    "zerofp4.NVFP4Tensor",
    "zerofp4.inspect.QuantizationReport",
    "zerofp4.integrations.fsdp2.Attachment",
    "zerofp4.launch.World",
    "zerofp4.nn.ConversionReport",
    "zerofp4.nn.Conv1D",
    "zerofp4.nn.Experts",
    "zerofp4.nn.FilterFn",
    "zerofp4.serving.FUSED",
    "zerofp4.serving.Part",
    "zerofp4.serving.Served",
    "zerofp4.serving.ServedWeights",
    "zerofp4.tensors.quantized_tensor.QuantizedTensor",
    "zerofp4.testing.VerificationError",
}
"""What functions return or raise, and a type of functions: their methods count, their constructors do not."""

ROOMS = re.compile(r"zerofp4\.(nn\.|optim\.|serving\.|gemm\.|launch\.|inspect\.|testing\.|integrations\.)?")
SHADOWED = re.compile(r"\b(\w+)\.\1\b")
"""A function in a module of its own name."""


def public_callables() -> Iterator[tuple[str, inspect.Signature]]:
    """In the order of the page: the name that the table uses, and the signature."""
    for path, options in re.findall(r"^::: (\S+)\n((?: .+\n)*)", PAGE, re.MULTILINE):
        found, name = pkgutil.resolve_name(path), SHADOWED.sub(r"\1", ROOMS.sub("", path))
        assert not inspect.ismodule(found), f"{path} is a module, whose function of that name is meant"
        if path not in NOT_CALLED_BY_USERS:
            yield name, inspect.signature(found)
        members = re.search(r"members: (.*)", options)
        for method in public_methods(found):
            if members is None or method in re.findall(r"\w+", members[1]):
                yield f"{name}.{method}", inspect.signature(getattr(found, method))


def public_methods(found: object) -> list[str]:
    """Of a class, those that it and its bases in this package define."""
    bases = [base for base in getattr(found, "__mro__", ()) if base.__module__.startswith("zerofp4")]
    methods = {name: value for base in reversed(bases) for name, value in vars(base).items()}
    return [name for name, value in methods.items() if inspect.isfunction(value) and name[0] != "_"]


def test_the_table_has_each_option_of_each_public_callable_once():
    taken: dict[str, list[str]] = {}
    for name, signature in public_callables():
        for option in signature.parameters:
            if option != "self":
                taken.setdefault(option, []).append(f"`{name}`")
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", PAGE.split("## All options")[1], re.MULTILINE)
    options = [option for option, _, _ in rows]
    assert options == sorted(taken, key=str.lower)
    for option, _, callables in rows:
        assert callables == ", ".join(taken[option]), f"docs/api.md: who takes {option}"
