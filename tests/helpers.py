"""Shared test helpers: running the command line, and generating a small corpus."""

import contextlib
import functools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pipeline.common.artifact import MANIFEST
from tests import warm

ROOT = Path(__file__).resolve().parents[1]


#: What runs Python in a process forked from one with all imports done; a launcher starts it in place of Python.
PYTHON = (sys.executable, "-S", str(ROOT / "tests" / "warm.py"))


def load_tool(name: str) -> ModuleType:
    """Import a script of tools/ that has no suffix."""
    loader = SourceFileLoader(f"tool_{name}", str(ROOT / "tools" / name))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = sys.modules[loader.name] = module_from_spec(spec)  # dataclasses look their module up
    loader.exec_module(module)
    return module


loaded = functools.cache(load_tool)  # of tests that change nothing in it, but by monkeypatch


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """The cases of a test, tuples if it has several parameters: one of so many is in the default tier, tools/test --all has all of them."""
    return [
        case if number % count == 0 else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for number, case in enumerate(cases)
    ]


def program(name: str) -> str:
    """A command of the environment that runs the tests."""
    return str(Path(sys.executable).with_name(name))


def torchrun(ranks: int, *arguments: str, cold: bool = False) -> tuple[str, ...]:
    """The words before a command that is to run on several ranks of this machine."""
    start = (program("torchrun"),) if cold else (*PYTHON, "-m", "torch.distributed.run")
    return *start, f"--nproc_per_node={ranks}", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--no-python", *arguments


def environment(**more: str) -> dict[str, str]:
    """The variables of this process, one thread a process, the package, and ranks of MPI that leave the core while they wait."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", **more}


def python(
    *arguments: object,
    ranks: int = 0,
    prefix: tuple[str, ...] = (),
    cold: bool = False,
    timeout: float = 300,
    env: dict[str, str] | None = None,
) -> tuple[int, str]:
    """Run `python ARGUMENTS`, under mpirun when ranks are given; returns the exit code and what it printed, both streams.

    Args:
        prefix: a command that is to run it.
        cold: start Python as users do. Otherwise the process is forked from one with all imports done (tests/warm.py).
        timeout: in seconds.
        env: environment variables besides those of this process.
    """
    variables = environment(**(env or {}))
    prefix += (program("mpirun"), "-n", str(ranks)) if ranks else ()
    with tempfile.TemporaryFile() as output:
        if prefix or cold:
            command = [*prefix, *((sys.executable,) if cold else PYTHON), *map(str, arguments)]
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            code = subprocess.run(command, env=variables, timeout=timeout, **streams).returncode
        else:
            code = warm.start(*arguments, environment=variables, output=output.fileno()).wait(timeout)
        output.seek(0)
        return code, output.read().decode()


def pipeline(*arguments: object, expect: int = 0, **options: Any) -> str:
    """Run `python -m pipeline ARGUMENTS` with the options of `python`; returns what it printed, both streams.

    Args:
        arguments: of stage=pretrain, if they name no stage.
        expect: the exit code it must have.
    """
    code, printed = python("-m", "pipeline", *with_stage(arguments), **options)
    assert code == expect, f"exit code {code}, expected {expect}:\n{' '.join(map(str, arguments))}\n{printed}"
    return printed


def with_stage(arguments: Iterable[object]) -> list[object]:
    """Add stage=pretrain to the arguments of a run that name no stage."""
    words = list(map(str, arguments))
    named = any(re.match(r"[+~]*-*stage=|-h$|--(help|version|hydra-help|cfg|info)", word) for word in words)
    return [*arguments] if named else [*arguments, "stage=pretrain"]


def free_port() -> int:
    """A port that is free, and that the kernel gives to no other process in the meantime: below those that it chooses from."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def start_ranks(
    count: int,
    *arguments: object,
    output: int | None = None,
    own: dict[int, tuple[str, ...]] | None = None,
    program: tuple[str, str] = ("-m", "pipeline"),
) -> list[warm.Process]:
    """Start `python -m pipeline ARGUMENTS` on several ranks, each with the variables that torchrun sets, and no launcher above them.

    Args:
        own: rank -> further arguments of this rank.
        program: what Python runs in place of the package.
    """
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "none"}
    job |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    arguments = tuple(with_stage(arguments))
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return [
        warm.start(*program, *arguments, *(own or {}).get(rank, ()), environment=environment(**job, **place), output=output)
        for rank, place in enumerate(places)
    ]


