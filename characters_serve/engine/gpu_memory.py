"""In: a process's GPU. Out: to its parent, how much of the memory there is in use."""

from __future__ import annotations

import torch

from characters_serve.messages import GpuMemory
from characters_serve.processes import ControlLink


def tell_gpu_memory(link: ControlLink, device: torch.device) -> None:
    """Of the whole GPU as the driver counts, since the buffers of NCCL and of symmetric memory are
    not torch's. Asked between sessions only: the driver may make it wait."""
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        link.channel.send(GpuMemory(link.name, total_bytes - free_bytes))
