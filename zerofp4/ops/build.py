"""What this build is and what this machine can run of it."""

import torch

import zerofp4._C as _C
from zerofp4.ops.cublaslt import products_by
from zerofp4.ops.device import architectures
from zerofp4.ops.hardware import FP4_CAPABILITY, code_for


def build_info() -> dict[str, dict]:
    """What was compiled in and what this machine can run.

    {"cpu": {"compiled": [instruction sets], "running": the one in use},
     "cuda": {"compiled": bool, "version": of the toolkit, "architectures": [...],
              "products": what multiplies for the exact backend, and why it is not cuBLASLt,
              "devices": [{"name", "capability", "usable", "gemm": the backend that zerofp4.gemm chooses}]}}
    """
    build = _C.build()
    devices = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        usable = code_for(capability, architectures()) is not None
        devices.append(
            {
                "name": torch.cuda.get_device_name(index),
                "capability": capability,
                "usable": usable,
                "gemm": "native" if capability >= FP4_CAPABILITY else "exact",
            }
        )
    return {
        "cpu": {"compiled": build["isas"].split(), "running": _C.cpu_isa()},
        "cuda": {
            "compiled": "cuda_version" in build,
            "version": build.get("cuda_version"),
            "architectures": architectures(),
            "products": products_by(),
            "devices": devices,
        },
    }
