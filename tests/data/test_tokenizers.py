"""stage=train_tokenizer: kinds, split policies, sizes, language balance, report and import."""

import io
import json
import logging
import os
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiktoken
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tiktoken.load import load_tiktoken_bpe
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from pipeline.common import artifact
from pipeline.common.artifact import MANIFEST
from pipeline.common.errors import UserError
from pipeline.config.data import TokenizerConfig
from pipeline.data.tokenize import tokenizer_report, tokenizer_training, training_progress
from pipeline.data.tokenize.tokenizer import TextEncoder, encode, load
from pipeline.data.tokenize.training_text import TrainingText, held_out
from tests.data.library import here
from tests.helpers import RAW, prose, same_files, words

EOD = "<|endoftext|>"
QUIET = "tokenizer.report=false"
TEXTS = [words(n, 400) for n in range(30)]
#: Texts that every lossless kind must decode unchanged.
HARD = [
    "Ein  Tännchen — 漢字 🎄\n\tüber 1234  ",
    " x",
    "\n",
    f"a {EOD} b",
    "<0x41> <unk>",
    "\0\ufffd\U0010ffff",
    "def f():\n        return 12345678",
]


def train(shards: Path, folder: Path, *settings: str, expect: int = 0) -> str:
    return here("stage=train_tokenizer", f"data.shards={shards}", f"tokenizer.path={folder}", *settings, expect=expect)


def test_stock_transformers_load_the_tokenizer(tokenizer):
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    text = "Ein  Tännchen — 漢字 🎄\n\tüber 1234"
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.eos_token, loaded.bos_token, len(loaded)) == (EOD, EOD, 300)
    assert loaded("Tännchen")["input_ids"][-1] != loaded.eos_token_id


@pytest.mark.parametrize("kind, unknown", [("bpe", EOD), ("unigram", "<unk>"), ("wordpiece", "[UNK]")])
def test_every_kind_has_the_same_ids_in_transformers_and_text_encoder(kind, unknown, tmp_path):
    wanted = TokenizerConfig(kind=kind, special_tokens=["<|user|>"])
    tokenizer_training.save(tokenizer_training.train(lambda: TEXTS, wanted, 600), tmp_path, EOD)
    stock, ours = AutoTokenizer.from_pretrained(tmp_path), TextEncoder(tmp_path, EOD)
    assert (stock.eos_token, stock.unk_token, stock.eos_token_id) == (EOD, unknown, ours.end_of_document)
    assert len(stock) == ours.vocab_size <= 600
    assert set(ours.special_tokens) >= {EOD, "<|user|>"}
    assert stock("<|user|>", add_special_tokens=False)["input_ids"] == [stock.convert_tokens_to_ids("<|user|>")]
    for text in [*TEXTS, *HARD]:
        ids = ours.encode([text])[0].tolist()
        if EOD not in text and "<unk>" not in text:
            assert ids == stock(text, add_special_tokens=False)["input_ids"]
        assert not {ours.end_of_document, stock.convert_tokens_to_ids("<|user|>")} & set(ids)
        if kind != "wordpiece":
            assert load(tmp_path).decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "kind, end, special, single, pair, segments",
    [
        ("wordpiece", "[SEP]", [], "[CLS] a [SEP]", "[CLS] a [SEP] b [SEP]", [0, 0, 0, 1, 1]),
        ("bpe", "</s>", ["<pad>", "<s>", "<mask>"], "<s> a </s>", "<s> a </s> </s> b </s>", None),
        ("unigram", "</s>", ["<pad>", "<extra_id_0>"], "a </s>", "a </s> b </s>", None),
        ("bpe", EOD, [], "a", "a b", None),
        ("wordpiece", EOD, [], "a", "a b", None),
    ],
    ids=["BERT", "RoBERTa", "T5", "GPT", "GPT with BERT's pieces"],
)
def test_stock_transformers_add_the_special_tokens_of_pretraining(kind, end, special, single, pair, segments, tmp_path):
    """Templates of a single text and a pair, and token_type_ids. TextEncoder adds no special tokens."""
    wanted = TokenizerConfig(kind=kind, end_of_document=end, special_tokens=special)
    texts = [*TEXTS, "a b " * 100]
    tokenizer_training.save(tokenizer_training.train(lambda: texts, wanted, 600), tmp_path, end)
    stock = AutoTokenizer.from_pretrained(tmp_path)
    assert stock.convert_ids_to_tokens(stock("a")["input_ids"]) == single.split()
    both = stock("a", "b")
    assert stock.convert_ids_to_tokens(both["input_ids"]) == pair.split()
    assert both.get("token_type_ids") == segments
    assert TextEncoder(tmp_path, end).encode(["a"])[1].tolist() == [1]


