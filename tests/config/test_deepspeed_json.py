"""parallel.deepspeed: a DeepSpeed configuration is the settings of a run, or is refused by name."""

import json

import pytest

from pipeline.config import compose, deepspeed_json
from pipeline.config.command_line import parse
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
#: A whole job in one file, in fp16.
WHOLE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 0.0002, "betas": [0.8, 0.99], "weight_decay": 3e-7}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 3000, "warmup_num_steps": 50, "warmup_type": "linear", "cos_min_ratio": 0.05},
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 1, "min_loss_scale": 1, "initial_scale_power": 15},
    "zero_optimization": {"stage": 2, "allgather_bucket_size": 50000000, "reduce_bucket_size": 50000000, "overlap_comm": True},
    "wandb": {"enabled": True, "project": "seven"},
    "flops_profiler": {"enabled": False, "profile_step": 1},
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


def test_auto_leaves_our_settings(file):
    config, refused = run(file(TRAINER), "optimizer.lr=0.002", "precision=fp16")
    assert not refused
    assert (config.parallel.zero_stage, config.parallel.offload, config.tracking.log_every) == (3, "optimizer", 2000)
    assert (config.precision.loss_scale_window, config.precision.initial_loss_scale) == (500, 4096)
    assert (config.optimizer.schedule, config.optimizer.lr, config.optimizer.beta2) == ("constant", 0.002, 0.95)
    assert (config.training.global_batch_size, config.training.micro_batch_size) == (64, 4)


def test_file_of_a_megatron_run(file):
    config, refused = run(file(MEGATRON), "optimizer.lr=0.002", "parallel.tensor=2")
    assert not refused
    assert (config.training.global_batch_size, config.training.micro_batch_size, config.optimizer.gradient_clipping) == (32, 2, 0.5)
    assert (config.parallel.zero_stage, config.precision.dtype, config.optimizer.schedule) == (1, "bf16", "cosine")


def test_whole_job_with_defaults_of_deepspeed(file):
    config, refused = run(file(WHOLE), "training.global_batch_size=128")
    assert not refused
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.weight_decay) == (2e-4, 0.8, 0.99, 1e-8, 3e-7)
    assert (optimizer.schedule, optimizer.warmup_steps, optimizer.min_lr_ratio, config.training.steps) == ("cosine", 50, 0.05, 3000)
    assert (config.precision.dtype, config.precision.initial_loss_scale, config.tracking.project) == ("fp16", 2.0**15, "seven")
    without = deepspeed_json.read(config.parallel.deepspeed).without_effect
    assert {"prescale_gradients", "zero_optimization.overlap_comm", "fp16.hysteresis"} <= without.keys()


