"""The configuration groups of a run. Each field has its meaning, unit and legal range."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from pipeline.common.knobs import knob
from pipeline.config.certificate import CertificateConfig
from pipeline.config.cleaning import CleanConfig
from pipeline.config.cluster import ClusterConfig
from pipeline.config.data import DataConfig, DedupConfig, RampupConfig, ScheduledWeight, TokenizerConfig, WarmupConfig
from pipeline.config.lora import LoraConfig

if TYPE_CHECKING:
    from pipeline.models.config import ModelConfig
else:
    ModelConfig = Any  # OmegaConf has no protocols


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
        "which a random share is masked (BERT, RoBERTa)",
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
        "recomputation in the backward pass: none, all but matrix products and attention (selective), or full blocks",
        choices=("none", "selective", "full"),
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
        "and saving may take 6 times as long",
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


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule."""

    name: str = knob(
        "adamw",
        "optimizer: AdamW (Loshchilov & Hutter 2019), AdEMAMix (Pagliardini et al. 2024), Lion (Chen et al. 2023), Muon (Jordan et al. "
        "2024) for the matrices of the blocks and AdamW for the other weights, or schedule-free AdamW (Defazio et al. 2024)",
        choices=("adamw", "ademamix", "lion", "muon", "schedule_free"),
    )
    lr: float = knob(3e-4, "peak learning rate; finetune: 2e-5, with lora.rank 2e-4, for dpo 1e-5", above=0, at_most=10)
    beta1: float = knob(
        0.9, "decay rate of the first moment; schedule_free: share of the average in the weights of training", at_least=0, at_most=0.9999
    )
    beta2: float = knob(0.95, "decay rate of the second moment; lion: of the moment, after the update", at_least=0, at_most=0.99999)
    beta3: float = knob(0.9999, "ademamix: decay rate of the slow first moment", at_least=0, at_most=0.9999999)
    alpha: float = knob(8.0, "ademamix: weight of the slow first moment in the update", at_least=0)
    slow_warmup_steps: int = knob(
        0, "ademamix: steps in which alpha rises from 0, and beta3 from beta1; 0: training.steps", unit="steps", at_least=0
    )
    muon_momentum: float = knob(0.95, "muon: decay rate of the momentum of a matrix", at_least=0, at_most=0.9999)
    muon_nesterov: bool = knob(True, "muon: Nesterov momentum")
    muon_steps: int = knob(5, "muon: iterations of Newton-Schulz", at_least=1, at_most=20)
    muon_adjust_lr: str = knob(
        "match_rms_adamw",
        "muon: factor of the update of a matrix (a, b): 0.2 sqrt(max(a, b)), as large as that of AdamW (Liu et al. 2025), or "
        "sqrt(max(1, a / b)) (original)",
        choices=("match_rms_adamw", "original"),
    )
    muon_lr_factor: float = knob(1.0, "muon: learning rate of the matrices, divided by optimizer.lr", above=0)
    muon_per_head: bool = knob(False, "muon: the rows of each head of queries, keys and values are a matrix of their own")
    eps: float = knob(1e-8, "term added to the denominator of the update", above=0)
    weight_decay: float = knob(0.1, "decoupled weight decay of matrices and embeddings; finetune: 0", at_least=0)
    gradient_clipping: float = knob(1.0, "maximum global gradient norm; 0 disables clipping", at_least=0)
    qk_clip: float | None = knob(
        None,
        "largest attention logit of a head: after a step with a larger one, its weights of queries and keys are scaled (QK-clip: Kimi Team "
        "2025)",
        above=0,
    )
    schedule: str = knob("cosine", "learning-rate schedule after the warm-up", choices=("cosine", "wsd", "linear", "constant"))
    warmup_steps: int = knob(100, "steps of linear warm-up; finetune: 0, for optimizer.warmup_ratio", unit="steps", at_least=0)
    warmup_ratio: float = knob(
        0.0, "linear warm-up as a fraction of the steps, if optimizer.warmup_steps is 0; finetune: 0.03", at_least=0, at_most=1
    )
    decay_steps: int = knob(
        0, "length of a decay of wsd; 0 uses a tenth of the steps from the beginning of the run to its end", unit="steps", at_least=0
    )
    decay_shape: str = knob(
        "linear", "shape of a decay of wsd: linear, 1 - sqrt (sqrt), or half a cosine", choices=("linear", "sqrt", "cosine")
    )
    decay_ends: list[int] = knob(
        [],
        "wsd: steps at which further decays end (WSD-S); after each one a checkpoint is written and kept, and the rate returns to its peak",
        unit="steps",
        at_least=1,
    )
    min_lr_ratio: float = knob(0.1, "ratio of the final to the peak learning rate", at_least=0, at_most=1)


