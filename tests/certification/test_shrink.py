"""The small version of a job: legal if the job is, with the same options and every parallel axis in use."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import operator
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from pipeline.certification.shrink import Shrunk, shrink
from pipeline.certification.state import other_layout
from pipeline.config.data import RampupConfig, WarmupConfig
from pipeline.config.layout import Layout
from pipeline.config.paths import CONF_DIR
from pipeline.config.rules import check
from pipeline.models.config_classes import CONFIG_CLASSES
from pipeline.parallel.parallelize import build_model
from pipeline.planner.flops import count_model_parameters
from tests.world import configured

#: Released sizes of every family, and the smallest models there are.
MODELS = """
llama3-70b llama3.1-405b qwen2.5-7b qwen3-8b llama-tiny gpt2-xl gpt3-175b gpt-tiny gpt1 opt-350m opt-66b pythia-12b bloom-176b
bloom-tiny mistral-7b mistral-nemo-12b mixtral-8x7b mixtral-8x22b mixtral-tiny deepseek-v3 deepseek-tiny gemma3-27b gemma2-27b
minitron-8b gemma3-1b gemma3-270m gemma4-e2b gemma4-31b olmo2-32b olmo3-32b granite3-8b qwen3-235b-a22b qwen3-moe-tiny
qwen3-next-80b-a3b nemotron3-nano-30b-a3b granite4-h-small qwen3.5-27b qwen3.5-35b-a3b olmo-hybrid-7b olmoe-1b-7b glm4.5 gpt-oss-20b
smollm3-3b apertus-70b bert-large-cased roberta-base modernbert-large t5-11b t5-v1.1-small t5-tiny transformer-big
"""
#: Keys of a model that are sizes; every other one is an option, which stays.
SIZES = """
layers hidden heads kv_heads head_width ffn_hidden expert_ffn_hidden vocab_size max_positions embed_width expert_interval dense_blocks
full_attention_interval shared_ffn_hidden partial_rotary_factor layer_pattern mamba_heads mamba_head_dim mamba_groups mamba_state
linear_key_heads linear_value_heads linear_key_dim linear_value_dim linear_heads linear_head_dim window sliding_window_pattern
no_rope_layer_interval encoder_layers buckets max_distance local_attention global_attn_every_n_layers q_lora_rank kv_lora_rank
qk_nope_head_dim qk_rope_head_dim v_head_dim dense_layers experts shared_experts top_k groups topk_group global_head_width
global_kv_heads kv_shared_layers layer_input_width
"""
STEPS = 6


@functools.cache
def pretraining(*overrides: str) -> Any:
    return configured("stage=pretrain", *overrides)


@functools.cache
def shipped(name: str) -> Any:
    """The configuration of conf/model/NAME.yaml."""
    values: Any = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "model" / f"{name}.yaml"))
    family = re.fullmatch(r"/schema/model/(\w+)@_here_", values.pop("defaults")[0])
    return CONFIG_CLASSES[family[1]](**values)


class Draft:
    """A configuration group whose values are still being drawn."""

    def __init__(self, group: Any) -> None:
        self.__dict__["_group"] = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_group"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["_group"] = dataclasses.replace(self.__dict__["_group"], **{name: value})

    def frozen(self) -> Any:
        return self.__dict__["_group"]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Any, int]:
    """A configuration that may be illegal, and its number of ranks."""
    model = shipped(draw(st.sampled_from(MODELS.split())))
    data = ["data.pairs.train=[unread.tsv]"] if model.objective == "pairs" else []
    planned = dataclasses.replace(pretraining(*data), model=model)
    model, parallel, training, optimizer = (
        Draft(group) for group in (planned.model, planned.parallel, planned.training, planned.optimizer)
    )

    def pick(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    if draw(st.booleans()):
        model.layers = draw(st.integers(2, 40))
        if hasattr(model, "dense_layers"):
            model.dense_layers = draw(st.integers(0, model.layers))
        if hasattr(model, "encoder_layers"):
            model.encoder_layers = draw(st.none() | st.integers(1, model.layers - 1))
    sliced = ("expert_ffn_hidden", "shared_ffn_hidden", "linear_key_heads")
    common = math.gcd(model.heads, model.kv_heads, model.ffn_hidden, *(getattr(model, name, 0) for name in sliced))
    parallel.tensor = draw(st.sampled_from([size for size in range(1, 17) if common % size == 0]))
    experts = getattr(model, "experts", 1)
    parallel.expert = draw(st.sampled_from([size for size in range(1, 33) if experts % size == 0]))
    parallel.context = pick(1, 1, 2, 3, 4) if model.objective == "causal" and not getattr(model, "mtp_depth", 0) else 1
    parallel.context_kind, parallel.sequence_parallel = pick("ring", "ulysses"), draw(st.booleans())
    whole = parallel.sequence_parallel and getattr(model, "experts", 0) and experts % (parallel.tensor * parallel.expert) == 0
    parallel.expert_tensor = pick(None, parallel.tensor, 1 if whole else None)
    parallel.pipeline, parallel.schedule = pick(1, 2, 3, 4, 7, 8), pick("1f1b", "interleaved", "zbv")
    parallel.schedule = parallel.schedule if parallel.pipeline > 1 else "1f1b"
    parallel.stages_per_rank = pick(None, None, 3) if parallel.schedule == "interleaved" else None
    parallel.zero_stage = draw(st.integers(0, 3))
    parallel.offload = pick("none", "none", "optimizer") if parallel.zero_stage else "none"
    training.sequence_length = pick(1, 3) * 2 * parallel.context * parallel.tensor * pick(4, 8, 32)
    assume(training.sequence_length <= model.max_positions)
    if model.objective == "causal" and draw(st.booleans()):
        training.sequence_warmup = [
            WarmupConfig(10 * (k + 1), training.sequence_length // divisor) for k, divisor in enumerate((4, 2)[: pick(1, 2)])
        ]
    training.micro_batch_size = pick(1, 2, 3, 8)
    data = pick(1, 2, 3, 16)
    shards = data * parallel.expert * training.micro_batch_size
    fewest = parallel.pipeline * (2 if parallel.schedule == "zbv" else 1)
    training.global_batch_size = shards * fewest * pick(1, 2, 5)
    if draw(st.booleans()):
        training.batch_rampup = [RampupConfig(5, shards * fewest), RampupConfig(50, shards * fewest)]
    training.steps = pick(3, 1000, 10**6)
    optimizer.warmup_steps = draw(st.integers(0, training.steps // 2))
    optimizer.schedule = pick("wsd", "cosine")
    optimizer.decay_steps = draw(st.integers(0, training.steps // 2)) if optimizer.schedule == "wsd" else 0
    if optimizer.schedule == "wsd" and draw(st.booleans()):
        optimizer.decay_ends, optimizer.decay_shape = [training.steps // 2], pick("linear", "sqrt", "cosine")
        optimizer.warmup_steps, optimizer.decay_steps = optimizer.warmup_steps // 4, optimizer.decay_steps // 4
    if model.objective == "causal" and not getattr(model, "mtp_depth", 0) and draw(st.booleans()):
        training.goldfish_k, training.goldfish_context = pick(2, 4), training.sequence_length - 1
    world = data * parallel.tensor * parallel.context * parallel.expert * parallel.pipeline
    groups = {"model": model, "parallel": parallel, "training": training, "optimizer": optimizer}
    return dataclasses.replace(planned, **{name: draft.frozen() for name, draft in groups.items()}), world


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(jobs())
def test_every_legal_job_has_a_legal_small_version(job: tuple[Any, int]) -> None:
    planned, world_size = job
    assume(not check.violations(planned, world_size))
    unchanged = copy.deepcopy(planned)
    small = shrink(planned, world_size, STEPS)
    assert planned == unchanged
    assert check.violations(small.config, small.world_size) == []
    other_layout(small.config)  # in which its checkpoint is continued; raises if there is none
    axes_in_use(planned, world_size, small)
    options_are_kept(planned, small)
    before, after = leaves(planned), leaves(small.config)
    assert {change.key for change in small.changes} == {key for key, value in before.items() if after[key] != value}


def axes_in_use(planned: Any, world_size: int, small: Shrunk) -> None:
    before, after = Layout.of(planned, world_size), Layout.of(small.config, small.world_size)
    for axis in ("tensor", "pipeline", "context", "expert", "data", "stages_per_rank"):
        assert (getattr(before, axis) > 1) == (getattr(after, axis) > 1), axis
        assert getattr(after, axis) <= getattr(before, axis), axis
    assert (before.micro_batches > 1) == (after.micro_batches > 1)
    assert after.micro_batches >= min(before.micro_batches, after.pipeline + 1)  # the schedule has a steady phase if the job's has
    if before.pipeline > 2 and before.schedule == "1f1b":
        assert after.pipeline == 3


def options_are_kept(planned: Any, small: Shrunk) -> None:
    old, new = planned.model, small.config.model
    for field in dataclasses.fields(old):
        if field.name not in SIZES.split():
            assert getattr(old, field.name) == getattr(new, field.name), field.name
        elif isinstance(size := getattr(old, field.name), int):
            assert getattr(new, field.name) <= size, field.name
    assert old.heads // old.kv_heads == new.heads // new.kv_heads
    for group in ("optimizer", "parallel", "precision", "training", "data"):
        after = leaves(getattr(small.config, group))
        for key, value in leaves(getattr(planned, group)).items():
            if isinstance(value, str | bool | float):
                assert after[key] == value, key


def leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of nested dataclasses."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        found |= leaves(value, f"{prefix}{field.name}.") if dataclasses.is_dataclass(value) else {f"{prefix}{field.name}": value}
    return found


def test_a_70b_job() -> None:
    words = ("model=llama3-70b", "training.sequence_length=8192", "training.micro_batch_size=1", "optimizer.schedule=wsd")
    planned = configured("stage=pretrain", *words, "parallel.tensor=8", "parallel.pipeline=4")
    small = shrink(planned, 64, STEPS)
    assert small.world_size == 2 * 3 * 2
    assert (small.config.model.heads, small.config.model.kv_heads) == (16, 2)
    assert small.config.optimizer.schedule == "wsd"
    assert count_model_parameters(small.config.model) < 2e6
    assert [(c.planned, c.small) for c in small.changes if c.key == "model.layers"] == [(80, 6)]


@pytest.mark.parametrize("changes, kept", [({"capacity_factor": 1.5}, "capacity_factor"), ({"window": 64}, "window")])
def test_options_of_experts(changes: dict[str, Any], kept: str) -> None:
    planned = configured("stage=pretrain", "model=mixtral-8x7b", *(f"model.{key}={value}" for key, value in changes.items()))
    assert getattr(shrink(planned, 1, STEPS).config.model, kept) is not None


@pytest.mark.parametrize(
    "words, ranks, kept",
    [
        (("model=t5-11b", "parallel.pipeline=4"), 8, {"model.layers": 6}),
        (("model=gemma3-27b", "parallel.context=4", "parallel.tensor=4"), 32, {"parallel.context": 4, "model.layers": 4}),
        (("model=mixtral-8x7b", "parallel.expert=8"), 64, {"parallel.expert": 4}),
        (("model=mixtral-8x7b", "parallel.expert=8", "parallel.pipeline=4", "parallel.tensor=4"), 512, {"parallel.expert": 2}),
        (
            ("model=deepseek-v3", "parallel.pipeline=16", "parallel.expert=64", "training.global_batch_size=4096"),
            2048,
            {"model.expert_ffn_hidden": 20, "training.global_batch_size": 16},  # 4 micro-batches on 3 pipeline ranks; 16 bytes a row
        ),
        (("model=llama3-8b", "parallel.zero_stage=3", "parallel.zero_group=8"), 64, {"parallel.zero_group": "2"}),
        (
            ("model=llama3-8b", "parallel.zero_stage=3", "parallel.zero_group=node", "cluster.tasks_per_node=8"),
            8,
            {"parallel.zero_group": "job"},
        ),
        (("model=mixtral-8x7b", "parallel.expert=8", "parallel.zero_group=8"), 64, {"parallel.expert": 4, "parallel.zero_group": "4"}),
        (("model=mixtral-8x7b", "parallel.expert=8", "parallel.zero_group=4"), 64, {"parallel.expert": 4, "parallel.zero_group": "2"}),
        (("model=llama3-8b", "parallel.pipeline=4", "parallel.layers_per_stage=[7,8,9,8]"), 8, {"parallel.layers_per_stage": [2, 3, 3]}),
    ],
)
def test_enough_of_everything(words: tuple[str, ...], ranks: int, kept: dict[str, Any]) -> None:
    common = ("training.global_batch_size=1024", "training.micro_batch_size=1", "training.sequence_length=512")
    small = shrink(configured("stage=pretrain", *common, *words), ranks, STEPS)
    assert check.violations(small.config, small.world_size) == []
    assert small.world_size <= 24
    assert {key: operator.attrgetter(key)(small.config) for key in kept} == kept


@pytest.mark.parametrize(
    "patterns, frozen",
    [
        ('["blocks.30.*"]', {"blocks.3"}),  # stands for block 30, blocks.2 for block 16
        (
            '["blocks.[0-9].*", "blocks.1?.*", "embed.*"]',
            {"blocks.0", "blocks.1", "blocks.2", "embed"},
        ),  # the second half begins at block 16
        ('["*norm*"]', {"blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm"}),
    ],
)
def test_frozen_weights(patterns: str, frozen: set[str]) -> None:
    words = ("model=llama3-8b", "parallel.pipeline=2", "training.global_batch_size=64")
    small = shrink(configured("stage=pretrain", *words, f"training.frozen={patterns}"), 4, STEPS)
    names = [name for name, _ in build_model(small.config).named_parameters()]
    found = {".".join(name.split(".")[: 2 if name.startswith("blocks") else 1]) for name in names if small.config.is_frozen(name)}
    assert found == frozen
    assert ("norm" in patterns) == ("training.frozen" not in {change.key for change in small.changes})
