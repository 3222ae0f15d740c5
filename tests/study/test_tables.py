"""Prediction of a table of runs: assumptions for empty cells, refusal of contradictions, and scores."""

from __future__ import annotations

import csv

import pytest

from pipeline.common.errors import UserError
from pipeline.planner.operations import Elementwise
from tests.helpers import ROOT, load_tool, python
from tools.study.cells import Contradiction, measured_step_time
from tools.study.runs import read
from tools.study.tables import predict, predict_table, traced_row

pytestmark = pytest.mark.long

scoring = load_tool("plan_score")

#: Llama-2 70B on 64 H100, as a user writes it.
TABLE = """\
source,model_name,layers,hidden,heads,kv_heads,ffn_hidden,vocab,seq_len,gpu,gpus,gpus_per_node,tp,pp,dp,ep,cp,zero_or_fsdp,interleave,\
micro_batch,global_batch,recompute,sequence_parallel,precision,year,step_time_s,status
here,Llama-2 70B,80,8192,64,8,28672,32000,4096,H100 SXM,64,8,4,4,4,1,1,distributed optimizer,5,\
1,128,none,y,bf16,2024,12.0,ok
"""
(RUN,) = csv.DictReader(TABLE.splitlines())


def test_a_complete_row_needs_no_assumption_but_the_network():
    run = read(RUN)
    assert run.assumptions == ["network=50 GB/s a GPU"]
    layout = run.layout
    assert (layout.tensor, layout.pipeline, layout.data, layout.stages_per_rank, layout.micro_batches) == (4, 4, 4, 5, 32)
    assert run.config.model.family == "llama"
    assert run.sharding.stage == 1


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dp": "8"}, "is not gpus=64"),
        ({"tp": "3", "dp": ""}, "not a multiple of tp x pp x cp"),
        ({"global_batch": ""}, "global_batch is empty"),
        ({"global_batch": "30"}, "not a multiple of dp"),
        ({"layers": "2"}, "fewer than pp=4"),
    ],
)
def test_contradictory_rows_are_refused(changes, reason):
    with pytest.raises(Contradiction, match=reason):
        read({**RUN, **changes})


def test_empty_cells_are_assumed_and_named():
    empty = dict.fromkeys(("heads", "kv_heads", "vocab", "dp", "recompute", "micro_batch", "layers", "ffn_hidden"), "")
    run = read({**RUN, **empty, "model_name": "mine", "params_b": "69", "zero_or_fsdp": ""})
    text = "; ".join(run.assumptions)
    assert all(f"{name}=" in text for name in ("heads", "vocab", "dp", "recompute", "micro_batch", "layers", "ffn_hidden", "zero_or_fsdp"))
    assert run.config.model.layers == pytest.approx(85, abs=4)  # 69e9 / (12 x 8192^2)


