"""convert_tokens: token shards -> Megatron indexed datasets or Parquet, and Megatron indexed datasets -> token shards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.common import artifact, mpi
from pipeline.common.artifact import Manifest
from pipeline.common.errors import UserError, collect_errors
from pipeline.common.files import digest
from pipeline.common.mpi import Comm
from pipeline.common.progress import Progress
from pipeline.common.ranks import Ranks
from pipeline.common.unfinished import work
from pipeline.config.schema import RunConfig
from pipeline.config.stages import ConvertTokens
from pipeline.data.tokenize import megatron, parquet_tokens, tokens
from pipeline.data.tokenize.tokenizer import TextEncoder

log = logging.getLogger("pipeline")

Files = dict[str, dict[str, Any]]


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
    text = comm.bcast(_text_shards(Path(config.data.shards), manifest) if comm.rank == 0 and to == "parquet" else None)
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
    copied = ("vocab_size", "end_of_document", "tokenizer", "dtype", *tokens.SPLITS, "corpora")
    made_as, resume = ("stage.output", "convert_tokens"), {"ids of data.shards": text is not None}
    _convert_parts(comm, output, made_as, settings, sizes, convert, lambda _: {key: manifest.totals[key] for key in copied}, resume)


def _text_shards(folder: Path, tokens_manifest: Manifest) -> parquet_tokens.Shards | None:
    """The text shards that the token shards were made from, with the ids of the documents; None with a warning if data.shards differs."""
    try:
        text = artifact.read(folder, key="data.shards", stage="shard")
    except UserError:
        found = "is not a complete folder of text shards"
    else:
        if artifact.fingerprint(text) == tokens_manifest.settings.get("data.shards"):
            return folder, text
        found = "is not the folder from which the token shards were made"
    log.warning("convert_tokens: the column id of the Parquet files is empty, because data.shards=%s %s", folder, found)
    return None


def _import(config: RunConfig, stage: ConvertTokens, comm: Comm) -> None:
    """Import indexed datasets as token shards in the format of stage=tokenize."""
    planned = _plan(config, stage) if comm.rank == 0 else None  # rank 0 first: it reports the errors
    comm.barrier()
    plan, encoder = planned or _plan(config, stage)

    def convert(name: str) -> Files:
        source, first, stop, metadata = plan[name]
        return {name: megatron.write_shard(source, first, stop, folder / name, encoder, metadata)}

    def totals(files: Files) -> dict[str, Any]:
        vocabulary = {"vocab_size": encoder.vocab_size, "end_of_document": encoder.end_of_document}
        return {**vocabulary, "tokenizer": encoder.fingerprint, "dtype": encoder.dtype.name, **tokens.totals(files)}

    folder, prefixes = Path(config.data.tokens), [Path(name) for name in stage.input]
    datasets = comm.bcast({prefix.name: _fingerprint(prefix) for prefix in prefixes} if comm.rank == 0 else None)
    settings = {
        "stage.input": datasets,
        "tokenizer.path": encoder.fingerprint,
        "tokenizer.end_of_document": config.tokenizer.end_of_document,
        "data.shard_megabytes": config.data.shard_megabytes,
    }
    sizes = {name: int(source.starts[stop] - source.starts[first]) for name, (source, first, stop, _) in plan.items()}
    _convert_parts(comm, folder, ("data.tokens", "tokenize"), settings, sizes, convert, totals)


ShardSource = tuple[megatron.IndexedDataset, int, int, dict[str, Any]]
"""The documents of a shard: dataset, index of the first document, index after the last one, and {"split", "corpus"} of the shard."""


def _plan(config: RunConfig, stage: ConvertTokens) -> tuple[dict[str, ShardSource], TextEncoder]:
    """Return shard name -> documents of the shard, and the tokenizer.

    Raises:
        UserError: a dataset or the tokenizer is invalid.
    """
    if not stage.input:
        raise UserError.of(
            "stage.input", "[]", "contains no dataset", "set it to datasets without .bin and .idx: 'stage.input=[data/train-text]'"
        )
    *sources, encoder = collect_errors(
        *(lambda name=name: megatron.IndexedDataset(Path(name)) for name in stage.input),
        lambda: TextEncoder(Path(config.tokenizer.path), config.tokenizer.end_of_document),
    )
    plan: dict[str, ShardSource] = {}
    for source in sources:
        split, _, corpus = source.prefix.name.partition("-")
        if split not in tokens.SPLITS or not corpus:
            split, corpus = "train", source.prefix.name
        stem = split if corpus == "default" else f"{split}-{corpus}"
        if f"{stem}-00000.tar" in plan:
            rule = f"maps to the {split} split of the corpus {corpus}, as another dataset does"
            raise UserError.of("stage.input", source.prefix, rule, "rename one of the datasets, or merge them")
        ranges = source.partition(max(1, round(config.data.shard_megabytes * 1e6 / encoder.dtype.itemsize)))
        for number, (first, stop) in enumerate(ranges):
            plan[f"{stem}-{number:05d}.tar"] = source, first, stop, {"split": split, "corpus": corpus}
    if not any(metadata["split"] == "train" for *_, metadata in plan.values()):
        raise UserError.of("stage.input", stage.input, "contains no training documents", "add a dataset of the train split")
    return plan, encoder


def _fingerprint(prefix: Path) -> list[str]:
    """Return the checksums of both files of an indexed dataset."""
    return [digest(prefix.with_name(f"{prefix.name}{suffix}")) for suffix in (".bin", ".idx")]


def _convert_parts(
    comm: Comm,
    folder: Path,
    key_and_stage: tuple[str, str],
    settings: dict[str, Any],
    sizes: dict[str, int],
    convert: Callable[[str], Files],
    totals: Callable[[Files], dict[str, Any]],
    resume: dict[str, Any] | None = None,
) -> None:
    """Convert the missing parts, distributed over the ranks, and write the manifest.

    Args:
        key_and_stage: the configuration key of the folder, and the stage recorded in its manifest.
        settings: all settings that determine the content.
        sizes: part -> size, for load balancing.
        convert: writes a part and returns the manifest entries of its files.
        totals: computes the totals of the manifest from all files.
        resume: further settings that must not change until the conversion is finished.
    """
    outputs = ["*-?????.tar", "*.parquet", "*.bin", "*.idx"]
    with work(comm, folder, key_and_stage, settings, lambda _: "converted", outputs, resume=resume) as unfinished:
        if not unfinished:
            return
        mine = [part for part in tokens.share(sizes, comm.rank, comm.size) if unfinished.note(part) is None]
        with Progress(len(mine), "convert_tokens", "parts", comm.rank) as progress:
            for part in mine:
                unfinished.write(part, convert(part))
                progress.advance(1, part)
        comm.barrier()
        if comm.rank == 0:
            files = {name: entry for part in sizes for name, entry in unfinished.note(part).items()}
            artifact.write(folder, Manifest(key_and_stage[1], settings, files, totals(files)))
            unfinished.clear()
            log.info("convert_tokens: wrote %s (%s files)", folder, len(files))
