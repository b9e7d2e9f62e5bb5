"""How much memory of a device this process holds, for the figures of hosts and servers."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device's memory.

    Attributes:
        allocated_bytes: in use by this process. On a GPU: in tensors. On a CPU: resident.
        reserved_bytes: these, and on a GPU what torch keeps for the next tensors, which no other process can have.
        total_bytes: what the device has.
    """

    allocated_bytes: int
    reserved_bytes: int
    total_bytes: int


def device_memory(device: torch.device) -> DeviceMemory:
    """What this process holds of a device now. Makes no GPU wait."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return DeviceMemory(torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), total)
    resident = psutil.Process().memory_info().rss
    return DeviceMemory(resident, resident, psutil.virtual_memory().total)
