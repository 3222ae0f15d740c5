"""The cases of tools/reshard_matrix: tiny models of three families, and the layouts that their checkpoints are saved and loaded in."""

from __future__ import annotations

COMMON = (
    *("stage=pretrain", "precision=fp32", "model.layers=4", "model.hidden=32", "model.heads=4", "model.max_positions=16"),
    "model.vocab_size=67",  # odd: tensor ranks have pieces of different sizes
    *(
        "training.sequence_length=16",
        "training.global_batch_size=24",
        "training.micro_batch_size=1",
        "training.steps=2",
        "optimizer.warmup_steps=1",
    ),
)

#: Family -> settings of its model.
MODELS = {
    "llama": ("model=llama-tiny", *COMMON, "model.kv_heads=4", "model.ffn_hidden=48"),
    "mixtral": ("model=mixtral-tiny", *COMMON, "model.kv_heads=4", "model.ffn_hidden=24"),
    "deepseek_v3": (
        *("model=deepseek-tiny", *COMMON, "model.ffn_hidden=48", "model.expert_ffn_hidden=12", "model.q_lora_rank=12"),
        *("model.kv_lora_rank=12", "model.qk_nope_head_dim=6", "model.qk_rope_head_dim=4", "model.v_head_dim=8"),
    ),
}

#: Layouts of all families, as (ranks, settings of parallel).
SHARED = (
    (1, "zero_stage=0"),
    (2, "zero_stage=1"),
    (3, "zero_stage=2"),
    (4, "zero_stage=3"),
    (2, "tensor=2 zero_stage=0"),
    (4, "tensor=4 zero_stage=1 sequence_parallel=false"),
    (2, "pipeline=2 zero_stage=0 schedule=zbv"),
    (4, "tensor=2 pipeline=2 zero_stage=0"),
    (6, "tensor=2 zero_stage=3"),
    (8, "tensor=2 pipeline=2 zero_stage=2"),
)
CONTEXT = (
    (4, "context=2 zero_stage=3"),
    (4, "context=2 tensor=2 zero_stage=1 context_kind=ulysses"),
    (8, "context=2 tensor=2 pipeline=2 zero_stage=1"),
    (4, "pipeline=4 zero_stage=1"),
)
EXPERT = (
    (2, "expert=2 zero_stage=0"),
    (4, "expert=2 zero_stage=3"),
    (4, "expert=4 zero_stage=1"),
    (4, "expert=2 tensor=2 zero_stage=1"),
    (4, "expert=2 tensor=2 zero_stage=1 expert_tensor=1"),
    (8, "expert=2 pipeline=2 zero_stage=2"),
)
#: Family -> its layouts.
LAYOUTS = {"llama": SHARED + CONTEXT, "mixtral": SHARED + EXPERT, "deepseek_v3": SHARED + EXPERT}


def name_of(layout: tuple[int, str]) -> str:
    """A short name of a layout: t2 p2 z0 x4 for tensor=2 pipeline=2 zero_stage=0 on 4 ranks."""
    ranks, settings = layout
    words = dict(word.split("=") for word in settings.split())
    letters = {"tensor": "t", "pipeline": "p", "context": "c", "expert": "e", "zero_stage": "z"}
    more = {"sequence_parallel": "-s", "context_kind": "u", "schedule": "v", "expert_tensor": "w"}
    parts = [f"{letter}{words[key]}" for key, letter in letters.items() if key in words]
    return "".join([*parts, *(text for key, text in more.items() if key in words), f"x{ranks}"])


def overrides(family: str, layout: tuple[int, str]) -> tuple[str, ...]:
    """The command line of a family in a layout."""
    return (*MODELS[family], *(f"parallel.{word}" for word in layout[1].split()))
