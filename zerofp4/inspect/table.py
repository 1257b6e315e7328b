"""Tables of text."""

from collections.abc import Sequence
from typing import TextIO


def plain_table(rows: Sequence[Sequence[str]], aligns: Sequence[str]) -> list[str]:
    """Lines of a table. rows: the first has the heads. aligns: by column, "<" or ">"."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{c:{align}{w}}" for c, align, w in zip(row, aligns, widths, strict=True)).rstrip()
        for row in rows
    ]


def print_table(rows: Sequence[Sequence[str]], aligns: Sequence[str], file: TextIO) -> None:
    """By rich on a terminal where rich is installed, in plain columns elsewhere."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        Table = None
    if Table is None or not file.isatty():
        print("\n".join(plain_table(rows, aligns)), file=file)
        return
    table = Table()
    heads, *others = rows
    for head, align in zip(heads, aligns, strict=True):
        table.add_column(head, justify="left" if align == "<" else "right", overflow="fold")
    for row in others:
        table.add_row(*map(Text, row))  # no markup: a name may have brackets
    Console(file=file).print(table)