def pieces(wanted: TokenizerConfig, text: str, size: int = 600) -> list[str]:
    numbers = [f"{n} 417285 417285 \t\t" for n in range(0, 5000, 7)]
    tokenizer = tokenizer_training.train(lambda: [*TEXTS, *numbers], wanted, size)
    return [tokenizer.decode([number]) for number in tokenizer.encode(text).ids]


@pytest.mark.parametrize(
    "kind, digits, longest", [("bpe", "groups_of_three", 3), ("wordpiece", "groups_of_three", 3), ("unigram", "single", 1)]
)
def test_digits(kind, digits, longest):
    kept, cut = (pieces(TokenizerConfig(kind=kind, digits=policy), "x 417285") for policy in ("keep", digits))
    assert max(len(piece.strip("# ")) for piece in kept) > longest
    assert max(len(piece.strip("# ")) for piece in cut) == longest


@pytest.mark.parametrize("split", ["gpt2", "llama3"])
def test_digits_within_the_splits_of_bpe(split):
    assert pieces(TokenizerConfig(split=split, digits="single"), "x 417")[-3:] == ["4", "1", "7"]
    assert "285" in pieces(TokenizerConfig(split=split, digits="groups_of_three"), "417285417")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_whitespace_runs_have_entries(kind):
    wanted = TokenizerConfig(kind=kind, whitespace="runs")
    tokenizer = tokenizer_training.train(lambda: TEXTS, wanted, 700)
    assert tokenizer.get_vocab_size() <= 700
    text = "x" + " " * 16 + "y\n\n\n\tz"
    ids = tokenizer.encode(text).ids
    assert {" " * 16, "\n\n\n"} <= {tokenizer.id_to_token(number) for number in ids}
    assert tokenizer.decode(ids) == text


def test_a_special_token_that_is_a_word_of_the_text_is_refused():
    with pytest.raises(UserError, match=r"tokenizer.special_tokens=winter: is learned as a word"):
        tokenizer_training.train(lambda: ["winter winter winter"] * 50, TokenizerConfig(special_tokens=["winter"]), 300)


def test_the_tokenizer_is_learned_from_the_training_split_only_and_again_the_same(shards, tokenizer, tmp_path):
    changed = tmp_path / "shards"
    changed.mkdir()
    manifest = json.loads((shards / MANIFEST).read_text())
    for name in manifest["files"]:  # without its validation split, the folder must yield the same tokenizer
        if name.startswith("train-"):
            (changed / name).write_bytes((shards / name).read_bytes())
        else:
            (changed / name).write_bytes(b"")
    (changed / MANIFEST).write_text(json.dumps(manifest))
    train(changed, tmp_path / "t", "tokenizer.vocab_size=300", QUIET)
    assert same_files(tokenizer, tmp_path / "t")
    assert "is truncated" in train(changed, tmp_path / "reported", "tokenizer.vocab_size=300", expect=2)


