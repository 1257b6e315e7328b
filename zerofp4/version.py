"""The version that is installed."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("zerofp4")
except PackageNotFoundError:  # a source tree that was built in place and never installed
    VERSION = "unknown"
