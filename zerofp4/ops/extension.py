"""The native extension can be imported, or an error says why not."""

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


def _why_missing() -> str:
    here = Path(__file__).parents[1]
    files = [Path(entry, "zerofp4", f"_C{suffix}") for entry in sys.path for suffix in EXTENSION_SUFFIXES]
    installed = next((file.parent for file in files if file.exists()), None)
    if installed is None:
        return f"zerofp4._C, the compiled extension, is not in {here}: pip install -e . builds it there"
    return (
        f"zerofp4._C, the compiled extension, is not in {here}, and this source folder shadows the "
        f"installation in {installed}: run zerofp4 instead of python -m zerofp4, run Python in another "
        "folder, or pip install -e ."
    )


try:
    import zerofp4._C  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "zerofp4._C":
        raise
    raise ModuleNotFoundError(_why_missing(), name=error.name) from None
