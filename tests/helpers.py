"""What several test files need: the command line as users call it, and a small corpus."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def pipeline(*arguments: str, ranks: int = 0, expect: int = 0, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None) -> str:
    """`python -m pipeline ARGUMENTS` to its end, under mpirun when ranks are given; returns what it printed, both streams.

    Args:
        expect: the exit code it must have.
        prefix: a command that is to run it.
    """
    launcher = [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks)] if ranks else []
    command = [*prefix, *launcher, sys.executable, "-m", "pipeline", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == expect, f"exit code {done.returncode}, expected {expect}:\n{' '.join(command)}\n{done.stdout}"
    return done.stdout


def words(seed: int, count: int) -> str:
    """Text of its own for every seed."""
    chance = random.Random(seed)
    vocabulary = ["Tännchen", "grün", "Wald", "Schnee", "der", "die", "of", "under", "Nadel", "tree", "winter,", "und", "and", "42", "\n"]
    return " ".join(chance.choice(vocabulary) for _ in range(count))


RAW = ("clean=none", "dedup=none")
"""Settings of stage=shard that keep every document as it is."""

SHARDS = (*RAW, "data.part_megabytes=0.1", "data.shard_megabytes=0.05", "data.validation_fraction=0.1")
"""Settings of the shards that many tests read."""

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
    """English sentences of their own for every seed, which pass the cleaning steps."""
    chance = random.Random(seed)
    pick = chance.choice
    made = [
        f"The {pick(KINDS)} {pick(NAMES)} {pick(DEEDS)} the {pick(THINGS)} of the {pick(KINDS)} {pick(THINGS)} "
        f"and that {pick(NAMES)} {pick(DEEDS)} {chance.randint(2, 99)} {pick(KINDS)} {pick(THINGS)}s with a {pick(THINGS)}."
        for _ in range(sentences)
    ]
    return " ".join(made)


def write_corpus(folder: Path, documents: int = 200) -> None:
    """Two files of JSON lines with documents of very different lengths."""
    folder.mkdir(parents=True)
    for part in range(2):
        lines = [
            json.dumps({"id": f"{part}-{n}", "text": words(part * documents + n, 5 + n * 37 % 400)}, ensure_ascii=False) + "\n"
            for n in range(documents // 2)
        ]
        (folder / f"part-{part}.jsonl").write_text("".join(lines), encoding="utf-8")


def same_files(first: Path, second: Path) -> bool:
    """Whether two folders hold the same files with the same bytes."""
    listing = [{p.relative_to(f): p.read_bytes() for p in sorted(f.rglob("*")) if p.is_file()} for f in (first, second)]
    return listing[0] == listing[1]
