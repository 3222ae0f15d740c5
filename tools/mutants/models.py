"""The tiny models of the jobs in which the mutants run."""

from __future__ import annotations

SIZES = "model.layers=2 model.hidden=32 model.heads=4"
GATED = f"{SIZES} model.kv_heads=2 model.ffn_hidden=48"
EXPERTS = f"{SIZES} model.kv_heads=2 model.ffn_hidden=24 model.experts=4 model.top_k=2"

LLAMA, MISTRAL = f"model=llama-tiny {GATED}", f"model=mistral-tiny {GATED}"
GPT, BERT, TRANSFORMER = (f"model={family}-tiny {SIZES} model.ffn_hidden=64" for family in ("gpt", "bert", "transformer"))
MIXTRAL = f"model=mixtral-tiny {EXPERTS}"
GPT_OSS = f"model=gpt-oss-tiny {EXPERTS} model.head_width=8 model.window=8"
MODERNBERT = f"model=modernbert-tiny {SIZES} model.ffn_hidden=48 model.local_attention=8"
DEEPSEEK = (
    f"model=deepseek-tiny {SIZES} model.ffn_hidden=48 model.expert_ffn_hidden=12 model.q_lora_rank=12 model.kv_lora_rank=12"
    " model.qk_nope_head_dim=6 model.qk_rope_head_dim=4 model.v_head_dim=8"
)
#: Its caps bound scores and logits of a tiny model, too.
GEMMA2 = f"model=gemma2-tiny {GATED} model.head_width=8 model.window=8 model.query_pre_attn_scalar=8 model.attn_logit_softcapping=1.0"
QWEN3_NEXT = (
    f"model=qwen3-next-tiny {GATED} model.head_width=8 model.experts=4 model.top_k=2 model.full_attention_interval=2"
    " model.linear_key_heads=2 model.linear_value_heads=4 model.linear_key_dim=8 model.linear_value_dim=8"
    " model.expert_ffn_hidden=12 model.shared_ffn_hidden=12"
)
