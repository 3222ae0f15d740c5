"""Learning a tokenizer: byte-level BPE and WordPiece with Hugging Face `tokenizers`, Unigram with SentencePiece.

Each is kept as a Hugging Face folder. Special tokens are recognised by tools that ask for them; our own encoding never does (TextEncoder).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pipeline.config.data import TokenizerConfig
from pipeline.errors import UserError

Texts = Callable[[], Iterable[str]]
"""Gives the texts to learn from."""

#: How a text falls into words: GPT-2 (Radford et al. 2019) and Llama 3 (Dubey et al. 2024; OpenAI's cl100k before it).
PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|NUMBER| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBER| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
_NUMBERS = {"single": r"\p{N}", "groups_of_three": r"\p{N}{1,3}"}
_NUMBERS_KEPT = {"gpt2": r" ?\p{N}+", "llama3": _NUMBERS["groups_of_three"]}

RUNS = [char * length for char in " \t\n" for length in range(16, 1, -1)]
"""Whitespace that gets entries of its own with `tokenizer.whitespace=runs`."""

UNKNOWN = "[UNK]"
"""WordPiece's token for a word that it cannot put together."""

_BERT = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]

#: What transformers asks a tokenizer for -> the names that such a token usually has.
ROLES = {"pad_token": ("[PAD]", "<pad>"), "cls_token": ("[CLS]", "<s>"), "sep_token": ("[SEP]", "</s>"), "mask_token": ("[MASK]", "<mask>")}

#: What BERT, RoBERTa and T5 have around a text and a pair, in pretraining and for stock users: the tokens that it takes -> both.
#: The first of the tokens ends documents, too; who ends them otherwise trains another kind of model.
TEMPLATES = {
    ("[SEP]", "[CLS]"): ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    ("</s>", "<s>", "<mask>"): ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
    ("</s>", "<extra_id_0>"): ("$A </s>", "$A </s> $B </s>"),
}


def train(texts: Texts, wanted: TokenizerConfig, vocab_size: int) -> Tokenizer:
    """Learn a tokenizer.

    Args:
        texts: the sample.
        wanted: kind, split, digits, whitespace and special tokens.
        vocab_size: entries at most, special tokens included; a small text yields fewer.

    Raises:
        UserError: a special token is a word that the text holds.
    """
    runs = RUNS if wanted.whitespace == "runs" else []
    learn = {"bpe": _train_bpe, "unigram": _train_unigram, "wordpiece": _train_wordpiece}[wanted.kind]
    special = list(dict.fromkeys([wanted.end_of_document, *wanted.special_tokens]))
    tokenizer = learn(texts, wanted, special, vocab_size - len(runs))
    tokenizer.add_tokens([AddedToken(run, normalized=False) for run in runs])
    tokenizer.encode_special_tokens = True
    forged = [token for token in special if tokenizer.token_to_id(token) in tokenizer.encode(token, add_special_tokens=False).ids]
    if forged:
        rule = "is learned as a word of the text, too: documents that spell it would hold the special token"
        raise UserError.of("tokenizer.special_tokens", forged[0], rule, "choose a text with signs around it, such as <|name|>")
    tokenizer.encode_special_tokens = False
    _surround(tokenizer, wanted.end_of_document)
    return tokenizer


def _surround(tokenizer: Tokenizer, end_of_document: str) -> None:
    """Have it add the tokens of the first template whose tokens it has, where it is asked for special tokens."""
    for needed, (single, pair) in TEMPLATES.items():
        numbers = [(token, tokenizer.token_to_id(token)) for token in needed]
        if needed[0] == end_of_document and all(number is not None for _, number in numbers):
            tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=numbers)
            return


def truncate_vocab(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """The BPE tokenizer that the same text would have yielded for a smaller vocabulary: the last merges go.

    Args:
        tokenizer: as train() made it.
        vocab_size: entries at most.
    """
    content = json.loads(tokenizer.to_str())
    model = content["model"]
    excess = max(0, tokenizer.get_vocab_size() - vocab_size)
    last = len(model["vocab"]) - excess
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < last}
    model["merges"] = model["merges"][: len(model["merges"]) - excess]
    for token in content["added_tokens"]:
        token["id"] -= excess if token["id"] >= last else 0
    return Tokenizer.from_str(json.dumps(content))


def split_pattern(split: str, digits: str) -> str:
    """The regular expression (Oniguruma's and PCRE's dialect) of a word.

    Args:
        split: a key of PATTERNS.
        digits: keep (as the split has it), single or groups_of_three.
    """
    return PATTERNS[split].replace("NUMBER", _NUMBERS.get(digits, _NUMBERS_KEPT[split]))


def _train_bpe(texts: Texts, wanted: TokenizerConfig, special: list[str], vocab_size: int) -> Tokenizer:
    """Merges over bytes within words (Sennrich et al. 2016; over bytes: Radford et al. 2019)."""
    tokenizer = Tokenizer(models.BPE())
    if (wanted.split, wanted.digits) == ("gpt2", "keep"):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        words = pre_tokenizers.Split(Regex(split_pattern(wanted.split, wanted.digits)), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def _train_unigram(texts: Texts, wanted: TokenizerConfig, special: list[str], vocab_size: int) -> Tokenizer:
    """SentencePiece's Unigram."""
    from pipeline.data.tokenize.tokenizer_sentencepiece import train_unigram

    return train_unigram(texts(), special, wanted.digits == "single", vocab_size)


def _train_wordpiece(texts: Texts, wanted: TokenizerConfig, special: list[str], vocab_size: int) -> Tokenizer:
    """Pieces of words as in BERT (Devlin et al. 2019), with case and accents. Whitespace is not kept."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), *_digits(wanted.digits)])
    tokenizer.decoder = decoders.WordPiece()
    special = list(dict.fromkeys([UNKNOWN, *_BERT, *special]))
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def _digits(digits: str) -> list[Any]:
    return [pre_tokenizers.Split(Regex(_NUMBERS[digits]), "isolated")] if digits in _NUMBERS else []


def save(tokenizer: Tokenizer, folder: Path, end_of_document: str) -> list[Path]:
    """Write the Hugging Face folder that AutoTokenizer loads; returns its files."""
    unknown = next((token for token in ("<unk>", UNKNOWN) if tokenizer.token_to_id(token) is not None), end_of_document)
    special = {"bos_token": end_of_document, "eos_token": end_of_document, "unk_token": unknown}
    for role, names in ROLES.items():
        for name in names:
            if tokenizer.token_to_id(name) is not None:
                special[role] = name
    # Not told so, transformers leaves out which text of a pair a token is of.
    segments = tokenizer.post_processor is not None and any(tokenizer.encode("a", "a").type_ids)
    settings = {
        **special,
        "model_input_names": ["input_ids", *(["token_type_ids"] if segments else []), "attention_mask"],
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