@dataclass(frozen=True)
class ParallelConfig:
    """The parallel layout. The data-parallel size is the world size divided by the product of the other sizes."""

    tensor: int = knob(1, "tensor-parallel size", unit="ranks", at_least=1)
    pipeline: int = knob(1, "pipeline-parallel size", unit="ranks", at_least=1)
    context: int = knob(1, "context-parallel size: ranks over which each sequence is split", unit="ranks", at_least=1)
    context_kind: str = knob(
        "ring",
        "context parallelism: ring attention (keys and values are passed around a ring) or Ulysses (all-to-all between tokens and heads)",
        choices=("ring", "ulysses"),
    )
    expert: int = knob(1, "expert-parallel size of an MoE model; each of these ranks processes different samples", unit="ranks", at_least=1)
    expert_padding: bool = knob(
        False,
        "every expert gets as many rows as model.capacity_factor allows, filled with zeros, so that no size depends on the router: no step "
        "waits for the device, and MoE blocks are compiled as one graph",
    )
    expert_parts: int = knob(
        1,
        "parts in which tokens travel to the experts of other ranks: one travels while another one is computed; needs expert_padding",
        at_least=1,
        at_most=8,
    )
    expert_tensor: int | None = knob(
        None,
        "tensor ranks over which each expert is sliced: parallel.tensor (the default), or 1: whole experts are distributed over tensor x "
        "expert ranks, and each tensor rank sends its own tokens of a sequence to them",
        unit="ranks",
        at_least=1,
    )
    zero_stage: int = knob(
        1,
        "ZeRO stage, sharding over the data ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights",
        at_least=0,
        at_most=3,
    )
    zero_group: str = knob(
        "job",
        "ranks over which ZeRO shards, with a copy of the state in every group: all data ranks of the job, those of a node "
        "(cluster.tasks_per_node), or so many successive data x expert x context ranks, such as 8",
    )
    schedule: str = knob("1f1b", "pipeline schedule", choices=("1f1b", "interleaved", "zbv"))
    stages_per_rank: int | None = knob(None, "pipeline stages per rank; default: 1 for 1f1b, 2 for interleaved and zbv", at_least=1)
    balance: str = knob(
        "flops",
        "distribution of the layers over pipeline stages: equal FLOPs, which count the output head (flops), or equal numbers (layers)",
        choices=("layers", "flops"),
    )
    layers_per_stage: list[int] = knob([], "number of layers of each pipeline stage, instead of parallel.balance", at_least=1)
    async_tensor: str = knob(
        "auto",
        "fuse the collectives of sequence parallelism with the matrix products beside them, in compiled blocks; auto: from Hopper GPUs on, "
        "if the tensor ranks are on one node",
        choices=("auto", "on", "off"),
    )
    sequence_parallel: bool = knob(True, "split norms and residuals along the sequence over the tensor ranks")
    offload: str = knob(
        "none",
        "what is kept in host memory: optimizer: master weights and optimizer state, which the CPU updates (ZeRO 1 to 3)",
        choices=("none", "optimizer"),
    )
    deepspeed: str | None = knob(
        None, "DeepSpeed configuration (JSON), whose settings become those of the run; what has no counterpart here is refused by name"
    )

    @property
    def model_ranks(self) -> int:
        """Number of ranks without data parallelism, tensor x context x expert x pipeline: the world size is a multiple of it."""
        return self.tensor * self.context * self.expert * self.pipeline

    @property
    def folded(self) -> bool:
        """Whether whole experts are distributed over tensor x expert ranks; else every tensor rank holds a slice of each expert."""
        return self.expert_tensor == 1 and self.tensor > 1

    @property
    def expert_ranks(self) -> int:
        """Number of ranks over which the experts are distributed."""
        return self.expert * (self.tensor if self.folded else 1)


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats. Master weights, optimizer state and accumulated gradients are always fp32."""

    dtype: str = knob("bf16", "dtype of weights and activations in matrix products", choices=("bf16", "fp16", "fp32"))
    fp8: str = knob(
        "none",
        "multiply 8-bit numbers in the linear layers of the blocks (bf16 elsewhere): one scale per tensor (the fastest), or per row; by "
        "torchao, on GPUs from Ada and Hopper on, emulated on a CPU",
        choices=("none", "tensorwise", "rowwise"),
    )
    fp8_experts: bool = knob(
        False,
        "fp8: routed experts multiply 8-bit numbers, too, with a scale per row whatever precision.fp8 is; on Hopper, emulated on a CPU",
    )
    fp8_exclude_layers: int = knob(1, "fp8: number of first and of last layers whose products stay bf16", unit="layers", at_least=0)
    reduce_dtype: str = knob(
        "fp32",
        "dtype in which gradients are summed over data ranks, after those of a rank's micro-batches in fp32; bf16 halves the bytes of the "
        "largest collective of data parallelism, and rounds the sum of every two ranks",
        choices=("fp32", "bf16"),
    )
    initial_loss_scale: float = knob(
        65536.0, "fp16: first factor of the loss, such that small gradients are not rounded to zero", at_least=1, at_most=1e30
    )
    loss_scale_window: int = knob(
        1000,
        "fp16: the loss scale is doubled after this many steps with a finite gradient, and halved after one without",
        unit="steps",
        at_least=1,
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    every: int = knob(500, "steps between checkpoints; 0 saves only at the end, by time, and when the job is about to end", at_least=0)
    every_minutes: float = knob(30.0, "time between checkpoints; 0 saves only by steps", unit="minutes", at_least=0)
    keep: int = knob(2, "number of newest checkpoints to keep", at_least=1)
    keep_every: int = knob(0, "also keep every checkpoint whose step is a multiple of this, for ever; 0: none", unit="steps", at_least=0)
    files: str = knob(
        "rank", "data files of a checkpoint: one for each rank, or one for each node, which are fewer and larger", choices=("rank", "node")
    )
    resume: str = knob("auto", "auto: newest checkpoint of run_dir, if any; none: refuse a run_dir with checkpoints")
    fork: str | None = knob(
        None,
        "run directory or checkpoint (RUN/step-300) that a new run continues: its weights, optimizer state, step and samples, with "
        "another schedule, length or later data",
    )
    initialize_from: str | None = knob(
        None, "run directory or checkpoint whose weights a new run starts from, without its optimizer state and its progress"
    )
    async_save: str = knob(
        "auto",
        "write checkpoints beside training: the weights are copied to host memory during the next step, and a writer process of each node "
        "hashes and writes them (auto; training waits if the memory does not suffice), or while training waits (off)",
        choices=("auto", "off"),
    )
    max_failures: int = knob(
        3, "stop the run after so many checkpoints in a row that could not be written (disk full, quota); each is tried once", at_least=1
    )
    skip_damaged: bool = knob(False, "with resume=auto, continue from the newest checkpoint that is whole, set aside newer ones")


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation of checkpoints, by Slurm jobs that a training run submits while it continues."""

    every: int = knob(
        0, "steps between checkpoints that are written and evaluated by a Slurm job of their own; 0: none", unit="steps", at_least=0
    )
    validation: bool = knob(True, "evaluate the validation split and its corpora")
    tasks: list[str] = knob([], "also evaluate these tasks of lm-eval, as stage.tasks of stage=evaluate")
    task_folder: str | None = knob(None, "folder with the task files (.yaml) of lm-eval")
    few_shot: int | None = knob(None, "examples before each question of a task; default: as the task file says", at_least=0)
    limit: int | None = knob(None, "number of documents of each task, the first ones; default: all", at_least=1)
    nodes: int = knob(1, "nodes of an evaluation job", unit="nodes", at_least=1)
    tasks_per_node: int = knob(1, "ranks per node of an evaluation job", unit="ranks", at_least=1)
    time: str = knob("01:00:00", "wall-clock limit of an evaluation job in Slurm format")
    sbatch: list[str] = knob([], "additional sbatch options of the evaluation jobs, each in command-line form")
    overrides: list[str] = knob(
        [], 'settings in which the evaluation jobs differ from the run, such as "parallel.tensor=1", each in quotes'
    )


