"""The tiny models of the jobs in which the mutants run."""

from __future__ import annotations

LLAMA = ("model=llama-tiny", "model.layers=2", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.ffn_hidden=48")
QWEN = ("model=qwen3-tiny", "model.layers=2", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.ffn_hidden=48")
GPT = ("model=gpt-tiny", "model.layers=2", "model.hidden=32", "model.heads=4", "model.ffn_hidden=64")
BLOOM = ("model=bloom-tiny", "model.layers=2", "model.hidden=32", "model.heads=4")
BERT = ("model=bert-tiny", "model.layers=2", "model.hidden=32", "model.heads=4", "model.ffn_hidden=64")
MIXTRAL = (
    *("model=mixtral-tiny", "model.layers=2", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.ffn_hidden=24"),
    *("model.experts=4", "model.top_k=2"),
)
DEEPSEEK = (
    *("model=deepseek-tiny", "model.layers=2", "model.hidden=32", "model.heads=4", "model.ffn_hidden=48", "model.expert_ffn_hidden=12"),
    *("model.q_lora_rank=12", "model.kv_lora_rank=12", "model.qk_nope_head_dim=6", "model.qk_rope_head_dim=4", "model.v_head_dim=8"),
)
TRANSFORMER = ("model=transformer-tiny", "model.layers=2", "model.hidden=32", "model.heads=4", "model.ffn_hidden=64")
