"""Byte-level BPE with Hugging Face `tokenizers`: learn one, keep it as a Hugging Face folder, turn text into ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.data import tar
from pipeline.errors import UserError
from pipeline.files import digest


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


class TextEncoder:
    """Text to ids, by a tokenizer that was trained here or brought along as a Hugging Face folder.

    Text that spells a special token stays text: no document can forge the end of another.

    Attributes:
        vocab_size: one more than the largest id.
        end_of_document: id of the token that is written after every document.
        fingerprint: checksum of tokenizer.json.
    """

    def __init__(self, folder: Path, end_of_document: str) -> None:
        """Load the tokenizer.

        Raises:
            UserError: there is none, it cannot be read, or `end_of_document` is not one of its special tokens.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            fix = f"run stage=train_tokenizer with tokenizer.path={folder} first, or name a Hugging Face tokenizer folder"
            raise UserError.of("tokenizer.path", folder, "holds no tokenizer.json", fix)
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # `tokenizers` raises nothing more precise
            raise UserError.of("tokenizer.path", path, f"cannot be read: {error}", "fetch or train it again") from error
        # What a brought tokenizer adds, cuts or pads for its own model has no place in pretraining data.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if end_of_document not in vocabulary:
            special = [str(token.content) for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
            fix = f"choose one of its special tokens: {', '.join(special[:10]) or 'it has none'}"
            raise UserError.of("tokenizer.end_of_document", end_of_document, f"is no token of {path}", fix)
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_document = vocabulary[end_of_document]
        self.fingerprint = digest(path)
        if self.end_of_document in self.encode([end_of_document])[0]:
            rule = f"is an ordinary token of {path}: documents that spell it would end there"
            raise UserError.of("tokenizer.end_of_document", end_of_document, rule, "choose one of its special tokens")

    @property
    def dtype(self) -> np.dtype:
        """The smallest little-endian unsigned integer that holds every id."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, without any token that the tokenizer would add around it."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]
