"""parallel.deepspeed: what a configuration sets before DeepSpeed reads it, how "auto" is filled, and what is refused by name."""

import json

import pytest

from pipeline.config import compose, deepspeed_json
from pipeline.config.command_line import parse
from pipeline.config.layout import Layout
from pipeline.config.rules import check
from tests.world import configured

#: As in the guides of Transformers: everything that its Trainer fills in is "auto".
TRAINER = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 12, "hysteresis": 2, "min_loss_scale": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
#: As of a run with Megatron-DeepSpeed, which sets schedule and optimizer itself.
MEGATRON = {
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 32,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
    "steps_per_print": 100,
    "wall_clock_breakdown": False,
}


@pytest.fixture
def file(tmp_path):
    """Writes a configuration; the argument that names it."""

    def write(content):
        deepspeed_json.read.cache_clear()
        path = tmp_path / "ds_config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return f"parallel.deepspeed={path}"

    return write


def run(*words, ranks=4):
    """The configuration of a command line, and what is refused."""
    compose.register()
    command = parse(["stage=pretrain", *words])
    if command.violations:
        return None, [str(violation) for violation in command.violations]
    config = configured(*command.overrides)
    return config, [str(violation) for violation in check.violations(config, ranks)]


def test_what_a_file_says_and_leaves_out(file):
    config, refused = run(file(MEGATRON), "optimizer.lr=0.002", "parallel.tensor=2")
    assert not refused
    assert (config.training.global_batch_size, config.training.micro_batch_size, config.optimizer.gradient_clipping) == (32, 2, 0.5)
    assert (config.parallel.engine, config.parallel.zero_stage, config.precision.dtype) == ("deepspeed", 1, "bf16")
    config, refused = run(file({"_comment": "from a wiki"}))  # as in DeepSpeed: fp32 without ZeRO and clipping
    assert not refused
    assert (config.parallel.zero_stage, config.precision.dtype, config.optimizer.gradient_clipping) == (0, "fp32", 0.0)


def test_auto_is_filled_with_our_settings(file):
    config, refused = run(
        file(TRAINER), "optimizer.lr=0.002", "precision=bf16", "optimizer.warmup_steps=7", "optimizer.gradient_clipping=2"
    )
    assert not refused
    assert (config.parallel.zero_stage, config.parallel.offload) == (3, "optimizer")
    filled = deepspeed_json.filled(config.parallel, config.training, config.optimizer, config.precision, Layout.of(config, 4))
    assert filled["bf16"] == {"enabled": True}
    assert not filled["fp16"]["enabled"]
    assert filled["optimizer"]["params"] == {"lr": 0.002, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    assert filled["scheduler"]["params"] == {"warmup_min_lr": 0, "warmup_max_lr": 0.002, "warmup_num_steps": 7, "warmup_type": "linear"}
    assert [filled[key] for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")] == [64, 4, 4]
    assert filled["gradient_clipping"] == 2
    assert "auto" not in json.dumps(filled)
    assert filled["zero_optimization"]["sub_group_size"] == 1e9


def test_number_of_micro_batches(file):
    word = file({**MEGATRON, "gradient_accumulation_steps": 8})
    (text,) = run(word)[1]
    assert text.startswith(
        f"training.global_batch_size=32: is not training.micro_batch_size=2 x 8 (gradient_accumulation_steps of {word}) x 4"
    )
    assert 'set gradient_accumulation_steps to "auto"' in text
    assert run(file({**MEGATRON, "gradient_accumulation_steps": 4}))[1] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("optimizer.gradient_clipping=1.0",), "optimizer.gradient_clipping=1.0: contradicts gradient_clipping of parallel.deepspeed="),
        (("precision=fp16",), "precision.dtype=fp16: contradicts bf16.enabled of parallel.deepspeed="),
        (("optimizer.gradient_clipping=0.5", "precision=bf16", "tracking=disabled"), None),
        (("-m", "optimizer.gradient_clipping=0.5,1"), None),
    ],
)
def test_contradiction_names_both(file, words, message):
    word = file(MEGATRON)
    if "-m" in words:  # the sweep's own value is left, and each of its points is checked
        assert [o for o in parse(["stage=pretrain", word, *words]).overrides if "clipping" in o] == [words[1]]
        return
    _, refused = run(word, *words)
    assert any(message in text for text in refused) if message else not refused, refused


