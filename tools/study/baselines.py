"""What simpler methods predict for the same rows: one MFU for a generation of GPUs, the textbook formula of memory, and llm-analysis."""

from __future__ import annotations

import importlib
import logging
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from pipeline.common.errors import UserError
from tools.study.cells import Contradiction
from tools.study.fit import GENERATIONS
from tools.study.gpus import file_of
from tools.study.runs import PublishedRun, read
from tools.study.score import RowScore

GENERATION = {file: name for name, files in GENERATIONS.items() for file in files}
#: Seconds of every measured row by a method whose only constant is an efficiency, at an efficiency of 1.
Ideal = list[tuple[RowScore, float]]


def constant_mfu(scores: list[RowScore]) -> Ideal:
    """Return the seconds of every measured row at the peak of its GPU in 16 bits, with the FLOPs that the planner counts."""
    return [(s, s.predicted * float(s.row["predicted_mfu"])) for s in scores if s.measured and s.row.get("predicted_mfu")]


def scaled(ideal: Ideal, *, left_out: bool) -> dict[str, list[float]]:
    """Return the relative errors by source with one efficiency for each generation of GPUs.

    The efficiency is the mean of the sources' medians. A generation that no other source has takes the efficiency of all generations.

    Args:
        ideal: seconds at an efficiency of 1.
        left_out: fit the efficiency to the other sources only.
    """
    found: dict[str, list[float]] = defaultdict(list)
    constants: dict[tuple[str, str], float] = {}
    for score, seconds in ideal:
        key = score.source if left_out else "", _generation(score)
        if key not in constants:
            others = [(s, t) for s, t in ideal if s.source != key[0]]
            constants[key] = _median_efficiency([(s, t) for s, t in others if _generation(s) == key[1]] or others)
        found[score.source].append(seconds / constants[key] / (score.measured or 1.0) - 1)
    return dict(found)


def _generation(score: RowScore) -> str:
    file = file_of(score.row)
    return GENERATION.get(file, file)


def _median_efficiency(rows: Ideal) -> float:
    sources: dict[str, list[float]] = defaultdict(list)
    for score, seconds in rows:
        sources[score.source].append(seconds / (score.measured or 1.0))
    return statistics.fmean(map(statistics.median, sources.values())) if sources else 0.4


def textbook_labels(scores: Iterable[RowScore]) -> dict[str, list[bool]]:
    """Return for every labelled row whether the textbook formula of memory is right, by source."""
    found: dict[str, list[bool]] = defaultdict(list)
    for score in scores:
        if score.fits is None:
            continue
        run = read(score.row)
        found[score.source].append((textbook_bytes(run) <= run.hardware.memory_gb * 1e9) == score.fits)
    return dict(found)


def textbook_bytes(run: PublishedRun) -> float:
    """Return the bytes of a rank by the formulas of Korthikanti et al. 2022 (activations) and Rajbhandari et al. 2020 (model state).

    18 bytes a parameter: 16-bit weights, fp32 gradients, and fp32 master weights and moments.
    """
    model, layout, training = run.config.model, run.layout, run.config.training
    tensor, sequence = layout.tensor, run.config.parallel.sequence_parallel
    gated = 3 if model.family != "gpt" else 2
    kv_heads = getattr(model, "kv_heads", 0) or model.heads
    attention = 2 * model.hidden**2 * (1 + kv_heads / model.heads)
    mlp = gated * model.hidden * model.ffn_hidden * getattr(model, "experts", 1) / layout.expert
    parameters = (model.layers * (attention + mlp) / layout.pipeline + model.vocab_size * model.hidden) / tensor
    shards = run.engine.shard_ranks or layout.data * layout.expert * layout.context
    state = {0: 18.0, 1: 6 + 12 / shards, 2: 2 + 16 / shards, 3: 18 / shards}[run.sharding.stage]
    tokens = training.micro_batch_size * training.sequence_length / layout.context
    if training.activation_checkpointing == "full":
        layer = 2.0
    else:
        scores = 0.0 if run.engine.scores != "saved" else 5 * model.heads * training.sequence_length / model.hidden
        layer = 34 / tensor + scores / tensor if sequence else 10 + 24 / tensor + scores / tensor
    stages = layout.pipeline
    interleaved = 1 + (stages - 1) / (stages * layout.stages_per_rank) if layout.stages_per_rank > 1 else 1.0
    activations = tokens * model.hidden * layer * model.layers * interleaved
    return parameters * state + activations + 4 * tokens * model.vocab_size / tensor


