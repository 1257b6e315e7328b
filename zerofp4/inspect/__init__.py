"""What a person asks of a model, and of an installation from a shell: `zerofp4`."""

from zerofp4.inspect.cli import main
from zerofp4.inspect.error import QuantizationReport, quantization_error

__all__ = ["QuantizationReport", "main", "quantization_error"]