def test_a_table_is_predicted_row_by_row_and_scored(tmp_path):
    small = {**RUN, "layers": "8", "step_time_s": "", "tokens_per_s_per_gpu": "4000", "memory_gb_per_gpu": "40"}
    rows = [small, {**small, "dp": "5"}, {**small, "gpus": "16", "pp": "1", "interleave": "1", "status": "oom"}]
    with open(tmp_path / "rows.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(small))
        writer.writeheader()
        writer.writerows(rows)
    assert predict_table(tmp_path / "rows.csv", tmp_path / "out.csv") == (2, 1)
    with open(tmp_path / "out.csv", newline="") as file:
        out = list(csv.DictReader(file))
    assert [bool(row["predicted_step_time_s"]) for row in out] == [True, False, True]
    assert "is not gpus" in out[1]["refused"]
    assert float(out[0]["predicted_step_time_s"]) > 0 < float(out[0]["predicted_memory_gb"])
    scores, refused = scoring.score(tmp_path / "out.csv")
    assert refused == 1
    measured = 128 * 4096 / (4000 * 64)
    assert scores[0].error == pytest.approx(float(out[0]["predicted_step_time_s"]) / measured - 1)
    assert scores[1].error is None
    assert scores[0].memory_error == pytest.approx(float(out[0]["predicted_memory_gb"]) / 40 - 1)
    assert scores[1].fits_right == (out[2]["fits"] == "no")


def test_a_table_without_a_required_column_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("gpu,gpus\nA100,8\n")
    with pytest.raises(UserError, match="has no column seq_len, global_batch"):
        predict_table(tmp_path / "rows.csv", tmp_path / "out.csv")


def test_the_tools_predict_and_score_a_table(tmp_path):
    rows, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    small = {**RUN, "layers": "8", "step_time_s": "0.5"}
    rows.write_text(f"{','.join(small)}\n{','.join(small.values())}\n")
    code, printed = python(ROOT / "tools/plan_table", str(rows), str(out))
    assert code == 0, printed
    assert "1 rows predicted, 0 refused" in printed
    assert python(ROOT / "tools/plan_score", str(out))[1].splitlines()[1].split()[:2] == ["here", "1"]
    code, printed = python(ROOT / "tools/plan_table", str(tmp_path / "none.csv"), str(out))
    assert code == 2
    assert "none.csv" in printed


def test_measured_step_time():
    assert measured_step_time(RUN) == 12.0
    tokens = {**RUN, "step_time_s": "", "tokens_per_s_per_gpu": "1000"}
    assert measured_step_time(tokens) == 128 * 4096 / 64000
    assert measured_step_time({**RUN, "step_time_s": ""}) is None


def test_more_layers_take_longer_and_twice_the_micro_batches_take_about_twice_as_long():
    cache: dict = {}
    base = {**RUN, "layers": "8", "interleave": "1"}
    one, deeper, longer = (predict(read({**base, **c}), cache).step_time for c in ({}, {"layers": "16"}, {"global_batch": "256"}))
    assert len(cache) == 1  # one block is traced for all three
    assert one < deeper < 2 * one
    assert 1.6 * one < longer < 2 * one


def test_frameworks_pad_the_vocabulary_and_keep_concatenated_weights():
    assert read({**RUN, "vocab": "250000"}).config.model.vocab_size == 250368  # a multiple of 128 x tp
    run = read({**RUN, "layers": "4"})
    names = [operation.name for operation in traced_row(run, {}).parts["0"].operations if isinstance(operation, Elementwise)]
    assert names
    assert not [name for name in names if name.startswith("cat")]


def test_accumulation_of_gradients_follows_the_framework():
    bytes_of = {
        text: read({**RUN, "zero_or_fsdp": text}).engine.accumulation_bytes for text in ("distributed optimizer (ZeRO-1)", "ZeRO-1")
    }
    assert bytes_of == {"distributed optimizer (ZeRO-1)": 0.0, "ZeRO-1": 10.0}  # the first accumulates inside the products


@pytest.mark.parametrize(
    "cells, state",
    [
        ({"precision": "fp16", "zero_or_fsdp": "ZeRO-1"}, 2 + 2 + (4 + 4 + 8) / 4),  # then fp32 gradients, master weights, moments
        ({"precision": "fp16", "zero_or_fsdp": "none"}, 2 + 2 + 16),
        ({"precision": "bf16 (fp32 grad accum)", "zero_or_fsdp": "ZeRO-1"}, 2 + 2 + 4 + 12 / 4),
        ({"precision": "bf16", "zero_or_fsdp": "distributed optimizer", "year": "2023"}, 2 + 4 + 12 / 4),
        ({"precision": "BF_16", "zero_or_fsdp": "FSDP2", "year": "2024", "pp": "1", "dp": "16"}, 0 + 2 / 16 + 12 / 16),
    ],
)
def test_bytes_of_the_model_state_follow_engine_and_format(cells, state):
    run = read({**RUN, "layers": "8", "interleave": "1", "year": "2022", **cells})
    memory, layout = predict(run, {}).memory, run.layout
    weights = 8 * (8192**2 * 2 * 1.125 + 3 * 8192 * 28672) / (layout.tensor * layout.pipeline)
    embedding = 32256 * 8192 / layout.tensor * (1 if layout.pipeline > 1 else 2)
    assert memory.weights + memory.gradients + memory.optimizer == pytest.approx(state * (weights + embedding), rel=0.01)


def test_omni_path_sustains_less_of_its_bandwidth():
    shares = {read({**RUN, "notes": text}).hardware.network_share for text in ("", "8x HDR200")}
    assert len(shares) == 1
    assert read({**RUN, "notes": "4x Omni-Path 100 per 8-GPU node"}).hardware.network_share < 0.6 * shares.pop()


def test_outputs_of_stages_are_kept_where_the_engine_keeps_them():
    base = {**RUN, "layers": "8", "interleave": "1", "year": "2022", "sequence_parallel": "n", "recompute": "full", "precision": "fp16"}
    kept, freed = (predict(read({**base, "zero_or_fsdp": text}), {}).memory for text in ("ZeRO-1", "none"))
    assert kept.activations / freed.activations == pytest.approx(3 / 2, rel=0.01)  # two blocks a stage


def test_a_compiler_changes_memory_bound_kernels_only():
    sharded = {**RUN, "zero_or_fsdp": "FSDP2", "tp": "1", "pp": "1", "dp": "64", "gpu": "H100"}
    eager, compiled, jax = (read({**sharded, "notes": text}).engine for text in ("not compiled", "torch.compile", "JAX"))
    assert eager.host_us > compiled.host_us == jax.host_us == 0
    assert (compiled.products, compiled.attention) == (eager.products, eager.attention)
    assert eager.products < jax.products == 1.0


def test_the_layout_that_is_predicted_fastest_is_compared_with_the_best():
    def row(predicted: float, measured: float, group: str) -> object:
        return scoring.RowScore("s", "", predicted / measured - 1, None, predicted, measured, (group,))

    rows = [row(1.0, 2.2, "a"), row(2.0, 2.0, "a"), row(3.0, 4.0, "a"), row(1.0, 9.0, "b"), row(2.0, 1.0, "b")]
    assert scoring.regrets(rows) == [pytest.approx(0.1)]  # group b has two layouts only


def test_quantiles_count_every_source_the_same():
    assert scoring.quantiles([("a", 2.0)] * 100 + [("b", 1.0)], (0.1, 0.5, 0.9)) == [1.0, 1.0, 2.0]