def llm_analysis(scores: list[RowScore]) -> Ideal:
    """Return the seconds of llm-analysis for every measured row that it can express, at an efficiency of 1.

    It takes dense models and Mixtral-like experts, tensor, pipeline, data and expert sizes, ZeRO stages and recomputation; not context
    parallelism, interleaving, hybrid sharding, products in 8 bits or multi-head latent attention.

    Raises:
        UserError: the package is not installed.
    """
    try:
        config, analysis = (importlib.import_module(f"llm_analysis.{name}") for name in ("config", "analysis"))
    except ImportError as error:
        fix = "pip install --no-deps llm-analysis==0.2.2 fire termcolor"
        raise UserError.of("--peer", "llm-analysis", f"cannot be imported: {error}", fix) from error
    logging.disable(logging.WARNING)
    times = []
    for score in scores:
        if score.measured:
            try:
                run = read(score.row)
            except Contradiction:
                continue
            if run.layout.context == 1 and run.layout.stages_per_rank == 1 and not run.engine.shard_ranks and _dense(run):
                times.append((score, _llm_analysis_time(run, config, analysis)))
    logging.disable(logging.NOTSET)
    return times


def _dense(run: PublishedRun) -> bool:
    return run.config.model.family in ("gpt", "llama", "mixtral") and not run.engine.fp8_products


def _llm_analysis_time(run: PublishedRun, config: Any, analysis: Any) -> float:
    """Seconds of a step at an efficiency of 1."""
    model, layout, hardware, training = run.config.model, run.layout, run.hardware, run.config.training
    described = config.ModelConfig(
        name="row",
        num_layers=model.layers,
        n_head=model.heads,
        hidden_dim=model.hidden,
        vocab_size=model.vocab_size,
        max_seq_len=training.sequence_length,
        num_key_value_heads=getattr(model, "kv_heads", 0) or model.heads,
        # It counts two matrices of an MLP: those of a gated one are three.
        ffn_embed_dim=model.ffn_hidden if model.family == "gpt" else model.ffn_hidden * 3 // 2,
        expansion_ratio=4,
        moe_num_experts=getattr(model, "experts", 1),
        moe_top_k=getattr(model, "top_k", 1),
    )
    gpu = config.GPUConfig(
        name=hardware.name,
        mem_per_GPU_in_GB=1e6,  # it refuses to time what it thinks does not fit
        hbm_bandwidth_in_GB_per_sec=hardware.memory_tb_s * 1000,
        intra_node_bandwidth_in_GB_per_sec=hardware.link_gb_s,
        intra_node_min_message_latency=hardware.link_us * 1e-6,
        peak_fp16_TFLOPS=hardware.tflops,
    )
    sizes = config.ParallelismConfig(
        tp_size=layout.tensor, pp_size=layout.pipeline, dp_size=layout.data * layout.expert, ep_size=layout.expert, sp_size=1
    )
    job = analysis.LLMAnalysis(described, gpu, parallelism_config=sizes, flops_efficiency=1.0)
    summary: dict[str, float] = job.training(
        batch_size_per_gpu=training.micro_batch_size,
        gradient_accumulation_steps=layout.micro_batches,
        seq_len=training.sequence_length,
        activation_recomputation=analysis.ActivationRecomputation[training.activation_checkpointing.upper()],
        ds_zero=analysis.DSZeRO(run.sharding.stage),
    )
    return summary["latency_per_iter"]


#: Name of a package -> the seconds of every row that it can express.
PEERS: dict[str, Callable[[list[RowScore]], Ideal]] = {"llm-analysis": llm_analysis}
