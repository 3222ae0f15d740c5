"""What a GPU can do, by vendor and architecture. The only file that asks PyTorch for either, and it needs no GPU to be tested."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        name: for messages.
        capability: compute capability of an NVIDIA GPU, else (0, 0). PyTorch has one for AMD's, too: (9, 0) for the MI250X, as for Hopper.
        architecture: of an AMD GPU, such as "gfx942" for the MI300X; else empty.
    """

    name: str
    capability: tuple[int, int] = (0, 0)
    architecture: str = ""

    @property
    def fp8(self) -> bool:
        """Whether it has the 8-bit products that training uses (torch._scaled_mm in E4M3). AMD's were never tried; MI300's E4M3 differs."""
        return self.capability >= (8, 9)

    @property
    def fp8_experts(self) -> bool:
        """Whether it has grouped 8-bit products: Hopper alone."""
        return self.capability == (9, 0)

    @property
    def symmetric_memory(self) -> bool:
        """Whether GPUs of a node map each other's memory as PyTorch's symmetric memory requires. MI200 never does."""
        return self.capability >= (9, 0) or self.architecture in ("gfx942", "gfx950")


def of(device: torch.device | int) -> Gpu:
    """Return a GPU by its index or device."""
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is None:
        return Gpu(name, torch.cuda.get_device_capability(device))
    return Gpu(name, architecture=torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0])
