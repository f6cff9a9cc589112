"""What a program needs to know of the device that it computes on, beyond tensors."""

from __future__ import annotations

import torch


def wait_for(device: torch.device) -> None:
    """Return when the device has done what was asked of it; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_device_memory(device: torch.device) -> int:
    """Bytes of a GPU's memory that are free, or that torch holds without using them."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def peak_device_memory(device: torch.device) -> int:
    """The most bytes of a GPU that this process's tensors have taken at once; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
