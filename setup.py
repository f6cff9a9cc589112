"""Builds the optional CPU kernels; everything else about the package is in pyproject.toml.

The library is plain C to the outside, so it depends on no version of Python or torch and is opened with ctypes. Without
a compiler the installation goes on, and torch's own operations are used.
"""

import platform
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = ["level", "linear", "attention", "elementwise", "layer", "team"]
HEADERS = ["common", "amx", "linear", "attention", "rows", "team"]
FOLDER = "src/octavo/ops/cpu"


class BuildKernels(build_ext):
    """Names the library `_kernels.so`: it is no Python module and serves every Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return ext.export_symbols

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:  # any failure of the compiler leaves a package that works through torch
            print(f"octavo: the CPU kernels were not built ({error}); torch's operations will be used", file=sys.stderr)


def kernels() -> list[Extension]:
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return []
    flags = [
        "-O3",
        "-g0",
        "-std=c++17",
        "-fopenmp",
        "-fvisibility=hidden",
        "-fno-math-errno",
        "-Wno-uninitialized",
        "-Wno-maybe-uninitialized",
    ]
    return [
        Extension(
            "octavo.ops.cpu._kernels",
            sources=[f"{FOLDER}/{name}.cpp" for name in SOURCES],
            depends=[f"{FOLDER}/{name}.h" for name in HEADERS],
            language="c++",
            extra_compile_args=flags,
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ]


setup(ext_modules=kernels(), cmdclass={"build_ext": BuildKernels})
