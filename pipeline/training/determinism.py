"""training.deterministic: the settings with which two runs of a job on the same GPUs, software and layout are equal in every bit."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass

import torch

from pipeline.common.errors import UserError, Violation


@dataclass(frozen=True)
class Variable:
    """An environment variable of a deterministic run.

    Attributes:
        allowed: its values; the first one is set if the user sets none.
        reason: what differs between runs with another value.
    """

    allowed: tuple[str, ...]
    reason: str


#: Read by cuBLAS and NCCL when they start.
VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": Variable((":4096:8", ":16:8"), "cuBLAS adds in an order that depends on the workspace that a stream gets"),
    "NCCL_NVLS_ENABLE": Variable(("0",), "switches of NVLink add in the order of arrival"),
    "NCCL_COLLNET_ENABLE": Variable(("0",), "switches of InfiniBand (SHARP) add in the order of arrival"),
}


def enable(environment: MutableMapping[str, str] = os.environ) -> None:
    """Make every operation of this process deterministic, before it uses a GPU. Operations that cannot be raise a RuntimeError by name.

    Deterministic algorithms of PyTorch include backward passes of FlashAttention 2 and 3 and of the memory-efficient kernel, sums of
    scattered rows, and generated kernels whose configuration is not chosen by time. cuDNN's attention has none and is not chosen
    (layers/attention_kernel.py).

    Raises:
        UserError: a variable has a value with which runs differ.
    """
    UserError.raise_for(violations(environment))
    for name, variable in VARIABLES.items():
        environment.setdefault(name, variable.allowed[0])
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # it costs a pass over every new tensor
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.mkldnn.deterministic = True  # type: ignore[assignment] # as its property is declared


def violations(environment: MutableMapping[str, str]) -> Iterator[Violation]:
    """Yield the variables with a value that training.deterministic does not allow."""
    for name, variable in VARIABLES.items():
        if (value := environment.get(name, variable.allowed[0])) not in variable.allowed:
            rule = f"is not supported with training.deterministic=true: {variable.reason}"
            yield Violation(name, value, rule, f"remove it, or set it to {' or '.join(variable.allowed)}")
