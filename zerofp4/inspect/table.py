"""Tables of text."""

from collections.abc import Sequence


def plain_table(rows: Sequence[Sequence[str]], aligns: Sequence[str]) -> list[str]:
    """The lines of a table. rows: the heads first. aligns: by column, "<" or ">"."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{c:{align}{w}}" for c, align, w in zip(row, aligns, widths, strict=True)).rstrip()
        for row in rows
    ]


def print_table(rows: Sequence[Sequence[str]], aligns: Sequence[str]) -> None:
    print("\n".join(plain_table(rows, aligns)))
