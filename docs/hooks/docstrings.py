"""An extension of griffe: lines of a docstring that explain a name become a list.

In the sources a docstring says `name: what it is`, a line for each name, which Markdown would run together.
"""

import re
from typing import Any

import griffe

NAMES = re.compile(r"(\w+(?:\[i\])?(?:, \w+(?:\[i\])?)*): (?=\S)")


class Lists(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            known = names_of(obj)
            paragraphs = re.split(r"\n\s*\n", obj.docstring.value)
            obj.docstring.value = "\n\n".join(with_list(paragraph, known) for paragraph in paragraphs)


def names_of(obj: griffe.Object) -> set[str]:
    """What a docstring may explain: parameters, of a class those of __init__, and its members."""
    if obj.is_function:
        return {parameter.name for parameter in obj.parameters}
    if obj.is_class:
        constructor = obj.members.get("__init__")
        parameters = names_of(constructor) if constructor is not None and constructor.is_function else set()
        return parameters | set(obj.members)
    return set()


def with_list(paragraph: str, known: set[str]) -> str:
    """The paragraph, with an item for each of its lines that begins with known names and a colon; a line that
    says what is raised ends the list.
    """
    text: list[str] = []
    items: list[str] = []
    after: list[str] = []
    for line in paragraph.split("\n"):
        match = NAMES.match(line)
        if after or (items and line.startswith("Raises ")):
            after.append(line)
        elif match and {name.removesuffix("[i]") for name in match[1].split(", ")} <= known:
            items.append(f"- `{match[1]}`: {line[match.end() :]}")
        elif items:
            items[-1] += " " + line.strip()
        else:
            text.append(line)
    return "\n\n".join("\n".join(lines) for lines in (text, items, after) if lines)
