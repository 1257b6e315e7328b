"""The command `zerofp4`, or `python -m zerofp4`: one module for each subcommand."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from zerofp4.inspect import blackwell, checkpoint, info, memory
from zerofp4.version import VERSION

COMMANDS = {"info": info, "inspect": checkpoint, "memory": memory, "blackwell-check": blackwell}
"""By name, modules with SUMMARY, DESCRIPTION, add_options(parser), and run(options) -> exit code."""

EPILOG = """\
exit codes:
  0  done, and nothing was found wrong
  1  done, and something was found wrong: the output says what
  2  the command line was wrong, or names what cannot be read
"""


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("zerofp4", **_about("Tools for an installation of ZeroFP4."))
    parser.add_argument("--version", action="version", version=f"zerofp4 {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.SUMMARY, **_about(command.DESCRIPTION))
        command.add_options(own)
    return parser.parse_args(arguments)


def _about(description: str) -> dict[str, Any]:
    layout = {"formatter_class": argparse.RawDescriptionHelpFormatter, "epilog": EPILOG}
    return {"description": description, "allow_abbrev": False, **layout}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default sys.argv's. Returns the exit code; a wrong one raises SystemExit(2)."""
    options = parse_options(arguments)
    try:
        code = COMMANDS[options.command].run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # as by `| head -1`, which has read enough
        # Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code
