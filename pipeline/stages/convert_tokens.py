"""convert_tokens: token shards -> Megatron indexed datasets or Parquet, and Megatron indexed datasets -> token shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.common import artifact, mpi
from pipeline.common.mpi import Comm
from pipeline.common.ranks import Ranks
from pipeline.config.schema import RunConfig
from pipeline.config.stages import ConvertTokens
from pipeline.data.shard.text_shards import SPLITS
from pipeline.data.tokenize import megatron, parquet_tokens, token_shards
from pipeline.data.tokenize.parquet_tokens import Files, convert_parts


def run(config: RunConfig, ranks: Ranks) -> None:
    """Write `stage.output` from `data.tokens`, or `data.tokens` from `stage.input`."""
    stage = config.stage
    assert isinstance(stage, ConvertTokens)
    if stage.to == "shards":
        with mpi.world(ranks, Path(config.data.tokens)) as comm:
            _import(config, stage, comm)
    else:
        output = Path(stage.output or f"{config.data.tokens}-{stage.to}")
        with mpi.world(ranks, output) as comm:
            _export(config, output, stage.to, comm)


def _export(config: RunConfig, output: Path, to: str, comm: Comm) -> None:
    """Export token shards: one indexed dataset per split and corpus, or one Parquet file per shard."""
    folder = Path(config.data.tokens)
    manifest = comm.bcast(artifact.read(folder, key="data.tokens", stage="tokenize") if comm.rank == 0 else None)
    text = comm.bcast(parquet_tokens.text_shards_of(Path(config.data.shards), manifest) if comm.rank == 0 and to == "parquet" else None)
    shards = {name: entry for name, entry in sorted(manifest.files.items()) if "split" in entry}
    groups: dict[str, list[str]] = {}
    for name, entry in shards.items():
        part = f"{entry['split']}-{entry['corpus']}" if to == "megatron" else name.removesuffix(".tar")
        groups.setdefault(part, []).append(name)

    def convert(part: str) -> Files:
        artifact.verify_files(folder, manifest, groups[part])
        if to == "megatron":
            return megatron.write(folder, manifest, groups[part], output / part)
        return parquet_tokens.write(folder, manifest, groups[part][0], output / f"{part}.parquet", text)

    settings = {"data.tokens": artifact.fingerprint(manifest), "stage.to": to}
    sizes = {part: sum(shards[name]["bytes"] for name in names) for part, names in groups.items()}
    copied = ("vocab_size", "end_of_document", "bos", "tokenizer", "dtype", *SPLITS, "corpora")
    made_as, resume = ("stage.output", "convert_tokens"), {"ids of data.shards": text is not None}
    convert_parts(comm, output, made_as, settings, sizes, convert, lambda _: {key: manifest.totals.get(key) for key in copied}, resume)


def _import(config: RunConfig, stage: ConvertTokens, comm: Comm) -> None:
    """Import indexed datasets as token shards in the format of stage=tokenize."""
    arguments = stage.input, config.tokenizer, config.data.shard_megabytes
    planned = megatron.plan_shards(*arguments) if comm.rank == 0 else None  # rank 0 first: it reports the errors
    comm.barrier()
    plan, encoder = planned or megatron.plan_shards(*arguments)

    def convert(name: str) -> Files:
        dataset, first, stop, metadata = plan[name]
        return {name: megatron.write_shard(dataset, first, stop, folder / name, encoder, metadata)}

    def totals(files: Files) -> dict[str, Any]:
        return {**encoder.totals, "dtype": encoder.dtype.name, **token_shards.totals(files)}

    folder, prefixes = Path(config.data.tokens), [Path(name) for name in stage.input]
    datasets = comm.bcast({prefix.name: megatron.fingerprint(prefix) for prefix in prefixes} if comm.rank == 0 else None)
    settings = {
        "stage.input": datasets,
        "tokenizer.path": encoder.fingerprint,
        "tokenizer.end_of_document": config.tokenizer.end_of_document,
        "data.shard_megabytes": config.data.shard_megabytes,
        **({} if encoder.bos is None else {"tokenizer.bos": "document"}),
    }
    sizes = {name: int(dataset.starts[stop] - dataset.starts[first]) for name, (dataset, first, stop, _) in plan.items()}
    convert_parts(comm, folder, ("data.tokens", "tokenize"), settings, sizes, convert, totals)
