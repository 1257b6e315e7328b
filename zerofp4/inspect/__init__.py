"""What a person asks of an installation from a shell: `python -m zerofp4`."""

from zerofp4.inspect.cli import main

__all__ = ["main"]
