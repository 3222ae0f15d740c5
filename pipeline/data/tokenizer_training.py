"""Byte-level BPE with Hugging Face `tokenizers`: learn one, keep it as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.data import tar


def sample(shards: Sequence[Path], fraction: float) -> Iterator[str]:
    """The leading part of every text shard. Shards are shuffled, so this is an even sample of the corpus.

    Args:
        fraction: share of each shard's bytes to take, at most 1.
    """
    for shard in shards:
        texts = [content for name, content in tar.members(shard) if name.endswith(".txt")]
        left = round(fraction * sum(map(len, texts)))
        for text in texts:
            if left <= 0:
                break
            yield text[:left].decode("utf-8", errors="ignore")  # the cut may fall into a character
            left -= len(text)


def train(texts: Iterable[str], vocab_size: int, end_of_document: str) -> Tokenizer:
    """Learn merges over bytes, split into words the GPT-2 way (Sennrich et al. 2016; Radford et al. 2019).

    Args:
        vocab_size: entries at most, the 256 bytes and `end_of_document` included; a small text yields fewer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[end_of_document], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, end_of_document: str) -> list[Path]:
    """Write the Hugging Face folder that AutoTokenizer loads; returns its files."""
    special = {"bos_token": end_of_document, "eos_token": end_of_document, "unk_token": end_of_document}
    settings = {
        **special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e30),  # transformers' way to say: the tokenizer knows no limit
    }
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2),
        "special_tokens_map.json": json.dumps(special, indent=2),
    }
    for name, content in files.items():
        (folder / name).write_text(content + "\n", encoding="utf-8")
    return [folder / name for name in files]