def test_a_corrupt_shard_is_refused_although_only_its_beginning_is_used(shards, tmp_path):
    changed = tmp_path / "shards"
    shutil.copytree(shards, changed)
    raw = bytearray((changed / "train-00000.tar").read_bytes())
    raw[raw.rindex(b"Wald")] ^= 32  # in the last text
    (changed / "train-00000.tar").write_bytes(raw)
    settings = ("tokenizer.train_megabytes=0.01", "tokenizer.vocab_size=300", QUIET)
    assert "train-00000.tar: is corrupt" in train(changed, tmp_path / "t", *settings, expect=2)
    assert not (tmp_path / "t").exists()


def test_training_a_tokenizer_twice(shards, tokenizer, tmp_path):
    assert "nothing to do" in train(shards, tokenizer, "tokenizer.vocab_size=300", QUIET)
    assert "was created with tokenizer.vocab_size=300" in train(shards, tokenizer, "tokenizer.vocab_size=400", QUIET, expect=2)
    (tmp_path / "precious.txt").write_text("mine")
    assert "did not write" in train(shards, tmp_path, expect=2)
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_small_text_yields_a_smaller_vocabulary_with_a_warning(shards, tmp_path):
    printed = train(shards, tmp_path / "t", "tokenizer.train_megabytes=0.001", QUIET)
    totals = json.loads((tmp_path / "t" / MANIFEST).read_text())["totals"]
    assert 257 <= totals["vocab_size"] < 8192
    assert f"yield only {totals['vocab_size']} of 8192 vocabulary entries" in printed


def test_a_unigram_vocabulary_that_is_too_small_for_the_characters_of_the_text_is_refused():
    ranges = [(0x41, 26), (0x391, 24), (0x410, 32), (0x905, 53), (0x3041, 80), (0x4E00, 3000), (0xAC00, 2000)]
    texts = [" ".join(chr(first + (7 * n) % count) * 2 for first, count in ranges) for n in range(3000)]
    wanted = TokenizerConfig(kind="unigram")
    with pytest.raises(UserError, match=r"tokenizer.vocab_size=2000: is too small: the characters .* need 5,\d\d\d entries") as refused:
        tokenizer_training.train(lambda: texts, wanted, 2000)
    assert "tokenizer.kind=bpe" in str(refused.value)
    with pytest.raises(UserError, match="SentencePiece cannot train on this text"):
        tokenizer_training.train(list, wanted, 2000)


def test_unigram_training_shows_progress_and_nothing_of_sentencepiece(caplog, capfd, monkeypatch):
    monkeypatch.setattr(training_progress, "EVERY", 0)

    def texts() -> Iterator[str]:
        yield from (prose(n, 40) for n in range(40))
        print("from Python", file=sys.stderr)

    with caplog.at_level(logging.INFO):
        tokenizer_training.train(texts, TokenizerConfig(kind="unigram"), 400)
        logging.getLogger("pipeline").info("afterwards")
    lines = [record.message for record in caplog.records]
    assert lines[0] == "train_tokenizer: extracting seed pieces"
    assert any(re.search(r"train_tokenizer: 400 entries: 1 of \d+ EM steps, .* left \([\d,]+ pieces remain\)", line) for line in lines)
    assert re.search(r"train_tokenizer: 400 entries: (\d+) of \1 EM steps, .*, done", lines[-2])
    assert capfd.readouterr().err == "from Python\n"
    os.write(2, b"restored")
    assert capfd.readouterr().err == "restored"


def test_training_without_information_logs_its_time(caplog, monkeypatch):
    monkeypatch.setattr(training_progress, "EVERY", 0.001)
    with caplog.at_level(logging.INFO), training_progress.Waiting("train_tokenizer: training") as waiting:
        waiting.begin()
        deadline = time.monotonic() + 60
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.001)
    assert caplog.records[0].message == "train_tokenizer: training, for 0:00:00"


