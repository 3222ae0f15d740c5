"""The files that the jobs read: token shards, some with the special tokens of a family or of short documents, and pairs of sentences."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tools.faults.data import WORDS, make_tokens, stage

#: Files of a folder of `make`: name in braces -> path.
NAMES = {
    "tokens": "causal/tokens",
    "tokenizer": "causal/tokenizer",
    "masked": "bert/tokens",
    "masked_tokenizer": "bert/tokenizer",
    "roberta": "roberta/tokens",
    "roberta_tokenizer": "roberta/tokenizer",
    "t5": "t5/tokens",
    "t5_tokenizer": "t5/tokenizer",
    "padded": "padded/tokens",
    "pairs": "pairs.tsv",
}
#: Tokenizer with special tokens -> the largest size of its vocabulary.
SPECIAL = {"bert": 520, "roberta": 520, "t5": 640}
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
    make_tokens(folder / "causal")
    for kind, size in SPECIAL.items():
        words = (f"tokenizer={kind}", f"tokenizer.path={folder / kind / 'tokenizer'}", f"data.shards={folder / 'causal/shards'}")
        (folder / kind).mkdir(exist_ok=True)
        stage("train_tokenizer", *words, f"tokenizer.vocab_size={size}", "tokenizer.report=false")
        stage("tokenize", *words, f"data.tokens={folder / kind / 'tokens'}")
    _padded(folder, found["tokenizer"])
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=chance.randint(2, 6))) for _ in range(600)]
    found["pairs"].write_text("".join(f"{text}\t{' '.join(reversed(text.split()))}\n" for text in texts))
    (folder / _DONE).touch()
    return found


def _padded(folder: Path, tokenizer: Path) -> None:
    """Token shards of documents of which no two fit into a sequence of 64 tokens: best-fit packing has to pad each."""
    chance, text = random.Random(1), folder / "padded/text"
    text.mkdir(parents=True, exist_ok=True)
    documents = (json.dumps({"text": " ".join(chance.choices(WORDS, k=chance.randint(33, 55)))}) for _ in range(300))
    (text / "documents.jsonl").write_text("\n".join(documents) + "\n")
    shards = folder / "padded/shards"
    small = ("data.validation_fraction=0.1", "clean=none", "dedup=none")
    stage("shard", f"data.input=[{text}]", f"data.shards={shards}", *small)
    stage("tokenize", f"data.shards={shards}", f"tokenizer.path={tokenizer}", f"data.tokens={folder / 'padded/tokens'}")
