"""Tensor-parallel table of gpt-oss (roles: models/tensor_parallel_roles.py)."""

from __future__ import annotations

from pipeline.models.mixtral import tensor_parallel as mixtral

TENSOR_PARALLEL: dict[str, str] = {
    **mixtral.TENSOR_PARALLEL,
    "blocks.*.attention.query.bias": "column",
    "blocks.*.attention.key.bias": "column",
    "blocks.*.attention.value.bias": "column",
    "blocks.*.attention.output.bias": "replicate",
    "blocks.*.attention.sinks": "column",
    "blocks.*.mlp.router.logit_bias": "partial",
    "blocks.*.mlp.experts.gate_bias": "expert_column",
    "blocks.*.mlp.experts.up_bias": "expert_column",
    # whole on every rank, which adds its share of it to a partial sum
    "blocks.*.mlp.experts.down_bias": "expert_partial",
}
