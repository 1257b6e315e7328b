"""Command lines in README.md and docs/ name programs and options that exist. Nothing is run."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from cases.docs import PAGES, ROOT, blocks, commands
from torch.distributed.run import get_args_parser

HISTORY = "CHANGELOG.md"
"""Names what was added, also where that has another name by now."""

COMMANDS = [
    pytest.param(command, id=f"{page.name}-{command.partition(' #')[0].strip()}")
    for page in PAGES
    if page.name != HISTORY
    for command in dict.fromkeys(commands(page))
]
CONSOLE = re.search(r'^zerofp4 = "([\w.]+):main"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
"""The module of the command `zerofp4`."""
PROGRAMS = {"benchmarks": "benchmarks.__main__", "examples.training": "examples.training.train"}
"""The modules of packages that have parse_options."""
FOREIGN = [
    ["pip", "install"],
    ["python", "-m", "mkdocs"],
    ["torchrun", "--nproc-per-node", "8", "-m", "torchtitan.train"],
]
"""How commands of other people's programs begin."""
LANGUAGES = {"python", "shell", "text"}


class Parsed(Exception):
    """Raised where a parser has taken its arguments: all that follows is the work itself."""


@contextlib.contextmanager
def parsing_alone() -> Iterator[None]:
    """Where a program of ours is given arguments. It raises SystemExit(2) for those it does not take."""
    original = argparse.ArgumentParser.parse_args

    def parse_args(self, *given):
        original(self, *given)
        raise Parsed

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args), pytest.raises(Parsed):
        yield


def check_python(module: str, arguments: list[str]) -> None:
    """A program is named alone where a page is about it; with arguments they have to be whole."""
    if arguments[-1:] == ["--help"]:
        with pytest.raises(SystemExit, match="0"):
            importlib.import_module(module).parse_options(arguments)
    elif arguments:
        with parsing_alone():
            importlib.import_module(module).parse_options(arguments)
    else:
        assert hasattr(importlib.import_module(module), "parse_options")


def check_example(script: Path, arguments: list[str]) -> None:
    """Its files are the reader's."""
    with mock.patch.object(sys, "argv", [str(script), *arguments]), parsing_alone():
        runpy.run_path(str(script))


def check_shell(script: Path, arguments: list[str]) -> None:
    """The comment at its top explains every option; what else it is given are folders, or of an option."""
    explained = re.findall(r"[\w-]+", script.read_text().partition("set -euo pipefail")[0])
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if argument.startswith("-"):
            assert argument in explained, f"{script.name} has no {argument}"
        elif before not in ("-k", "--torch"):
            assert (ROOT / argument).exists(), argument


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_can_start(command):
    words = shlex.split(command, comments=True)
    if any(words[: len(start)] == start for start in FOREIGN):
        return
    by_python = words[0] == "torchrun"
    if words[0] == "torchrun":
        launch = get_args_parser().parse_args(words[1:])
        module = ["python", "-m"] if launch.module else []
        words = [*module, launch.training_script, *launch.training_script_args]
    if words[:2] == ["python", "-m"]:
        check_python(PROGRAMS.get(words[2], words[2]), words[3:])
        return
    if words[0] == "zerofp4":
        named_alone = len(words) == 2 and not words[1].startswith("-")
        check_python(CONSOLE, [*words[1:], *["--help"] * named_alone])
        return
    script = ROOT / words[0]
    if script.parent == ROOT / "examples":
        assert script.exists()
        if words[1:]:
            check_example(script, words[1:])
        return
    assert script.parent == ROOT / "scripts" and script.exists(), f"there is no {words[0]}"
    if len(words) > 1 and not by_python:
        assert os.access(script, os.X_OK), f"{words[0]} is not executable"
    check_shell(script, words[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is(page):
    """A block without a language would be looked at by nothing."""
    assert page.read_text().count("```") == 2 * len(blocks(page))
    assert {block.language for block in blocks(page)} <= LANGUAGES
