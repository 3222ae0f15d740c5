"""What the input consists of, and what of it is not read: for the log and the report."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from pipeline.common import artifact
from pipeline.data.read import suffixes as file_suffixes
from pipeline.data.read.documents import add_counts, add_in_group, key_of
from pipeline.data.read.input_files import InputFile, Listing

log = logging.getLogger("pipeline")

Counts = Mapping[str, Sequence[int]]
"""Suffix or reason -> [number, bytes]."""

_NAMED = 8
"""Suffixes and reasons that a line of the log names."""

_SPHINX = "_sources"
"""Folder of Sphinx with the sources of its pages, DIR/_sources/NAME.rst.txt of DIR/NAME.html."""


def by_suffix(files: Iterable[InputFile]) -> dict[str, dict[str, list[int]]]:
    """Corpus -> suffix -> [files, bytes]."""
    counts: dict[str, dict[str, list[int]]] = {}
    for file in files:
        add_in_group(counts, file.corpus, file_suffixes.of_name(file.name), 1, file.size)
    return counts


def same_names(files: Iterable[InputFile]) -> dict[str, tuple[int, list[str]]]:
    """Corpus -> (number of names that several files share except for the suffix, the files of the first one).

    Such files, a page and its text or a file and its compressed copy, often hold the same documents. All of them are read: which of them is
    wanted, and whether they are the same, is not decided here.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for file in files:
        groups.setdefault((file.corpus, _stem(file.name)), []).append(file.name)
    shared: dict[str, tuple[int, list[str]]] = {}
    for (corpus, _), names in groups.items():
        if len(names) > 1:
            number, first = shared.get(corpus, (0, names))
            shared[corpus] = (number + 1, first)
    return shared


def _stem(name: str) -> str:
    stem = file_suffixes.stem(name)
    if _SPHINX not in stem:
        return stem
    folders = PurePosixPath(stem).parts
    return PurePosixPath(*(part for part in folders if part != _SPHINX)).with_suffix("").as_posix() if _SPHINX in folders else stem


def report_listing(listing: Listing, suffixes: Sequence[str]) -> None:
    """Log the number of files and bytes of every suffix, and what is not read; with a warning if documents may be missed or read twice.

    Args:
        suffixes: data.suffixes; if it is set, other files were left out on purpose.
    """
    total: dict[str, list[int]] = {}
    for counts in by_suffix(listing.files).values():
        add_counts(total, counts)
    size = sum(file.size for file in listing.files)
    log.info("shard: input of %s files, %s MB: %s", f"{len(listing.files):,}", f"{size / 1e6:,.1f}", described(total))
    for folder in sorted({Path(file.path).parent for file in listing.files if file.path.endswith(".tar")}):
        manifest = folder / artifact.MANIFEST
        if manifest.is_file() and '"stage": "shard"' in manifest.read_text(encoding="utf-8", errors="replace"):
            log.warning(
                "shard: %s has text shards, whose documents are new ones here: with other ids, the corpus of this input, and a validation "
                "split of their own, so that held-out documents may become training documents. Read what they were made of, with all steps",
                folder,
            )
    for corpus, reasons in listing.skipped.items():
        unread = {reason.removeprefix(file_suffixes.UNREAD): counts for reason, counts in reasons.items() if file_suffixes.UNREAD in reason}
        missed = [suffix for suffix in unread if not suffixes or suffix in file_suffixes.SEARCHED]
        further = sorted((suffix for suffix in missed if suffix.startswith(".")), key=lambda suffix: -unread[suffix][0])[:1]
        chosen = ",".join(dict.fromkeys([*(suffixes or sorted(total)), *further]))
        fix = f". Other suffixes can be selected, unknown ones are read as text: data.suffixes=[{chosen}]" if missed else ""
        log.log(logging.WARNING if missed else logging.INFO, "shard: %s: not read: %s%s", key_of(corpus), described(reasons), fix)
    for corpus, (number, names) in same_names(listing.files).items():
        log.warning(
            "shard: %s: %s several files that differ only in their suffix, such as %s: all are read. If they hold the same documents, "
            'leave out one kind, for example with \'data.exclude=[".*","*%s"]\'',
            key_of(corpus),
            "a name has" if number == 1 else f"{number:,} names have",
            " and ".join(names[:2]),
            file_suffixes.of_name(names[0]),
        )


def described(counts: Counts) -> str:
    """The numbers in words, the most frequent first: "12 .jsonl.gz (3.4 MB), 1 .md (0.0 MB)"."""
    ordered = sorted(counts.items(), key=lambda entry: (-entry[1][0], entry[0]))
    more = [f"{sum(number for _, (number, _) in ordered[_NAMED:]):,} others"] if len(ordered) > _NAMED else []
    return ", ".join([*(f"{number:,} {name} ({size / 1e6:,.1f} MB)" for name, (number, size) in ordered[:_NAMED]), *more])
