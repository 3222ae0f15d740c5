"""The tokenizer of a GGUF file: llama.cpp computes its tokens, or the export refuses it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pipeline.common.errors import UserError
from pipeline.conversion.original import TokenIds
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.data.tokenize.tokenizer_training import split_pattern
from pipeline.quantization import gguf_file
from pipeline.quantization.gguf_tokens import read_tokens
from tests.conversion.test_huggingface_export import InMemory, random_model
from tests.models.small_decoders import CONFIGS
from tests.quantization.llama_cpp import LlamaCpp

BEGIN, END = "<|begin|>", "<|endoftext|>"
TEXTS = [
    *("", " ", "a", " a", "Hello world", "hello  world", "Hello, world! It's 12345.", "don't DON'T we'LL", "\n\n  x\n", "a\tb\r\nc"),
    *(
        "Über die Straße",
        "naïve café",
        "北京 是 首都",
        "日本語のテキスト",
        "привет мир",
        "emoji 🙂🙃 end",
        "x=y+z;//c",
        "  leading",
        "trailing  ",
    ),
    *(
        "1 22 333 4444 55555",
        "CamelCaseHTTPServer",
        f"one{END}two",
        f"one {END} two",
        "ﬁne ½ ²",
        "zero\u200bwidth",
        "the the the",
        "a_b-c.d",
    ),
]
SAMPLE = [
    *TEXTS[3:],
    "the quick brown fox jumps over the lazy dog and it's 2026 now, we'll see",
    "Die Straße ist naß und der Wald steht schwarz",
]


def trained(split: str = "llama3", digits: str = "keep") -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(split_pattern(split, digits)), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if split == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(SAMPLE, trainers.BpeTrainer(vocab_size=420, special_tokens=[END, BEGIN], initial_alphabet=alphabet))
    return tokenizer


def template(text: str) -> Callable[[Tokenizer], None]:
    def change(tokenizer: Tokenizer) -> None:
        tokenizer.post_processor = processors.TemplateProcessing(text, None, [(BEGIN, 1), (END, 0)])

    return change


def normalized(normalizer: Any) -> Callable[[Tokenizer], None]:
    return lambda tokenizer: setattr(tokenizer, "normalizer", normalizer)


def with_prefix(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def other_split(pattern: str, behavior: str = "isolated", *, invert: bool = False) -> Callable[[Tokenizer], None]:
    def change(tokenizer: Tokenizer) -> None:
        words = pre_tokenizers.Split(Regex(pattern), behavior, invert)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return change


def added(token: AddedToken) -> Callable[[Tokenizer], None]:
    return lambda tokenizer: tokenizer.add_tokens([token]) and None


LLAMA3 = split_pattern("llama3", "keep")
SAME: dict[str, tuple[str, Callable[[Tokenizer], object]]] = {
    "llama3": ("llama3", lambda _: None),
    "llama3, a word is a token": ("llama3", lambda tokenizer: setattr(tokenizer.model, "ignore_merges", True)),
    "gpt2": ("gpt2", lambda _: None),
    "bos": ("llama3", template(f"{BEGIN} $A")),
    "eos": ("gpt2", template(f"$A {END}")),
    "bos and eos": ("llama3", template(f"{BEGIN} $A {END}")),
    "a token that is not special": ("llama3", added(AddedToken("<tool>"))),
    "qwen2": ("llama3 single", lambda _: None),
}
REFUSED: dict[str, tuple[str, Callable[[Tokenizer], object], str]] = {
    "a space in front": ("gpt2", with_prefix, "splits words as GPT-2"),
    "two bos": ("llama3", template(f"{BEGIN} {BEGIN} $A"), "adds .* to a text"),
    "another token at the end": ("llama3", template(f"$A {BEGIN}"), "adds .* to a text"),
    "lower case": ("llama3", normalized(normalizers.Lowercase()), "normalizer Lowercase"),
    "NFKC": ("llama3", normalized(normalizers.NFKC()), "normalizer NFKC"),
    "a sequence": ("llama3", normalized(normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])), "normalizer Sequence"),
    "a regex with the beginning of Llama 3's": ("llama3", other_split(LLAMA3.removesuffix(r"|\s+(?!\S)|\s+") + r"|\s"), "splits words"),
    "removed": ("llama3", other_split(LLAMA3, "removed"), "splits words"),
    "inverted": ("llama3", other_split(LLAMA3, invert=True), "splits words"),
    "GPT-2's, and a word is a token": ("gpt2", lambda tokenizer: setattr(tokenizer.model, "ignore_merges", True), "splits words"),
    "lstrip": ("llama3", added(AddedToken("<mask>", lstrip=True)), "the token <mask> with lstrip"),
    "rstrip": ("llama3", added(AddedToken("<end>", rstrip=True, special=True)), "the token <end> with rstrip"),
    "single_word": ("llama3", added(AddedToken("the", single_word=True)), "the token the with single_word"),
    "a suffix of words": ("llama3", lambda tokenizer: setattr(tokenizer.model, "end_of_word_suffix", "</w>"), "splits words"),
    "dropout": ("llama3", lambda tokenizer: setattr(tokenizer.model, "dropout", 0.1), "splits words"),
}


def saved(folder: Path, split: str, change: Callable[[Tokenizer], object]) -> Tokenizer:
    tokenizer = trained(*split.split())
    change(tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


IDS = TokenIds(bos=1, ends=[0], pad=None)
CONFIG = replace(CONFIGS["llama-grouped"], vocab_size=440)


@pytest.mark.parametrize("name", SAME)
def test_llama_cpp_has_the_same_tokens(name, tmp_path):
    tokenizer = saved(tmp_path, *SAME[name])
    tokens = read_tokens(TextEncoder(tmp_path, END), CONFIG.vocab_size, IDS)
    gguf_file.write(tmp_path, InMemory(random_model(CONFIG)), CONFIG, tokens, kind="fp32", name="test")
    if name == "bos and eos":  # which stands behind documents, and behind no prompt (tokenizer.bos)
        template(f"{BEGIN} $A")(tokenizer)
    llama = LlamaCpp(tmp_path / gguf_file.FILE)
    assert {text: llama.tokens(text) for text in TEXTS} == {text: tokenizer.encode(text).ids for text in TEXTS}


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_does_not_do_is_refused(name, tmp_path):
    split, change, expected = REFUSED[name]
    saved(tmp_path, split, change)
    with pytest.raises(UserError, match=expected):
        read_tokens(TextEncoder(tmp_path, END), CONFIG.vocab_size, IDS)


def test_composed_characters_are_warned_of(tmp_path, caplog):
    saved(tmp_path, "llama3 single", normalized(normalizers.NFC()))
    read_tokens(TextEncoder(tmp_path, END), CONFIG.vocab_size, IDS)
    assert "does not compose characters (NFC)" in caplog.text
