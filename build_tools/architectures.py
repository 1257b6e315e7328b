"""The GPU architectures to compile for: ZEROFP4_CUDA_ARCHS, the GPUs of this machine, or all.

Architectures are written as nvcc writes them behind sm_: "80", "90", "100f" (the family of 10.0 and 10.3).
"compute_80" stands alone, PTX and nothing else: so code for an older GPU can be tried on a newer one.
"""

import re
import shutil
import subprocess

from build_tools import BuildError

VARIABLE = "ZEROFP4_CUDA_ARCHS"
# Machine code for these, and PTX of PTX_ARCHITECTURE for GPUs that are newer than this list.
ALL = ("80", "90", "100f", "120f")
# With the PTX these have every branch of the sources: enough to see that all of it compiles.
BRANCHES = ("80", "100f")
PTX_ARCHITECTURE = "90"
PTX = "compute_"
OLDEST = 80
OLDEST_FAMILY = 100
OLDEST_NVCC_WITH_FAMILIES = (12, 9)


def choose(wanted, toolkit, gpus):
    """The architectures that `wanted`, the value of ZEROFP4_CUDA_ARCHS or "", asks for.

    toolkit.version and toolkit.bases say what nvcc can do; gpus() returns [(major, minor)].
    """
    wanted = wanted.strip()
    if wanted == "all":
        return all_of(toolkit)
    if wanted == "branches":
        return [arch for arch in all_of(toolkit) if arch in BRANCHES]
    if wanted in ("", "native"):
        usable = sorted({gpu for gpu in gpus() if 10 * gpu[0] + gpu[1] >= OLDEST})
        if usable:
            return in_order(native(gpu, toolkit) for gpu in usable)
        if wanted == "native":
            raise BuildError(f"{VARIABLE}=native: nvidia-smi names no GPU of compute capability 8.0 or newer")
        return all_of(toolkit)
    if wanted.startswith(PTX):
        return [PTX + checked(wanted.removeprefix(PTX), wanted, toolkit)]
    return in_order(checked(item, wanted, toolkit) for item in re.split(r"[;,\s]+", wanted) if item)


def names(architectures):
    """What build_info() says of them."""
    machine_code, ptx = split(architectures)
    return [f"sm_{arch}" for arch in machine_code] + [PTX + ptx]


def nvcc_flags(architectures):
    """PTX is always there; with machine code of its own architecture it is one compilation for both."""
    machine_code, ptx = split(architectures)
    codes = {arch: [f"sm_{arch}"] for arch in machine_code}
    codes.setdefault(ptx, []).append(PTX + ptx)
    return [f"-gencode=arch={PTX}{arch},code=[{','.join(code)}]" for arch, code in codes.items()]


def split(architectures):
    """Those with machine code, and that of the PTX."""
    if len(architectures) == 1 and architectures[0].startswith(PTX):
        return [], architectures[0].removeprefix(PTX)
    return architectures, PTX_ARCHITECTURE


def all_of(toolkit):
    return [arch for arch in ALL if has_families(toolkit) or not arch.endswith("f")]


def has_families(toolkit):
    return toolkit.version >= OLDEST_NVCC_WITH_FAMILIES


def native(gpu, toolkit):
    """Blackwell's conversions are compiled for a family. None where this nvcc leaves the GPU to the PTX."""
    major, minor = gpu
    if 10 * major >= OLDEST_FAMILY:
        return f"{major}0f" if has_families(toolkit) and f"{major}0" in toolkit.bases else None
    return f"{major}{minor}" if f"{major}{minor}" in toolkit.bases else None


def in_order(architectures):
    return sorted({arch for arch in architectures if arch}, key=lambda arch: (number(arch), arch))


def number(arch):
    return int(arch.rstrip("af"))


def checked(item, wanted, toolkit):
    def refuse(why):
        raise BuildError(f"{VARIABLE}={wanted!r}: {item!r} {why}")

    if not re.fullmatch(r"\d{2,3}[af]?", item):
        refuse(
            "is no architecture; give all, native, branches, or a list of numbers as in 80;90;100f, "
            "or compute_80"
        )
    if number(item) < OLDEST:
        refuse("is too old: the kernels need compute capability 8.0")
    version = ".".join(map(str, toolkit.version))
    if item.rstrip("af") not in toolkit.bases:
        refuse(f"is unknown to nvcc {version}, which knows {', '.join(sorted(toolkit.bases, key=int))}")
    if item.endswith("f") and number(item) < OLDEST_FAMILY:
        refuse(f"is no family; they begin with {OLDEST_FAMILY}f")
    if item.endswith("f") and not has_families(toolkit):
        refuse(f"is a family, for which nvcc 12.9 is needed; this is {version}")
    if item.endswith("a") and number(item) < number(PTX_ARCHITECTURE):
        refuse("has no variant with an a")
    return item


def gpus_of_this_machine():
    """[(major, minor)] of every GPU, asked of the driver, since the build knows nothing of torch."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return []  # there is no driver behind it
    return [(int(major), int(minor)) for major, minor in re.findall(r"^(\d+)\.(\d)\s*$", text, re.MULTILINE)]
