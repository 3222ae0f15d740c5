"""Which form a file has: by the ending of its name, in this one table."""

from __future__ import annotations

FORMS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "lines",
    ".txt": "text",
    ".html": "html",
    ".htm": "html",
    ".warc": "warc",
    ".wet": "warc",
    ".parquet": "parquet",
    ".tar": "tar",
}
"""Ending -> form, the module of formats/ that reads it. Each may be compressed, except .parquet, which is inside."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Ending -> compression."""

EXPANSION = 3
"""Bytes of text per byte of a compressed file, about: work is shared before anything is decompressed."""

# `.json` alone is rarely JSON lines: it counts only where data.suffixes names it.
SEARCHED = tuple(
    f"{ending}{packed}"
    for ending in FORMS
    for packed in ("", *COMPRESSIONS)
    if (ending, packed) != (".json", "") and (ending != ".parquet" or not packed)
)
"""The endings that are looked for in a folder unless data.suffixes names others."""


def form(name: str) -> str:
    """The form of a file; a name that is not in the table is a text."""
    name, _ = split_compression(name)
    return FORMS.get("." + name.rpartition(".")[2], "text")


def split_compression(name: str) -> tuple[str, str]:
    """(the name without the ending of its compression, the compression or "")."""
    stem, dot, ending = name.rpartition(".")
    compression = COMPRESSIONS.get(dot + ending, "")
    return (stem, compression) if compression else (name, "")