def test_several_sizes_in_one_run_equal_single_runs(shards, tokenizer, tmp_path):
    printed = train(shards, tmp_path / "t", "tokenizer.vocab_sizes=[300,320]", f"tokenizer.compare=[{tokenizer}]")
    assert (tmp_path / "t/300/tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()
    train(shards, tmp_path / "alone", "tokenizer.vocab_size=320", QUIET)
    assert (tmp_path / "t/320/tokenizer.json").read_bytes() == (tmp_path / "alone/tokenizer.json").read_bytes()
    report = json.loads((tmp_path / "t/320/report.json").read_text())
    assert [row["name"] for row in report["tokenizers"]] == ["t/320", "t/300", str(tokenizer)]
    small, large = report["tokenizers"][1], report["tokenizers"][0]
    assert small["tokens"] == report["tokenizers"][2]["tokens"] > large["tokens"]
    assert all(row["name"] in printed for row in report["tokenizers"])
    assert set(artifact.read(tmp_path / "t/300", key="tokenizer.path", stage="train_tokenizer").files) >= {"report.json", "report.html"}
    assert printed.count("wrote") == 2
    assert train(shards, tmp_path / "t", "tokenizer.vocab_sizes=[300,320]").count("nothing to do") == 2


def corpus_of_languages(folder: Path, **counts: int) -> Path:
    """Text shards with a given number of documents of each language."""
    folder.mkdir()
    chance = random.Random(3)
    lines = [json.dumps({"text": words(n, 50), "lang": language}) for language, count in counts.items() for n in range(count)]
    (folder / "x.jsonl").write_text("\n".join(chance.sample(lines, len(lines))))
    here(
        "stage=shard",
        *RAW,
        f"data.input=[{folder}/x.jsonl]",
        f"data.shards={folder}/s",
        "data.shard_megabytes=0.02",
        "data.validation_fraction=0.2",
    )
    return folder / "s"


def test_the_sample_is_balanced_by_language(tmp_path):
    shards = corpus_of_languages(tmp_path / "c", de=300, deu=60, de_AT=40, en=100, la=20)  # three spellings of one language
    text = artifact.read(shards, key="data.shards", stage="shard")
    shares = {}
    for balance in (1.0, 0.5, 0.0):
        sample = TrainingText(shards, text, 0.03, balance)
        first, again = list(sample.documents()), list(sample.documents())
        assert first == again
        shares[balance] = sample.languages
        taken = sum(len(part.encode()) for _, part in first)
        assert taken == pytest.approx(sample.languages.total(), abs=20)
    proportional, equal = shares[1.0], shares[0.0]
    assert proportional["de"] > 2.5 * proportional["en"]
    assert equal["de"] == pytest.approx(equal["en"], rel=0.15)
    assert proportional["la"] < equal["la"] <= equal["en"]
    ratio = {balance: count["de"] / count["en"] for balance, count in shares.items()}
    assert ratio[1.0] > ratio[0.5] > ratio[0.0]
    found = held_out(shards, text, 1)
    assert set(found) <= {"de", "en", "la"}
    assert sum(map(len, found.values())) == text.totals["validation"]["documents"]


def test_parallel_texts_get_as_many_tokens_in_each_language(tmp_path):
    chance = random.Random(5)
    letters = {"de": "abcdefghi", "la": "nopqrstuv"}
    known = {language: ["".join(chance.choices(own, k=6)) for _ in range(80)] for language, own in letters.items()}

    def text(language: str, count: int) -> str:
        return " ".join(chance.choices(known[language], k=count))

    documents = [{"text": text(language, 60), "lang": language} for language, count in (("de", 200), ("la", 15)) for _ in range(count)]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(each) for each in documents))
    shards = tmp_path / "s"
    here("stage=shard", *RAW, f"data.input=[{tmp_path}/x.jsonl]", f"data.shards={shards}", "data.validation_fraction=0")
    parallel = {language: [text(language, 8) for _ in range(50)] for language in known}
    for language, lines in parallel.items():
        (tmp_path / f"{language}.txt").write_text("\n".join(lines) + "\n")
    both = f"tokenizer.parity={{deu: {tmp_path}/de.txt, la: {tmp_path}/la.txt}}"
    ratios = {}
    for name, settings in (("plain", []), ("fair", [both])):
        train(shards, tmp_path / name, "tokenizer.vocab_size=450", QUIET, *settings)
        made = load(tmp_path / name)
        assert made.get_vocab_size() == 450
        counts = {language: sum(len(made.encode(line).ids) for line in lines) for language, lines in parallel.items()}
        ratios[name] = counts["la"] / counts["de"]
    assert ratios["plain"] > 1.5
    assert abs(ratios["fair"] - 1) < 0.05
    assert "nothing to do" in train(shards, tmp_path / "fair", "tokenizer.vocab_size=450", QUIET, both)
    (tmp_path / "la.txt").write_text("\n".join(parallel["la"][::-1]))
    assert "tokenizer.parity" in train(shards, tmp_path / "fair", "tokenizer.vocab_size=450", QUIET, both, expect=2)
    (tmp_path / "la.txt").write_text(parallel["la"][0])
    assert "de: 50, la: 1: are different numbers of lines" in train(shards, tmp_path / "t", QUIET, both, expect=2)
    elsewhere = f"tokenizer.parity={{de: {tmp_path}/de.txt, fr: {tmp_path}/de.txt}}"
    assert "fr: no document of the sample is in this language" in train(shards, tmp_path / "t", QUIET, elsewhere, expect=2)


