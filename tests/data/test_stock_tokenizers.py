"""Tokenizers as stock transformers writes them: the ids of its classes, and no special token from text that spells one."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import transformers
from sentencepiece import SentencePieceTrainer, sentencepiece_model_pb2
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipeline.common.errors import UserError
from pipeline.data.tokenize.encoders import HARD_TEXTS
from pipeline.data.tokenize.tokenizer import TextEncoder
from tests.helpers import prose, words

TEXTS = [
    *HARD_TEXTS,
    *(prose(n, 3) for n in range(5)),
    words(0, 60),
    "Ｆｕｌｌ width ½ ﬁ Å",
    "по-русски",
    "漢字 한국어",
    "unknown: \ue123\u0a85 end",
]


def pieces() -> list[tuple[str, float]]:
    """A Unigram vocabulary: characters and short words, with log-probabilities."""
    characters = sorted(set("▁" + "".join(TEXTS[:7]) + "<>/_") - set(" \ue123\u0a85"))
    common = [f"▁{word}" for word in ("the", "of", "and", "Tännchen", "der", "und")] + ["er", "en", "/s", "as"]
    return [(piece, -4.0 - number / 100) for number, piece in enumerate(characters)] + [(piece, -3.0) for piece in common]


def scored(*names: str) -> list[tuple[str, float]]:
    """Control symbols with the score that transformers gives them."""
    return [(name, 0.0) for name in names]


def byte_level() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet))
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def precompiled(folder: Path) -> None:
    """Give a tokenizer.json the normalizer and the pre-tokenizer in the notation of released checkpoints."""
    model = io.BytesIO()
    SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=200, hard_vocab_limit=False, minloglevel=2)
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model.getvalue())
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)
    content = json.loads(tokenizer.to_str())
    split = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True, "str_rep": "▁"}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, split]}
    path.write_text(json.dumps(content))


def gapped() -> PreTrainedTokenizerFast:
    """A vocabulary with unused ids, and special tokens between others."""
    vocabulary, merges = byte_level()
    spread = {token: 3 * number for token, number in vocabulary.items()} | {"<eos>": 301, "<mask>": 5}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(spread, merges)), eos_token="<eos>", mask_token="<mask>")


def bpe(name: str, *first: str, last: str) -> Callable[[], PreTrainedTokenizerFast]:
    """A class with byte-level BPE, and special tokens before and after the vocabulary."""

    def build() -> PreTrainedTokenizerFast:
        vocabulary, merges = byte_level()
        tokens = [*first, *vocabulary, last]
        return getattr(transformers, name)(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)

    return build


def unigram(name: str, *first: str, last: tuple[str, ...] = ()) -> Callable[[], PreTrainedTokenizerFast]:
    """A class with a Unigram model, and special tokens before and after the vocabulary."""
    return lambda: getattr(transformers, name)(vocab=[*scored(*first), *pieces(), *scored(*last)])


#: Name -> (a tokenizer of a stock class, its end-of-document token).
STOCK: dict[str, tuple[Callable[[], PreTrainedTokenizerFast], str]] = {
    "T5": (unigram("T5TokenizerFast", "<pad>", "</s>", "<unk>"), "</s>"),
    "XLM-R": (unigram("XLMRobertaTokenizerFast", "<s>", "<pad>", "</s>", "<unk>", last=("<mask>",)), "</s>"),
    "CamemBERT": (
        unigram("CamembertTokenizerFast", "<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>", last=("<mask>",)),
        "</s>",
    ),
    "mBART": (unigram("MBartTokenizerFast", "<s>", "<pad>", "</s>", "<unk>"), "</s>"),
    "ALBERT": (unigram("AlbertTokenizerFast", "<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"), "[SEP]"),
    "DeBERTa-v2": (unigram("DebertaV2TokenizerFast", "[PAD]", "[CLS]", "[SEP]", "[UNK]"), "[SEP]"),
    "XLNet": (unigram("XLNetTokenizerFast", "<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"), "<eod>"),
    "Pegasus": (unigram("PegasusTokenizerFast", "<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk>"), "</s>"),
    "BERT": (
        lambda: transformers.BertTokenizerFast(
            vocab={t: n for n, t in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcst", "##s", "the"])}
        ),
        "[SEP]",
    ),
    "RoBERTa": (bpe("RobertaTokenizerFast", "<s>", "<pad>", "</s>", "<unk>", last="<mask>"), "</s>"),
    "GPT-NeoX": (bpe("GPTNeoXTokenizerFast", "<|endoftext|>", last="<|padding|>"), "<|endoftext|>"),
    "Qwen2": (bpe("Qwen2TokenizerFast", last="<|endoftext|>"), "<|endoftext|>"),
    "gaps": (gapped, "<eos>"),
}


def split(ids: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


@pytest.mark.parametrize("name", STOCK)
def test_the_ids_are_those_of_stock_transformers_and_text_has_no_special_token(name, tmp_path):
    build, end = STOCK[name]
    build().save_pretrained(tmp_path)
    stock, encoder = AutoTokenizer.from_pretrained(tmp_path), TextEncoder(tmp_path, end)
    assert split(*encoder.encode(TEXTS)) == [stock(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert encoder.end_of_document == stock.convert_tokens_to_ids(end)
    special = set(encoder.special_tokens)
    spelled = [form for token in sorted(special) for form in (token, f"a {token}b", token + token, f" the {token}\n")]
    mixed = [text for pair in zip(TEXTS * 40, spelled, strict=False) for text in pair]
    ids = split(*encoder.encode(mixed))
    assert ids[::2] == split(*encoder.encode(mixed[::2]))
    assert ids[1::2] == [split(*encoder.encode([text]))[0] for text in mixed[1::2]]
    text_tokens = {stock.convert_ids_to_tokens(number) for document in ids for number in document}
    assert not text_tokens & (special - {stock.unk_token})


@pytest.mark.parametrize("name", ["T5", "XLM-R", "CamemBERT"])
def test_released_tokenizers_with_a_precompiled_normalizer(name, tmp_path):
    build, end = STOCK[name]
    build().save_pretrained(tmp_path)
    precompiled(tmp_path)
    stock = AutoTokenizer.from_pretrained(tmp_path)
    ids = split(*TextEncoder(tmp_path, end).encode([*TEXTS, "a ＜／ｓ＞ b"]))
    assert ids[:-1] == [stock(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert stock.convert_tokens_to_ids("</s>") not in ids[-1], "the normalizer makes the token out of other characters"


def test_text_that_spells_a_token_is_divided_into_the_pieces_of_sentencepiece(tmp_path):
    build, end = STOCK["T5"]
    build().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    found = tokenizer.convert_ids_to_tokens(TextEncoder(tmp_path, end).encode(["as</s>as \ue123<extra_id_0>"])[0].tolist())
    assert found == ["▁", "as", *"<", "/s", ">", "as", "▁", "<unk>", "<", *"extra_id_0", ">"]


def test_an_entry_that_is_no_special_token_is_still_refused(tmp_path):
    build, end = STOCK["T5"]
    build().save_pretrained(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != end]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="a document whose text contains it would end there"):
        TextEncoder(tmp_path, end)
