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
#: Its caps bound scores and logits of a tiny model, too.
GEMMA2 = (
    *("model=gemma2-tiny", "model.layers=2", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.head_width=8"),
    *("model.ffn_hidden=48", "model.window=8", "model.query_pre_attn_scalar=8", "model.attn_logit_softcapping=1.0"),
)
GPT_OSS = (
    *("model=gpt-oss-tiny", "model.layers=2", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.head_width=8"),
    *("model.ffn_hidden=24", "model.experts=4", "model.top_k=2", "model.window=8"),
)
MODERNBERT = (
    "model=modernbert-tiny",
    "model.layers=2",
    "model.hidden=32",
    "model.heads=4",
    "model.ffn_hidden=48",
    "model.local_attention=8",
)
OLMOE = (
    *("model=olmoe-tiny", "model.layers=2", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.ffn_hidden=24"),
    *("model.experts=4", "model.top_k=2"),
)
QWEN3_NEXT = (
    *("model=qwen3-next-tiny", "model.layers=2", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.head_width=8"),
    *("model.full_attention_interval=2", "model.linear_key_heads=2", "model.linear_value_heads=4", "model.linear_key_dim=8"),
    *("model.linear_value_dim=8", "model.ffn_hidden=48", "model.experts=4", "model.top_k=2", "model.expert_ffn_hidden=12"),
    "model.shared_ffn_hidden=12",
)
