"""The rooms of zerofp4 and the arrows between them are those that the design draws."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from house import MOST_FOLDERS, ROOMS, violations

PACKAGE = Path(__file__).parents[1] / "zerofp4"


def test_every_import_keeps_to_the_rules():
    found = violations(PACKAGE)
    assert not found, "\n".join(["", *found])


def test_an_extension_is_imported_by_an_absolute_name():
    """`from zerofp4 import _C` reads the package's __init__ before it is complete."""
    for path in (PACKAGE / "ops").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = {a.name for a in node.names} if isinstance(node, ast.ImportFrom) else set()
            assert not names & {"_C", "_autograd"}, path


# The checker, on houses of three or four files

GOOD = {
    "__init__.py": "from pack.cast import CastPlan\nfrom pack import launch\n",
    "format.py": "BLOCK = 16\n",
    "layout.py": "from pack.format import BLOCK\n",
    "testing.py": "import torch\nfrom pack import optim\n\nX = optim.Optimizer\n",
    "reference/__init__.py": "from pack.format import BLOCK\n",
    "launch/__init__.py": "from pack.launch.group import World\n\n__all__ = ['World']\n",
    "launch/group.py": "class World: ...\n",
    "ops/__init__.py": "from pack.ops.stages import Stage\n",
    "ops/stages.py": "import pack._C as _C\nfrom pack import layout\n\nclass Stage: ...\n",
    "cast/__init__.py": "from .plan import CastPlan\n\n__all__ = ['CastPlan']\n",
    "cast/plan.py": "from ..ops import Stage\nfrom . import status\n\nclass CastPlan: ...\n",
    "cast/status.py": "from pack.format import BLOCK\n",
    "optim/__init__.py": "class Optimizer: ...\n\n__all__ = ['Optimizer']\n",
    "integrations/__init__.py": "",
    "integrations/fsdp2/__init__.py": "from pack.integrations.fsdp2.prepare import prepare\n",
    "integrations/fsdp2/prepare.py": "from pack.cast import CastPlan\n",
}


def build(folder: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        path = folder / "pack" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return violations(folder / "pack")


def test_a_good_house_has_no_violations(tmp_path):
    assert build(tmp_path, GOOD) == []


PAST = "cast imports pack.ops.stages (other rooms are entered by their face, ops/__init__.py)"
HIDDEN = "hidden is not shown by pack.ops (a face says what it shows)"
CIRCLE = "pack.cast.plan -> pack.cast.status -> pack.cast.plan (no circles)"
ORACLE = "reference imports pack.layout (an oracle knows nothing of the product but constants)"
NATIVE = "imports pack._C (only ops/ calls the extensions)"


@pytest.mark.parametrize(
    ("place", "text", "message"),
    [
        ("ops/stages.py:2", "\nfrom pack.cast import X", "ops imports X of pack.cast, which is above it"),
        ("ops/stages.py:2", "def f():\n    import pack.optim", "ops imports pack.optim, which is above it"),
        ("format.py:1", "from pack.layout import x", "format imports x of pack.layout, which is above it"),
        ("cast/plan.py:1", "from pack import CastPlan", "cast imports CastPlan of pack, which is above it"),
        (
            "ops/stages.py:1",
            "from pack.integrations import fsdp2",
            "ops imports pack.integrations.fsdp2, which",
        ),
        ("__init__.py:1", "from pack import testing", "the package's __init__ imports pack.testing (testing"),
        ("cast/status.py:1", "from pack.ops.stages import Stage", PAST),
        ("cast/status.py:1", "import pack.ops.stages", PAST),
        ("cast/status.py:1", "from ..ops import stages", PAST),
        ("cast/status.py:1", "from pack.ops import hidden", HIDDEN),
        ("cast/status.py:3", "from pack import ops as o\n\no.hidden()", HIDDEN),
        ("launch/__init__.py:1", "class World: ...", "the face of launch has no __all__"),
        ("cast/status.py:1", "from pack.cast.plan import CastPlan", CIRCLE),
        ("cast/status.py:1", "from pack.reference import x", "cast imports pack.reference (the product does"),
        ("reference/__init__.py:1", "from pack.layout import BLOCK", ORACLE),
        ("cast/plan.py:1", "import pack._C as _C", NATIVE),
        ("cast/plan.py:1", "from pack import _C", NATIVE),
        ("cast/plan.py:1", "import pack._autograd", NATIVE.replace("_C", "_autograd")),
        ("cast/plan.py:1", "from pack.attic import box", "imports pack.attic, which is no module of the"),
        ("attic", "", "no place among the rooms"),
    ],
)
def test_each_rule_is_kept(tmp_path, place, text, message):
    name = "attic/__init__.py" if place == "attic" else place.partition(":")[0]
    house = GOOD | {"testing.py": "from pack.launch import World\n", name: f"{text}\n"}
    found = build(tmp_path, house)
    assert any(line.startswith(f"pack/{place}: {message}") for line in found), "\n".join(found)


def test_rooms_are_not_too_many(tmp_path):
    rooms = [room for room in ROOMS if not room.startswith("__")]
    files = {f"{room}/__init__.py": "" for room in rooms[: MOST_FOLDERS + 1]} | {"__init__.py": ""}
    assert f"pack: {MOST_FOLDERS + 1} folders" in build(tmp_path, files)[0]
