"""How a published run shards its model state, from the spellings in use: ZeRO stage, ranks, and kind of engine."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tools.study.cells import integer, text_of


@dataclass(frozen=True)
class Sharding:
    """What a row says about ZeRO or FSDP.

    Attributes:
        stage: 0 to 3.
        engine: fsdp, deepspeed, megatron (its distributed optimizer), or none.
        ranks: over which stage 3 shards (hybrid sharding); 0 for all that hold the same weights.
    """

    stage: int
    engine: str = "none"
    ranks: int = 0


#: Spelling -> stage and engine; the first that matches counts.
SPELLINGS: dict[str, tuple[int, str]] = {
    r"no_?shard": (0, "none"),
    r"shard_?grad_?op": (2, "fsdp"),
    r"fsdp|fully_?shard|full_?shard|hsdp|hybrid_?shard": (3, "fsdp"),
    r"dist\w*[ _-]*opt\w*": (1, "megatron"),
    r"(?:zero|stage|^z)\D{0,8}([0-3])": (-1, "deepspeed"),
    r"zero\s*\+\+|mics|zero-infinity": (3, "deepspeed"),
    r"^([0-3])(?:\.0)?$": (-1, "deepspeed"),
    r"\bddp\b|^no(ne)?\b|^false$|^off$|replicat": (0, "none"),
}
#: Words in the name or notes of a source -> engine, where the cell is empty.
ENGINES = {
    r"torchtitan|fsdp|modalities|llm-foundry|litgpt|lit-gpt|olmo": "fsdp",
    r"deepspeed|gpt-neox": "deepspeed",
    r"megatron|nemo": "megatron",
}


def sharding_of(row: dict[str, str], model_ranks: int, gpus_per_node: int, assumed: list[str]) -> Sharding:
    """Return the sharding of a row; an empty or unknown cell is assumed.

    Args:
        row: cells by column.
        model_ranks: ranks of a replica.
        gpus_per_node: over which hybrid sharding shards.
        assumed: list to which assumptions are added.
    """
    text = row.get("zero_or_fsdp", "").strip().lower()
    if found := re.search(r"fsdp (\d+) x dp", text):
        return Sharding(3, "fsdp", int(found[1]))
    for spelling, (stage, engine) in SPELLINGS.items():
        if match := re.search(spelling, text):
            stage = int(match[1]) if stage < 0 else stage
            hybrid = stage == 3 and re.search(r"hybrid|hsdp|mics", text)
            return Sharding(stage, engine if stage else "none", integer(row, "gpus_per_node", gpus_per_node, []) if hybrid else 0)
    written = text_of(row, "source", "table", "notes", "model_name").lower()
    engine = next((engine for word, engine in ENGINES.items() if re.search(word, written)), "")
    stage = {"fsdp": 3, "megatron": 1}.get(engine, 1 if model_ranks > 1 else 3)
    assumed.append(f"zero_or_fsdp=ZeRO-{stage}" + (f" ({text} is not known)" if text else ""))
    return Sharding(stage, engine or ("deepspeed" if stage == 1 else "fsdp"))
