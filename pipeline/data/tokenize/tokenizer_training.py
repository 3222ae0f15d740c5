"""Tokenizer training: byte-level BPE and WordPiece with Hugging Face `tokenizers`, Unigram with SentencePiece.

Each tokenizer is saved as a Hugging Face folder. Text that spells a special token is encoded as the special token by other tools, but never
by TextEncoder.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pipeline.common import languages
from pipeline.common.errors import UserError
from pipeline.common.progress import Progress
from pipeline.config.data import TokenizerConfig
from pipeline.data.tokenize.training_progress import Waiting
from pipeline.data.tokenize.training_text import TrainingText

log = logging.getLogger("pipeline")

Texts = Callable[..., Iterable[str]]
"""Returns an iterable over the training texts; given a language, over those in it."""

#: Pre-tokenization, the split of text into words: GPT-2 (Radford et al. 2019) and Llama 3 (Dubey et al. 2024; OpenAI's cl100k before it).
PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|NUMBER| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBER| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
_NUMBERS = {"single": r"\p{N}", "groups_of_three": r"\p{N}{1,3}"}
_NUMBERS_KEPT = {"gpt2": r" ?\p{N}+", "llama3": _NUMBERS["groups_of_three"]}

WHITESPACE_RUNS = [char * length for char in " \t\n" for length in range(16, 1, -1)]
"""Additional entries with `tokenizer.whitespace=runs`."""

UNKNOWN = "[UNK]"
"""WordPiece's token for a word that it cannot represent."""

CHARACTER_COVERAGE = 0.9995
"""If the alphabet exceeds WordPiece's vocabulary, it learns the most frequent characters that cover this share of the text, as Unigram."""

_BERT = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]

#: Special token attribute of transformers -> conventional names of the token.
ROLES = {"pad_token": ("[PAD]", "<pad>"), "cls_token": ("[CLS]", "<s>"), "sep_token": ("[SEP]", "</s>"), "mask_token": ("[MASK]", "<mask>")}

#: Required special tokens -> templates of a single text and a pair, as in pretraining and in stock transformers: BERT, RoBERTa, T5.
#: A template applies only if its first token is the end-of-document token.
TEMPLATES = {
    ("[SEP]", "[CLS]"): ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    ("</s>", "<s>", "<mask>"): ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
    ("</s>", "<extra_id_0>"): ("$A </s>", "$A </s> $B </s>"),
}


