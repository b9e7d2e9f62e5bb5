"""How much memory of its devices this process holds, for the figures of hosts and servers."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch


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
