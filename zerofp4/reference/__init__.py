"""NVFP4 and MXFP8 in plain PyTorch: the specification that every backend equals byte for byte, on any device.

All arithmetic is float32 in the order written, rounding to nearest even. The order is part of the format:
where a product has three factors the brackets say which two are multiplied first, because another order
changes bytes.
"""

# ruff: noqa: F403 (every public name of every file)
from zerofp4.reference.adamw import *
from zerofp4.reference.compact import *
from zerofp4.reference.elements import *
from zerofp4.reference.four_over_six import *
from zerofp4.reference.gemm import *
from zerofp4.reference.hadamard import *
from zerofp4.reference.layouts import *
from zerofp4.reference.mxfp8 import *
from zerofp4.reference.quantize import *
from zerofp4.reference.scales import *
from zerofp4.reference.shards import *
from zerofp4.reference.step import *
from zerofp4.reference.stochastic import *
from zerofp4.reference.vote import *
from zerofp4.reference.wire import *
