"""convert_tokens: token shards -> Megatron's indexed datasets or Parquet, and such datasets -> token shards, on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline import artifact
from pipeline.artifact import Manifest
from pipeline.config.schema import RunConfig
from pipeline.config.stages import ConvertTokens
from pipeline.data import mpi
from pipeline.data.mpi import Comm
from pipeline.data.tokenize import megatron, parquet_tokens, tokens
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.data.unfinished import remove_strangers, work
from pipeline.errors import UserError, together
from pipeline.files import digest
from pipeline.launch.ranks import Ranks
from pipeline.progress import Progress

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
            _export(Path(config.data.tokens), output, stage.to, comm)


def _export(folder: Path, output: Path, to: str, comm: Comm) -> None:
    """Token shards in another format: a dataset for each split of each corpus, or a Parquet file for each shard."""
    manifest = comm.bcast(artifact.read(folder, key="data.tokens", stage="tokenize") if comm.rank == 0 else None)
    shards = {name: entry for name, entry in sorted(manifest.files.items()) if "split" in entry}
    groups: dict[str, list[str]] = {}
    for name, entry in shards.items():
        part = f"{entry['split']}-{entry['corpus']}" if to == "megatron" else name.removesuffix(".tar")
        groups.setdefault(part, []).append(name)

    def convert(part: str) -> Files:
        artifact.verify_files(folder, manifest, groups[part])
        if to == "megatron":
            return megatron.write(folder, manifest, groups[part], output / part)
        return parquet_tokens.write(folder, manifest, groups[part][0], output / f"{part}.parquet")

    settings = {"data.tokens": artifact.fingerprint(manifest), "stage.to": to}
    sizes = {part: sum(shards[name]["bytes"] for name in names) for part, names in groups.items()}
    kept = ("vocab_size", "end_of_document", "tokenizer", "dtype", *tokens.SPLITS, "corpora")
    _all(comm, output, ("stage.output", "convert_tokens"), settings, sizes, convert, lambda _: {key: manifest.totals[key] for key in kept})


def _import(config: RunConfig, stage: ConvertTokens, comm: Comm) -> None:
    """Indexed datasets as token shards, as if stage=tokenize had made them."""
    early = _plan(config, stage) if comm.rank == 0 else None  # rank 0 tells the mistakes
    comm.barrier()
    plan, encoder = early or _plan(config, stage)

    def convert(name: str) -> Files:
        source, first, stop, about = plan[name]
        return {name: megatron.write_shard(source, first, stop, folder / name, encoder, about)}

    def totals(files: Files) -> dict[str, Any]:
        made = {"vocab_size": encoder.vocab_size, "end_of_document": encoder.end_of_document}
        return {**made, "tokenizer": encoder.fingerprint, "dtype": encoder.dtype.name, **tokens.totals(files)}

    folder, prefixes = Path(config.data.tokens), [Path(name) for name in stage.input]
    datasets = comm.bcast({prefix.name: _fingerprint(prefix) for prefix in prefixes} if comm.rank == 0 else None)
    settings = {
        "stage.input": datasets,
        "tokenizer.path": encoder.fingerprint,
        "tokenizer.end_of_document": config.tokenizer.end_of_document,
        "data.shard_megabytes": config.data.shard_megabytes,
    }
    sizes = {name: int(source.starts[stop] - source.starts[first]) for name, (source, first, stop, _) in plan.items()}
    _all(comm, folder, ("data.tokens", "tokenize"), settings, sizes, convert, totals)


Piece = tuple[megatron.IndexedDataset, int, int, dict[str, Any]]
"""What becomes a shard: a dataset, its first document, the one after the last, and the shard's split and corpus."""


def _plan(config: RunConfig, stage: ConvertTokens) -> tuple[dict[str, Piece], TextEncoder]:
    """Shard -> what it is made of; and the tokenizer.

    Raises:
        UserError: a dataset or the tokenizer cannot be used.
    """
    if not stage.input:
        raise UserError.of("stage.input", "[]", "names no dataset", "name datasets without .bin and .idx: 'stage.input=[data/train-text]'")
    *sources, encoder = together(
        *(lambda name=name: megatron.IndexedDataset(Path(name)) for name in stage.input),
        lambda: TextEncoder(Path(config.tokenizer.path), config.tokenizer.end_of_document),
    )
    plan: dict[str, Piece] = {}
    for source in sources:
        split, _, corpus = source.prefix.name.partition("-")
        if split not in tokens.SPLITS or not corpus:
            split, corpus = "train", source.prefix.name
        stem = split if corpus == "default" else f"{split}-{corpus}"
        if f"{stem}-00000.tar" in plan:
            rule = f"is not the only one that becomes the {split} split of the corpus {corpus}"
            raise UserError.of("stage.input", source.prefix, rule, "give the datasets names of their own, or merge them")
        pieces = source.partition(max(1, round(config.data.shard_megabytes * 1e6 / encoder.dtype.itemsize)))
        for number, (first, stop) in enumerate(pieces):
            plan[f"{stem}-{number:05d}.tar"] = source, first, stop, {"split": split, "corpus": corpus}
    if not any(about["split"] == "train" for *_, about in plan.values()):
        raise UserError.of("stage.input", stage.input, "holds no document to train on", "name a dataset for training, too")
    return plan, encoder


def _fingerprint(prefix: Path) -> list[str]:
    return [digest(prefix.with_name(f"{prefix.name}{suffix}")) for suffix in (".bin", ".idx")]


def _all(
    comm: Comm,
    folder: Path,
    made_as: tuple[str, str],
    settings: dict[str, Any],
    sizes: dict[str, int],
    convert: Callable[[str], Files],
    totals: Callable[[Files], dict[str, Any]],
) -> None:
    """Convert every part that is not there yet, this rank its share, and declare the folder complete.

    Args:
        made_as: the key that names the folder, and the stage that its manifest names.
        settings: all that determines the content.
        sizes: part -> its size, to share the parts evenly.
        convert: makes a part; returns its files.
        totals: the manifest's totals from all files.
    """
    if comm.rank == 0 and folder.exists() and any(folder.iterdir()) and not {path.name for path in folder.iterdir()} & _OWN:
        raise UserError.of(made_as[0], folder, "holds what convert_tokens did not write", "name another folder, or remove this one")
    with work(comm, folder, made_as, settings, lambda _: "converted") as unfinished:
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
            for pattern in ("*-?????.tar", "*.parquet", "*.bin", "*.idx"):
                remove_strangers(folder, pattern, set(files))
            artifact.write(folder, Manifest(made_as[1], settings, files, totals(files)))
            unfinished.clear()
            log.info("convert_tokens: wrote %s (%s files)", folder, len(files))


_OWN = {artifact.MANIFEST, ".unfinished", ".lock"}
"""What tells a folder that a stage wrote, or is writing."""
