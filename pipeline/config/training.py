"""The configuration group of training: length, batches, objective, recomputation and kernels."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.knobs import knob
from pipeline.config.data import RampupConfig, ScheduledWeight, TrainingPhaseConfig, WarmupConfig


@dataclass(frozen=True)
class TrainingConfig:
    """Length of the run, batches, recomputation and kernels."""

    steps: int = knob(
        1000, "number of optimizer steps; finetune: 0, the default there, trains for training.epochs", at_least=0, at_most=10**7
    )
    epochs: float | None = knob(
        None, "finetune: passes over data.instructions.train, instead of training.steps; default: 3", unit="epochs", above=0, at_most=10**4
    )
    objective: str = knob(
        "auto",
        "what the model learns to predict: auto is the objective of its family; supervised: the answers in data.instructions; dpo: "
        "which of two answers is preferred; classification: the label of a text (BERT, RoBERTa); masked_diffusion: tokens of a text of "
        "which a random share is masked (BERT, RoBERTa, ModernBERT)",
        choices=("auto", "supervised", "dpo", "classification", "masked_diffusion"),
    )
    preference_loss: str = knob(
        "sigmoid",
        "dpo: the loss of a pair: DPO (sigmoid), DPO per token (sigmoid_norm), IPO, SLiC (hinge), or without a reference model SimPO and "
        "ORPO",
        choices=("sigmoid", "sigmoid_norm", "hinge", "ipo", "simpo", "orpo"),
    )
    dpo_beta: float = knob(
        0.1,
        "dpo: strength of the penalty for leaving the reference model, for orpo the weight of the odds ratio; sigmoid_norm and simpo "
        "compare means over tokens and need larger ones, such as 5 and 2",
        above=0,
    )
    simpo_margin: float = knob(0.0, "dpo: the margin between both rewards that preference_loss=simpo aims at", at_least=0)
    teacher_weight: float = knob(
        1.0, "data.teacher: share of the divergence in the loss; the cross-entropy of the text has the rest of 1", at_least=0, at_most=1
    )
    goldfish_k: int = knob(
        0,
        "goldfish loss: one of so many targets has no loss, chosen by a hash of the tokens before it, so that no text can be recited, "
        "such as 4; 0: all targets have one",
        at_least=0,
    )
    goldfish_context: int = knob(13, "goldfish loss: tokens that are hashed", unit="tokens", at_least=1)
    diffusion_eps: float = knob(
        1e-3,
        "masked_diffusion: smallest share of the tokens of a sequence that are masked; the share is drawn from here to 1",
        above=0,
        at_most=1,
    )
    frozen: list[str] = knob([], "patterns of names of weights that are not trained, such as embed.* or blocks.[0-3].*")
    fake_quantize: str = knob(
        "none",
        "quantization-aware training: linear layers of the blocks compute with weights rounded to 8 bits, as by stage.quantize=int8",
        choices=("none", "int8"),
    )
    global_batch_size: int = knob(
        64, "samples per optimizer step, over all ranks; finetune: 32", unit="sequences", at_least=1, at_most=10**7
    )
    micro_batch_size: int = knob(4, "samples per forward pass on one rank", unit="sequences", at_least=1)
    sequence_length: int = knob(256, "tokens per sequence", unit="tokens", at_least=2)
    sequence_warmup: list[WarmupConfig] = knob(
        [],
        "shorter sequences (tokens) in the first steps; each sample is split, so that the number of tokens per step is unchanged",
        item=WarmupConfig,
    )
    batch_rampup: list[RampupConfig] = knob(
        [], "smaller global batches (sequences) in the first steps, which may have fewer nodes", item=RampupConfig
    )
    phases: list[TrainingPhaseConfig] = knob(
        [],
        "pretrain: phases with other sequence lengths, batches, corpora or settings; the state is kept, and no sample is read twice",
        item=TrainingPhaseConfig,
    )
    balance_loss: float | None = knob(
        None,
        "weight of the load-balancing loss of each MoE layer; default: that of the checkpoint or imported model that the run starts "
        "from, or of the family (Mixtral 0.02, OLMoE 0.01, Qwen3-MoE 0.001, DeepSeek-V3 and GLM-4.5 0.0001)",
        at_least=0,
    )
    balance_loss_schedule: list[ScheduledWeight] = knob([], "other weights in the first steps", item=ScheduledWeight)
    z_loss: float | None = knob(None, "Mixtral, OLMoE, Qwen3-MoE: weight of the routers' z-loss; default: 0, OLMoE 0.001", at_least=0)
    z_loss_schedule: list[ScheduledWeight] = knob([], "other weights in the first steps", item=ScheduledWeight)
    head_z_loss: float = knob(
        0.0,
        "weight of the z-loss of the output head, the mean square of log Z over the targets, such as 1e-4 (PaLM): it keeps logits small, "
        "and is not in the loss that is logged",
        at_least=0,
    )
    bias_update_speed: float | None = knob(
        None,
        "DeepSeek-V3, GLM-4.5: change of the routers' correction biases per step, to balance the load; 0 disables it; default: 0.001",
        at_least=0,
    )
    bias_update_speed_schedule: list[ScheduledWeight] = knob([], "other speeds in the first steps", item=ScheduledWeight)
    mtp_loss: float | None = knob(
        None,
        "DeepSeek-V3, GLM-4.5: weight of the mean loss of the MTP modules (model.mtp_depth) in the training loss; default: 0.3",
        at_least=0,
    )
    mtp_loss_schedule: list[ScheduledWeight] = knob([], "other weights in the first steps", item=ScheduledWeight)
    seed: int = knob(0, "seed of the initial weights and of the sample order", at_least=0, at_most=10**18)
    document_mask: bool = knob(False, "restrict attention to tokens of the same document")
    activation_checkpointing: str = knob(
        "none",
        "recomputation in the backward pass: none, all but matrix products and attention (selective), or whole blocks, with inputs on the "
        "device (full) or in host memory (offload)",
        choices=("none", "selective", "full", "offload"),
    )
    activation_budget: float | None = knob(
        None,
        "with activation_checkpointing=selective: activations that a layer may keep of a micro-batch on a rank; the results that cost the "
        "most to compute again are kept; default: all results of matrix products and attention",
        unit="MB",
        above=0,
    )
    attention: str = knob(
        "auto",
        "attention kernel: PyTorch SDPA, flex attention, or the unfused formula (plain); auto chooses by GPU, dtype, head widths and mask "
        "(FlashAttention 3, cuDNN, FlashAttention 2, flex, memory-efficient) and logs the choice",
        choices=("auto", "sdpa", "flex", "plain"),
    )
    delta_rule: str = knob(
        "auto",
        "linear attention (GatedDeltaNet, Kimi Delta Attention): the kernels of flash-linear-attention, a package of its own "
        "(fla), or PyTorch's operators (plain); auto is fla on GPUs where it is installed, in 16 bits and without context parallelism, "
        "and logs the choice",
        choices=("auto", "fla", "plain"),
    )
    attention_group: int = knob(
        0,
        "shifted sparse attention (LongLoRA): training has attention in groups of so many tokens, shifted by half a group in half of the "
        "heads; 0: full attention. Validation has full attention",
        unit="tokens",
        at_least=0,
    )
    context_factor: float = knob(
        1.0,
        "finetune: the model gets a context that is longer by this factor than that of its checkpoint, by position interpolation",
        at_least=1,
        at_most=1024,
    )
    compile: str = knob(
        "auto", "compile the blocks with torch.compile; auto compiles on a GPU, but not with zbv", choices=("auto", "on", "off")
    )
    deterministic: bool = knob(
        False,
        "runs of a job on the same GPUs, software and layout are equal in every bit: deterministic algorithms of PyTorch (attention, "
        "scattered sums, generated kernels), cuDNN and cuBLAS (CUBLAS_WORKSPACE_CONFIG), no attention of cuDNN, no sums in switches "
        "(NCCL_NVLS_ENABLE=0, NCCL_COLLNET_ENABLE=0); an operation without such an algorithm fails by name. Slower",
    )
    validate_every: int = knob(0, "steps between validations; 0 validates only at the end", unit="steps", at_least=0)
    validation_batches: int | None = knob(
        8,
        "global batches per validation: a sample of the validation split, of all corpora in proportion to their tokens, always the same; "
        "null, or more than there are, reads all of it",
        at_least=1,
    )
    ema: float | None = knob(
        None,
        "also keep an exponential moving average of the weights, fp32, which stage.weights=ema uses: the share of the average that an "
        "optimizer update keeps, such as 0.999; default: none",
        above=0,
        at_most=0.9999999,
    )
    max_skipped_steps: int = knob(5, "stop the run after this many skipped steps in a row (gradients that are not finite)", at_least=1)
    spike_factor: float = knob(
        0.0,
        "standard deviations above the median at which a loss or gradient norm is a spike: the run then returns to the checkpoint before "
        "and skips the samples up to there; 0: off",
        at_least=0,
    )
    spike_window: int = knob(128, "steps whose median and median absolute deviation decide about a loss spike", unit="steps", at_least=8)
    spike_patience: int = knob(2, "the run returns to a checkpoint after so many steps of a loss spike in a row", unit="steps", at_least=1)
    max_rewinds: int = knob(10, "most returns to a checkpoint after loss spikes; at the next one the run fails", at_least=1)
    timeout_minutes: float = knob(
        10.0,
        "time without progress after which the run ends and names the slowest rank; a collective of a step fails one minute later; loading "
        "and saving may take 6 times as long; at the start, ranks wait for each other for half of it",
        unit="minutes",
        above=0,
        at_most=600,
    )
    check_replicas_every: int = knob(
        1000,
        "compare the copies of weights, optimizer state and learning rate on all ranks after so many steps, and before every checkpoint; "
        "copies that differ end the run and no checkpoint is written. 0: never",
        unit="steps",
        at_least=0,
    )
    noise_scale_every: int = knob(
        0,
        "measure the gradient noise scale, in sequences, after so many steps, from the gradients of shares of the batch that are reduced "
        "anyway. 0: never",
        unit="steps",
        at_least=0,
    )
    recompute_every: int = knob(
        0,
        "compute a forward pass of the step twice, and once more on another data rank, after so many steps, and compare all bits: finds "
        "GPUs that compute wrongly; bits that differ end the run. 0: never",
        unit="steps",
        at_least=0,
    )
    profile: list[int] = knob(
        [], "steps that torch.profiler records: run_dir/profile gets a trace and a report of each (it takes time)", unit="steps", at_least=1
    )
    profile_ranks: list[int] = knob([0], "ranks that record them", at_least=0)
    token_budget: int | None = knob(
        None, "planned number of training tokens; the dry run prints the number of steps for it", at_least=1, at_most=10**18
    )

    @property
    def sample_length(self) -> int:
        """Tokens of a sample, of which a sequence has one, or several in a later phase."""
        return (self.phases[0].sequence_length if self.phases else None) or self.sequence_length
