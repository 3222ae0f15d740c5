"""FlexAttention in a recorded step: one kernel without a (queries, keys) tensor, as in a job, where it is compiled.

While operators are recorded nothing is compiled, and PyTorch would compute the scores as a tensor in memory. On the driver without a GPU
results have no values, so that it is enough to allocate them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

from pipeline.config.hardware import Hardware
from pipeline.planner import operator_kinds
from pipeline.planner.kernel_time import attention_time
from pipeline.rehearsal.operator_work import OperatorWork, access

#: Arguments of the two operators that a kernel reads: q, k, v; of the backward pass also the output, its logsumexp, and their gradients.
_READ = {"flex_attention": 3, "flex_attention_backward": 7}


def run(operator: HigherOrderOperator, args: Any) -> Any:
    """Return what flex_attention or flex_attention_backward returns, without values.

    Args:
        operator: one of the two.
        args: its arguments.

    Raises:
        NotImplementedError: it is another operator.
    """
    if operator.name() not in _READ:
        raise NotImplementedError(f"a recorded step has no rule for the operator {operator.name()}")
    q, k, v = args[:3]
    if operator.name() == "flex_attention":
        (batch, heads, queries, _), width = q.shape, v.shape[3]
        statistics = (q.new_empty((batch, heads, queries), dtype=torch.float32) for _ in ("logsumexp", "maximum"))
        return q.new_empty(batch, queries, heads, width).transpose(1, 2), *statistics
    *_, captured, _ = args  # tensors that the function of the scores uses, such as slopes
    gradients = tuple(torch.empty_like(value) if isinstance(value, Tensor) and value.requires_grad else None for value in captured)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), gradients


def work(operator: HigherOrderOperator, args: Any, result: Any, hardware: Hardware) -> OperatorWork:
    """Return the work of the kernel. The values of its mask are not known: the time is that of all pairs of a query and a key.

    Args:
        operator, args: as of run.
        result: what it returned.
    """
    q, k, v = args[:3]
    call = operator_kinds.attention(q, k, v, "backward" if "backward" in operator.name() else "forward", 1.0)
    reads, writes = (tuple(filter(None, map(access, operator_kinds.tensors(some)))) for some in (args[: _READ[operator.name()]], result))
    return OperatorWork("attention", attention_time(call, hardware), reads, writes)
