"""Ring attention without a fused kernel: the warning before work, and its time and memory in the plan."""

import re
from dataclasses import replace

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from pipeline.config import ring_kernels
from pipeline.layers import document_segments, partial_attention
from pipeline.layers.mask import Mask
from pipeline.planner import ring_formula
from pipeline.planner.operations import AttentionCall, RingRules
from pipeline.planner.plan import hardware_of, plan, table
from pipeline.planner.trace import trace
from tests.helpers import pipeline
from tests.world import configured

SMALL = ("stage=pretrain", "training.sequence_length=32", "training.micro_batch_size=1", "parallel.context=2", "precision=bf16")
#: Settings -> parts of the warning; empty without one.
CASES = [
    ("model=llama-tiny", ""),
    ("model=llama-tiny training.document_mask=true", ""),
    ("model=llama-tiny precision=fp32", "precision.dtype=fp32: "),
    ("model=llama-tiny precision=fp32 training.document_mask=true", "with precision.dtype=fp32: "),
    ("model=mistral-tiny model.window=8 parallel.context_kind=ulysses", ""),
    ("model=mistral-tiny model.window=8 parallel.context=1", ""),
    ("model=llama-tiny model.hidden=60 model.heads=6 model.kv_heads=6 model.head_width=10", "heads of 10 columns: "),
    ("model=mistral-tiny model.window=8", "with model.window=8: .*context_kind=ulysses$"),
    ("model=mistral-tiny model.window=32", ""),
    ("model=gemma3-tiny model.window=8 training.document_mask=true", "with model.window=8: "),
    ("model=gpt-tiny model.banded_window=8", "model.banded_window=8: "),
    ("model=mixtral-tiny", ""),
    ("model=bloom-tiny", "model.family=bloom"),
    ("model=bloom-tiny precision=fp32", "with ALiBi .model.family=bloom. and precision.dtype=fp32: "),
    ("model=gemma2-tiny", "with model.attn_logit_softcapping=50: "),
    ("model=gemma2-tiny model.attn_logit_softcapping=null", ""),
    ("model=deepseek-tiny model.mtp_depth=0", ""),
    ("model=mistral-tiny model.window=8 model.kv_heads=2 parallel.context=4", "context_kind=ulysses and parallel.context=2"),
    ("model=mistral-tiny model.window=8 model.kv_heads=1", "remove model.window=8, or set parallel.context=1"),
]


def ring_calls(config) -> list[AttentionCall]:
    """The calls of ring attention of a micro-batch."""
    operations = (operation for part in trace(config).parts.values() for operation in part.operations)
    return [operation for operation in operations if isinstance(operation, AttentionCall) and operation.ring > 1]


@pytest.mark.parametrize(
    ("settings", "warned"),
    [pytest.param(*case, id=case[0], marks=pytest.mark.long if number % 2 else ()) for number, case in enumerate(CASES)],
)
def test_the_warning_agrees_with_the_choice_of_the_kernel_for_the_traced_model(settings, warned):
    config = configured(*SMALL, *settings.split())
    assert any(map(ring_formula.is_unfused, ring_calls(config))) == bool(warned)
    text = ring_kernels.notice(config)
    if warned:
        assert text.startswith("parallel.context_kind=ring has no fused kernel with ")
        assert re.search(warned, text), text
    else:
        assert text == ""


BIG = ("stage=pretrain", "model=mistral-7b", "cluster.hardware=h100", "training.sequence_length=32768", "training.micro_batch_size=1")
ULYSSES = "parallel.context_kind=ulysses"
LAYOUT = ("training.global_batch_size=64", "parallel.context=4", "parallel.zero_stage=1", "training.activation_checkpointing=full")


def planned(*settings: str):
    """The plan of the big job with other settings."""
    config = configured(*BIG, *LAYOUT, *settings)
    return plan(config, 32, hardware_of(config))


def test_the_plan_of_a_ring_with_a_window_has_the_time_and_the_scores_of_the_formula():
    """Ulysses with a window of most of the sequence is about as fast as a ring without one; the published factor is 10 to 30."""
    plain, window, ulysses = (planned("model.window=32768"), planned("model.window=30000"), planned("model.window=30000", ULYSSES))
    attention = [each.estimate.causes["attention"] for each in (plain, window, ulysses)]
    assert 10 < attention[1] / attention[0] < 30
    assert attention[2] < 1.5 * attention[0]
    assert window.estimate.step_time - plain.estimate.step_time > 0.9 * (attention[1] - attention[0])
    scores = 4 * partial_attention.MAX_SCORES
    assert window.trace.block(0).peaks[0] > plain.trace.block(0).peaks[0]
    for passed in (0, 1):
        assert window.trace.block(0).peaks[passed] > 2 * scores, "fp32 scores and their mask or gradient"
    rows = {row.name for row in table(window) if row.bound == "memory" and row.flops}
    assert rows == {"attention (unfused)"}


