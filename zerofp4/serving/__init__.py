"""Trained NVFP4 weights in the formats of serving engines, and their masters as safetensors."""

from zerofp4.serving.files import save_safetensors
from zerofp4.serving.fused import FUSED, amax_groups
from zerofp4.serving.load import LoadReport, load_pretrained
from zerofp4.serving.plan import Part, Served
from zerofp4.serving.report import ExportReport
from zerofp4.serving.save import ServedWeights, save_pretrained, weights

__all__ = [
    "FUSED",
    "ExportReport",
    "LoadReport",
    "Part",
    "Served",
    "ServedWeights",
    "amax_groups",
    "load_pretrained",
    "save_pretrained",
    "save_safetensors",
    "weights",
]