def test_number_of_micro_batches(file):
    (text,) = run(word := file(WHOLE), ranks=4)[1]
    assert text == (
        "training.global_batch_size=64: is not training.micro_batch_size=4 x 8 (gradient_accumulation_steps of "
        f"{word}) x 4 data ranks\n    fix: set training.global_batch_size=128"
    )
    assert run(file({**MEGATRON, "gradient_accumulation_steps": 4}), "model=llama-tiny", ranks=4)[1] == []
    (text,) = run(file({**MEGATRON, "gradient_accumulation_steps": 8}), ranks=4)[1]
    assert 'set gradient_accumulation_steps to "auto"' in text
    # DeepSpeed's default is one micro-batch.
    (text,) = run(file({"train_micro_batch_size_per_gpu": 2}), ranks=4)[1]
    assert "fix: set training.global_batch_size=8" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("optimizer.gradient_clipping=1.0",), "optimizer.gradient_clipping=1.0: contradicts gradient_clipping of parallel.deepspeed="),
        (("precision=fp16",), "precision.dtype=fp16: contradicts bf16.enabled of parallel.deepspeed="),
        (("experiment=demo",), "tracking.log_every=25: contradicts steps_per_print of parallel.deepspeed="),
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
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "zero_hpz_partition_size=8: gathers weights within a group"),
        ({"zero_optimization": {"stage": 2, "mics_shard_size": 2}}, "mics_shard_size=2: shards weights, which DeepSpeed does with ZeRO 3"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2.5}}, "mics_shard_size=2.5: is not a number of ranks"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 3}}, "parallel.zero_group=3: is no size of groups"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            'offload_optimizer.device="nvme": is not supported\n    fix: set it to none or cpu',
        ),
        (
            {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
            "parallel.offload=optimizer: keeps the rank's partition",
        ),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, 'offload_param.device="cpu": weights stay on the device'),
        ({"optimizer": {"type": "OneBitAdam", "params": {}}}, 'optimizer.type="OneBitAdam": is not an optimizer of this program'),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}}, "weight decay is decoupled"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "max_grad_norm=1: is not a parameter of Adam"),
        ({"optimizer": {"type": "Adam", "params": {"betas": 0.9}}}, "betas=0.9: is not a list of two numbers"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "set it to WarmupLR, WarmupDecayLR, WarmupCosineLR, or remove it"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, 'warmup_type="log": the warm-up is linear\n    fix: set warmup_type to linear'),
        (
            {**WHOLE, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.001, "warmup_type": "linear"}}},
            "scheduler.params.warmup_max_lr=0.001: contradicts optimizer.params.lr=0.0002: both set optimizer.lr",
        ),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale=128: the loss scale is dynamic"),
        ({"fp16": {"enabled": True, "hysteresis": 2}}, "fp16.hysteresis=2"),
        ({"communication_data_type": "fp16"}, 'communication_data_type="fp16": is not supported\n    fix: set it to fp32 or bf16'),
        ({"flops_profiler": {"enabled": True}}, "run stage=plan, or set training.profile=[STEP]"),
        ({"compression_training": {"weight_quantization": {}}}, "set training.fake_quantize=int8"),
        ({"train_batch_sise": 4}, "train_batch_sise=4: is not a key that is known here\n    fix: did you mean train_batch_size or"),
        ({"zero_optimization": {"stagee": 4}}, "did you mean zero_optimization.stage"),
        ({"train_batch_size": "32"}, 'train_batch_size="32": is not a number'),
        ({"steps_per_print": 1.5}, "steps_per_print=1.5: is not an integer"),
        ({"zero_optimization": True}, "zero_optimization=true: is not a section"),
        ({"zero_optimization": {"stage": 4}}, "parallel.zero_stage=4: must be at least 0 and at most 3"),
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"bf16": {}, "bf16": {}}', "bf16 occurs twice"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value)[:60],
)
def test_what_is_refused(file, content, message):
    _, refused = run(file(content), "training.global_batch_size=128")
    assert any(message in text for text in refused), refused


def test_groups_of_mics(file):
    grouped = file({"zero_optimization": {"stage": 3, "mics_shard_size": 2}})
    assert run(grouped)[0].parallel.zero_group == "2"
    assert not run(grouped)[1]
    assert any("contradicts zero_optimization.mics_shard_size" in text for text in run(grouped, "parallel.zero_group=4", ranks=8)[1])
    for value in (-1, 0, "auto"):
        config, refused = run(file({"zero_optimization": {"stage": 3, "mics_shard_size": value}}), "parallel.zero_group=2")
        assert (config.parallel.zero_group, refused) == ("2", [])


def test_no_dtype_is_fp32(file):
    assert run(file({"fp16": {"enabled": False}}))[0].precision.dtype == "fp32"
    assert run(file({}))[0].precision.dtype == "bf16"  # ours


def test_missing_file_and_other_stages(file, tmp_path):
    assert "cannot be read: No such file" in run(f"parallel.deepspeed={tmp_path}/no.json")[1][0]
    assert run("parallel.deepspeed=null")[1] == []
    _, refused = run(file(MEGATRON), "stage=plan", "stage.search=true", "cluster.hardware=h100")
    assert any("this stage plans others" in text for text in refused), refused
