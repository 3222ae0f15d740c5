"""The dry run: its output on the command line, and the parameters of all ranks against the model."""

import re
from itertools import product

import pytest
import torch

from pipeline.common import knobs
from pipeline.config.layout import Layout
from pipeline.config.rules.check import check
from pipeline.parallel.parallelize import init_weights, partition_model
from pipeline.planner.flops import count_local_parameters, count_primary_parameters
from pipeline.planner.planned_buckets import frozen_bytes, planned_buckets
from pipeline.planner.rank_report import init_fake
from pipeline.planner.state_memory import model_state, state_format_of
from pipeline.planner.trace import trace
from pipeline.training.buckets import ALIGNMENT, build_buckets
from tests.helpers import pipeline
from tests.world import configured

LARGE = (
    "stage=pretrain",
    "dry_run=true",
    "model=gpt3-175b",
    "parallel.tensor=8",
    "parallel.pipeline=16",
    "training.sequence_length=2048",
    "training.micro_batch_size=1",
    "training.global_batch_size=1536",
    "training.steps=100000",
)


def test_one_rank_of_a_large_job():
    text = pipeline(*LARGE, "dry_run.world_size=1024", "dry_run.rank=517", "parallel.zero_stage=1", "training.token_budget=300_000_000_000")
    shown = dict(re.findall(r"^  (\w[\w ]*?)  +(.*)$", text, re.MULTILINE))
    assert (shown["pipeline"], shown["data"], shown["tensor"]) == ("8 of 16", "0 of 8", "5 of 8")
    assert shown["stage 8"] == "layers 48 to 53 (6 of 96)"
    # Six blocks: 1/8 of 12 h^2 + 7 h sharded weights, and 6 h replicated weights of norms and output biases.
    hidden = 12288
    held = 6 * ((12 * hidden**2 + 7 * hidden) // 8 + 6 * hidden)
    assert shown["parameters"] == f"{held:,}"
    assert shown["weights"].split() == [f"{2 * held / 2**30:.3f}", "GiB", "bf16"]
    assert shown["gradients"].split()[:2] == [f"{4 * held / 2**30:.3f}", "GiB"]
    assert shown["optimizer"].split()[:2] == [f"{12 * held / 8 / 2**30:.3f}", "GiB"]
    assert shown["sequences"] == "1,536 of 2,048 tokens = 3,145,728 tokens"
    assert shown["a rank"] == "192 micro-batches of 1"
    assert shown["token budget"] == "300,000,000,000 tokens = training.steps=95368"
    assert "sbatch --" not in text  # how many tasks a node has is not known
    assert "set cluster.tasks_per_node to the GPUs of a node" in text
    text = pipeline(*LARGE, "dry_run.world_size=1024", "cluster.tasks_per_node=8", "parallel.zero_stage=1", "training.ema=0.999")
    shown = dict(re.findall(r"^  (weights|optimizer) +(.*)$", text, re.MULTILINE))
    assert shown["optimizer"].endswith("fp32 master weights and exp_avg, exp_avg_sq and ema, sharded over 8 data ranks")
    assert shown["optimizer"].split()[0] == shown["weights"].split()[0], "16 bytes over 8 ranks, and 2 bytes"
    command = next(line for line in text.splitlines() if line.startswith("sbatch "))
    assert "--nodes=128 --ntasks-per-node=8" in command
    assert " model=gpt3-175b " in command
    assert "dry_run" not in command
    assert "--time" not in command, "that of slurm/pretrain.sbatch"


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_frozen_weights_have_no_gradient_and_their_own_size(quantize):
    """The bytes of the weights that a run allocates; slices of tensor ranks that are no full blocks."""
    words = ("model=llama-tiny", "lora.rank=4", f"lora.quantize={quantize}", "parallel.tensor=4", "lora.modules_to_save=[embed.*]")
    config = configured("stage=pretrain", "precision=bf16", *words)
    local, traced = init_fake(config, 4)[0], trace(config)
    state = model_state(planned_buckets(traced, local.layout, [0]), state_format_of(config, local.layout))
    real = partition_model(config, local.layout, 0)
    init_weights(real, config, torch.device("cpu"))
    frozen = sum(weight.nbytes for weight in (*real.fixed, *real.quantized))
    assert bool(real.quantized) == (quantize == "nf4")
    assert frozen_bytes(traced, local.layout, [0]) == frozen
    buckets = build_buckets(real, local, sequence_parallel=False)
    trained = sum(bucket.elements for bucket in buckets)
    assert 0 <= trained - sum(parameter.numel() for parameter in real.pieces) < ALIGNMENT * len(buckets)
    assert state.weights == 2 * trained
    assert (state.gradients, state.optimizer) == (4 * trained, 12 * trained)


def test_offloaded_state_is_named(tmp_path):
    """ZeRO 3 on 4 ranks in bf16: 2 + 4 bytes of the partition on the device, 12 and buffers of 6 on the host; vectors are replicated."""
    words = ("stage=pretrain", "dry_run=true", "dry_run.world_size=4", "model=llama-tiny", "parallel.zero_stage=3")
    text = pipeline(*words, "parallel.offload=optimizer", f"run_dir={tmp_path}")
    shown = dict(re.findall(r"^  (\w[\w ]*?)  +([\d.]+) GiB", text, re.MULTILINE))
    weights, gradients, host = (float(shown[name]) for name in ("weights", "gradients", "host memory"))
    assert gradients == pytest.approx(4_769_472 / 4 * 4 / 2**30, abs=6e-4)
    assert weights == pytest.approx(gradients / 2, abs=6e-4)
    assert host == pytest.approx(gradients * 18 / 4, abs=3e-3)
    assert float(shown["total"]) == pytest.approx(weights + gradients, abs=1.1e-3)
    assert float(shown["optimizer"]) == 0


def test_tokens_of_a_blend_and_a_batch_rampup():
    """The default world size is that of the cluster."""
    text = pipeline(
        *LARGE[:3],
        "parallel.tensor=4",
        "cluster.nodes=4",
        "cluster.tasks_per_node=4",
        "training.sequence_length=2048",
        "training.steps=100",
        "training.batch_rampup=[{until_step:10,value:32}]",
        "training.token_budget=13_000_000",
        "data.blend={web:{weight:3},code:{weight:1}}",
    )
    assert "\nrank 0 of 16\n" in f"\n{text}"
    shown = dict(re.findall(r"^  (\w[\w ]*?)  +(.*)$", text, re.MULTILINE))
    assert shown["steps"] == f"100 = {(10 * 32 + 90 * 64) * 2048:,} tokens"
    assert shown["token budget"] == "13,000,000 tokens = training.steps=105"
    assert shown["web"] == f"{(10 * 32 + 90 * 64) * 3 // 4 * 2048:,} tokens, 75.00 %"
    assert shown["code"].endswith("25.00 %")


def test_token_shards_that_do_not_fit_are_refused_before_a_job_is_submitted(tokens, tmp_path):
    model, more = "model=llama-tiny", ("model.vocab_size=200", "data.blend={web: {corpus: default}, code: {}}")
    for words in (["stage=pretrain", "dry_run=true"], ["stage=submit", "submit.stages=[pretrain]", "dry_run=true"]):
        text = pipeline(*words, model, *more, f"data.tokens={tokens}", f"run_dir={tmp_path}", expect=2)
        assert re.search(r"data\.blend\.code\.corpus=code: \S+ contains no such corpus", text), text
        assert re.search(r"model\.vocab_size=200: is less than the vocabulary size 300", text), text
    assert "sbatch" in pipeline("stage=pretrain", "dry_run=true", model, *more, "data.tokens=not-yet", "cluster.tasks_per_node=4")


def test_errors_are_reported_together():
    text = pipeline(*LARGE, "dry_run.world_size=1000", "dry_run.rank=1000", "training.compile=on", "parallel.schedule=zbv", expect=2)
    for key in ("dry_run.rank=1000", "world size=1000", "training.compile=on"):
        assert f"- {key}" in text
    assert "Traceback" not in text
    assert "stage=pretrain" in pipeline("stage=convert", "dry_run=true", expect=2)
    frozen = pipeline("stage=pretrain", "dry_run=true", "model=llama-tiny", "training.frozen=[block.0.*]", expect=2)
    assert "training.frozen=block.0.*: matches no weight of model.family=llama" in frozen


@pytest.mark.parametrize(
    ("overrides", "published"),
    [
        (("model=gpt2-xl", "parallel.pipeline=5", "parallel.schedule=1f1b"), 1_557_611_200),
        (("model=gpt2", "parallel.tensor=4", "parallel.pipeline=3", "parallel.schedule=zbv"), 124_439_808),
        pytest.param(("model=gpt3-175b", "parallel.tensor=8", "parallel.pipeline=4"), 174_604_259_328, marks=pytest.mark.long),
        pytest.param(
            ("model=llama2-70b", "parallel.tensor=4", "parallel.pipeline=2", "parallel.schedule=interleaved"),
            68_976_648_192,
            marks=pytest.mark.long,
        ),
        pytest.param(("model=llama3-405b", "parallel.tensor=8", "parallel.pipeline=4"), 405_853_388_800, marks=pytest.mark.long),
    ],
)
def test_the_parameters_of_all_ranks_add_up_to_the_model(overrides, published):
    """All ranks with data index 1, in a job with data-parallel size 2."""
    config = configured("training.micro_batch_size=1", *overrides)
    world_size = 2 * config.parallel.tensor * config.parallel.pipeline
    check(config, world_size)
    layout = Layout.of(config, world_size)
    counted, layers, held = 0, [], []
    for stage, tensor in product(range(layout.pipeline), range(layout.tensor)):
        rank = (stage * layout.data + 1) * layout.tensor + tensor
        mesh, model = init_fake(knobs.changed(config, {"dry_run.rank": rank}), world_size)
        counted += count_primary_parameters(model, mesh)
        held.append(count_local_parameters(model))
        if tensor == 0:
            layers += [int(key) for part in model.stage_modules() for key in part.blocks]
    assert counted == published
    assert sorted(layers) == list(range(config.model.layers))
    assert sum(held) >= published
    assert max(held) < 2 * published / len(held) + 2 * config.model.vocab_size * config.model.hidden
