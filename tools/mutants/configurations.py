"""Certify on random legal configurations without a mutant: every job that is not certified is a defect.

A configuration is drawn from all families, objectives, schedules, precisions and parallel axes. Whether it is legal, the command says: one
that it refuses (exit code 2) is replaced by the next draw.
"""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass
from pathlib import Path

from tools.mutants import files
from tools.mutants.mutation import copy_tree
from tools.mutants.trial import Job, certify, reason

#: Family -> settings of its tiny model. "pairs" is the objective of translation, t5 learns to fill spans, bert and roberta masked tokens.
FAMILIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "qwen2.5", "qwen3", "gpt", "gpt1", "opt", "bloom", "mixtral", "deepseek"), ()),
    **dict.fromkeys(("mistral", "gemma2", "gemma3", "gpt-oss", "olmo3"), ("model.window=24",)),  # at most model.max_positions
    **dict.fromkeys(("olmo2", "smollm3", "apertus", "granite", "phi3", "gpt-neox", "nemotron"), ()),
    **dict.fromkeys(("olmoe", "qwen3-moe", "glm4-moe", "qwen3-next"), ()),
    "bert": ("data.tokens={masked}", "tokenizer.path={masked_tokenizer}", "model.vocab_size=520"),
    "modernbert": ("data.tokens={masked}", "tokenizer.path={masked_tokenizer}", "model.vocab_size=520", "model.local_attention=12"),
    "roberta": ("data.tokens={roberta}", "tokenizer.path={roberta_tokenizer}", "model.vocab_size=520"),
    "t5": ("data.tokens={t5}", "tokenizer.path={t5_tokenizer}", "model.vocab_size=640"),
    "transformer": ("data.pairs.train=[{pairs}]", "tokenizer.path={masked_tokenizer}", "model.vocab_size=520"),
}
EXPERTS = ("mixtral", "deepseek", "gpt-oss", "olmoe", "qwen3-moe", "glm4-moe", "qwen3-next")
MASKED = ("bert", "roberta", "modernbert")
NOT_CAUSAL = (*MASKED, "t5", "transformer")
#: Largest number of ranks that hold one copy of the model; certify trains on at most twice as many.
MODEL_RANKS = 4


@dataclass(frozen=True)
class Outcome:
    """A configuration and what certify says of it.

    Attributes:
        seed, number: of the draw.
        words: overrides.
        ranks: of the job.
        refused: draws before it that were not legal.
        code: exit code of certify.
        failures: lines of the certificate, or the last line of its output.
        seconds: of the command.
    """

    seed: int
    number: int
    words: list[str]
    ranks: int
    refused: int
    code: int
    failures: list[str]
    seconds: float


