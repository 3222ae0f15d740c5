"""QK-clip: weights of queries and keys are scaled after an update in which a head had too large an attention logit.

MuonClip of the Kimi K2 report (Kimi Team 2025, https://arxiv.org/abs/2507.20534, section 2.1), for every optimizer that updates the weights
of the forward pass. With gamma = min(1, tau / largest logit) of a head in a step, the logits of the head are multiplied by gamma: its rows
of query and key weights by sqrt(gamma) each, or, where several heads share a key, its rows of the query weights by gamma, since the shared
key must not change for the others. Parts of multi-head latent attention follow the same rule.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.layers.attention import Attention
from pipeline.layers.largest_logits import MeasuringCore
from pipeline.layers.linear import Linear
from pipeline.layers.mla import LatentAttention
from pipeline.parallel.mesh import Mesh, reduce_over
from pipeline.parallel.parallelize import attention_layers
from pipeline.training.engine import Engine


class QKClip:
    """Measures the largest logit of every head of this rank, and scales the master weights. Collective, in each update.

    Args:
        threshold: tau, optimizer.qk_clip.
        engine: has the master weights; its model's attention cores are replaced by measuring ones.
    """

    def __init__(self, threshold: float, engine: Engine, mesh: Mesh) -> None:
        self._threshold, self._engine, self._mesh = threshold, engine, mesh
        self._layers = attention_layers(engine.model)
        self._cores = [measured(layer, mesh.device) for layer in self._layers]
        self._masters: dict[str, list[tuple[int, Tensor]]] | None = None
        #: The largest logit of all heads of the model in the last step, 0-dim.
        self.largest = torch.zeros((), device=mesh.device)
        engine.after_update(self.after_update)

    @torch.no_grad()
    def after_update(self, skipped: Tensor) -> None:
        """Scale the master weights of heads above the threshold, without waiting for the device; not those of a skipped step."""
        heads = [len(core.largest) for core in self._cores]
        largest = torch.cat([core.take() for core in self._cores]) if heads else torch.zeros(1, device=self._mesh.device)
        reduce_over((self._mesh.dense,), largest, dist.ReduceOp.MAX)
        self.largest = largest.amax()
        reduce_over((self._mesh.tensor, self._mesh.pipeline), self.largest, dist.ReduceOp.MAX)
        gamma = torch.where((largest > self._threshold) & (skipped == 0), self._threshold / largest, 1.0)
        for layer, factors in zip(self._layers, gamma.split(heads) if heads else (), strict=True):
            for linear, rows in scaled_rows(layer, factors):
                for weight in (linear.weight, linear.bias):
                    if isinstance(weight, nn.Parameter):
                        self._scale(weight, rows)

    def _scale(self, weight: nn.Parameter, rows: Tensor) -> None:
        """Multiply the rows of this rank's part of a master weight."""
        piece = self._engine.model.pieces[weight]
        width = piece.shape[1] if len(piece.shape) > 1 else 1
        for start, values in self._fragments().get(piece.name, ()):
            first, last = start // width, -(-(start + values.numel()) // width)
            factors = rows[first:last, None].expand(-1, width).reshape(-1)
            values.mul_(factors[start - first * width :][: values.numel()])

    def _fragments(self) -> dict[str, list[tuple[int, Tensor]]]:
        """By name of a weight, the runs of elements of this rank's piece whose master weights it has: the first element, and the values."""
        if self._masters is None:  # after the first update: before it, the optimizer has no state
            self._masters = {}
            for fragment in self._engine.fragments():
                values = fragment.tensors["weight"]
                if isinstance(values, Tensor):
                    self._masters.setdefault(fragment.piece.name, []).append((fragment.start, values))
        return self._masters


def measured(layer: Any, device: torch.device) -> MeasuringCore:
    """Replace the attention core of a layer by a measuring one, and return that."""
    if isinstance(layer, LatentAttention):
        heads = layer.query_up.weight.shape[0] // (layer.qk_nope_head_dim + layer.qk_rope_head_dim)
    else:
        assert isinstance(layer, Attention), f"unknown attention {type(layer).__name__}"
        assert layer.query_norm is None, "norms of queries and keys undo a change of scale (config/rules/optimizer.py)"
        heads = layer.query.weight.shape[0] // layer.head_dim
    layer.core = MeasuringCore(layer.core, heads, device)
    return layer.core


def scaled_rows(layer: Any, gamma: Tensor) -> list[tuple[Linear, Tensor]]:
    """Return the linear layers of an attention layer that are scaled, and the factors of their rows.

    Args:
        layer: on this rank's heads.
        gamma: fp32 (heads,).
    """
    root = gamma.sqrt()
    if isinstance(layer, LatentAttention):
        # The rotated part of the keys is shared by all heads.
        nope, rope, value = layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim
        queries = torch.cat([root[:, None].expand(-1, nope), gamma[:, None].expand(-1, rope)], dim=1)
        keys = torch.cat([root[:, None].expand(-1, nope), torch.ones_like(root)[:, None].expand(-1, value)], dim=1)
        return [(layer.query_up, queries.flatten()), (layer.key_value_up, keys.flatten())]
    width = layer.head_dim
    if layer.key.weight.shape[0] != layer.query.weight.shape[0]:
        return [(layer.query, gamma.repeat_interleave(width))]
    return [(linear, root.repeat_interleave(width)) for linear in (layer.query, layer.key)]