def test_command_line_of_a_job_is_composed_again(file):
    """A job gets the expanded command line: the file, and what it has set."""
    first = parse(["stage=pretrain", file(MEGATRON)])
    again = parse(first.arguments)
    assert "optimizer.gradient_clipping=0.5" in again.overrides
    assert sorted(again.overrides) == sorted(first.overrides)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, 'offload_optimizer.device="nvme": is on a disk'),
        ({"optimizer": {"type": "OneBitAdam", "params": {}}}, 'optimizer.type="OneBitAdam": has a state that checkpoints do not store'),
        ({"compression_training": {"weight_quantization": {}}}, "set training.fake_quantize=int8"),
        ({"elasticity": {"enabled": True}}, "elasticity"),
        ({"train_batch_sise": 4}, "train_batch_sise=4: is no key of DeepSpeed\n    fix: did you mean train_batch_size"),
        ({"train_batch_size": "32"}, 'train_batch_size="32": is not an integer'),
        ({"gradient_accumulation_steps": "8"}, 'gradient_accumulation_steps="8": is not an integer\n    fix: write it without quotes'),
        ({"bf16": {"enabled": "false"}}, 'bf16.enabled="false": is neither true nor false'),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16.enabled=true: contradicts bf16.enabled=true"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, 'is deprecated\n    fix: set "offload_optimizer": {"device": "cpu"}'),
        ({"zero_optimisation": {}}, "fix: did you mean zero_optimization?"),
        ({"zero_optimization": True}, "zero_optimization=true: is not a section"),
        ({"zero_optimization": {"stage": 4}}, "parallel.zero_stage=4: must be at least 0 and at most 3"),
        ({"bf16": {"enabled": True}}, "precision.dtype=bf16: requires ZeRO with parallel.engine=deepspeed"),
        ({"zero_optimization": {"stage": 1, "zenflow": {"topk_ratio": 0.1}}}, "updates some weights later"),
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"bf16": {}, "bf16": {}}', "bf16 occurs twice"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value)[:60],
)
def test_what_is_refused(file, content, message):
    _, refused = run(file(content), "training.global_batch_size=128")
    assert any(message in text for text in refused), refused


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.parametrization=mup", "model.parametrization=mup: has learning rates of its own"),
        ("parallel.pipeline=2", "parallel.pipeline=2: is not a layout of parallel.engine=deepspeed"),
        ("optimizer=muon", "optimizer.name=muon: is not an optimizer of parallel.engine=deepspeed"),
        ("training.noise_scale_every=5", "training.noise_scale_every=5: is not measured by parallel.engine=deepspeed"),
        ("lora.rank=4", "lora.rank=4: is not supported with parallel.engine=deepspeed"),
        ("parallel.engine=native", "parallel.engine=native: "),
    ],
)
def test_what_its_engine_does_not_have(file, word, message):
    _, refused = run(file(MEGATRON), word)
    assert any(text.startswith(message) for text in refused), refused
    if word != "parallel.engine=native":
        assert any(text.startswith(message) for text in run("parallel.engine=deepspeed", word)[1])


@pytest.mark.parametrize("model", ["bert-tiny", "t5-tiny", "mixtral-tiny", "deepseek-tiny", "qwen3-next-tiny", "gpt-tiny"])
def test_every_kind_of_family_is_accepted(model):
    assert run("parallel.engine=deepspeed", f"model={model}", ranks=2)[1] == []


def test_missing_file_and_other_stages(file, tmp_path):
    assert "cannot be read: No such file" in run(f"parallel.deepspeed={tmp_path}/no.json")[1][0]
    assert run("parallel.deepspeed=null")[1] == []
    _, refused = run(file(MEGATRON), "stage=plan", "stage.search=true", "cluster.hardware=h100")
    assert any("has one layout, where a search plans others" in text for text in refused), refused
