"""The keys of a DeepSpeed configuration (release 0.19): what each one sets here, has no effect on, or is refused for.

The keys of `optimizer`, `scheduler`, `bf16` and `fp16` depend on each other; config/deepspeed_sections.py reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Only:
    """A key of which some values describe what is done here anyway.

    Attributes:
        values: those that are accepted, without effect.
        rule: why others are refused.
        fix: what to set instead.
    """

    values: tuple[Any, ...]
    rule: str
    fix: str


#: Our key -> what a value of the file is called here; others are refused.
VALUES = {
    "parallel.offload": {"none": "none", "cpu": "optimizer"},
    "precision.reduce_dtype": {"fp32": "fp32", "bf16": "bf16"},
}
#: MiCS: ZeRO 3 within so many ranks, replicated outside. Files for older releases have it, 0.19 no longer does.
MICS = "zero_optimization.mics_shard_size"
#: Key -> our key, which gets the same value.
SETS = {
    "train_batch_size": "training.global_batch_size",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "gradient_clipping": "optimizer.gradient_clipping",
    "communication_data_type": "precision.reduce_dtype",
    "steps_per_print": "tracking.log_every",
    "zero_optimization.stage": "parallel.zero_stage",
    "zero_optimization.offload_optimizer.device": "parallel.offload",
    MICS: "parallel.zero_group",
    "tensor_parallel.autotp_size": "parallel.tensor",
    "wandb.project": "tracking.project",
}

_BUCKETS = "buckets follow the blocks of the model, and are reduced and gathered beside the passes"
_FILES = "checkpoints are written in a format of their own"
#: Key or section -> why it has no effect. A section stands for all of its keys.
WITHOUT_EFFECT = {
    **{
        f"zero_optimization.{name}": _BUCKETS
        for name in (
            *("allgather_partitions", "allgather_bucket_size", "reduce_scatter", "reduce_bucket_size", "overlap_comm"),
            *("contiguous_gradients", "round_robin_gradients", "use_multi_rank_bucket_allreduce", "sub_group_size", "parameter_alignment"),
            *("stage3_prefetch_bucket_size", "prefetch_bucket_size", "stage3_max_live_parameters", "max_live_parameters"),
            *("stage3_max_reuse_distance", "max_reuse_distance", "stage3_module_granularity_threshold", "module_granularity_threshold"),
            *("stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params", "stage3_allgather_sequential"),
            *("allgather_sequential", "override_module_apply", "memory_efficient_linear", "legacy_stage1", "leaf_module"),
        )
    },
    **{
        f"zero_optimization.{name}": "vectors are replicated under ZeRO 3, matrices are sharded"
        for name in (
            *("stage3_param_persistence_threshold", "param_persistence_threshold"),
            *("stage3_model_persistence_threshold", "model_persistence_threshold"),
        )
    },
    **{
        f"zero_optimization.{name}": _FILES
        for name in (
            *("load_from_fp32_weights", "elastic_checkpoint", "pipeline_loading_checkpoint", "save_muon_momentum_buffer_in_memory"),
            *("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save"),
            "stage3_gather_fp16_weights_on_model_save",
        )
    },
    **{
        f"zero_optimization.{name}": "the gradient norm is computed and verified in every step"
        for name in ("compute_grad_norm", "enable_sanity_checks", "log_trace_cache_warnings", "ignore_unused_parameters")
    },
    "checkpoint": _FILES,
    "datastates_ckpt": _FILES,
    "nebula": _FILES,
    "aio": "nothing is offloaded to NVMe",
    "prescale_gradients": "sums of gradients in fp32 and bf16 do not overflow",
    "gradient_predivide_factor": "sums of gradients in fp32 and bf16 do not overflow",
    "disable_allgather": _BUCKETS,
    "zero_allow_untested_optimizer": "the optimizer is optimizer.name",
    "zero_force_ds_cpu_optimizer": "the optimizer is optimizer.name",
    "optimizer.legacy_fusion": "the optimizer is PyTorch's fused one",
    "wall_clock_breakdown": "metrics.jsonl has the times of a step; training.profile=[STEP] records one",
    "memory_breakdown": "metrics.jsonl has the memory; training.profile=[STEP] records a step",
    "dump_state": "run_dir/config.yaml has the settings",
    "log_level": "the log has one level",
    "timers": "metrics.jsonl has the times of a step",
    "disable_python_gc": "garbage collection is controlled by the program",
    "dataloader_drop_last": "a sample is never dropped",
    "vocabulary_size": "the vocabulary is model.vocab_size",
    "managed_gradient_accumulation": "a step accumulates the micro-batches of its batch",
    "data_types.buffer_dtype": "the models have no trained buffers",
    **{
        f"activation_checkpointing.{name}": "training.activation_checkpointing decides what is recomputed"
        for name in ("contiguous_memory_optimization", "number_checkpoints", "synchronize_checkpoint_boundary", "profile")
    },
    "activation_checkpointing.partition_activations": "parallel.sequence_parallel splits them over the tensor ranks",
    "wandb.enabled": "set tracking=online, offline or disabled",
    **{
        f"zero_optimization.offload_optimizer.{name}": "its copies are pinned, and made once a step"
        for name in ("pin_memory", "buffer_count", "fast_init", "pipeline_read", "pipeline_write", "pipeline", "cpuadam_cores_perc")
    },
    **{
        f"zero_optimization.offload_param.{name}": "weights stay on the device"
        for name in ("pin_memory", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu")
    },
}

_FP32 = (None, "fp32", "float32", "torch.float32")
_NOT_QUANTIZED = Only((False,), "weights and gradients are sent in full", "set it to false; precision=fp8 multiplies in 8 bits")
#: Key -> values that describe what is done here; others are refused.
ONLY = {
    "seq_parallel_communication_data_type": Only(_FP32, "gradients are reduced in fp32", "remove it, or set it to fp32"),
    "data_types.grad_accum_dtype": Only(_FP32, "gradients are accumulated in fp32", "remove it, or set it to fp32"),
    "data_types.param_dtype": Only((None,), "weights have the dtype of bf16.enabled and fp16.enabled", "set one of these instead"),
    "data_types.keep_in_fp32_modules": Only(("auto", []), "no module is kept in fp32", "remove it, or set precision=fp32"),
    "gradient_allreduce_op": Only(("mean",), "the loss is the mean over the tokens of all ranks", "set it to mean"),
    "sparse_gradients": Only((False,), "gradients are dense", "set it to false"),
    "train_iterations": Only((None,), "is not a setting of DeepSpeed", "set training.steps"),
    "use_data_before_expert_parallelism": Only((False,), "expert ranks are inside the data ranks", "set it to false"),
    "activation_checkpointing.cpu_checkpointing": Only(
        (False,), "activations stay on the device", "set it to false, and training.activation_checkpointing=full"
    ),
    "zero_optimization.offload_optimizer.nvme_path": Only((None,), "nothing is offloaded to NVMe", "remove it"),
    "zero_optimization.offload_optimizer.ratio": Only((1, 1.0), "all of the optimizer state is in one place", "set it to 1"),
    "zero_optimization.offload_optimizer.super_offload": Only((False,), "is not supported", "set it to false"),
    "zero_optimization.offload_param.device": Only(
        ("none", None), "weights stay on the device", 'set it to "none", and parallel.zero_stage=3 or more tensor and pipeline ranks'
    ),
    "zero_optimization.cpu_offload": Only((False, None), "is deprecated", 'set "offload_optimizer": {"device": "cpu"}'),
    "zero_optimization.cpu_offload_param": Only((False, None), "weights stay on the device", "set it to false"),
    "zero_optimization.cpu_offload_use_pin_memory": Only((False, True, None), "is deprecated", "remove it"),
    "zero_optimization.zenflow": Only((None,), "all weights are updated in every step", "remove it"),
    "zero_optimization.zero_hpz_partition_size": Only(
        (0, 1),
        "gathers weights within a group and keeps gradients and optimizer state over all data ranks",
        "set it to 1; parallel.zero_group=node keeps all three within a node, and needs its memory",
    ),
    "zero_optimization.mics_hierarchical_params_gather": Only((False,), "weights are gathered at once", "set it to false"),
    "zero_optimization.zero_quantized_weights": _NOT_QUANTIZED,
    "zero_optimization.zero_quantized_nontrainable_weights": _NOT_QUANTIZED,
    "zero_optimization.zero_quantized_gradients": _NOT_QUANTIZED,
    "wandb.group": Only((None,), "is not a setting here", "set the environment variable WANDB_RUN_GROUP"),
    "wandb.team": Only((None,), "is not a setting here", "set the environment variable WANDB_ENTITY"),
}

#: Section -> why it is refused unless it is off (without keys, or with enabled=false), and what to set instead.
OFF = {
    "amp": ("Apex's mixed precision is not used", 'remove it, and set "bf16": {"enabled": true}'),
    "torch_autocast": ("the dtype of weights is that of products", 'remove it, and set "bf16": {"enabled": true}'),
    "flops_profiler": ("FLOPs are predicted before the run", "remove it, and run stage=plan, or set training.profile=[STEP]"),
    "comms_logger": ("collectives are not logged", "remove it, and set training.profile=[STEP]"),
    "autotuning": ("layouts are searched before the run", "remove it, and run stage=plan stage.search=true"),
    "elasticity": ("the batch does not follow the ranks", "remove it; cluster.min_nodes lets the layout follow the nodes"),
    "tensorboard": ("metrics are in run_dir/metrics.jsonl", "remove it, or set tracking=online for Weights & Biases"),
    "csv_monitor": ("metrics are in run_dir/metrics.jsonl", "remove it"),
    "comet": ("metrics are in run_dir/metrics.jsonl", "remove it, or set tracking=online for Weights & Biases"),
    "curriculum_learning": ("sequences are lengthened by another setting", "remove it, and set training.sequence_warmup"),
    "data_efficiency": ("every token of a sample is used", "remove it; training.sequence_warmup shortens early sequences"),
    "progressive_layer_drop": ("no layer is dropped", "remove it"),
    "eigenvalue": ("is not computed", "remove it"),
    "quantize_training": ("weights are quantized by other settings", "remove it, and set training.fake_quantize=int8"),
    "compression_training": ("weights are quantized by other settings", "remove it, and set training.fake_quantize=int8"),
    "weight_quantization": ("weights are quantized after training", "remove it, and run stage=convert stage.quantize=int8"),
    "sparse_attention": ("attention is sparse by other settings", "remove it, and set training.attention_group"),
    "hybrid_engine": ("generation is a stage of its own", "remove it, and run stage=generate"),
    "compile": ("blocks are compiled by another setting", "remove it, and set training.compile=on"),
    "pipeline": ("the pipeline is another one", "remove it, and set parallel.pipeline and parallel.schedule"),
    "expert_parallel": ("experts are distributed by another setting", "remove it, and set parallel.expert"),
}

#: Sections whose keys are listed above, or are read by deepspeed_sections.py; the value of each is a dictionary.
SECTIONS = (
    *("zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param", "activation_checkpointing"),
    *("data_types", "tensor_parallel", "wandb", "optimizer", "scheduler", "bf16", "fp16"),
)
