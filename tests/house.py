"""Reads the imports of a package with ast and says which of them break the rules of its house.

A room is a folder of the package, or a module beside the folders; a folder's face is its __init__. Imports
inside functions and under TYPE_CHECKING count too: that is where arrows that point up like to hide.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

MOST_FOLDERS = 14

# From the roof to the ground: a room imports only rooms that come after it here.
ROOMS = (
    "__main__",
    "__init__",
    "integrations",
    "inspect",
    "blackwell_check",
    "testing",
    "serving",
    "optim",
    "nn",
    "engine",
    "cast",
    "tensors",
    "gemm",
    "distributed",
    "launch",
    "ops",
    "storage",
    "reference",
    "shard",
    "version",
    "layout",
    "format",
)
# Who wants these asks for them by name: the package's own face does not import them.
NOT_IN_THE_FACE = ("__main__", "integrations", "blackwell_check", "testing")
EXTENSIONS, THEIR_ROOM = ("_C", "_autograd"), "ops"
# Their faces have nothing for users: they show the names that they import, without an __all__.
INNER_ROOMS = (THEIR_ROOM, "storage", "distributed", "tensors", "cast", "gemm", "engine")
# The oracle shares nothing with what it judges but constants; all names of its files are its face.
ORACLE, WHAT_IT_KNOWS, WHO_ASKS_IT = "reference", {"format"}, {"testing", "blackwell_check"}

NOT_FOR_USERS = {
    "nn": {
        "choose_weights",
        "converted_model_of",
        "free_frozen",
        "primary_parameter",
        "show_weights",
        "why_not_quantized",
    },
    "optim": {
        "check_one_rank_has_all",
        "gather_masters",
        "named_tensors",
        "own_values",
        "scales_shape",
        "suits_compact",
    },
}
"""What the face of a room has for other rooms, and does not show to users in its __all__."""


@dataclasses.dataclass(frozen=True)
class Import:
    """`module` is what is imported, without the package's name; `name` is what is taken from it, or None."""

    line: int
    module: tuple[str, ...]
    name: str | None = None


class House:
    """The files of a package, their imports and their faces."""

    def __init__(self, package: Path):
        self.package = package
        self.trees = {}
        for path in sorted(package.rglob("*.py")):
            self.trees[self._module(path)] = ast.parse(path.read_text(), str(path))
        self.paths = {self._module(path): path for path in package.rglob("*.py")}

    def _module(self, path: Path) -> tuple[str, ...]:
        """("cast", "plan") for cast/plan.py, ("cast",) for cast/__init__.py, () for the package's own."""
        parts = path.relative_to(self.package).with_suffix("").parts
        return parts[:-1] if parts[-1] == "__init__" else parts

    def where(self, module: tuple[str, ...], line: int = 1) -> str:
        return f"{self.paths[module].relative_to(self.package.parent)}:{line}"

    def is_folder(self, module: tuple[str, ...]) -> bool:
        return module in self.paths and self.paths[module].name == "__init__.py"

    def exported(self, face: tuple[str, ...]) -> set[str] | None:
        """The names in __all__, of INNER_ROOMS those that they import; None if there are none."""
        if face[0] in INNER_ROOMS:
            return {each.name or each.module[-1] for each in self.imports(face)}
        for node in self.trees[face].body:
            if isinstance(node, ast.Assign) and any(
                getattr(t, "id", None) == "__all__" for t in node.targets
            ):
                return set(ast.literal_eval(node.value))
        return None

    def imports(self, module: tuple[str, ...]) -> Iterator[Import]:
        """The imports of this package's own modules."""
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    package, *rest = alias.name.split(".")
                    if package == self.package.name:
                        yield Import(node.lineno, tuple(rest))
            elif isinstance(node, ast.ImportFrom):
                base = self._base(module, node)
                for alias in node.names if base is not None else ():
                    inner = (*base, alias.name)
                    if inner in self.paths or inner[0] in EXTENSIONS:
                        yield Import(node.lineno, inner)
                    else:
                        yield Import(node.lineno, base, alias.name)

    def _base(self, module: tuple[str, ...], node: ast.ImportFrom) -> tuple[str, ...] | None:
        """What `from BASE import` names, None where it is of another package."""
        rest = tuple(node.module.split(".")) if node.module else ()
        if node.level:
            above = node.level - self.is_folder(module)
            return (*module[: len(module) - above], *rest)
        return rest[1:] if rest and rest[0] == self.package.name else None

    def face_attributes(self, module: tuple[str, ...]) -> Iterator[Import]:
        """What is taken as `room.name` from a room that was imported whole."""
        rooms = {}
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.ImportFrom) and self._base(module, node) == ():
                rooms |= {a.asname or a.name: (a.name,) for a in node.names if self.is_folder((a.name,))}
        for node in ast.walk(self.trees[module]):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in rooms
            ):
                yield Import(node.lineno, rooms[node.value.id], node.attr)


