"""Settings that a job would not read are refused, and so are weights that the zero-bubble schedule cannot train."""

import pytest

from pipeline.common import knobs
from pipeline.config.rules import check, unread
from tests.world import configured

ZBV = ("parallel.schedule=zbv", "parallel.pipeline=2", "training.micro_batch_size=2", "training.global_batch_size=32")
WSD = ("optimizer.schedule=wsd",)
STAGE = "{until_step: 10, value: 30}"
QWEN3_NEXT = "model=qwen3-next-tiny"
GEMMA4 = "model=gemma4-tiny"
GEMMA4_KEYS = (GEMMA4, "model.attention_k_eq_v=true", "model.global_kv_heads=2")
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
        (("training.delta_rule=plain",), "training.delta_rule=plain: has no effect with model.family="),
        (("model=kimi-linear-tiny", "training.delta_rule=fla"), None),
        (("model=kimi-linear-tiny", "training.delta_rule=fla", "precision=fp32"), "training.delta_rule=fla: computes in 16 bits"),
        (("training.head_z_loss=1e-4",), None),
        (("training.objective=dpo", "training.head_z_loss=1e-4"), "training.head_z_loss=0.0001: has no effect with the objective dpo"),
        ((QWEN3_NEXT, "parallel.tensor=4", "model.linear_key_heads=2"), "parallel.tensor=4: must divide model.linear_key_heads=2"),
        ((QWEN3_NEXT, "parallel.tensor=4", "model.shared_ffn_hidden=6"), "parallel.tensor=4: must divide model.shared_ffn_hidden=6"),
        (
            (QWEN3_NEXT, "optimizer.name=muon", "optimizer.muon_per_head=true"),
            "optimizer.muon_per_head=True: is not supported for model.fam",
        ),
        ((QWEN3_NEXT, "model.linear_value_heads=6"), "model.linear_value_heads=6: must be a multiple of model.linear_key_heads=4"),
        ((QWEN3_NEXT, "model.partial_rotary_factor=0.1"), "model.partial_rotary_factor=0.1: rotates 3 of the 32 dims of a head"),
        ((QWEN3_NEXT,), None),
        ((GEMMA4, "parallel.pipeline=2"), "parallel.pipeline=2: has stages that exchange hidden states, and blocks of model.family=gemma4"),
        ((GEMMA4, "parallel.pipeline=2", "model.layer_input_width=0"), "also read keys of earlier layers (model.kv_shared_layers=2)"),
        ((GEMMA4, "parallel.pipeline=2", "model.layer_input_width=0", "model.kv_shared_layers=0"), None),
        (
            (GEMMA4, "training.activation_checkpointing=selective", "training.activation_budget=99"),
            "training.activation_budget=99.0: is chosen for each block alone",
        ),
        ((GEMMA4, "model.global_kv_heads=2"), "requires model.attention_k_eq_v=true"),
        ((*GEMMA4_KEYS, "model.global_kv_heads=3"), "model.global_kv_heads=3: must divide model.heads=8"),
        ((*GEMMA4_KEYS, "parallel.tensor=4"), "parallel.tensor=4: must divide model.global_kv_heads=2"),
        (
            (*GEMMA4_KEYS, "parallel.context=4", "parallel.context_kind=ulysses"),
            "parallel.context=4: must divide model.global_kv_heads=2",
        ),
        ((*GEMMA4_KEYS, "optimizer.name=muon", "optimizer.muon_per_head=true"), "is not supported with model.global_kv_heads=2"),
        ((GEMMA4, "optimizer.name=muon", "optimizer.muon_per_head=true"), None),
        ((GEMMA4, "model.kv_shared_layers=3"), "model.kv_shared_layers=3: leaves no layer with keys and values of its own"),
        ((GEMMA4, "model.kv_shared_layers=4"), "model.kv_shared_layers=4: leaves no layer with keys and values of its own"),
        ((GEMMA4, "model.kv_shared_layers=4", "model.sliding_window_pattern=1"), "leaves no layer with keys and values of its own"),
        ((GEMMA4, "model.global_head_width=33"), "model.global_head_width=33: is odd"),
        ((GEMMA4, "model.rope_scaling=yarn"), "model.rope_scaling=yarn: is not supported by model.family=gemma4"),
        ((GEMMA4, "optimizer.qk_clip=9"), "optimizer.qk_clip=9.0: has no effect on model.family=gemma4"),
        (("training.dpo_beta=0.2",), "training.dpo_beta=0.2: has no effect with the objective causal"),
        (("++lora.rank_pattern={a:2}",), "lora.rank_pattern={'a': 2}: has no effect with lora.rank=0"),
        (("++lora.alpha_pattern={a:2}",), "lora.alpha_pattern={'a': 2.0}: has no effect with lora.rank=0"),
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


