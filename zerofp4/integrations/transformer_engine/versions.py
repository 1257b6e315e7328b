"""The versions of TransformerEngine that this adapter knows."""

OLDEST, NEWEST = (2, 14), (2, 20)
"""The minor versions whose functions and tensors were read: 2.14 is the first with both functions."""


def shown(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


KNOWN = f"{shown(OLDEST)} to {shown(NEWEST)}"
