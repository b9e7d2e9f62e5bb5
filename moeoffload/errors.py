"""Every error a user can meet, one class per cause, each with its exit code.

The message is one line that says what was wrong, with which value, and what is allowed.
"""

from __future__ import annotations

import errno
import re
import resource


class MoeOffloadError(Exception):
    """Base of all errors that moeoffload raises on purpose. ``exit_code`` is that of the command line."""

    exit_code = 1


class SettingError(MoeOffloadError):
    """A setting has a value that is not allowed; the message holds its name, its value and what is allowed."""

    exit_code = 2


class ModelError(MoeOffloadError):
    """The model cannot be used: no such folder, not a Mixture-of-Experts model, damaged or unsupported files."""

    exit_code = 3


class PromptError(MoeOffloadError):
    """The prompt is empty, or longer than the model allows."""

    exit_code = 3


class PlacementError(MoeOffloadError):
    """The routed experts do not fit on the servers; the message holds a table of needed, offered and missing bytes."""

    exit_code = 4


class ServerError(MoeOffloadError):
    """An expert server cannot be used: it does not answer, refuses, has another version, or failed."""

    exit_code = 5


class DeadlineError(ServerError):
    """A wait reached its deadline; the message says what was waited for and how long (seconds)."""


class ProtocolError(ServerError):
    """Bytes from the peer are not a valid frame or message; the error message names the field."""


class CapacityError(ServerError):
    """A frame holds more rows, or needs more bytes, than the peer said it accepts."""


class BusyError(CapacityError):
    """An expert server is full; the message says what is in use. ``retry_after_s``: seconds to wait before a retry."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PayloadError(MoeOffloadError):
    """A value cannot be represented in the payload dtype (overflow or not finite); the message names layer and row."""

    exit_code = 6


class DisagreementError(MoeOffloadError):
    """Two computations of the same rows disagree: a device or server is faulty; the message names both."""

    exit_code = 8


class SystemLimitError(MoeOffloadError):
    """The system refused a resource: file descriptors, threads, memory, disk space. The message says what to change."""

    exit_code = 7

    @classmethod
    def from_exception(cls, error: BaseException) -> SystemLimitError | None:
        """Returns an error that says what a user can do about ``error``; None if no resource was refused."""
        if isinstance(error, OSError):
            if error.errno == errno.EMFILE or (error.errno is None and "files open" in str(error)):  # posix_ipc's words
                soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
                return cls(
                    f"too few file descriptors: this process may have {soft}; raise that with 'ulimit -n' "
                    f"(at most {hard})"
                )
            if error.errno == errno.ENFILE:
                return cls("too few file descriptors on this machine; raise fs.file-max")
            return cls(f"{error.filename or 'the system'}: {error.strerror or error}")
        if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
            return cls("no further thread can be started; raise 'ulimit -u', or the address space with 'ulimit -v'")
        if isinstance(error, RuntimeError) and re.search("(CUDA|HIP) out of memory", str(error)):
            return cls("out of memory on the GPU; lower --memory-gib or --batch-capacity, or stop what else uses it")
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))):
            return cls("out of memory; allow this process more ('ulimit -v', the control group), or give it less to do")
        return None


_NO_MEMORY = re.compile("can't allocate memory|not enough memory|out of memory", re.IGNORECASE)  # torch's wording
