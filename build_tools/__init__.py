"""How setup.py builds the extension: for which GPUs, by which commands, and what need not be built again."""

from pathlib import Path

from setuptools.errors import BaseError

ROOT = Path(__file__).resolve().parent.parent


class BuildError(BaseError):
    """What a person can put right: printed without a traceback."""