def test_report_metrics(tokenizer):
    texts = {"a": ["Wald und Schnee", "tree"], "b": ["漢字 漢字"]}
    reference = load(tokenizer)
    row = tokenizer_report.measure("name", reference, texts, lambda vocab_size: 2.0 * vocab_size)
    counts = {language: sum(len(reference.encode(text).ids) for text in group) for language, group in texts.items()}
    assert {language: part["tokens"] for language, part in row["languages"].items()} == counts
    assert (row["languages"]["a"]["words"], row["languages"]["a"]["bytes"], row["languages"]["b"]["bytes"]) == (4, 19, 13)
    assert row["languages"]["a"]["fertility"] == counts["a"] / 4
    per_byte = {"a": counts["a"] / 19, "b": counts["b"] / 13}
    assert row["languages"]["a"]["parity"] == 1
    assert row["languages"]["b"]["parity"] == pytest.approx(per_byte["b"] / per_byte["a"])
    assert row["bytes_per_token"] == 32 / sum(counts.values())
    assert row["flops_per_gigabyte"] == pytest.approx(1e9 * sum(counts.values()) / 32 * 600)
    used = {number for group in texts.values() for text in group for number in reference.encode(text).ids}
    assert row["coverage"] == len(used) / 300
    assert row["unknown"] == 0


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece"])
def test_the_pieces_of_a_sample_are_its_text(kind):
    model = tokenizer_training.train(lambda: TEXTS, TokenizerConfig(kind=kind), 600)
    text = "Wald und 漢字 winter, 🎄 Tännchen"
    pieces = tokenizer_report.segmentation(model, text)
    shown = "".join(piece for piece, _ in pieces)
    assert shown.replace(" ", "") == text.replace(" ", "")
    assert sum(count for _, count in pieces) == len(encode(model, [text])[0])
    assert len(pieces) > 5


