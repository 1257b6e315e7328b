"""Builds zerofp4._C: pybind11 and our sources, no torch. CUDA sources are compiled when there is an nvcc.
Where a torch is installed, also zerofp4._autograd, which is built against it, and which all works without.
Its sources become part of the package: where there was no torch, it is compiled on first use.

Environment:
    ZEROFP4_CUDA=0      the CPU side only
    ZEROFP4_CUDA_ARCHS  GPU architectures: "90", "80;90;100f", "native", "all", or "branches", the least that
                        has every branch of the sources. If not given, native where there is a GPU, else all.
                        PTX of compute_90 is always added, for newer GPUs. Or "compute_80": its PTX alone, to
                        try the code for an older GPU on a newer one.
    ZEROFP4_CUDA_OPTIMIZE=0
                        GPU code that is hardly optimized, in a fifth of the time: to see that it compiles.
                        nvcc before 12.9 optimizes all the same.
    ZEROFP4_AUTOGRAD=0  without zerofp4._autograd
    ZEROFP4_SANITIZE=1  with AddressSanitizer and UndefinedBehaviorSanitizer. Needs ZEROFP4_CUDA=0, and that
                        Python runs under them, as scripts/test.sh --sanitize starts it.
    NVCC, CXX           the compilers to use in place of those on the PATH

Objects are kept in build/objects. A build where nothing changed compiles and links nothing.
"""

import functools
import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there in an isolated build

from build_tools import architectures, commands, compilers, objects, torch_extension


class Build(build_ext):
    """The extensions out of what build_tools finds and compiles."""

    def build_extension(self, ext):
        cxx = compilers.find_cxx()
        nvcc = compilers.find_nvcc(cxx)
        archs = self.choose_architectures(nvcc) if nvcc else []
        processes = self.parallel if isinstance(self.parallel, int) else len(os.sched_getaffinity(0))
        of_torch = torch_extension.jobs(cxx, torch) if torch else []
        if ext.name == torch_extension.NAME:
            jobs, beside, link = of_torch, [], torch_extension.link(cxx, torch)
        else:
            jobs, beside, link = commands.all_jobs(cxx, nvcc, archs), of_torch, commands.link(cxx, nvcc)
        with objects.locked():
            announce = functools.partial(self.announce_build, cxx, nvcc, archs)
            built = objects.compile_all(jobs, processes, announce, beside)
            objects.link(link, [job.object for job in jobs], built, self.get_ext_fullpath(ext.name))

    def choose_architectures(self, nvcc):
        wanted = os.environ.get(architectures.VARIABLE, "")
        return architectures.choose(wanted, nvcc, architectures.gpus_of_this_machine)

    def announce_build(self, cxx, nvcc, archs):
        compilers.try_out(cxx, nvcc)
        print(f"C++ by {' '.join(cxx.command)}, instruction sets {', '.join(commands.ISA_FLAGS)}")
        if nvcc:
            flags = " ".join(["", *commands.optimization(nvcc)])
            print(f"CUDA by {nvcc.command[0]}{flags} for {', '.join(architectures.names(archs))}")
        else:
            print("no CUDA")
        print(f"{torch_extension.NAME} for torch {torch.version}" if torch else f"no {torch_extension.NAME}")


class WithSources(build_py):
    """The package, and in it the sources of what is compiled on first use. A checkout has them beside it."""

    def run(self):
        super().run()
        if not self.editable_mode:
            for file in torch_extension.source_files(Path("csrc")):
                target = Path(self.build_lib, "zerofp4", file)
                self.mkpath(str(target.parent))
                self.copy_file(str(file), str(target))


torch = torch_extension.find_torch()
extensions = [Extension("zerofp4._C", sources=[])]
if torch:  # a torch that it does not compile against does not keep the package from being installed
    extensions.append(Extension(torch_extension.NAME, sources=[], optional=True))
setup(ext_modules=extensions, cmdclass={"build_ext": Build, "build_py": WithSources})
