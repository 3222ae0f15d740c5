"""The files that the jobs read: token shards, token shards with the special tokens of BERT, and pairs of sentences."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from tools.faults.data import WORDS, make_tokens
from tools.mutants.mutation import ROOT

#: Files of a folder of `make`: name in braces -> path.
NAMES = {
    "tokens": "causal/tokens",
    "tokenizer": "causal/tokenizer",
    "masked": "masked/tokens",
    "masked_tokenizer": "masked/tokenizer",
    "pairs": "pairs.tsv",
}
_DONE = "done"


def make(folder: Path) -> dict[str, Path]:
    """Return the files by their name in braces; they are made once.

    Raises:
        RuntimeError: a stage failed; with what it printed.
    """
    found = {name: folder / path for name, path in NAMES.items()}
    if (folder / _DONE).exists():
        return found
    (folder / "causal").mkdir(parents=True, exist_ok=True)
    (folder / "masked").mkdir(exist_ok=True)
    make_tokens(folder / "causal")
    masked = ("tokenizer=bert", f"tokenizer.path={found['masked_tokenizer']}", f"data.shards={folder / 'causal/shards'}")
    _stage("train_tokenizer", *masked, "tokenizer.vocab_size=520", "tokenizer.report=false")
    _stage("tokenize", *masked, f"data.tokens={found['masked']}")
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=chance.randint(2, 6))) for _ in range(600)]
    found["pairs"].write_text("".join(f"{text}\t{' '.join(reversed(text.split()))}\n" for text in texts))
    (folder / _DONE).touch()
    return found


def _stage(name: str, *settings: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pipeline", f"stage={name}", *settings], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"stage={name} failed:\n{done.stdout}{done.stderr}")
