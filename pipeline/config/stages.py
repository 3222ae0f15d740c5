"""The stages and their keys (`stage.KEY` on the command line)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.knobs import knob
from pipeline.config.schema import StageConfig

#: Parts of a certificate besides the comparison in fp32, which is always made.
CERTIFICATE_PARTS = ("bounds", "copies", "state", "validation", "data", "precision", "shapes", "phases")


@dataclass(frozen=True)
class CheckpointReader(StageConfig):
    """A stage that reads one checkpoint."""

    checkpoint: str = knob("latest", "checkpoint folder to read; latest: the newest checkpoint of run_dir")
    adapter: str | None = knob(None, "folder of an adapter in PEFT's format, which is merged into the weights")
    weights: str = knob("trained", "weights to read: those of the optimizer, or their average (training.ema)", choices=("trained", "ema"))


@dataclass(frozen=True)
class Shard(StageConfig):
    """Documents to text shards."""

    until: str = knob(
        "shards",
        "last pass of this job: read and clean the parts, search for duplicates too, or write the shards too; another job continues",
        choices=("read", "duplicates", "shards"),
    )


@dataclass(frozen=True)
class Evaluate(CheckpointReader):
    """Loss, perplexity and bits per byte of checkpoints on the validation split and its corpora; or scores of tasks."""

    checkpoint: str = knob(
        "latest", "checkpoint folder to read; latest: the newest checkpoint of run_dir; all: every one that is not evaluated yet"
    )
    every: int = knob(
        1, "with stage.checkpoint=all: evaluate steps that are multiples of this, and training.steps", unit="steps", at_least=1
    )
    batches: int | None = knob(
        None,
        "number of global batches: a sample, from all corpora in proportion to their tokens; default: the full validation split",
        at_least=1,
    )
    stride: int | None = knob(
        None,
        "tokens between the begins of overlapping windows, of which only the last ones count, so that each has a context of "
        "training.sequence_length - stage.stride tokens at least; default: windows do not overlap",
        unit="tokens",
        at_least=1,
    )
    pseudo_perplexity: bool = knob(
        False,
        "BERT, RoBERTa and ModernBERT: also mask each token alone, which costs training.sequence_length forward passes for each sequence",
    )
    distill: str | None = knob(
        None,
        "output: a folder with the most probable next tokens of the samples that a run with these settings reads in training.steps, "
        "instead of scores; a run with data.teacher reads it",
    )
    distill_top_k: int = knob(64, "distill: number of tokens", unit="tokens", at_least=1)
    tasks: list[str] = knob([], "tasks of lm-eval to evaluate, instead of the validation split")
    task_folder: str | None = knob(None, "folder with the task files (.yaml) of lm-eval; nothing is downloaded")
    few_shot: int | None = knob(None, "examples before each question of a task; default: as the task file says", at_least=0)
    limit: int | None = knob(None, "number of documents of each task, the first ones; default: all", at_least=1)
    apply_chat_template: bool = knob(
        False, "ask the questions of tasks as chats, in the template of the tokenizer or tokenizer.chat_template"
    )
    fewshot_as_multiturn: bool | None = knob(None, "chats: each example is a turn of its own; default: true, as in lm-eval")
    system_instruction: str | None = knob(None, "tasks: text before every question; chats: the system message", multiline=True)


@dataclass(frozen=True)
class Generate(CheckpointReader):
    """Completions of prompts, from a checkpoint."""

    prompts: str | None = knob(None, 'prompts, JSON lines: {"prompt": TEXT}, or {"messages": [...]} for the tokenizer\'s chat template')
    template: str | None = knob(
        None, "Jinja template (a file) that makes a prompt of each line of stage.prompts; its variables are the fields"
    )
    examples: str | None = knob(None, "JSON lines with the fields of examples, which the template shows before the question")
    few_shot: int | None = knob(None, "examples in each prompt, chosen by stage.seed and the line; 0 for none", at_least=0)
    output: str | None = knob(None, "output folder; default run_dir/generated")
    engine: str = knob(
        "native",
        "what computes the tokens: this package (native), or an installed vLLM, which loads a Hugging Face export of the checkpoint (vllm)",
        choices=("native", "vllm"),
    )
    export: str | None = knob(
        None, "stage.engine=vllm: folder of the export, which is written if it does not exist; default run_dir/hf, as of stage=convert"
    )
    max_tokens: int = knob(256, "maximum number of new tokens of a completion", unit="tokens", at_least=1)
    batch_size: int = knob(16, "maximum number of sequences in a forward pass on one rank", unit="sequences", at_least=1)
    cache_gigabytes: float | None = knob(
        None,
        "maximum size of the KV cache of a rank; default: 0.8 of the memory that is free after the weights are loaded",
        unit="GB",
        above=0,
    )
    temperature: float = knob(0.0, "divides the logits before sampling; 0 chooses the most probable token", at_least=0)
    top_k: int = knob(0, "sample from this many most probable tokens; 0 for all", at_least=0)
    top_p: float = knob(1.0, "sample from the smallest set of most probable tokens with at least this probability", above=0, at_most=1)
    min_p: float = knob(0.0, "sample from tokens with at least this fraction of the largest probability", at_least=0, at_most=1)
    repetition_penalty: float = knob(1.0, "divides positive and multiplies negative logits of tokens that occurred; 1 for none", above=0)
    seed: int = knob(0, "seed of sampling; a completion depends on it and on the line of its prompt", at_least=0, at_most=10**18)
    beams: int = knob(1, "beams of beam search, which requires temperature 0; 1 for greedy or sampled completions", at_least=1)
    length_penalty: float = knob(
        1.0, "beam search divides the log-probability of a completion by its length to this power", at_least=-10, at_most=10
    )
    draft: str | None = knob(None, "run directory or checkpoint of a smaller model, which proposes tokens (speculative decoding)")
    draft_tokenizer: str | None = knob(None, "tokenizer folder of the draft model, to verify that it is the same; default: that of its run")
    prompt_lookup: bool = knob(False, "speculative decoding with tokens that followed the same text in the prompt; requires no draft model")
    speculative_tokens: int = knob(
        12,
        "maximum number of proposed tokens that are verified in one pass; fewer while proposals are rejected",
        unit="tokens",
        at_least=1,
        at_most=64,
    )
    stop: list[str] = knob([], "texts that end a completion, which is cut before them", multiline=True)
    ignore_eos: bool = knob(False, "continue after the end-of-document token, up to stage.max_tokens")
    metrics: list[str] = knob(
        [], 'scores of sacrebleu, against the "reference" of each line, for run_dir/evaluations', choices=("bleu", "chrf")
    )
    logprobs: bool = knob(False, "also write token ids and their log-probabilities (nats, before the rules of sampling)")


@dataclass(frozen=True)
class Convert(CheckpointReader):
    """Export of a native checkpoint to the format of another program, or import."""

    input: str | None = knob(
        None,
        "folder to import into run_dir: of Hugging Face, DeepSpeed (a universal checkpoint with its moments), Megatron-LM, GPT-NeoX, or "
        "PyTorch DCP; unset: export the checkpoint of run_dir",
    )
    output: str | None = knob(
        None,
        "output folder of an export; default run_dir/hf, run_dir/hf-int4 for stage.quantize=int4, run_dir/gguf, run_dir/gguf-q8_0, "
        "run_dir/consolidated, run_dir/megatron, run_dir/universal, or run_dir/adapter",
    )
    format: str = knob(
        "huggingface",
        "output of an export: full weights, with adapters merged, as a Hugging Face folder, as a GGUF file for llama.cpp (gguf), as one "
        "safetensors file with the names of this package (consolidated), or as a distributed checkpoint of Megatron-Core (megatron); "
        "weights, moments and step as a universal checkpoint of DeepSpeed (deepspeed_universal); or only the adapter in PEFT's format "
        "(peft)",
        choices=("huggingface", "gguf", "consolidated", "megatron", "deepspeed_universal", "peft"),
    )
    dtype: str = knob("fp32", "dtype of the exported weights; checkpoints are fp32", choices=("fp32", "bf16", "fp16"))
    shard_gigabytes: float = knob(5.0, "maximum size of a file with weights; gguf and consolidated have one file", unit="GB", above=0)
    quantize: str = knob(
        "none",
        "quantize the linear layers of an export: 8-bit weights (int8), 8-bit weights and inputs, which get a scale per token when the "
        "model runs (int8_dynamic), or 4-bit weights (int4); with stage.format=gguf the types q8_0 and q4_0",
        choices=("none", "int8", "int8_dynamic", "int4", "q8_0", "q4_0", "q4_k"),
    )
    symmetric: bool = knob(True, "quantize: without a zero point; false: affine, from the smallest to the largest weight")
    granularity: str = knob(
        "channel", "int8: one scale for each row of a weight (channel), or for all of it", choices=("channel", "tensor")
    )
    group_size: int = knob(128, "int4: weights of a row that share a scale; must divide the inputs of every layer", at_least=1)
    rounding: str = knob(
        "nearest",
        "quantize: round to the nearest integer, or minimize the error of the outputs on stage.calibration (GPTQ)",
        choices=("nearest", "gptq"),
    )
    calibration: list[str] = knob([], "gptq: documents like the training data; files, folders, globs or URLs of the formats of data.input")
    held_out: list[str] = knob([], "quantize: documents for the perplexity before and after, other ones than those of stage.calibration")
    sample_tokens: int = knob(131072, "tokens to read of stage.calibration and of stage.held_out", unit="tokens", at_least=2)


@dataclass(frozen=True)
class ConvertTokens(StageConfig):
    """Conversion of token shards to and from the formats of other tools."""

    to: str = knob(
        "megatron",
        "output format: Megatron indexed datasets (.bin and .idx), Parquet, or token shards from indexed datasets (shards)",
        choices=("megatron", "parquet", "shards"),
    )
    output: str | None = knob(None, "output folder of megatron and parquet; default: data.tokens with suffix -megatron or -parquet")
    input: list[str] = knob(
        [],
        "indexed datasets to read for stage.to=shards, without .bin and .idx; the prefix train- or validation- selects the split, "
        "the remainder is the corpus name",
    )


@dataclass(frozen=True)
class Certify(StageConfig):
    """Comparison of a small version of a planned pretraining job with a plain loop, on the CPU of one machine."""

    world_size: int | None = knob(
        None, "ranks of the planned job; default: cluster.nodes x cluster.tasks_per_node, or two data ranks if that is 1", at_least=1
    )
    steps: int = knob(6, "optimizer steps to train and compare", at_least=3, at_most=1000)
    skip: list[str] = knob(
        [],
        "parts of the certificate to leave out: smaller bounds, so that values of the small job pass them (bounds), bits of all copies of "
        "the weights (copies), saving and resuming (state), data.tokens (data), the job's own precision (precision), rules that depend on "
        "full sizes (shapes), changes between training.phases (phases)",
        choices=CERTIFICATE_PARTS,
    )
    timeout_minutes: float = knob(
        10.0, "time after which the local ranks are stopped and the job is not certified", unit="minutes", above=0
    )


@dataclass(frozen=True)
class Plan(StageConfig):
    """Prediction of matrix products, memory, time and cost of a training job."""

    tokens: float | None = knob(None, "tokens of the run, which replace training.steps", unit="tokens", above=0, at_most=1e18)
    search: bool = knob(False, "search the fastest legal layout, micro-batch and recomputation instead of planning the configured ones")
    scaling: bool = knob(False, "search the fastest layout for 1, 2, 4, ... up to cluster.nodes nodes")
    plot: str | None = knob(
        None,
        "output: a PNG file with the roofline of the matrix products; with stage.search, time over memory of the layouts; with "
        "stage.scaling, time and efficiency over the number of nodes; default: none",
    )
    run: str | None = knob(
        None,
        "run directory of a training job, whose plan is printed beside its measured step time and memory; with cluster.correction, the run "
        "is added to this file, and later plans with it are corrected by its runs",
    )
    out: str | None = knob(None, "output: a JSON file with what is printed; default: none")


@dataclass(frozen=True)
class Rehearse(StageConfig):
    """One rank of a planned training job on its CUDA path, on a machine without a GPU."""

    world_size: int | None = knob(
        None,
        "ranks of the planned job; default: cluster.nodes x cluster.tasks_per_node; nodes have one GPU unless the latter says otherwise",
        at_least=1,
    )
    rank: int | None = knob(None, "rank to rehearse; default: the first rank with the most memory, as planned", at_least=0)
    steps: int = knob(3, "optimizer steps", unit="steps", at_least=1, at_most=1000)
    python: str | None = knob(
        None,
        "Python interpreter of an environment whose torch is a CUDA build; default: this one, or .venv-cuda (tools/install --cuda)",
    )


@dataclass(frozen=True)
class Preflight(StageConfig):
    """Test of the nodes of an allocation."""

    folder: str | None = knob(None, "output: folder with a result of each node, which all nodes share; default: run_dir/preflight")


@dataclass(frozen=True)
class Report(StageConfig):
    """Page of one training run, or of several for a comparison."""

    compare: list[str] = knob([], "further run directories, or folders of several, to compare with run_dir")
    out: str | None = knob(None, "output: an HTML file that loads nothing; default: run_dir/report.html")


@dataclass(frozen=True)
class Ledger(StageConfig):
    """Which documents a step has read, or which steps have read a document."""

    step: int | None = knob(
        None, "print the documents of this step; with stage.certificate, the step of the checkpoint; default there: the newest", at_least=1
    )
    rank: int | None = knob(None, "with stage.step: those of one rank", at_least=0)
    micro_batch: int | None = knob(None, "with stage.rank: those of one micro-batch, counted from 0", at_least=0)
    where: dict[str, str] = knob(
        {},
        "print when documents were read of which fields match patterns, such as {url: '*.example.org/*'}; fields: id, corpus, lang, "
        "source, and those of the metadata",
    )
    ids: str | None = knob(None, "file with the ids or URLs of documents, one a line: print when they were read")
    contains: str | None = knob(None, "print when documents were read that contain this text", multiline=True)
    shards: list[str] = knob([], "folders of the text shards of the run, which name the documents; default: data.shards of the run")
    out: str | None = knob(None, "JSON lines file with every document, which data.remove reads")
    certificate: str | None = knob(
        None,
        "JSON file: states of a checkpoint how often the documents were read before they were removed (data.remove), and that they were "
        "not read since; default of the documents: all removed ones",
    )
    summary: str | None = knob(
        None,
        "folder: the public summary of the training content in the order of the template of the EU's AI Act, Article 53(1)(d), as Markdown "
        "and JSON, with blanks for what no file can tell, and the most relevant domains",
    )


#: Stages with one rank per GPU.
GPU_STAGES = ("pretrain", "finetune", "evaluate", "generate", "preflight")
#: Stages of one task without GPUs, unless their command asks for more: the sizes of a cluster's jobs are those of training.
ONE_TASK_STAGES = ("train_tokenizer", "certify", "convert")
#: Stages that are no jobs.
INTERACTIVE_STAGES = ("plan", "rehearse", "submit", "report", "ledger")
#: Stages that train until all steps are done, over several jobs if necessary.
TRAINING_STAGES = ("pretrain", "finetune")
#: Stages whose settings are those of a parallel layout and of training samples.
PARALLEL_STAGES = ("pretrain", "evaluate", "certify", "plan", "rehearse")


def plans_other_layouts(stage: StageConfig) -> bool:
    """Whether a stage does not read the configured layout: the planner chooses layouts, or reads that of a run."""
    return isinstance(stage, Plan) and bool(stage.search or stage.scaling or stage.run)


#: stage name -> (dataclass of its keys, one-line description)
STAGES: dict[str, tuple[type[StageConfig], str]] = {
    "shard": (Shard, "documents -> cleaned, deduplicated, shuffled text shards (multiple ranks: mpirun or srun)"),
    "train_tokenizer": (StageConfig, "text shards -> BPE, Unigram or WordPiece tokenizer (Hugging Face folder) and a report"),
    "tokenize": (
        StageConfig,
        "text shards -> token shards; or files of chats and prompts -> shards of packed examples (multiple ranks: mpirun or srun)",
    ),
    "convert_tokens": (ConvertTokens, "token shards -> Megatron indexed datasets or Parquet; or Megatron indexed datasets -> token shards"),
    "pretrain": (StageConfig, "token shards -> checkpoints and metrics.jsonl (multiple ranks: torchrun or srun)"),
    "finetune": (
        StageConfig,
        "weights, and chats, prompts or labeled texts -> checkpoints and metrics.jsonl (multiple ranks: torchrun or srun)",
    ),
    "certify": (
        Certify,
        "settings of a planned pretrain job -> certificate.json: a small version equals a plain loop; one process, no GPU",
    ),
    "plan": (Plan, "settings of a planned pretrain or finetune job -> its matrix products, memory, time and cost; one process, no GPU"),
    "rehearse": (
        Rehearse,
        "settings of a planned pretrain or finetune job -> rehearsal.json: memory, launches, waits and collectives of one rank on its CUDA "
        "path; one process, no GPU",
    ),
    "preflight": (
        Preflight,
        "nodes of a Slurm allocation -> which ones are bad, and why: GPUs, speed, network, file system, clocks, versions",
    ),
    "evaluate": (
        Evaluate,
        "checkpoints -> validation loss, perplexity and bits per byte by corpus, or scores of lm-eval tasks; a table and plots",
    ),
    "generate": (Generate, "prompts -> completions, from a checkpoint (multiple ranks: torchrun or srun)"),
    "convert": (
        Convert,
        "checkpoint -> Hugging Face, GGUF, Megatron-Core or one file (multiple ranks: mpirun or srun); or folder of another tool "
        "(stage.input) -> checkpoint; no GPU",
    ),
    "ledger": (
        Ledger,
        "run directory and shards -> which documents a step has read, or which steps have read a document; one process, no GPU",
    ),
    "report": (Report, "run directories -> report.html: progress, restarts, node-hours, data and comparison; also while they train"),
    "submit": (StageConfig, "settings of the other stages -> a chain of Slurm jobs, one for each stage of submit.stages"),
}

_TRAINING = (
    "model",
    "data",
    "training",
    "optimizer",
    "parallel",
    "precision",
    "checkpoint",
    "evaluation",
    "tracking",
    "lora",
    "cluster",
    "dry_run",
)
#: stage name -> the groups that it reads, besides its own keys
READS: dict[str, tuple[str, ...]] = {
    "shard": ("data", "clean", "dedup"),
    "train_tokenizer": ("tokenizer", "data"),
    "tokenize": ("data", "tokenizer", "training"),
    "convert_tokens": ("data", "tokenizer"),
    "pretrain": (*_TRAINING, "certify"),
    "finetune": (*_TRAINING, "tokenizer"),
    "certify": ("model", "data", "training", "optimizer", "parallel", "precision", "checkpoint", "tokenizer", "cluster"),
    "plan": ("model", "training", "parallel", "precision", "cluster"),
    "rehearse": _TRAINING,
    "preflight": ("cluster",),
    "evaluate": ("model", "data", "training", "parallel", "precision", "tokenizer", "cluster"),
    "generate": ("tokenizer", "parallel", "precision", "cluster"),
    "convert": ("model", "tokenizer"),
    "ledger": (),
    "report": (),
    "submit": ("submit", "cluster", "dry_run"),
}
