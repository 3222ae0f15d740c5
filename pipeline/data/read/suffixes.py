"""The table of file formats: the suffix of a file name determines its format."""

from __future__ import annotations

FORMATS = {
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
"""Suffix -> format, the module of formats/ that reads it. All may be compressed, except .parquet, which is compressed internally."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Suffix -> compression."""

EXPANSION = 3
"""Approximate bytes of text per byte of a compressed file: parts are assigned before anything is decompressed."""

# `.json` files are rarely JSON lines: they are read only if data.suffixes contains `.json`.
SEARCHED = tuple(
    f"{ending}{packed}"
    for ending in FORMATS
    for packed in ("", *COMPRESSIONS)
    if (ending, packed) != (".json", "") and (ending != ".parquet" or not packed)
)
"""The suffixes that are read from a folder unless data.suffixes specifies others."""


def file_format(name: str) -> str:
    """The format of a file; a suffix that is not in the table means text."""
    name, _ = split_compression(name)
    return FORMATS.get("." + name.rpartition(".")[2], "text")


def split_compression(name: str) -> tuple[str, str]:
    """Return (the name without the suffix of its compression, the compression or "")."""
    stem, dot, ending = name.rpartition(".")
    compression = COMPRESSIONS.get(dot + ending, "")
    return (stem, compression) if compression else (name, "")
