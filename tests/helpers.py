"""Shared test helpers: running the command line, and generating a small corpus."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def pipeline(*arguments: str, ranks: int = 0, expect: int = 0, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None) -> str:
    """Run `python -m pipeline ARGUMENTS`, under mpirun if ranks > 0, and return its combined stdout and stderr.

    Args:
        arguments: command-line arguments.
        ranks: number of MPI ranks; 0 starts a single process without mpirun.
        expect: expected exit code.
        prefix: command placed before the pipeline command, for example a launcher.
        env: additional environment variables.
    """
    launcher = [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks)] if ranks else []
    command = [*prefix, *launcher, sys.executable, "-m", "pipeline", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == expect, f"exit code {done.returncode}, expected {expect}:\n{' '.join(command)}\n{done.stdout}"
    return done.stdout


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


def same_files(first: Path, second: Path) -> bool:
    """Whether two folders contain the same files with identical bytes."""
    listing = [{p.relative_to(f): p.read_bytes() for p in sorted(f.rglob("*")) if p.is_file()} for f in (first, second)]
    return listing[0] == listing[1]
