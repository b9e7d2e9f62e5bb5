"""The types of settings: they convert user input to values of the program; a ValueError says what is wrong."""

from __future__ import annotations

import functools
import ipaddress
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf

from moeoffload.config.base import Words

_HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_SIZE = re.compile(r"([0-9]+)\s*([KMG])?(?:iB)?", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]*))?")
_GPU = re.compile(r"0|[1-9][0-9]{0,3}")
_MOST_BYTES = 1 << 40

OWN_HEAD = Path("own")
"""The value of `draft` for the checkpoint's own multi-token-prediction layer."""


class Address(str):
    """A validated ``host:port`` in canonical spelling, so equal addresses are equal strings. IPv6 has brackets."""

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


def bracketed(host: str) -> str:
    """A host name or address as written before ``:port``: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


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


def _read(read: Callable[[str], Any]) -> BeforeValidator:
    """Applies ``read`` to text; other values are validated unchanged."""
    return BeforeValidator(lambda value: read(value.strip()) if isinstance(value, str) else value)


def _read_several(read: Callable[[str], Any], *, or_none: bool = False) -> BeforeValidator:
    """Applies ``read`` to each part of comma-separated text, or of several values; a number is one part. With
    ``or_none`` empty text has no parts, else one, which is empty."""

    def read_parts(value: Any) -> Any:
        if or_none and value == "":
            return ()
        parts = str(value).split(",") if isinstance(value, str | int) else value
        return tuple(read(str(part).strip()) for part in parts) if isinstance(parts, Iterable) else value

    return BeforeValidator(read_parts)


def _each_once(values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    repeated = [value for value, n in Counter(values or ()).items() if n > 1]
    if repeated:
        raise ValueError(f"{repeated[0]} is there twice")
    return values


def read_host(text: str) -> str:
    """One host name or address; brackets of an IPv6 address are removed."""
    return _host(bracketed(text)).strip("[]")


def read_size(text: str) -> int:
    """A number of bytes, plain or with a suffix; K, M and G are powers of 1024, like KiB, MiB and GiB."""
    match = _SIZE.fullmatch(text)
    if match is None or ("i" in text.lower() and match[2] is None):
        raise ValueError("not a number of bytes")
    return int(match[1]) * _SIZE_UNITS[(match[2] or "").lower()]


def is_loopback(host: str) -> bool:
    """Whether this name or address is loopback. Names other than localhost are not resolved."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_folder(text: str) -> Path:
    """An existing folder, with links resolved."""
    folder = Path(os.path.realpath(os.path.expanduser(text)))
    if not text or not folder.is_dir():
        raise ValueError(f"{text!r} is no folder")
    return folder


def read_model(text: str) -> str:
    """A model's name; text that has the form of a path must exist."""
    if text.startswith(("/", "~", ".")) and not os.path.exists(os.path.expanduser(text)):
        raise ValueError("there is no such folder and no such file")
    return text


def read_device(text: str) -> str:
    """A device name in lower case."""
    if not _DEVICE.fullmatch(text.lower()):
        raise ValueError("no such kind of device")
    return text.lower()


def read_gpu(text: str) -> int:
    """The number of a GPU."""
    if not _GPU.fullmatch(text):
        raise ValueError(f"{text!r} is no number of a GPU")
    return int(text)


def _path(check: Callable[[Path], None]) -> AfterValidator:
    """Runs ``check`` on the path with ~ expanded; names that are too long and inaccessible folders are ValueErrors."""

    def validate(path: Path | None) -> Path | None:
        try:
            if path is not None:
                path = path.expanduser()
                check(path)
        except OSError as error:
            raise ValueError(error.strerror or type(error).__name__) from None
        except RuntimeError as error:  # ~ of a user that does not exist
            raise ValueError(str(error)) from None
        return path

    return AfterValidator(validate)


def _folder_to_read(path: Path) -> None:
    if not path.is_dir():
        raise ValueError(f"{path} is no folder")


def _draft(path: Path) -> None:
    if path != OWN_HEAD:
        _folder_to_read(path)


def _folder_to_fill(path: Path) -> None:
    """Check that a folder exists and is writable, or can be created; it is not created here."""
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise ValueError(f"{nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{nearest} cannot be written to")


def _file_to_read(path: Path) -> None:
    if not (path.is_file() and os.access(path, os.R_OK)):
        raise ValueError("it is no file that can be read")