def room_of(module: tuple[str, ...]) -> str:
    return module[0] if module else "__init__"


def violations(package: Path) -> list[str]:
    """`file:line: what is wrong (rule)`, for every import of the package that breaks one."""
    house = House(package)
    found = []
    folders = sorted(module[0] for module in house.paths if len(module) == 1 and house.is_folder(module))
    if len(folders) > MOST_FOLDERS:
        found.append(
            f"{package.name}: {len(folders)} folders, {', '.join(folders)} (at most {MOST_FOLDERS} rooms)"
        )
    for room in sorted({room_of(module) for module in house.paths} - set(ROOMS)):
        found.append(
            f"{package.name}/{room}: no place among the rooms (add it to ROOMS, where DESIGN.md draws it)"
        )
    for module in house.paths:
        for imported in house.imports(module):
            found += _judge(house, module, imported)
        for used in house.face_attributes(module):
            found += _judge_name(house, module, used)
    return found + list(_circles(house))


def _judge(house: House, module: tuple[str, ...], imported: Import) -> Iterator[str]:
    where, room, other = house.where(module, imported.line), room_of(module), room_of(imported.module)
    dotted = ".".join((house.package.name, *imported.module))
    if other in EXTENSIONS:
        if room != THEIR_ROOM:
            yield f"{where}: imports {dotted} (only {THEIR_ROOM}/ calls the extensions)"
        return
    if other == room:
        return
    if other not in ROOMS or room not in ROOMS:
        if imported.module not in house.paths:
            yield f"{where}: imports {dotted}, which is no module of the package"
        return
    if ROOMS.index(other) < ROOMS.index(room):
        taken = f"{imported.name} of {dotted}" if imported.name else dotted
        yield f"{where}: {room} imports {taken}, which is above it (arrows point down only)"
    if other == ORACLE and room not in WHO_ASKS_IT:
        yield f"{where}: {room} imports {dotted} (the product does not stand on its oracle)"
    if room == ORACLE and other not in WHAT_IT_KNOWS:
        yield f"{where}: {room} imports {dotted} (an oracle knows nothing of the product but constants)"
    if room == "__init__" and other in NOT_IN_THE_FACE:
        yield f"{where}: the package's __init__ imports {dotted} ({other} is asked for by name)"
    if len(imported.module) > 1:
        yield f"{where}: {room} imports {dotted} (other rooms are entered by their face, {other}/__init__.py)"
    else:
        yield from _judge_name(house, module, imported)


def _judge_name(house: House, module: tuple[str, ...], imported: Import) -> Iterator[str]:
    """A name that is taken from another room's face is one that the face shows."""
    face = imported.module
    if imported.name is None or not house.is_folder(face) or not face or room_of(face) == room_of(module):
        return
    if room_of(face) == ORACLE:
        return
    names = house.exported(face)
    if names is None:
        yield f"{house.where(face)}: the face of {face[0]} has no __all__ (a face says what it shows)"
    elif imported.name not in names | NOT_FOR_USERS.get(face[0], set()):
        where, dotted = house.where(module, imported.line), ".".join((house.package.name, *face))
        yield f"{where}: {imported.name} is not shown by {dotted} (a face says what it shows)"


def _circles(house: House) -> Iterator[str]:
    """Modules that import each other, also within a room."""
    arrows = {}
    for module in house.paths:
        arrows[module] = {
            i.module: i.line for i in house.imports(module) if i.module in house.paths and i.module
        }
        arrows[module].pop(module, None)
    done: set[tuple[str, ...]] = set()

    def walk(module: tuple[str, ...], path: list[tuple[str, ...]]) -> Iterator[str]:
        if module in path:
            circle = [*path[path.index(module) :], module]
            names = " -> ".join(".".join((house.package.name, *m)) for m in circle)
            yield f"{house.where(circle[-2], arrows[circle[-2]][module])}: {names} (no circles)"
        elif module not in done:
            for other in arrows[module]:
                yield from walk(other, [*path, module])
            done.add(module)

    for module in house.paths:
        yield from walk(module, [])