def test_the_plan_of_a_ring_with_documents_has_the_fused_kernel_and_the_scores_of_short_documents():
    plain, documents = planned("model.window=32768"), planned("model.window=32768", "training.document_mask=true")
    attention = [each.estimate.causes["attention"] for each in (plain, documents)]
    assert 1 < attention[1] / attention[0] < 1.5
    # A block of short documents has a score for each of its keys, in two blocks.
    tokens, heads = 32768 // 4, 32
    scores = 4 * tokens * 2 * document_segments.SHORT * heads
    for passed in (0, 1):
        assert documents.trace.block(0).peaks[passed] - plain.trace.block(0).peaks[passed] > 0.5 * scores
    assert not [row.name for row in table(documents) if row.bound == "memory" and row.flops]


CALL = AttentionCall("forward", 2, 8, 2, 256, 256, 32, 32, 0.5, 2, 4, RingRules(causal=True, documents=True, slopes=True))
FUSED = replace(CALL, bytes_per_element=2, rules=RingRules(causal=True, documents=True))


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(
    "rules",
    [RingRules(True, documents=True), RingRules(True, window=100, slopes=True), RingRules(True, softcap=5.0)],
    ids=["documents", "alibi", "soft cap"],
)
def test_the_memory_of_a_step_of_the_ring_is_that_of_the_real_formula(phase, rules, monkeypatch):
    """In two chunks of queries, as torch's memory tracker counts it on a CPU."""
    monkeypatch.setattr(partial_attention, "MAX_SCORES", 2 * 8 * 256 * 128)
    ring_formula.work.cache_clear()
    planned = ring_formula.work(replace(CALL, phase=phase, rules=rules))
    ring_formula.work.cache_clear()
    q, k, v = torch.randn(2, 8, 256, 32), torch.randn(2, 2, 256, 32), torch.randn(2, 2, 256, 32)
    documents = torch.arange(256).expand(2, -1) // 50 if rules.documents else None
    positions = torch.arange(256)[None]
    slopes = torch.rand(8) if rules.slopes else None
    mask = Mask(documents=documents, key_documents=documents, positions=positions, key_positions=positions, slopes=slopes)
    mask = mask.replace(softcap=rules.softcap)
    out, lse = partial_attention.forward(q, k, v, mask, window=rules.window)
    tracker = MemTracker()
    tracker.track_external(q, k, v, out, lse)
    with tracker:
        if phase == "forward":
            partial_attention.forward(q, k, v, mask, window=rules.window)
        else:
            partial_attention.backward(out, q, k, v, out, lse, mask, window=rules.window)
    before = sum(tensor.nbytes for tensor in (q, k, v, out, lse))
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] - before
    assert planned.allocated == pytest.approx(peak, rel=0.1)
    assert planned.allocated > 2 * 4 * partial_attention.MAX_SCORES


def test_formula_counts_all_pairs_that_a_rank_computes():
    """The first step computes all local pairs, each other one half of them, and steps beyond a window none."""
    sizes = (2, 8, 256, 256)

    def flops(rules: RingRules, ring: int) -> float:
        operations = ring_formula.work(replace(CALL, ring=ring, rules=rules)).operations
        return sum(count * operation.flops for operation, count in operations if hasattr(operation, "flops"))

    pair = 2 * 2 * 32  # a query and a key: two products of 32 columns
    everything = sizes[0] * sizes[1] * sizes[2] * sizes[3] * pair
    assert flops(RingRules(True, slopes=True), 4) == pytest.approx(everything * 2.5)
    assert flops(RingRules(True, window=20), 4) == pytest.approx(everything * 2.0)
    assert flops(RingRules(False, slopes=True), 4) == pytest.approx(everything * 4)
    short = ring_formula.work(replace(FUSED, ring=4)).operations
    queries = 2 * 8 * 256 * 2 * document_segments.SHORT
    assert sum(count * operation.flops for operation, count in short if hasattr(operation, "flops")) == pytest.approx(queries * pair)


def test_the_dry_run_warns_before_it_builds_the_model():
    words = ("dry_run=true", "dry_run.world_size=4", "model=mistral-tiny", "parallel.context=2", "model.window=8")
    printed = pipeline(*words, "training.sequence_length=64", "training.global_batch_size=8", "training.micro_batch_size=1")
    line = "parallel.context_kind=ring has no fused kernel with model.window=8"
    assert line in printed
    assert printed.index(line) < printed.index("rank 0 of 4")