def _secret_file(path: Path) -> None:
    _file_to_read(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ValueError(f"others may use it: its mode is {mode:03o}; chmod 600 it")


def _file_to_write(path: Path) -> None:
    """Check now, not at the end of a long run, that the file can be written in an existing folder."""
    if path.is_dir():
        raise ValueError("it is a folder")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ValueError("it cannot be written")


_SIZES = f"0 to {_MOST_BYTES >> 30}G: bytes, plain or with K, M, G, KiB, MiB or GiB (x 1024)"
_HOSTS = "HOST:PORT, or several with commas between, each once, ports 1 to 65535, IPv6 in brackets"
_LISTEN = "HOST:PORT, port 0 to 65535 (0 picks a free one), IPv6 in brackets"
_TO_FILL = "a folder that exists and can be written to, or that can be made"
_TO_WRITE = "a file that can be written, in a folder that exists"
_SECRET = "a file that only its owner can read (chmod 600)"

Addresses = Annotated[
    tuple[InstanceOf[Address], ...],
    _read_several(Address.parse, or_none=True),
    AfterValidator(_each_once),
    Words(_HOSTS, "HOST:PORT,..."),
]
Listen = Annotated[
    InstanceOf[Address],
    _read(functools.partial(Address.parse, lowest_port=0)),
    Words(_LISTEN, "HOST:PORT", hint="port 0 picks a free one"),
]
HostName = Annotated[str, _read(read_host), Words("a host name or an address", "HOST")]
Device = Annotated[str, _read(read_device), Words("auto, cpu, cuda or cuda:N", "auto|cpu|cuda|cuda:N")]
Size = Annotated[
    int, _read(read_size), Field(ge=0, le=_MOST_BYTES), Words(_SIZES, "BYTES", "bytes", "K, M and G are x 1024")
]
Folders = Annotated[
    tuple[Path, ...],
    _read_several(read_folder),
    Words("a folder that exists, or several with commas between", "FOLDER,..."),
]
DenseFolder = Annotated[Path | None, _path(_folder_to_read), Words("the folder of a transformers checkpoint", "FOLDER")]
Draft = Annotated[Path | None, _path(_draft), Words(f"{OWN_HEAD}, or a folder that exists", f"{OWN_HEAD}|FOLDER")]
FolderToFill = Annotated[Path | None, _path(_folder_to_fill), Words(_TO_FILL, "FOLDER")]
FileToRead = Annotated[Path | None, _path(_file_to_read), Words("a file that can be read", "FILE")]
SecretFile = Annotated[Path | None, _path(_secret_file), Words(_SECRET, "FILE", hint="needs chmod 600")]
FileToWrite = Annotated[Path | None, _path(_file_to_write), Words(_TO_WRITE, "FILE")]
ModelName = Annotated[
    str | None,
    _read(read_model),
    Words("a folder, a model id of the Hugging Face hub or a GGUF file", "MODEL", hint="folder, hub id or GGUF file"),
]
Name = Annotated[str | None, Field(max_length=200), Words("a text of 1 to 200 characters", "NAME")]

MOST_ROWS: Final = 4096
Rows = Annotated[int, Field(ge=1, le=MOST_ROWS), Words(unit="rows")]
RowsOrMeasured = Annotated[int | None, Field(ge=1, le=MOST_ROWS), Words(unit="rows")]
Slots = Annotated[int, Field(ge=1, le=64), Words(unit="requests")]
Requests = Annotated[int, Field(ge=1, le=1024), Words(unit="requests")]
RequestsOrNone = Annotated[int, Field(ge=0, le=65536), Words(unit="requests")]
Tokens = Annotated[int, Field(ge=1), Words(unit="tokens")]
PromptTokens = Annotated[int, Field(ge=1, le=65536), Words(unit="tokens")]
Guesses = Annotated[int, Field(ge=1, le=15), Words(unit="tokens")]
GuessesOrNone = Annotated[int, Field(ge=0, le=15), Words(unit="tokens")]
Copies = Annotated[int, Field(ge=1, le=8), Words(unit="copies")]
Threads = Annotated[int | None, Field(ge=1, le=1024), Words(unit="threads")]
Seed = Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1), Words("an integer of 64 bits", "INTEGER")]
Gpu = Annotated[int | None, Field(ge=0)]
Gpus = Annotated[
    tuple[int, ...] | None,
    _read_several(read_gpu),
    AfterValidator(_each_once),
    Words("a GPU's number from 0 on, or several with commas between, each once", "N,..."),
]
Port = Annotated[int, Field(ge=0, le=65535)]
Spread = Annotated[float, Field(ge=0, le=5)]
Gib = Annotated[float, Field(gt=0, le=65536), Words(unit="GiB")]
GibOrZero = Annotated[float, Field(ge=0, le=65536), Words(unit="GiB")]
GibOrAll = Annotated[float | None, Field(gt=0), Words(unit="GiB")]
Percent = Annotated[float, Field(ge=0, le=100), Words(unit="percent")]
Seconds = Annotated[float, Field(gt=0, le=3600), Words(unit="seconds")]
DaySeconds = Annotated[float, Field(gt=0, le=86400), Words(unit="seconds")]
DaySecondsOrNone = Annotated[float, Field(ge=0, le=86400), Words(unit="seconds")]