#: Keys of pretrain, or of a group, that every run reads.
ALWAYS = """
run_dir data.tokens data.seed data.packing data.verify data.stage_in data.prefetch data.blend data.blend_weights data.phases
data.teacher data.remove data.infill.rate
tokenizer.path training.steps training.objective training.frozen training.fake_quantize training.global_batch_size
training.micro_batch_size training.sequence_length training.sequence_warmup training.batch_rampup training.phases training.head_z_loss
training.goldfish_k training.seed training.document_mask training.activation_checkpointing training.attention training.compile
training.deterministic training.validate_every training.validation_batches training.ema training.max_skipped_steps
training.spike_factor training.timeout_minutes training.check_replicas_every training.noise_scale_every training.recompute_every
training.profile lora.rank lora.adapter optimizer.name optimizer.lr optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.state_dtype
optimizer.weight_decay optimizer.gradient_clipping optimizer.qk_clip optimizer.schedule optimizer.warmup_steps
optimizer.min_lr_ratio parallel.tensor parallel.pipeline parallel.context parallel.expert parallel.zero_stage parallel.zero_group
parallel.offload parallel.deepspeed precision.dtype precision.fp8 precision.reduce_dtype checkpoint.every checkpoint.every_minutes
checkpoint.keep checkpoint.keep_every checkpoint.files checkpoint.resume checkpoint.fork checkpoint.initialize_from
checkpoint.async_save checkpoint.max_failures checkpoint.skip_damaged evaluation.every certify.required tracking.wandb
tracking.log_every checkpoint.failing_minutes dry_run.enabled dry_run.rank
"""
#: Keys that pretrain accepts without effect: they belong to other stages of the same file or chain, or are prepared for another value.
REASONS = {
    "of the data stages": """data.input data.corpora data.text_field data.suffixes data.exclude data.document_megabytes data.main_content
data.shards data.part_megabytes data.shard_megabytes data.validation_fraction data.documents_per_member data.quarantine_limit
data.save_dropped data.sample data.compare data.select clean. dedup.""",
    "of train_tokenizer and tokenize": "tokenizer.",
    "of finetune, later in a chain": "data.instructions. training.attention_group lora.quantize lora.modules_to_save",
    "of encoder-decoders, which the tokenizer decides": "data.decoder_start",
    "of the engine, which is built after the rules": "parallel.engine",
    "of the layouts that a job chooses among": "parallel.async_tensor parallel.sequence_parallel",
    "of jobs that Slurm starts": "cluster. evaluation.sbatch submit.",
    "prepared for tracking=online": "tracking.project tracking.name",
    "printed by a dry run and a plan": "training.token_budget",
}
#: Value of a key, and settings with which it is read.
READ = {
    "parallel.schedule": ("interleaved", ("parallel.pipeline=2", "parallel.stages_per_rank=2")),
    "parallel.stages_per_rank": (2, ("parallel.pipeline=2", "parallel.schedule=interleaved")),
    "parallel.balance": ("layers", ("parallel.pipeline=2",)),
    "parallel.layers_per_stage": ("[1,3]", ("parallel.pipeline=2",)),
    "parallel.context_kind": ("ulysses", ("parallel.context=2",)),
    "parallel.expert_padding": ("true", ("model=mixtral-tiny", "model.capacity_factor=2", "parallel.expert=2")),
    "parallel.expert_parts": (2, ("model=mixtral-tiny", "model.capacity_factor=2", "parallel.expert=2", "parallel.expert_padding=true")),
    "parallel.expert_buffer": (2, ("model=mixtral-tiny", "parallel.expert=2", "parallel.expert_padding=true")),
    "parallel.expert_tensor": (1, ("model=mixtral-tiny", "parallel.tensor=2")),
    "precision.initial_loss_scale": (8, ("precision=fp16",)),
    "precision.loss_scale_window": (8, ("precision=fp16",)),
    "precision.fp8_exclude_layers": (0, ("precision=fp8",)),
    "precision.fp8_experts": ("true", ("precision=fp8", "model=mixtral-tiny")),
    **{
        f"checkpoint.{name}": (value, ("checkpoint.initialize_from=x",))
        for name, value in {"expert_noise": 0.1, "expert_reinitialized": 0.5, "new_blocks": "last"}.items()
    },
    "optimizer.beta3": (0.5, ("optimizer=ademamix",)),
    "optimizer.alpha": (2, ("optimizer=ademamix",)),
    "optimizer.slow_warmup_steps": (7, ("optimizer=ademamix",)),
    **{
        f"optimizer.muon_{name}": (value, ("optimizer=muon",))
        for name, value in {
            "momentum": 0.5,
            "nesterov": "false",
            "steps": 3,
            "adjust_lr": "original",
            "lr_factor": 2,
            "per_head": "true",
        }.items()
    },
    "optimizer.warmup_ratio": (0.1, ("optimizer.warmup_steps=0",)),
    "optimizer.decay_steps": (50, WSD),
    "optimizer.decay_shape": ("sqrt", WSD),
    "optimizer.decay_ends": ("[300]", WSD),
    "training.epochs": (2, ()),
    "training.context_factor": (2, ()),
    "training.preference_loss": ("ipo", ()),
    "training.dpo_beta": (0.2, ()),
    "training.simpo_margin": (0.2, ()),
    "training.teacher_weight": (0.5, ("data.teacher=x",)),
    "training.goldfish_context": (7, ("training.goldfish_k=4",)),
    "training.diffusion_eps": (0.2, ("model=bert-tiny", "training.objective=masked_diffusion")),
    "training.balance_loss": (0.1, ("model=mixtral-tiny",)),
    "training.balance_loss_schedule": ("[{until_step: 5, value: 1}]", ("model=mixtral-tiny",)),
    "training.z_loss": (0.1, ("model=mixtral-tiny",)),
    "training.z_loss_schedule": ("[{until_step: 5, value: 1}]", ("model=mixtral-tiny",)),
    "training.bias_update_speed": (0.1, ("model=deepseek-tiny",)),
    "training.bias_update_speed_schedule": ("[{until_step: 5, value: 1}]", ("model=deepseek-tiny",)),
    "training.mtp_loss": (0.1, ("model=deepseek-tiny", "model.mtp_depth=1")),
    "training.mtp_loss_schedule": ("[{until_step: 5, value: 1}]", ("model=deepseek-tiny", "model.mtp_depth=1")),
    "training.delta_rule": ("plain", ("model=qwen3-next-tiny",)),
    "training.activation_budget": (5, ("training.activation_checkpointing=selective",)),
    "training.spike_window": (9, ("training.spike_factor=6",)),
    "training.spike_patience": (3, ("training.spike_factor=6",)),
    "training.max_rewinds": (3, ("training.spike_factor=6",)),
    "training.profile_ranks": ("[1]", ("training.profile=[3]",)),
    "lora.alpha": (3, ("lora.rank=4",)),
    "lora.dropout": (0.1, ("lora.rank=4",)),
    "lora.targets": ("[embed*]", ()),
    "lora.rank_pattern": ("{a: 2}", ("lora.rank=4",)),
    "lora.alpha_pattern": ("{a: 2}", ("lora.rank=4",)),
    **{
        f"data.infill.{name}": (value, ("data.infill.rate=0.5",))
        for name, value in {"spm_rate": 0.1, "prefix": "a", "middle": "b", "suffix": "c"}.items()
    },
    **{
        f"data.masking.{name}": (value, ("model=bert-tiny",))
        for name, value in {"rate": 0.2, "random": 0.2, "keep": 0.2, "mask": "a", "first": "b", "between": "c"}.items()
    },
    **{f"data.spans.{name}": (value, ("model=t5-tiny",)) for name, value in {"rate": 0.2, "mean_length": 4, "sentinel": "x*"}.items()},
    **{
        f"data.pairs.{name}": (value, ("model=transformer-tiny",))
        for name, value in {"train": "[a]", "validation": "[a]", "source": "a", "target": "b"}.items()
    },
    **{
        f"evaluation.{name}": (value, ("evaluation.every=5",))
        for name, value in {
            "validation": "false",
            "tasks": "[a]",
            "nodes": 2,
            "tasks_per_node": 2,
            "time": "02:00:00",
            "overrides": "[a]",
        }.items()
    },
    **{f"evaluation.{name}": (3, ("evaluation.every=5", "evaluation.tasks=[a]")) for name in ("task_folder", "few_shot", "limit")},
    "certify.certificate": ("a.json", ("certify.required=true",)),
    "dry_run.world_size": (4, ("dry_run.enabled=true",)),
}


