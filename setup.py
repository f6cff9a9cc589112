"""Builds the optional CPU kernels; everything else about the package is in pyproject.toml.

The same sources make one library for AVX2 and one for AVX-512. They are plain C to the outside, so they depend on no
version of Python or torch and are opened with ctypes. Without a compiler the installation goes on, and torch's own
operations are used.
"""

import platform
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = ["level", "linear", "attention", "elementwise", "gram", "layer", "quantize", "round_columns", "team"]
HEADERS = ["common", "amx", "attention", "attention_amx", "linear", "rows", "shared_loop", "team"]
HEADERS += ["vec_avx2", "vec_avx512"]
LEVELS = {"avx2": "1", "avx512": "2"}  # OCTAVO_LEVEL in common.h
FOLDER = "src/octavo/ops/cpu"


class BuildKernels(build_ext):
    """Names the libraries `_kernels_*.so`: they are no Python modules and serve every Python.

    Objects of the two levels have the same names, so each library has a folder of its own for them.
    """

    build_temp: str

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return ext.export_symbols

    def build_extension(self, ext: Extension) -> None:
        build_temp = self.build_temp
        try:
            self.build_temp = f"{build_temp}/{ext.name}"
            super().build_extension(ext)
        except Exception as error:  # any failure of the compiler leaves a package that works through torch
            print(f"octavo: the CPU kernels were not built ({error}); torch's operations will be used", file=sys.stderr)
        finally:
            self.build_temp = build_temp


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
            f"octavo.ops.cpu._kernels_{level}",
            sources=[f"{FOLDER}/{name}.cpp" for name in (*SOURCES, f"linear_{level}")],
            define_macros=[("OCTAVO_LEVEL", number)],
            depends=[f"{FOLDER}/{name}.h" for name in HEADERS],
            language="c++",
            extra_compile_args=flags,
            extra_link_args=["-fopenmp"],
            optional=True,
        )
        for level, number in LEVELS.items()
    ]


setup(ext_modules=kernels(), cmdclass={"build_ext": BuildKernels})
