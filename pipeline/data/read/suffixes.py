"""The table of file formats: the suffix of a file name determines its format. The case of a suffix does not matter."""

from __future__ import annotations

import re
from collections.abc import Sequence

FORMATS = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json_values",
    ".csv": "delimited",
    ".tsv": "delimited",
    ".txt": "text",
    ".html": "html",
    ".htm": "html",
    ".warc": "warc",
    ".wet": "warc",
    ".xml": "mediawiki",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "tar",
    ".zip": "zip",
}
"""Suffix -> format, the module of formats/ that reads it. All may be compressed, except those of INTERNAL."""

INTERNAL = (".parquet", ".arrow", ".zip")
"""Suffixes of formats that are compressed internally, and read at random."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}
"""Suffix -> compression."""

_PACKED_TAR = {".tgz": "gzip", ".tzst": "zstd", ".tbz2": "bzip2", ".txz": "xz"}
"""Suffix of a compressed tar -> its compression."""

EXPANSION = 3
"""Approximate bytes of text per byte of a compressed file: parts are assigned before anything is decompressed."""

# Not .md, .py and .tex: beside documents they are mostly descriptions, programs and sources of the documents themselves.
SEARCHED = (
    *(f"{ending}{packed}" for ending in FORMATS for packed in ("", *COMPRESSIONS) if not packed or ending not in INTERNAL),
    *_PACKED_TAR,
)
"""The suffixes that are read from a folder unless data.suffixes specifies others."""


UNREAD = "with suffix "
"""Begins the reason why a file is not read if its suffix is the reason."""

_RANGE = re.compile(r"\.xml-p\d+p\d+(?=$|\.)")
"""The suffix of a part of a dump of Wikipedia, which names its pages."""

_SHOWN = re.compile(r"(\.[a-z0-9_+-]{1,16}){1,3}")
"""What is shown as the suffix of a file or a tar member that is not read; a longer or other one may be a part of its name."""


def file_format(name: str) -> str:
    """The format of a file; a suffix that is not in the table means text."""
    return FORMATS.get(_ending(split_compression(name)[0]), "text")


def split_compression(name: str) -> tuple[str, str]:
    """Return (the name without the suffix of its compression, the compression or "")."""
    if tar := _PACKED_TAR.get(_ending(name), ""):
        return f"{name.rpartition('.')[0]}.tar", tar
    compression = COMPRESSIONS.get(_ending(name), "")
    return (name.rpartition(".")[0], compression) if compression else (name, "")


def has_suffix(name: str, suffixes: Sequence[str]) -> bool:
    """Whether a file name ends in one of the suffixes."""
    return _RANGE.sub(".xml", name.lower()).endswith(tuple(suffix.lower() for suffix in suffixes))


def stem(name: str) -> str:
    """A name without the suffixes of its compression and its format."""
    name, _ = split_compression(name)
    return name.rpartition(".")[0] if _ending(name) in FORMATS else name


def of_name(name: str) -> str:
    """The suffix of a file in lower case, with that of its compression, such as ".md" or ".jsonl.gz"; without one, "none"."""
    base, _ = split_compression(name)
    return shown(_ending(base) + name[len(base) :].lower() if name.startswith(base) else _ending(name))


def shown(suffix: str) -> str:
    """A suffix in lower case for logs and reports."""
    return suffix if _SHOWN.fullmatch(suffix) else "other" if suffix else "none"


def described(suffixes: Sequence[str]) -> str:
    """The suffixes that a folder is searched for, in words."""
    if tuple(suffixes) != SEARCHED:
        return ", ".join(suffixes)
    return f"{', '.join(FORMATS)}, or compressed with {', '.join(COMPRESSIONS)}"


def _ending(name: str) -> str:
    """The last suffix of a name, in lower case; empty if it has none."""
    _, dot, ending = name.rpartition("/")[2].rpartition(".")
    return _RANGE.sub(".xml", (dot + ending).lower()) if dot else ""