def test_every_key_has_an_effect_or_a_reason():
    """A new key belongs to ALWAYS, READ or REASONS; those in READ are refused where they are not read, and not where they are."""
    accepted = tuple(" ".join(REASONS.values()).split())
    config = configured("stage=pretrain", "model=llama-tiny")
    keys = {key for key, _, _ in knobs.walk(config) if not key.startswith(("model.", "stage."))}
    unknown = {key for key in keys - READ.keys() - set(ALWAYS.split()) if not key.startswith(accepted)}
    assert not unknown, "neither read by every run, nor refused, nor accepted for a reason"
    assert set(ALWAYS.split()) <= keys


def test_keys_are_refused_where_they_are_not_read():
    """In two jobs: keys with which others are read are not set beside them."""
    enabling = {word.partition("=")[0] for _, words in READ.values() for word in words}
    for keys in (READ.keys() & enabling, READ.keys() - enabling):
        words = [f"++{key}={READ[key][0]}" for key in sorted(keys)]
        found = check.violations(configured("stage=pretrain", "model=llama-tiny", *words), 1)
        assert keys - {violation.key for violation in found} == set()


@pytest.mark.parametrize("words", sorted({words for _, words in READ.values() if words}), ids=" ".join)
def test_keys_are_accepted_where_they_are_read(words):
    keys = {key: value for key, (value, needed) in READ.items() if needed == words}
    config = configured("stage=pretrain", "model=llama-tiny", *words, *(f"++{key}={value}" for key, value in keys.items()))
    assert [found.key for found in check.violations(config, 1) if found.key in keys and "has no effect" in found.rule] == []