def test_wordpiece_stays_within_its_vocabulary(caplog):
    """Of 900 characters, 600 occur once: they are left out, or the vocabulary is refused."""
    frequent, rare = ["".join(map(chr, range(first, first + count))) for first, count in ((0x4E00, 300), (0x5E00, 600))]
    rare_words = [rare[n : n + 6] for n in range(0, 600, 6)]
    texts = [" ".join([frequent, "ein altes Haus am Wald", rare_words[n]]) for n in range(100)]
    texts += [frequent * 40 + " ein altes Haus am Wald"] * 100
    model = tokenizer_training.train(lambda: texts, TokenizerConfig(kind="wordpiece"), 520)
    assert 300 < model.get_vocab_size() <= 520
    assert "600 of " in caplog.text
    assert model.encode("Haus am " + frequent[:3], add_special_tokens=False).tokens[-3:] == list(frequent[:3])
    assert model.encode(rare[0], add_special_tokens=False).tokens == ["[UNK]"]
    everything = tokenizer_training.train(lambda: texts, TokenizerConfig(kind="wordpiece"), 1000)
    assert "[UNK]" not in everything.encode(rare, add_special_tokens=False).tokens
    with pytest.raises(UserError, match=r"vocab_size=512: is below the 1,\d{3} entries that wordpiece needs for the 1,\d{3} characters"):
        tokenizer_training.train(
            lambda: [frequent + rare + "".join(map(chr, range(0x6E00, 0x6F80)))], TokenizerConfig(kind="wordpiece"), 512
        )


def test_unknown_tokens_are_counted():
    model = tokenizer_training.train(lambda: TEXTS, TokenizerConfig(kind="wordpiece"), 600)
    row = tokenizer_report.measure("wordpiece", model, {"x": ["Wald 🎄 und ж"]}, float)
    assert row["unknown"] == 2


def test_the_report_page_escapes_what_it_shows(tmp_path, tokenizer):
    row = tokenizer_report.measure("<script>", load(tokenizer), {"a&b": ["text"]}, float)
    tokenizer_report.write(tmp_path, [row], {"text": "<i>"})
    page = (tmp_path / "report.html").read_text()
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    assert "<i>" not in page
    assert "a&amp;b" in page
    assert "<span class=token>" in page


def tiktoken_file(path: Path, tokenizer: Path) -> Path:
    """The byte-level BPE of the fixture in tiktoken's format."""
    import base64

    content = json.loads((tokenizer / "tokenizer.json").read_text())
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte = {char: number for number, char in bytes_to_unicode().items()}
    entries = sorted((number, token) for token, number in content["model"]["vocab"].items() if token != EOD)
    raw = [bytes(byte[char] for char in token) for _, token in entries]
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(raw)))
    return path


def test_a_tiktoken_file(tokenizer, tmp_path):
    source = tiktoken_file(tmp_path / "x.tiktoken", tokenizer)
    settings = ("stage=train_tokenizer", f"tokenizer.source={source}", f"tokenizer.path={tmp_path}/t")
    here(*settings, "tokenizer.split=llama3")
    ranks = load_tiktoken_bpe(str(source))
    pattern = tokenizer_training.split_pattern("llama3", "keep")
    original = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={EOD: len(ranks)})
    ours, stock = load(tmp_path / "t"), AutoTokenizer.from_pretrained(tmp_path / "t")
    for text in [*TEXTS, *HARD]:
        assert encode(ours, [text])[0].tolist() == original.encode_ordinary(text)
        if text != f"a {EOD} b":
            assert stock(text)["input_ids"] == original.encode_ordinary(text)
    assert TextEncoder(tmp_path / "t", EOD).end_of_document == len(ranks)
    assert "nothing to do" in here(*settings, "tokenizer.split=llama3")
    assert "was created with tokenizer.split=llama3" in here(*settings, "tokenizer.split=gpt2", expect=2)


AS_IT_IS = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}