def draw(chance: random.Random, family: str) -> tuple[list[str], int]:
    """Return the overrides of a configuration, which may be illegal, and the ranks of the job."""
    causal = family not in NOT_CAUSAL
    sizes = {
        "tensor": chance.choice((1, 1, 2)),
        "pipeline": chance.choice((1, 1, 2, 3, 4)),
        "context": chance.choice((1, 1, 2)) if causal else 1,
        "expert": chance.choice((1, 2)) if family in EXPERTS else 1,
    }
    while (ranks := sizes["tensor"] * sizes["pipeline"] * sizes["context"] * sizes["expert"]) > MODEL_RANKS:
        largest = max(sizes, key=lambda axis: sizes[axis])
        sizes[largest] = 1
    pipelined, data = sizes["pipeline"] > 1, chance.choice((1, 2))
    words = [f"model={family}-tiny", *FAMILIES[family], *(f"parallel.{axis}={size}" for axis, size in sizes.items())]
    words += [f"parallel.zero_stage={chance.randrange(4)}", f"parallel.context_kind={chance.choice(('ring', 'ulysses'))}"]
    words += [f"parallel.sequence_parallel={chance.choice(('true', 'false'))}"]
    words += [f"parallel.schedule={chance.choice(('1f1b', 'interleaved', 'zbv'))}"] if pipelined else []
    words += [f"precision={chance.choice(('fp32', 'bf16', 'bf16', 'fp16'))}"]
    words += [f"training.activation_checkpointing={chance.choice(('none', 'selective', 'full', 'offload'))}"]
    words += [f"training.attention={chance.choice(('auto', 'sdpa', 'plain'))}"]
    words += _optimizer(chance)
    words += [f"optimizer.gradient_clipping={chance.choice((0, 0.5, 1.0))}", f"optimizer.weight_decay={chance.choice((0, 0.1))}"]
    words += [f"training.global_batch_size={16 * chance.choice((1, 2))}", f"training.micro_batch_size={chance.choice((1, 2))}"]
    words += chance.choice(([], [], ["training.ema=0.9"]))
    words += chance.choice(([], ["training.document_mask=true"])) if family not in ("t5", "transformer") else []
    words += chance.choice(([], ["data.packing=best_fit"])) if causal else []
    words += chance.choice(([], [], ["parallel.offload=optimizer"]))
    words += ["parallel.expert_tensor=1"] if family in EXPERTS and sizes["tensor"] > 1 and chance.random() < 0.3 else []
    words += chance.choice(([], [], ["training.goldfish_k=4", "training.goldfish_context=3"])) if causal else []
    words += chance.choice(([], [], ["training.head_z_loss=0.01"]))
    words += chance.choice(([], ["training.objective=masked_diffusion"])) if family in MASKED else []
    words += ["precision.fp8=tensorwise"] if causal and "precision=bf16" in words and chance.random() < 0.3 else []
    return words, ranks * data


def _optimizer(chance: random.Random) -> list[str]:
    """Draw the optimizer, its schedule, and what scales its updates."""
    name = chance.choice(("adamw", "adamw", "adamw", "ademamix", "lion", "muon", "muon", "schedule_free"))
    schedule = "constant" if name == "schedule_free" else chance.choice(("cosine", "wsd", "linear", "constant"))
    words = [f"optimizer={name}", f"optimizer.schedule={schedule}"]
    words += ["optimizer.muon_per_head=true"] if name == "muon" and chance.random() < 0.3 else []
    words += chance.choice(([], [], [], ["optimizer.qk_clip=1"]))
    words += ["model.parametrization=mup", "model.mup_base_width=32"] if name in ("adamw", "muon") and chance.random() < 0.2 else []
    return words


def run(count: int, seed: int, folder: Path) -> int:
    """Certify configurations, print a row for each, write FOLDER/configurations.json, and return the number of alarms."""
    path = folder / "configurations.json"
    done = [Outcome(**row) for row in json.loads(path.read_text())] if path.exists() else []
    known = {(outcome.seed, outcome.number): outcome for outcome in done}
    made, tree = files.make(folder / "files"), copy_tree(folder / "original")
    alarms, names = 0, list(FAMILIES)
    for number in range(count):
        if (seed, number) not in known:
            known[seed, number] = _next(seed, number, names[number % len(names)], tree, folder, made)
            path.write_text(json.dumps([dataclasses.asdict(outcome) for outcome in known.values()], indent=1) + "\n")
        outcome = known[seed, number]
        alarms += outcome.code != 0
        verdict = "certified" if outcome.code == 0 else f"ALARM {outcome.failures[0] if outcome.failures else ''}"
        print(f"{number:>3} {outcome.seconds:>6.1f} s  {outcome.ranks} ranks  {' '.join(outcome.words)}: {verdict}", flush=True)
    return alarms


def _next(seed: int, number: int, family: str, tree: Path, folder: Path, made: dict[str, Path]) -> Outcome:
    """Draw until a configuration is legal, and certify it."""
    chance = random.Random(f"{seed} {number}")
    refused = 0
    while True:
        words, ranks = draw(chance, family)
        job = Job(ranks, tuple(words), None, made)
        verdict = certify(tree, job, folder / "certificate")
        if verdict.code != 2:
            failures = verdict.failures or ([reason(verdict.output)] if verdict.code else [])
            return Outcome(seed, number, words, ranks, refused, verdict.code, failures, round(verdict.seconds, 1))
        refused += 1
        if refused > 200:
            raise RuntimeError(f"200 draws of {family} were refused, the last one with:\n{verdict.output}")
