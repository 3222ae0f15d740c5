"""Settings that a job would not read are refused, and so are weights that the zero-bubble schedule cannot train."""

import pytest

from pipeline.config.rules import check
from tests.world import configured

ZBV = ("parallel.schedule=zbv", "parallel.pipeline=2", "training.micro_batch_size=2", "training.global_batch_size=32")
WSD = ("optimizer.schedule=wsd",)
STAGE = "{until_step: 10, value: 30}"
QWEN3_NEXT = "model=qwen3-next-tiny"
DEEPSEEK = ("model=deepseek-tiny", "model.layers=8", "model.dense_layers=0")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("optimizer.decay_steps=50",), "optimizer.decay_steps=50: has no effect with optimizer.schedule=cosine"),
        (("optimizer.decay_steps=50", "optimizer.schedule=wsd"), None),
        (
            ("optimizer.decay_shape=sqrt", "optimizer.schedule=linear"),
            "optimizer.decay_shape=sqrt: has no effect with optimizer.schedule=lin",
        ),
        (("optimizer.decay_ends=[50]",), "optimizer.decay_ends=[50]: has no effect with optimizer.schedule=cosine"),
        (("optimizer.decay_ends=[111,124]", *WSD), None),
        (
            ("optimizer.decay_ends=[110]", *WSD),
            "optimizer.decay_ends.0=110: is the end of a decay of 11 steps, which begins before the end of",
        ),
        (("optimizer.decay_ends=[300,310]", *WSD), "set it to at least 333, or reduce optimizer.decay_steps"),
        (("optimizer.decay_ends=[500,2000]", *WSD), "optimizer.decay_ends.1=2000: is not before training.steps=1000"),
        (("parallel.expert_tensor=1",), "parallel.expert_tensor=1: requires an MoE model; model.family=llama has no experts"),
        (
            ("optimizer.decay_ends=[950]", *WSD),
            "training.steps=1000: is the end of a decay of 100 steps, which begins before the end of the decay",
        ),
        ((f"training.batch_rampup=[{STAGE}]", "training.micro_batch_size=8"), "set it to 32, the nearest one, or another multiple of 8"),
        (("parallel.schedule=zbv",), "parallel.schedule=zbv: has no effect with parallel.pipeline=1"),
        (("parallel.stages_per_rank=2",), "parallel.stages_per_rank=2: has no effect with parallel.pipeline=1"),
        (("model.layers=8", *ZBV), None),
        (("model=t5-tiny", "model.layers=8", *ZBV), "stage 1 of 4 shares the relative position biases of 2 encoder blocks"),
        (("model=t5-tiny", "model.layers=4", *ZBV), None),
        (("model=t5-tiny", "model.layers=5", "model.encoder_layers=3", "parallel.layers_per_stage=[2,1,1,1]", *ZBV), None),
        ((*DEEPSEEK, "model.mtp_depth=1", *ZBV), None),
        ((*DEEPSEEK, "model.mtp_depth=2", *ZBV), "stage 3 of 4 shares the embedding in model.mtp_depth=2 MTP modules"),
        ((*DEEPSEEK, "model.mtp_depth=2", *ZBV, "parallel.schedule=1f1b"), None),
        (("model=gemma2-tiny", "training.attention=sdpa"), "training.attention=sdpa: has no kernel with a soft cap of the scores"),
        (("model=gemma2-tiny", "training.attention=sdpa", "model.attn_logit_softcapping=null"), None),
        (("model=gemma2-tiny", "training.attention=plain"), None),
        (("model=gpt-oss-tiny", "training.attention=sdpa"), "training.attention=sdpa: has no kernel with attention sinks"),
        (("model=gpt-oss-tiny", "training.attention=flex"), None),
        (("training.head_z_loss=1e-4",), None),
        (
            ("training.objective=dpo", "training.head_z_loss=1e-4"),
            "training.head_z_loss=0.0001: has no effect with the objective dpo",
        ),
        ((QWEN3_NEXT, "parallel.tensor=4", "model.linear_key_heads=2"), "parallel.tensor=4: must divide model.linear_key_heads=2"),
        ((QWEN3_NEXT, "parallel.tensor=4", "model.shared_ffn_hidden=6"), "parallel.tensor=4: must divide model.shared_ffn_hidden=6"),
        (
            (QWEN3_NEXT, "optimizer.name=muon", "optimizer.muon_per_head=true"),
            "optimizer.muon_per_head=True: is not supported for model.fam",
        ),
        ((QWEN3_NEXT, "model.linear_value_heads=6"), "model.linear_value_heads=6: must be a multiple of model.linear_key_heads=4"),
        ((QWEN3_NEXT, "model.partial_rotary_factor=0.1"), "model.partial_rotary_factor=0.1: rotates 3 of the 32 dims of a head"),
        ((QWEN3_NEXT,), None),
        (("training.dpo_beta=0.2",), "training.dpo_beta=0.2: has no effect with the objective causal"),
        (("++lora.rank_pattern={a:2}",), "lora.rank_pattern={'a': 2}: has no effect without adapters"),
        (("++lora.alpha_pattern={a:2}",), "lora.alpha_pattern={'a': 2.0}: has no effect without adapters"),
        (("lora.rank=4", "++lora.rank_pattern={a:2}", "++lora.alpha_pattern={a:2}"), None),
    ],
)
def test_what_is_refused(settings, message):
    config = configured("stage=pretrain", "model=llama-tiny", *settings)
    found = [str(violation) for violation in check.violations(config, config.parallel.pipeline)]
    assert any(message in text for text in found) if message else not found, found


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        (("stage.input=x",), []),
        (("stage.input=x", "stage.shard_gigabytes=1"), []),
        (("stage.input=x", "stage.format=gguf", "stage.output=y"), ["format", "output"]),
        (("stage.input=x", "stage.dtype=bf16", "stage.checkpoint=y", "stage.weights=ema"), ["dtype", "checkpoint", "weights"]),
        (("stage.input=x", "stage.quantize=int4"), ["quantize"]),
        (("stage.format=peft", "stage.output=y", "stage.checkpoint=y", "stage.weights=ema"), []),
        (("stage.format=peft", "stage.dtype=bf16", "stage.adapter=y", "stage.shard_gigabytes=1"), ["dtype", "adapter", "shard_gigabytes"]),
        (("stage.group_size=64", "stage.symmetric=false", "stage.sample_tokens=9"), ["group_size", "symmetric", "sample_tokens"]),
        (("stage.quantize=int8", "stage.group_size=64"), ["group_size"]),
        (("stage.quantize=int4", "stage.group_size=64", "stage.symmetric=false"), []),
        (("stage.quantize=q8_0", "stage.format=gguf", "stage.granularity=tensor"), ["granularity"]),
        (("stage.quantize=int4", "stage.sample_tokens=9"), ["sample_tokens"]),
        (("stage.quantize=int4", "stage.sample_tokens=9", "stage.held_out=[z]"), []),
    ],
)
def test_what_convert_does_not_read(settings, keys):
    found = check.violations(configured("stage=convert", *settings), 1)
    assert {violation.key for violation in found} == {f"stage.{key}" for key in keys}
