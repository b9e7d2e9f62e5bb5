"""What a user writes on the command line or into the environment: addresses, sizes, devices, paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter

from moeoffload.config.values import (
    Address,
    Addresses,
    FileToRead,
    FileToWrite,
    FolderToFill,
    Listen,
    read_device,
    read_size,
)
from moeoffload.errors import SettingError

_PATHS: tuple[Any, ...] = (FolderToFill, FileToRead, FileToWrite)
_READERS: tuple[Callable[[str], object], ...] = (
    TypeAdapter(Addresses).validate_python,
    TypeAdapter(Listen).validate_python,
    read_size,
    read_device,
    *(TypeAdapter(kind).validate_python for kind in _PATHS),
)


def make() -> Callable[[bytes], None]:
    """The function to be fuzzed."""

    def one_input(data: bytes) -> None:
        if not data:
            return
        text = data[1:].decode(errors="surrogateescape")  # as Python reads arguments
        try:
            value = _READERS[data[0] % len(_READERS)](text)
        except (ValueError, SettingError):
            return
        if isinstance(value, Address) and Address.parse(value, lowest_port=0) != value:
            raise AssertionError(f"{value!r} is not in one spelling")
        if isinstance(value, int) and value < 0:
            raise AssertionError(f"a size of {value}")

    return one_input


def seeds() -> dict[str, bytes]:
    """Inputs that are allowed."""
    texts = (
        "10.0.0.1:50051,[::1]:7,box-2.lan:1",
        "0.0.0.0:0",
        "64MiB",
        "cuda:1",
        "/tmp",
        "x",
        "/",
    )
    return {f"{number}": bytes([number]) + text.encode() for number, text in enumerate(texts)}
