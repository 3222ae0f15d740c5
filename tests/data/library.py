"""Documents for stage=shard with copies, near copies, and text to repair and to drop; and reading what was written."""

import contextlib
import io
import logging
from pathlib import Path

import webdataset

from pipeline import __main__
from pipeline.config.command_line import parse
from tests.data.raw_files import json_line
from tests.helpers import prose
from tests.world import composition

LIBRARY = ("stage=shard", "data.part_megabytes=0.03", "data.shard_megabytes=0.05", "data.validation_fraction=0.1")
"""Overrides of the shards of the library."""


def write_library(folder: Path) -> None:
    """Write prose in three files, with copies, near copies, and documents to repair and to drop."""
    folder.mkdir()
    for part in range(3):
        lines = [json_line(prose(100 * part + n), number=n) for n in range(60)]
        lines += [json_line(prose(n)) for n in range(0, 60, 10)] if part else []  # copies of documents in the first file
        lines += [json_line(prose(n, 40) + f" Printed for the {part}. time.") for n in range(500, 503)]  # near copies in each file
        lines += [json_line("too short"), json_line("click here " * 200), json_line("MÃ¤rchen. " + prose(900 + part))]
        (folder / f"part {part}.jsonl").write_text("".join(lines), encoding="utf-8")


def samples(folder: Path, split: str = "*") -> list[dict]:
    """Read every document of the shards with webdataset."""
    paths = [str(path) for path in sorted(folder.glob(f"{split}-*.tar"))]
    return list(webdataset.WebDataset(paths, shardshuffle=False, empty_check=False).decode()) if paths else []


def here(*arguments: object, expect: int = 0) -> str:
    """As `pipeline` for one process, but in this one, which has composed the files of the groups before."""
    command, printed, code = parse(list(map(str, arguments))), io.StringIO(), 0
    assert not command.violations
    root = logging.getLogger()
    handlers, level, root.handlers[:] = root.handlers[:], root.level, []
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            __main__.run_one(composition(tuple(command.overrides)))
        except SystemExit as end:
            code = int(end.code or 0)
    root.handlers[:] = handlers
    root.setLevel(level)
    assert code == expect, f"exit code {code}, expected {expect}:\n{' '.join(map(str, arguments))}\n{printed.getvalue()}"
    return printed.getvalue()