def parallel_texts(files: Mapping[str, str]) -> dict[str, list[str]]:
    """Read the files of tokenizer.parity: the label of a language -> its lines.

    Raises:
        UserError: a file cannot be read, or has another number of lines.
    """
    texts: dict[str, list[str]] = {}
    for label, name in languages.by_label(files).items():
        try:
            texts[label] = Path(name).expanduser().read_text(encoding="utf-8").rstrip("\n").split("\n")
        except (OSError, UnicodeError) as error:
            raise UserError.of("tokenizer.parity", name, f"cannot be read: {error}", "name a text file in UTF-8") from error
    counts = {label: len(lines) for label, lines in texts.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{label}: {count:,}" for label, count in counts.items())
        fix = "name files whose lines are translations of each other"
        raise UserError.of("tokenizer.parity", shown, "are different numbers of lines", fix)
    return texts


def train_sizes(
    sample: TrainingText, options: TokenizerConfig, sizes: list[int], parallel: Mapping[str, list[str]]
) -> dict[int, Tokenizer]:
    """Train one tokenizer per size. The smaller vocabularies of BPE are prefixes of the largest one.

    Args:
        sizes: maximum numbers of entries, ascending.
        parallel: as in train.

    Raises:
        UserError: as train.
    """

    def trained(size: int) -> Tokenizer:
        with Waiting(f"train_tokenizer: training {size:,} entries") as waiting:

            def texts(wanted: str = "") -> Iterator[str]:
                with Progress(sample.bytes, f"train_tokenizer: reading {wanted}".rstrip(), "B") as progress:
                    for language, text in sample.documents():
                        if wanted in ("", language):
                            yield text
                        progress.advance(len(text.encode("utf-8")))
                log.info("train_tokenizer: training %s entries on %.1f MB", f"{size:,}", sum(sample.languages.values()) / 1e6)
                if options.kind != "unigram":  # which reports its own progress
                    waiting.begin()

            return train(texts, options, size, parallel)

    if options.kind == "bpe":
        largest = trained(sizes[-1])
        return {size: truncate_vocab(largest, size) if size < sizes[-1] else largest for size in sizes}
    return {size: trained(size) for size in sizes}


def train(texts: Texts, config: TokenizerConfig, vocab_size: int, parallel: Mapping[str, list[str]] | None = None) -> Tokenizer:
    """Train a tokenizer.

    Args:
        config: kind, split, digits, whitespace and special tokens.
        vocab_size: maximum number of entries, special tokens included; a small text yields fewer.
        parallel: the texts of tokenizer.parity by language.

    Raises:
        UserError: a special token is also a word of the text, the vocabulary has no room for the characters of the text, or a language of
            `parallel` has no text.
    """
    runs = WHITESPACE_RUNS if config.whitespace == "runs" else []
    train_bpe: Callable[..., Tokenizer] = partial(_train_bpe, parallel=parallel or {})
    train_kind = {"bpe": train_bpe, "unigram": _train_unigram, "wordpiece": _train_wordpiece}[config.kind]
    special = list(dict.fromkeys([config.end_of_document, *config.special_tokens]))
    tokenizer = train_kind(texts, config, special, vocab_size - len(runs))
    tokenizer.add_tokens([AddedToken(run, normalized=False) for run in runs])
    tokenizer.encode_special_tokens = True
    ambiguous = [token for token in special if tokenizer.token_to_id(token) in tokenizer.encode(token, add_special_tokens=False).ids]
    if ambiguous:
        rule = "is learned as a word of the text, too: a document whose text contains it would contain the special token"
        raise UserError.of("tokenizer.special_tokens", ambiguous[0], rule, "choose a name with punctuation around it, such as <|name|>")
    tokenizer.encode_special_tokens = False
    for required, (single, pair) in TEMPLATES.items():  # the first one applies with add_special_tokens=True
        ids = [(token, tokenizer.token_to_id(token)) for token in required]
        if required[0] == config.end_of_document and all(number is not None for _, number in ids):
            tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
            break
    return tokenizer


def truncate_vocab(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """Remove the last merges of a BPE tokenizer. The result equals the tokenizer that train() returns for the smaller vocabulary."""
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
    """The regular expression of a word, in the syntax of Oniguruma and PCRE.

    Args:
        split: a key of PATTERNS.
        digits: keep (the split's own rule), single or groups_of_three.
    """
    return PATTERNS[split].replace("NUMBER", _NUMBERS.get(digits, _NUMBERS_KEPT[split]))


def _train_bpe(
    texts: Texts, config: TokenizerConfig, special: list[str], vocab_size: int, *, parallel: Mapping[str, list[str]]
) -> Tokenizer:
    """Train byte-level BPE: merges within words (Sennrich et al. 2016), over bytes (Radford et al. 2019).

    With parallel texts, each merge is the most frequent pair of the language that they are longest in, in tokens (Foroutan et al. 2025,
    Parity-Aware Byte-Pair Encoding, https://arxiv.org/abs/2508.04796).
    """
    tokenizer = Tokenizer(models.BPE())
    if (config.split, config.digits) == ("gpt2", "keep"):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        words = pre_tokenizers.Split(Regex(split_pattern(config.split, config.digits)), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if parallel:
        if missing := [language for language in parallel if next(iter(texts(language)), None) is None]:
            fix = "remove it, or raise tokenizer.train_megabytes"
            raise UserError.of("tokenizer.parity", ", ".join(missing), "no document of the sample is in this language", fix)
        fair = trainers.ParityBpeTrainer(
            num_merges=vocab_size - len(special) - len(alphabet), special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        fair.train_from_iterator(tokenizer, [iter(texts(language)) for language in parallel], [iter(lines) for lines in parallel.values()])
        return tokenizer
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def _train_unigram(texts: Texts, config: TokenizerConfig, special: list[str], vocab_size: int) -> Tokenizer:
    """Train a Unigram model with SentencePiece."""
    from pipeline.data.tokenize.tokenizer_sentencepiece import train_unigram

    return train_unigram(texts(), special, config.digits == "single", vocab_size)


def _train_wordpiece(texts: Texts, config: TokenizerConfig, special: list[str], vocab_size: int) -> Tokenizer:
    """Train WordPiece as in BERT (Devlin et al. 2019), with case and accents. Whitespace is not preserved."""
    special = list(dict.fromkeys([UNKNOWN, *_BERT, *special]))
    tokenizer = _wordpiece(texts(), config, special, vocab_size)
    if tokenizer.get_vocab_size() > vocab_size:  # the trainer adds every character, as the first of a word and within words
        rare = str.maketrans(dict.fromkeys(_rare_characters(texts(), tokenizer.get_vocab(), len(special), vocab_size)))
        tokenizer = _wordpiece((text.translate(rare) for text in texts()), config, special, vocab_size)
    return tokenizer


def _rare_characters(texts: Iterable[str], vocab: dict[str, int], special: int, vocab_size: int) -> list[str]:
    """The least frequent characters of a text, without which WordPiece's alphabet fits into the vocabulary.

    Args:
        vocab: with the entries of all characters; one that occurs within a word needs a second entry as the first character of a word.

    Raises:
        UserError: the most frequent characters do not fit.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    ranked = sorted((c for c in counts if c in vocab or f"##{c}" in vocab), key=lambda c: (-counts[c], c))
    total, covered, kept = sum(counts[c] for c in ranked), 0, 0
    while covered < CHARACTER_COVERAGE * total:
        covered += counts[ranked[kept]]
        kept += 1
    needed = special + sum(2 if f"##{c}" in vocab else 1 for c in ranked[:kept])
    if needed > vocab_size:
        rule = f"is below the {needed:,} entries that wordpiece needs for the {kept:,} characters in {CHARACTER_COVERAGE:.2%} of the text"
        fix = f"choose more than {needed:,}; or train bpe or unigram, which divide rare characters into bytes"
        raise UserError.of("tokenizer.vocab_size", vocab_size, rule, fix)
    log.warning(
        "train_tokenizer: %s of %s characters are too rare for the vocabulary and become %s", len(ranked) - kept, len(ranked), UNKNOWN
    )
    return ranked[kept:]


def _wordpiece(texts: Iterable[str], config: TokenizerConfig, special: list[str], vocab_size: int) -> Tokenizer:
    digits = [pre_tokenizers.Split(Regex(_NUMBERS[config.digits]), "isolated")] if config.digits in _NUMBERS else []
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), *digits])
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, end_of_document: str) -> list[Path]:
    """Write the files of a Hugging Face folder that AutoTokenizer loads; returns their paths."""
    unknown = next((token for token in ("<unk>", UNKNOWN) if tokenizer.token_to_id(token) is not None), end_of_document)
    special = {"bos_token": end_of_document, "eos_token": end_of_document, "unk_token": unknown}
    for role, names in ROLES.items():
        for name in names:
            if tokenizer.token_to_id(name) is not None:
                special[role] = name
    # transformers returns token_type_ids only if model_input_names lists them.
    segments = tokenizer.post_processor is not None and any(tokenizer.encode("a", "a").type_ids)
    settings = {
        **special,
        "model_input_names": ["input_ids", *(["token_type_ids"] if segments else []), "attention_mask"],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e30),  # transformers' value for no limit
    }
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2),
        "special_tokens_map.json": json.dumps(special, indent=2),
    }
    for name, content in files.items():
        (folder / name).write_text(content + "\n", encoding="utf-8")
    return [folder / name for name in files]
