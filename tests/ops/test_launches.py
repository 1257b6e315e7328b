"""Every kernel waits for the one before it in its stream before it touches memory.

It may start while that one still runs (csrc/cuda/device/launch.cuh): a kernel that forgets to wait is a race
that no sanitizer sees. Memory is reached by a kernel's parameters, so none is named in front of the wait.
"""

from __future__ import annotations

import re
from pathlib import Path

CUDA = Path(__file__).parents[2] / "csrc" / "cuda"
KERNEL = re.compile(
    r"__global__ [^{;]*?\b(?P<name>(?!__launch_bounds__)\w+)\((?P<parameters>[^{;]*)\)\s*\{(?P<body>.*?)^\}",
    re.S | re.M,
)
WAIT = re.compile(r"^ {4}wait_for_previous_kernel(_and_hold_next)?\(\);", re.M)  # in no branch


def early_kernels(source: str) -> tuple[list[str], int]:
    """The kernels that name a parameter, return or end before they wait, and how many kernels there are."""
    found = list(KERNEL.finditer(re.sub(r"//.*", "", source)))
    early = []
    for kernel in found:
        before, *behind = WAIT.split(kernel["body"], maxsplit=1)
        words = {*re.findall(r"(\w+)\s*(?:,|$)", kernel["parameters"]), "return"}
        if not behind or words & set(re.findall(r"\w+", before)):
            early.append(kernel["name"])
    return early, len(found)


def test_every_kernel_waits_before_it_touches_memory():
    sources = [path.read_text() for path in sorted(CUDA.rglob("*.cu*"))]
    found = [early_kernels(source) for source in sources]
    assert [name for early, _ in found for name in early] == []
    assert sum(count for _, count in found) == sum(source.count("__global__ ") for source in sources) > 30


def test_one_that_forgets_is_found():
    kernel = "__global__ void {}(const __grid_constant__ Args args, int64_t n) {{\n{}}}\n"
    wait = "    wait_for_previous_kernel();\n"
    bodies = {
        "right": "    __shared__ float sum;\n    sum = 0;\n" + wait + "    *args.out = n;\n",
        "forgets": "    *args.out = n;\n",
        "reads": "    const float x = *args.in;\n" + wait,
        "returns": "    if (threadIdx.x > 4) return;\n" + wait,
        "branches": "    if (threadIdx.x > 4) {\n    " + wait + "    }\n",
    }
    early, count = early_kernels("".join(kernel.format(*item) for item in bodies.items()))
    assert early == ["forgets", "reads", "returns", "branches"] and count == len(bodies)
