"""Token shards of generated text, made by the stages of the pipeline."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("fir", "snow", "green", "forest", "needle", "winter", "path", "bird", "stone", "light", "river", "cone", "wind", "42", "deep")


def make_tokens(folder: Path) -> Path:
    """Return the token shards of 200 documents, with a vocabulary of at most 300."""
    chance = random.Random(0)
    text, shards, tokenizer, tokens = (folder / name for name in ("text", "shards", "tokenizer", "tokens"))
    text.mkdir()
    documents = (json.dumps({"text": " ".join(chance.choices(WORDS, k=chance.randint(5, 300)))}) for _ in range(200))
    (text / "documents.jsonl").write_text("\n".join(documents) + "\n")
    small = ("data.part_megabytes=0.1", "data.shard_megabytes=0.05", "data.validation_fraction=0.1", "clean=none", "dedup=none")
    stage("shard", f"data.input=[{text}]", f"data.shards={shards}", *small)
    trained = ("tokenizer.vocab_size=300", "tokenizer.report=false", f"tokenizer.path={tokenizer}")
    stage("train_tokenizer", f"data.shards={shards}", *trained)
    stage("tokenize", f"data.shards={shards}", f"tokenizer.path={tokenizer}", f"data.tokens={tokens}")
    return tokens


def stage(name: str, *settings: str) -> None:
    """Run a stage in a process of its own.

    Raises:
        RuntimeError: it failed; with what it printed.
    """
    command = [sys.executable, "-m", "pipeline", f"stage={name}", *settings]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"stage={name} failed:\n{done.stdout}")