@pytest.mark.parametrize(
    "name, options",
    [
        ("unigram", {"user_defined_symbols": ["<|tool|>"]}),
        ("unigram", {**AS_IT_IS, "add_dummy_prefix": False, "user_defined_symbols": ["<|tool|>"]}),
        ("bpe", {**AS_IT_IS, "split_digits": True}),
        ("bpe", {**AS_IT_IS, "add_dummy_prefix": False, "user_defined_symbols": ["<|tool|>"]}),
    ],
    ids=["unigram, normalized", "unigram, as it is", "bpe like Llama 2", "bpe like Gemma"],
)  # fmt: skip
def test_a_sentencepiece_model(name, options, tmp_path):
    model = io.BytesIO()
    required = "".join(sorted(set("<unk></s>|endoftext0x123456789ABCDEF")))
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, model_type=name, vocab_size=450, hard_vocab_limit=False, required_chars=required,
        byte_fallback=True, minloglevel=2, **options,
    )  # fmt: skip
    (tmp_path / "x.model").write_bytes(model.getvalue())
    original = SentencePieceProcessor(model_proto=model.getvalue())
    here(
        "stage=train_tokenizer", f"tokenizer.source={tmp_path}/x.model", f"tokenizer.path={tmp_path}/t", 'tokenizer.end_of_document="</s>"'
    )
    ours = load(tmp_path / "t")
    for text in [*TEXTS, *HARD, "</s> Wald</s>", "Wald <|tool|> und"]:
        assert encode(ours, [text])[0].tolist() == original.encode(text), text
    assert TextEncoder(tmp_path / "t", "</s>").end_of_document == original.eos_id()
    assert AutoTokenizer.from_pretrained(tmp_path / "t").eos_token_id == original.eos_id()


def test_files_that_cannot_be_imported(tmp_path):
    def refused(name: str, content: bytes | None) -> str:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        return here("stage=train_tokenizer", f"tokenizer.source={tmp_path}/{name}", f"tokenizer.path={tmp_path}/t", expect=2)

    assert "is not a file" in refused("missing.model", None)
    assert "must end in .tiktoken or .model" in refused("x.json", b"{}")
    assert "cannot be read" in refused("x.model", b"no model")
    assert "cannot be read" in refused("x.tiktoken", b"no ranks")
    unread = here("stage=tokenize", f"tokenizer.path={tmp_path}/x.model", f"data.shards={tmp_path}/s", expect=2)
    assert f"stage=train_tokenizer tokenizer.source={tmp_path}/x.model" in unread
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    "settings, told",
    [
        (["tokenizer=wordpiece", "tokenizer.whitespace=runs"], "is not supported by wordpiece"),
        (["tokenizer=unigram", "tokenizer.split=llama3"], "unigram has its own pre-tokenization"),
        (["tokenizer=unigram", "tokenizer.digits=groups_of_three"], "is not supported by SentencePiece"),
        (["tokenizer=unigram", "tokenizer.parity={de: a, en: b}"], "applies to bpe only, not to unigram"),
        (["tokenizer.parity={de: a}"], "balances several languages, not one"),
        (["tokenizer.vocab_sizes=[300,100]"], "leaves nothing to learn"),
        (["tokenizer.vocab_sizes=[300,300]"], "contains a size twice"),
        (["tokenizer.kind=bpq"], "one of bpe, unigram, wordpiece"),
    ],
)
def test_impossible_settings_are_refused(settings, told, tmp_path):
    assert told in here("stage=train_tokenizer", f"tokenizer.path={tmp_path}/t", *settings, expect=2)


def test_a_tokenizer_to_compare_with_must_exist(shards, tmp_path):
    told = train(shards, tmp_path / "t", f"tokenizer.compare=[{tmp_path}/a,{tmp_path}/b]", expect=2)
    assert "2 problems" in told
    assert f"tokenizer.compare={tmp_path}/b: holds no tokenizer.json" in told


def test_truncate_vocab_removes_the_last_merges():
    whole = tokenizer_training.train(lambda: TEXTS, TokenizerConfig(whitespace="runs"), 400)
    small = tokenizer_training.train(lambda: TEXTS, TokenizerConfig(whitespace="runs"), 350)
    assert json.loads(tokenizer_training.truncate_vocab(whole, 350).to_str()) == json.loads(small.to_str())
    assert isinstance(tokenizer_training.truncate_vocab(whole, 10_000), Tokenizer)
    assert Counter(tokenizer_training.truncate_vocab(whole, 10_000).get_vocab()) == Counter(whole.get_vocab())