@dataclass(frozen=True)
class SubmitConfig:
    """The jobs of stage=submit."""

    stages: list[str] = knob([], "stages to submit, one Slurm job each: a job starts when the one before it has succeeded")
    overrides: dict[str, list[str]] = knob(
        {}, "settings in which the job of one stage differs from the others, such as submit.overrides.evaluate=[parallel.tensor=1]"
    )


@dataclass(frozen=True)
class TrackingConfig:
    """Experiment tracking: metrics.jsonl is always written; rank 0 optionally logs to Weights & Biases."""

    wandb: str = knob("offline", "Weights & Biases mode", choices=("offline", "online", "disabled"))
    project: str = knob("tannschen", "Weights & Biases project")
    name: str | None = knob(None, "run name in Weights & Biases; default: the name of run_dir")
    log_every: int = knob(10, "steps between log lines", unit="steps", at_least=1)


@dataclass(frozen=True)
class DryRunConfig:
    """`dry_run=true`: print the model state and batch arithmetic of one rank, without starting the job."""

    enabled: bool = knob(False, "print model state and batch arithmetic of one rank instead of running (short form: dry_run=true)")
    world_size: int | None = knob(None, "simulated world size; default: cluster.nodes x cluster.tasks_per_node", at_least=1)
    rank: int = knob(0, "simulated rank", at_least=0)


@dataclass(frozen=True)
class StageConfig:
    """The selected stage. Stages with additional keys extend this class in config/stages.py."""

    name: str = MISSING


@dataclass(frozen=True)
class RunConfig:
    """The complete configuration of a run."""

    run_dir: str = knob("runs/default", "run directory: config.yaml, manifest.json, metrics.jsonl, checkpoints/")
    stage: StageConfig = field(default_factory=StageConfig)
    model: ModelConfig = MISSING
    data: DataConfig = field(default_factory=DataConfig)
    clean: CleanConfig = field(default_factory=CleanConfig)
    dedup: DedupConfig = field(default_factory=DedupConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    submit: SubmitConfig = field(default_factory=SubmitConfig)
    certify: CertificateConfig = field(default_factory=CertificateConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    dry_run: DryRunConfig = field(default_factory=DryRunConfig)

    @property
    def objective(self) -> str:
        """Name of the training objective: that of the model's family with training.objective=auto."""
        return self.model.objective if self.training.objective == "auto" else self.training.objective
