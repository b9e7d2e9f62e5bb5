"""Turns what a user wrote for a setting into the value the program works with; ValueError says what is wrong."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_SIZE = re.compile(r"([0-9]+)\s*([KMG])?(?:iB)?", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]*))?")
SMALLEST_SHARED_BYTES = 65536


class Address(str):
    """A checked ``host:port``; the text is in one spelling, so equal addresses are equal texts. IPv6 has brackets."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str, lowest_port: int = 1) -> Address:
        """Check one HOST:PORT; ``lowest_port`` 0 lets a listener ask for any free port."""
        host, colon, port = text.strip().rpartition(":")
        if not colon or not host:
            raise ValueError(f"{text!r} is not HOST:PORT")
        if not re.fullmatch(r"[0-9]{1,5}", port) or not lowest_port <= int(port) <= 65535:
            raise ValueError(f"{text!r} has no port from {lowest_port} to 65535")
        return cls(f"{_host(host)}:{int(port)}")

    @property
    def host(self) -> str:
        """The host name or address, without brackets."""
        return self.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port; 0 only for a listener."""
        return int(self.rpartition(":")[2])


def _host(text: str) -> str:
    if text.startswith("[") and text.endswith("]"):
        try:
            return f"[{ipaddress.IPv6Address(text[1:-1])}]"
        except ValueError:
            raise ValueError(f"{text} is not an IPv6 address") from None
    if ":" in text:
        raise ValueError(f"{text!r} is no host name; an IPv6 address goes in brackets")
    if re.fullmatch(r"[0-9.]+", text):
        try:
            return str(ipaddress.IPv4Address(text))
        except ValueError:
            raise ValueError(f"{text!r} is not an IPv4 address") from None
    if len(text) > 253 or not all(_HOST_LABEL.fullmatch(label) for label in text.split(".")):
        raise ValueError(f"{text!r} is no host name")
    return text.lower()


def read_addresses(value: Any) -> Any:
    """Comma-separated text, or several HOST:PORT texts, to a tuple of addresses, each there once."""
    if isinstance(value, str):
        value = value.split(",") if value else ()
    if not isinstance(value, Iterable):
        return value
    addresses = []
    for text in value:
        if not isinstance(text, str):
            raise ValueError(f"{text!r} is not HOST:PORT")
        address = Address.parse(text)
        if address in addresses:
            raise ValueError(f"{address} is there twice")
        addresses.append(address)
    return tuple(addresses)


def read_listen(value: Any) -> Any:
    """One HOST:PORT to listen on."""
    return Address.parse(value, lowest_port=0) if isinstance(value, str) else value


def read_host(value: Any) -> Any:
    """One host name or address; an IPv6 address may have brackets, and loses them."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    return _host(f"[{text}]" if ":" in text and not text.startswith("[") else text).strip("[]")


def read_size(value: Any) -> Any:
    """A number of bytes, plain or with a suffix; K, M and G are powers of 1024, as KiB, MiB and GiB are."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None or ("i" in value.lower() and match[2] is None):
        raise ValueError("not a number of bytes")
    return int(match[1]) * _SIZE_UNITS[(match[2] or "").lower()]


def check_shared_bytes(size: int) -> int:
    """0, or enough to hold a frame."""
    if size != 0 and size < SMALLEST_SHARED_BYTES:
        raise ValueError(f"less than {SMALLEST_SHARED_BYTES} bytes")
    return size


def read_device(value: Any) -> Any:
    """A device name in lower case."""
    if not isinstance(value, str):
        return value
    device = value.lower()
    if not _DEVICE.fullmatch(device):
        raise ValueError("no such kind of device")
    return device


def check_folder_to_read(path: Path | None) -> Path | None:
    """A folder that exists."""
    if path is None:
        return None
    with _path_errors_as_value_errors():
        path = path.expanduser()
        if not path.is_dir():
            raise ValueError(f"{path} is no folder")
    return path


def check_folder(path: Path | None) -> Path | None:
    """A folder that exists and takes files, or that can be made; it is not made here."""
    if path is None:
        return None
    with _path_errors_as_value_errors():
        path = path.expanduser()
        nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not nearest.is_dir():
            raise ValueError(f"{nearest} is not a folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise ValueError(f"{nearest} cannot be written to")
    return path


def check_file_to_read(path: Path | None) -> Path | None:
    """The path if it is a file that can be read, else a ValueError."""
    if path is None:
        return None
    with _path_errors_as_value_errors():
        path = path.expanduser()
        if not (path.is_file() and os.access(path, os.R_OK)):
            raise ValueError("it is no file that can be read")
    return path


def check_secret_file(path: Path | None) -> Path | None:
    """A file that can be read, and by nobody but its owner."""
    path = check_file_to_read(path)
    if path is not None:
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise ValueError(f"others may use it: its mode is {mode:03o}; chmod 600 it")
    return path


def check_file_to_write(path: Path | None) -> Path | None:
    """A file that can be written, in a folder that exists: found out now, not at the end of a long run."""
    if path is None:
        return None
    with _path_errors_as_value_errors():
        path = path.expanduser()
        if path.is_dir():
            raise ValueError("it is a folder")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"there is no folder {path.parent}")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise ValueError("it cannot be written")
    return path


@contextlib.contextmanager
def _path_errors_as_value_errors() -> Iterator[None]:
    """A name too long, a folder that may not be entered, a home folder of nobody."""
    try:
        yield
    except OSError as error:
        raise ValueError(error.strerror or type(error).__name__) from None
    except RuntimeError as error:
        raise ValueError(str(error)) from None