def run_ranks(count: int, *arguments: object, timeout: float = 400, own: dict[int, tuple[str, ...]] | None = None) -> str:
    """Run `start_ranks` to the end; returns what all ranks printed, both streams. A rank that fails ends the others."""
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryFile() as output:
        ranks = start_ranks(count, *arguments, output=output.fileno(), own=own)
        codes: list[int | None] = [None]
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(0.02)
            codes = [rank.poll() for rank in ranks]
        for rank in ranks:
            rank.kill()
        output.seek(0)
        printed = output.read().decode()
    assert codes == [0] * count, f"exit codes {codes}:\n{printed}"
    return printed


def run_directory(folder: str | Path) -> Path:
    """Create what a run directory has before its first checkpoint."""
    (Path(folder) / "checkpoints").mkdir(parents=True, exist_ok=True)
    return Path(folder)


@functools.cache
def words(seed: int, count: int) -> str:
    """Generate random words; the text depends only on the seed and the count."""
    rng = random.Random(seed)
    vocabulary = ["Tännchen", "grün", "Wald", "Schnee", "der", "die", "of", "under", "Nadel", "tree", "winter,", "und", "and", "42", "\n"]
    return " ".join(rng.choice(vocabulary) for _ in range(count))


RAW = ("clean=none", "dedup=none")
"""Overrides of stage=shard that disable cleaning and deduplication."""

SHARDS = (*RAW, "data.part_megabytes=0.1", "data.shard_megabytes=0.05", "data.validation_fraction=0.1")
"""Overrides of the shared shards."""

NAMES = ["keeper", "captain", "sailor", "widow", "teacher", "farmer", "stranger", "child", "painter", "doctor"]
DEEDS = ["watched", "crossed", "remembered", "painted", "described", "feared", "loved", "visited", "forgot", "measured"]
THINGS = [
    "harbour",
    "island",
    "lighthouse",
    "village",
    "forest",
    "bridge",
    "garden",
    "winter",
    "letter",
    "mountain",
    "river",
    "market",
    "mirror",
]
KINDS = ["old", "silent", "distant", "narrow", "golden", "empty", "crowded", "frozen", "gentle", "curious", "wooden", "hidden"]


@functools.cache
def prose(seed: int, sentences: int = 12) -> str:
    """Generate English sentences that pass the cleaning steps; the text depends only on the seed and the number of sentences."""
    rng = random.Random(seed)
    pick = rng.choice
    generated = [
        f"The {pick(KINDS)} {pick(NAMES)} {pick(DEEDS)} the {pick(THINGS)} of the {pick(KINDS)} {pick(THINGS)} "
        f"and that {pick(NAMES)} {pick(DEEDS)} {rng.randint(2, 99)} {pick(KINDS)} {pick(THINGS)}s with a {pick(THINGS)}."
        for _ in range(sentences)
    ]
    return " ".join(generated)


def write_corpus(folder: Path, documents: int = 200) -> None:
    """Write two JSON Lines files with documents of different lengths."""
    folder.mkdir(parents=True)
    for part in range(2):
        lines = [
            json.dumps({"id": f"{part}-{n}", "text": words(part * documents + n, 5 + n * 37 % 400)}, ensure_ascii=False) + "\n"
            for n in range(documents // 2)
        ]
        (folder / f"part-{part}.jsonl").write_text("".join(lines), encoding="utf-8")


def with_manifest(source: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Copy a folder of shards, and change its manifest."""
    shutil.copytree(source, folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def same_files(first: Path, second: Path) -> bool:
    """Whether two folders contain the same files with identical bytes. The date of a page may differ: the tests may run past midnight."""

    def content(file: Path) -> bytes:
        return re.sub(rb"\d{4}-\d\d-\d\d", b"", file.read_bytes()) if file.suffix == ".html" else file.read_bytes()

    listing = [{p.relative_to(f): content(p) for p in sorted(f.rglob("*")) if p.is_file()} for f in (first, second)]
    return listing[0] == listing[1]
