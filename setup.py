"""Builds the CPU kernels, plain C, into one shared library; without a compiler the package installs without them."""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = sorted(str(path) for path in Path("moeoffload").rglob("*.c"))
HEADERS = sorted(str(path) for path in Path("moeoffload").rglob("*.h"))

setup(
    ext_modules=[
        Extension(
            "moeoffload._native",
            SOURCES,
            depends=HEADERS,
            # Instruction sets are chosen per function and at run time, so one build runs on any x86-64 or ARM machine.
            # A product and a sum are two roundings unless the code says otherwise: results have torch's bits.
            extra_compile_args=["-O3", "-std=gnu11", "-Wall", "-fno-math-errno", "-ffp-contract=off", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