@pytest.mark.parametrize(
    "words",
    [
        ("optimizer.min_lr_ratio=0.2", "optimizer.schedule=constant"),
        ("optimizer.eps=1e-6", "optimizer=lion"),
        ("checkpoint.skip_damaged=true", "checkpoint.resume=none"),
        ("training.goldfish_k=4", "model=bert-tiny"),
        ("cluster.preflight_seconds=60", "cluster.preflight=off"),
        ("optimizer.warmup_ratio=0.05", "optimizer.warmup_steps=10"),
        ("data.blend_weights=epochs",),
        ("training.sequence_warmup=[{until_step: 10, value: 256}]",),
        ("evaluation.few_shot=3", "evaluation.every=100"),
        ("model.rope_factor=4", "model.rope_scaling=none"),
        ("dedup.bands=8", "dedup.near=false", "stage=shard"),
        ("dedup.url_field=a", "stage=shard"),
        ("dedup.paragraph_characters=9", "stage=shard"),
        ("dedup.span_megabytes=9", "stage=shard"),
        ("clean.gopher.symbols=0.5", "clean.steps=[repair]", "stage=shard"),
        ("stage.top_k=4", "stage=generate"),
        ("stage.length_penalty=2", "stage=generate"),
        ("stage.speculative_tokens=2", "stage=generate"),
    ],
)
def test_a_key_that_other_settings_make_useless(words):
    key = words[0].partition("=")[0]
    said = [str(found) for found in check.violations(configured("stage=pretrain", "model=llama-tiny", *words), 1)]
    assert any(text.startswith(key) and "no effect" in text for text in said), said


def test_warm_ups_beyond_the_end_are_named():
    """And not refused: the run may be continued with more steps."""
    words = (
        "training.batch_rampup=[{until_step: 1000, value: 32}]",
        "training.sequence_warmup=[{until_step: 10, value: 64}, {until_step: 1020, value: 128}]",
        "training.z_loss_schedule=[{until_step: 10, value: 1}, {until_step: 20, value: 2}]",
        "++data.blend={a: {}, b: {}}",
        "data.phases=[{until_tokens: 1000, weights: {a: 1}}, {until_tokens: 1000000000, weights: {b: 1}}, {weights: {a: 1}}]",
    )
    config = configured("stage=pretrain", "model=mixtral-tiny", "training.steps=1000", *words)
    named = [line.partition(" ")[0] for line in unread.beyond_the_end(config)]
    assert named == ["training.batch_rampup", "training.sequence_warmup", "data.phases.2"]
    assert not check.violations(config, 1)
