"""Which device holds the experts, how much of its memory they may use, and how much this process holds."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import torch

from moeoffload.errors import SettingError
from moeoffload.native import has_gpu_driver
from moeoffload.placement import GIB
from moeoffload.text import one_line

logger = logging.getLogger(__name__)

# Not all free memory may be used: kernels need workspace on a GPU, and other programs need memory on a CPU.
FREE_SHARE: Final = {"cuda": 0.9, "cpu": 0.7}


def resolve_device(setting: str, *, last: bool) -> torch.device:
    """The torch device of a setting: cpu, cuda, cuda:N or auto.

    ``auto`` is the last CUDA device (the first one if not ``last``), else the CPU.
    Raises SettingError: there is no such device; the message names the available ones.
    """
    n_gpus = torch.cuda.device_count()
    if setting == "auto":
        if not n_gpus and has_gpu_driver():
            logger.warning("the CPU computes: this machine has %s", _no_gpu())
        return torch.device("cuda", n_gpus - 1 if last else 0) if n_gpus else torch.device("cpu")
    device = torch.device(setting)
    if device.type == "cuda":
        index = device.index or 0
        if index >= n_gpus:
            have = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(n_gpus))
            raise SettingError(f"device {setting}: this machine has no such GPU; it has {have or _no_gpu()}")
        return torch.device("cuda", index)
    return device


def resolve_devices(setting: str, *, last: bool) -> tuple[torch.device, ...]:
    """The torch devices of a comma-separated setting; see `resolve_device`."""
    return tuple(resolve_device(each, last=last) for each in setting.split(","))


def _no_gpu() -> str:
    """Why torch sees no GPU."""
    if not has_gpu_driver():
        return "no CUDA device"
    if torch.version.cuda is None and torch.version.hip is None:
        return "a GPU, and a build of torch that uses none; install the one for GPUs (README)"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # a driver that is too old for torch's CUDA fails here
        return f"a GPU that torch cannot use: {one_line(str(error), 200)}"
    return "a GPU driver, and no GPU that this process may use"


def device_name(device: torch.device) -> str:
    """The marketing name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_budget(device: torch.device, memory_gib: float | None) -> int:
    """Bytes that experts and batches may take: ``memory_gib`` if given, else a share of what is free now.
    Raises SettingError: ``memory_gib`` is more than the device has."""
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else psutil.virtual_memory().total
    if memory_gib is None:
        return int(free_now(device) * FREE_SHARE[device.type])
    if memory_gib * GIB > total:
        raise SettingError(f"memory-gib: {memory_gib:g} is more than {device} has ({total / GIB:.4g} GiB)")
    return int(memory_gib * GIB)


def free_now(device: torch.device) -> int:
    """Bytes that can still be allocated: free on the GPU, or available on this machine within the process' limit."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # cached by torch
        return int(torch.cuda.mem_get_info(device)[0] + kept)
    return min(int(psutil.virtual_memory().available), _cgroup_room())


def _cgroup_room(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that this process' control group (version 2) and those above it may still allocate; without a limit a very
    large number."""
    try:
        path = next(line.removeprefix("0::/") for line in own.read_text().splitlines() if line.startswith("0::/"))
    except (OSError, StopIteration):
        path = ""
    folders = [root / path, *(folder for folder in (root / path).parents if folder.is_relative_to(root))]
    return min(map(_room_of, folders))


def _room_of(folder: Path) -> int:
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit == "max":
            return 1 << 62
        # The kernel drops cached file pages when memory is needed.
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - int(used) + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 1 << 62


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of the memory of one device, or of several together.

    Attributes:
        allocated_bytes: in use by this process. On a GPU: in tensors. On a CPU: resident.
        reserved_bytes: these, and on a GPU what torch keeps for the next tensors, which no other process can have.
        total_bytes: what the device has.
    """

    allocated_bytes: int
    reserved_bytes: int
    total_bytes: int


def device_memory(*devices: torch.device) -> DeviceMemory:
    """Returns what this process holds of its devices now, GPUs or the CPU. Makes no GPU wait."""
    gpus = [device for device in devices if device.type == "cuda"]
    if gpus:
        return DeviceMemory(
            sum(map(torch.cuda.memory_allocated, gpus)),
            sum(map(torch.cuda.memory_reserved, gpus)),
            sum(torch.cuda.get_device_properties(device).total_memory for device in gpus),
        )
    resident = psutil.Process().memory_info().rss
    return DeviceMemory(resident, resident, psutil.virtual_memory().total)


_M_MMAP_THRESHOLD: Final = -3
_LOADING_THRESHOLD: Final = 1 << 20
_RUNNING_THRESHOLD: Final = 32 << 20


@contextlib.contextmanager
def lean_heap() -> Iterator[None]:
    """While open, freed buffers above 1 MiB are returned to the system at once; smaller ones at the end.

    For loading, whose buffers are large and short-lived. Later the threshold is raised to 32 MiB, because calls that
    run repeatedly are faster if the heap keeps its memory.
    """
    try:  # glibc's
        library = ctypes.CDLL(None)
        mallopt, trim = library.mallopt, library.malloc_trim
    except (OSError, AttributeError):
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _LOADING_THRESHOLD)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _RUNNING_THRESHOLD)
        trim(0)
