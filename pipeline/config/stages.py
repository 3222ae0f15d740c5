"""The stages and the knobs that are theirs alone (`stage.KEY` on the command line)."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.schema import StageConfig
from pipeline.knobs import knob


@dataclass
class CheckpointReader(StageConfig):
    """A stage that reads one checkpoint."""

    checkpoint: str = knob("latest", "checkpoint folder to read; latest is the newest of run_dir")


@dataclass
class Evaluate(CheckpointReader):
    """Loss and bits per byte of a checkpoint on the whole validation split."""

    batches: int | None = knob(None, "global batches to read; all of the validation split when unset", at_least=1)


@dataclass
class Convert(CheckpointReader):
    """A native checkpoint as a Hugging Face folder, or back."""

    input: str | None = knob(None, "Hugging Face folder to import into run_dir; unset exports run_dir's checkpoint")
    output: str | None = knob(None, "folder to write when exporting; run_dir/hf when unset")
    dtype: str = knob("fp32", "number format of the exported weights; checkpoints are fp32", choices=("fp32", "bf16"))
    shard_gigabytes: float = knob(5.0, "largest safetensors file", unit="GB", above=0)


@dataclass
class ConvertTokens(StageConfig):
    """Token shards in other tools' formats, and from them."""

    to: str = knob(
        "megatron",
        "what to write: Megatron's indexed datasets (.bin and .idx), Parquet, or token shards out of indexed datasets",
        choices=("megatron", "parquet", "shards"),
    )
    output: str | None = knob(None, "folder to write for megatron and parquet; data.tokens with -megatron or -parquet when unset")
    input: list[str] = knob(
        [],
        "indexed datasets to read for shards, without .bin and .idx; a name that begins with train- or validation- tells the split, "
        "the rest is the corpus",
    )


#: Stages that start a process group with a layout, and read training samples.
PARALLEL_STAGES = ("pretrain", "evaluate")

#: stage name -> (its knobs, what it does in one line)
STAGES: dict[str, tuple[type[StageConfig], str]] = {
    "shard": (StageConfig, "documents -> shuffled WebDataset text shards (mpirun or srun for many ranks)"),
    "train_tokenizer": (StageConfig, "text shards -> BPE, Unigram or WordPiece tokenizer, a Hugging Face folder with a report"),
    "tokenize": (StageConfig, "text shards -> token shards (mpirun or srun for many ranks)"),
    "convert_tokens": (ConvertTokens, "token shards -> Megatron's .bin and .idx, or Parquet; or back from Megatron's"),
    "pretrain": (StageConfig, "token shards -> checkpoints and metrics.jsonl (torchrun or srun for many ranks)"),
    "evaluate": (Evaluate, "checkpoint -> validation loss and bits per byte"),
    "convert": (Convert, "checkpoint -> Hugging Face folder, or back with stage.input; no GPU, no process group"),
}
