"""Builds the CPU kernels, plain C, into one shared library; without a compiler the package installs without them."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = sorted(str(path) for path in Path("moeoffload").rglob("*.c"))
HEADERS = sorted(str(path) for path in Path("moeoffload").rglob("*.h"))


class ParallelBuild(build_ext):
    """Compiles the files of an extension side by side: one after the other they take a minute."""

    def build_extension(self, ext: Extension) -> None:
        """See the base class."""

        def objects_of(source: str) -> list[str]:
            return self.compiler.compile(
                [source], self.build_temp, depends=ext.depends, extra_postargs=ext.extra_compile_args, debug=self.debug
            )

        largest_first = sorted(ext.sources, key=lambda source: "kernels_" not in source)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            ext.extra_objects = [each for objects in pool.map(objects_of, largest_first) for each in objects]
        ext.depends, ext.sources = [*ext.depends, *ext.sources], []  # linked again when one of them is newer
        super().build_extension(ext)


setup(
    cmdclass={"build_ext": ParallelBuild},
    ext_modules=[
        Extension(
            "moeoffload._native",
            SOURCES,
            depends=HEADERS,
            # Instruction sets are chosen per function and at run time, so one build runs on any x86-64 or ARM machine.
            # A product and a sum are two roundings unless the code says otherwise: results have torch's bits.
            # Vectors are never handed to a function that is called: how that is done may differ between compilers.
            extra_compile_args=[
                *("-O3", "-std=gnu11", "-Wall", "-Wno-psabi", "-fno-math-errno", "-ffp-contract=off", "-pthread"),
            ],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ],
)
