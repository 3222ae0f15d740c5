"""Classifiers of fastText: the probabilities of its own library for files of every kind, and languages by such a file in stage=shard."""

import io
import json
import struct
import sys
from pathlib import Path
from unittest import mock

import fasttext
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common import artifact
from pipeline.common.errors import UserError
from pipeline.config.rules import check
from pipeline.data.clean import fasttext_model, language, quality
from pipeline.data.clean.cleaner import Cleaner
from pipeline.data.clean.document_batch import DocumentBatch
from pipeline.data.clean.fasttext_model import MAGIC, VERSION, FastText
from pipeline.data.read.documents import Document
from pipeline.data.shard import text_shards
from tests.data.test_clean import clean, config
from tests.training.one_rank import run
from tests.world import configured

LOSSES = {"tree": 1, "negative sampling": 2, "softmax": 3, "one for each label": 4}
WORDS = ["der", "Baum", "ein", "söng", "мир", "日本", "e\u0301", "😀x", "a", "</s>"]


def write(path, words, counts, rows, output, *, loss=3, minn=0, maxn=0, word_ngrams=1, bucket=0, kept=None, parts=0, norms=False):
    """Write a file as fastText does.

    Args:
        words: the words.
        counts: label -> how often it occurred, most frequent first.
        rows: (words + n-grams, dim) input matrix.
        output: (labels or inner nodes, dim) output matrix.
        kept: buckets of n-grams that have a row, if not all have one.
        parts: product-quantize the input matrix in this many parts; `rows` has numbers of centroids then, (rows, dim) random ones.
        norms: quantize the norms of the rows, too.
    """
    dim, random = output.shape[1], np.random.default_rng(7)
    file = io.BytesIO()
    file.write(struct.pack("<2i", MAGIC, VERSION))
    file.write(struct.pack("<12id", dim, 5, 5, 1, 5, word_ngrams, loss, 3, bucket, minn, maxn, 100, 1e-4))
    file.write(struct.pack("<3i2q", len(words) + len(counts), len(words), len(counts), 100, -1 if kept is None else len(kept)))
    for entry, (count, kind) in {**dict.fromkeys(words, (9, 0)), **{f"__label__{name}": (n, 1) for name, n in counts.items()}}.items():
        file.write(entry.encode() + b"\0" + struct.pack("<qb", count, kind))
    for row, number in enumerate(kept or []):
        file.write(struct.pack("<2i", number, row))
    file.write(struct.pack("<?", parts > 0))
    if parts:
        width = -(-dim // parts)
        parts, last = -(-dim // width), dim % width or width
        codes = random.integers(0, 256, (len(rows), parts), dtype=np.uint8)
        file.write(struct.pack("<?2qi", norms, *rows.shape, codes.size) + codes.tobytes())
        file.write(struct.pack("<4i", dim, parts, width, last) + random.normal(size=256 * dim).astype("<f4").tobytes())
        if norms:
            file.write(random.integers(0, 256, len(rows), dtype=np.uint8).tobytes())
            file.write(struct.pack("<4i", 1, 1, 1, 1) + random.normal(size=256).astype("<f4").tobytes())
    else:
        file.write(struct.pack("<2q", *rows.shape) + rows.astype("<f4").tobytes())
    file.write(struct.pack("<?2q", False, *output.shape) + output.astype("<f4").tobytes())
    path.write_bytes(file.getvalue())
    return path


@given(st.data())
@settings(max_examples=60)
def test_its_probabilities_are_those_of_fasttext(tmp_path_factory, data):
    draw = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    loss, (minn, maxn), word_ngrams = draw(*LOSSES), draw((0, 0), (1, 2), (2, 4), (3, 6), (4, 2)), draw(1, 2, 3)
    bucket, labels, dim = 50 if maxn or word_ngrams > 1 else 0, draw(2, 3, 7), draw(1, 5, 8)
    parts = draw(0, 1, 3)
    kept = draw(None, [3, 11, 12, 40], []) if parts and bucket else None
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    counts = dict(sorted({f"L{n}": int(random.integers(1, 30)) for n in range(labels)}.items(), key=lambda item: -item[1]))
    rows = random.normal(size=(len(WORDS) + (bucket if kept is None else len(kept)), dim))
    output = random.normal(size=(labels, dim))
    choice = {"loss": LOSSES[loss], "minn": minn, "maxn": maxn, "word_ngrams": word_ngrams, "bucket": bucket, "kept": kept}
    path = write(tmp_path_factory.mktemp("model") / "m.bin", WORDS, counts, rows, output, parts=parts, norms=draw(False, True), **choice)
    spelled = st.lists(st.sampled_from([*WORDS, "unknown", "__label__L1", "__label__none", "Bäume", "\u00a0", "x" * 30]), max_size=9)
    texts = [" ".join(words) for words in data.draw(st.lists(spelled | st.lists(st.text("aöя日😀\t\x0b<>"), max_size=5), min_size=1))]
    theirs, ours = fasttext.load_model(str(path)), FastText(path)
    exact = 2e-5 if loss in ("tree", "softmax") else 0.01  # fastText adds 1e-5, and has sigmoids from a table
    with mock.patch.object(fasttext_model, "WORDS_KEPT", draw(1, 1 << 16)):
        both = [*ours.probabilities(texts[:1]), *ours.probabilities(texts[1:])]
    for text, found in zip(texts, both, strict=True):
        expected = dict(zip(*theirs.predict(text, k=-1), strict=True))
        assert found == pytest.approx([expected.get(f"__label__{name}", 0) for name in ours.labels], abs=exact), text


@pytest.mark.parametrize(("word_ngrams", "characters"), [(1, (0, 0)), (2, (0, 0)), (3, (2, 4)), (1, (1, 2))])
def test_fasttext_reads_what_is_written(tmp_path, word_ngrams, characters):
    """Words are counted without labels and rare ones; the rows of a text are those whose mean it is."""
    texts = [" ".join(WORDS[:place] * 2) for place in range(1, 9)] + ["rare __label__good", "a\nb</s>"]
    words = fasttext_model.count_words(texts, 2)
    assert words == dict(sorted(words.items(), key=lambda item: -item[1]))
    assert words[b"der"] == 16
    assert words[b"</s>"] == 10
    assert b"rare" not in words
    assert b"__label__good" not in words
    random, hashed = np.random.default_rng(1), 60 if word_ngrams > 1 or characters[1] else 0
    matrices = random.normal(size=(len(words) + hashed, 5)), random.normal(size=(3, 5))
    with open(tmp_path / "m.bin", "wb") as file:
        fasttext_model.write(file, words, {"good": 7, "other": 3, "third": 1}, matrices, word_ngrams, characters)
    theirs, ours = fasttext.load_model(str(tmp_path / "m.bin")), FastText(tmp_path / "m.bin")
    texts = [" ".join(text.split()) for text in [*texts, "Bäume 日本 nichts", "x"]]
    rows, owners = ours.rows(texts)
    means = np.stack([matrices[0][rows[owners == number]].mean(axis=0) for number in range(len(texts))])
    exponentials = np.exp(means @ matrices[1].T)
    np.testing.assert_allclose(ours.probabilities(texts), exponentials / exponentials.sum(axis=1, keepdims=True), rtol=1e-5)
    for text, found in zip(texts, ours.probabilities(texts), strict=True):
        expected = dict(zip(*theirs.predict(text, k=-1), strict=True))
        assert found == pytest.approx([expected[f"__label__{name}"] for name in ("good", "other", "third")], abs=2e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: b"PK" + content, "does not begin as a file of fastText"),
        (lambda content: content[:70], "it is cut"),
        (lambda content: content[:-1], "it is cut"),
        (lambda content: content[:36] + struct.pack("<i", 1) + content[40:], "no labels"),
    ],
)
def test_a_file_that_is_no_classifier_is_refused(tmp_path, change, reason):
    path = write(tmp_path / "m.bin", WORDS, {"de": 2, "en": 1}, np.ones((len(WORDS), 4)), np.ones((2, 4)))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=f"clean.language.model={path}: cannot be read: .*{reason}"):
        clean(["x"], config("language", language={"model": str(path)}))


def speaker(path: Path, words: dict[str, str]) -> Path:
    """Write a classifier that knows a word of each language."""
    names = sorted(set(words.values()))
    rows = np.array([[20.0 * (language == name) for name in names] for language in words.values()])
    return write(path, list(words), dict.fromkeys(names, 1), rows, np.eye(len(names)))


def test_languages_of_a_file_have_the_labels_of_the_built_in_ones(tmp_path):
    words = {"haus": "deu_Latn", "hus": "nds_Latn", "dom": "srp_Cyrl", "house": "eng_Latn", "mal": "kmr_Latn", "xanu": "ckb_Arab"}
    model = {"model": str(speaker(tmp_path / "m.bin", words))}
    texts = [f"{word} " * 20 for word in words]

    def kept(*codes: str) -> list[str]:
        found = clean(texts, config("language", language={**model, "keep": list(codes)}))[0]
        return [text.split()[0] for text in found if text]

    assert kept("de") == kept("deu") == kept("de-DE") == ["haus"]
    assert kept("nds") == kept("nds_Latn") == ["hus"]
    assert kept("en", "sr") == ["dom", "house"]
    assert kept("ckb") == ["xanu"]
    assert kept("kmr") == ["mal"]
    by_language = {"least": 0, "by_language": {"nds": {"least": 10_000}}}
    assert clean(texts, config("language", "length", language=model, length=by_language))[0].count(None) == 1
    for group, key in (
        ({"language": {**model, "keep": ["fra"]}}, "keep"),
        ({"language": model, "length": {"by_language": {"xyz": {}}}}, "by"),
    ):
        with pytest.raises(UserError, match=rf"clean.*{key}.*(fra|xyz): is no language of clean.language.model"):
            clean(texts, config("language", "length", **group))


def test_codes_of_two_languages_that_would_have_one_label_stay_apart(tmp_path):
    twice = {"maja": "ekk_Latn", "kodu": "est_Latn"}
    path = speaker(tmp_path / "m.bin", {"mal": "ku", "xanu": "ckb", "hüsli": "als", "shtëpi": "sq"} | twice)  # codes as those of lid.176
    found = language.Detector(str(path)).identify([*(f"{word} " * 9 for word in ("mal", "xanu", "hüsli", "shtëpi", "maja kodu")), ""])
    assert [label for label, _ in found] == ["ku", "ckb", "gsw", "sq", "et", "und"]
    assert all(probability > 0.99 for _, probability in found[:5])


def test_the_share_is_the_probability_of_the_language(tmp_path):
    model = {"model": str(speaker(tmp_path / "m.bin", {"haus": "deu_Latn", "house": "eng_Latn"})), "keep": ["de"]}
    both = "haus house " * 9
    assert clean([both], config("language", language={**model, "share": 0.4}))[0] == [both]
    assert clean([both], config("language", language={**model, "share": 0.6}))[0] == [None]


def test_a_score_is_recorded_and_decides(tmp_path):
    """Of a classifier that knows good and bad words; the step that comes after it sees the same documents."""
    path = speaker(tmp_path / "m.bin", {"good": "hq", "bad": "cc"})
    texts = ["good " * 9, "bad " * 9, "good bad " * 9, "good " * 3]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    shards, chosen = tmp_path / "shards", f"clean.score={{model: {path}, label: hq, least: 0.4}}"
    steps = ("clean.steps=[normalise,score,length]", "clean.length.least=20", "dedup=none", "data.validation_fraction=0")
    run("shard", tmp_path, f"data.input=[{tmp_path}/in.jsonl]", f"data.shards={shards}", *steps, chosen)
    manifest = artifact.read(shards, key="data.shards", stage="shard")
    names = [name for name in manifest.files if name.endswith(".tar")]
    documents = [document for name in names for document in text_shards.readable(shards, manifest, name)]
    found = {text.decode(): fields["score"] for text, fields in documents}
    assert found == {texts[0].strip(): 1.0, texts[2].strip(): 0.5}
    (step,) = [step for step in json.loads((shards / "report.json").read_text())["steps"] if step["step"] == "score"]
    assert step["dropped"] == {"low score": {"documents": 1, "bytes": len(texts[1].strip())}}
    with pytest.raises(UserError, match=rf"clean.language.model={path}: names no language: its labels are cc, hq"):
        clean(texts, config("language", language={"model": str(path)}))
    with pytest.raises(UserError, match=r"clean.score.label='x': is no label of .*\n.*choose one of cc, hq"):
        clean(texts, config("score", score={"model": str(path), "label": "x"}))
    for more, said in (
        ((), "clean.score.model=None: is not set, and clean.steps has score"),
        (("clean.score.model=a.bin", "clean.score.command=b"), "clean.score.model=a.bin: is set beside clean.score.command"),
        (('clean.score.command="python \\"x"',), 'clean.score.command=python "x: is no command: No closing quotation'),
        (('clean.score.command="a | b"',), "clean.score.command=a . b: is for a shell"),
        (('clean.score.command=""',), "clean.score.command=: is empty"),
        (("clean.score.command=a", "clean.score.label=hq"), "clean.score.label=hq: is not read with clean.score.command"),
    ):
        with pytest.raises(UserError, match=said):
            check.check(configured("stage=shard", f"data.input=[{tmp_path}/in.jsonl]", "clean.steps=[score]", *more), 1)


#: Scores a text by its length, or fails at one.
SCORER = """
import json, sys
if sys.argv[1:] == ["header"]:
    print(json.dumps({"score": 0}), flush=True)
if sys.argv[1:] == ["late"]:
    sys.stdin = list(sys.stdin)
for line in sys.stdin:
    text = json.loads(line)["text"]
    if text == "leave":
        sys.exit(3)
    print("no score" if text == "wrong" else json.dumps({"score": len(text) - 5}), flush=True)
"""


def test_a_command_scores_documents(tmp_path, monkeypatch, caplog):
    """More text than a pipe holds, in both directions; below 0, and above 1."""
    (tmp_path / "score.py").write_text(SCORER)
    command = f"{sys.executable} {tmp_path}/score.py"
    texts = ["é", "Wald", "a" * 200_000, "Schnee\u2028"] + [f"text {number}" for number in range(20_000)]
    batch = DocumentBatch([Document("x.jsonl", number, text, {}) for number, text in enumerate(texts)])
    batch = Cleaner(config("score", score={"command": command})).clean(batch, {})
    assert batch.scores.tolist() == [len(text) - 5 for text in texts]
    assert batch.alive.all()
    assert clean(["Wald", "Wälder"], config("score", score={"command": command, "least": 1.0}))[0] == [None, "Wälder"]
    for wrong, text, said in (
        (command, "leave", "ended with exit code 3 before it had answered"),
        (command, "wrong", "wrote a line without a score: b'no score"),
        (f"{command} header", "text", "writes more lines than it reads"),
        (f"{command} late", "text", "has not answered for 2 s"),
        ("/none/such", "", "cannot be started"),
    ):
        monkeypatch.setattr(quality, "WARN_SECONDS", 1.0)
        monkeypatch.setattr(quality, "LAST_SECONDS", 2.0)
        with pytest.raises(UserError, match=f"clean.score.command=.*: {said}"):
            clean([text], config("score", score={"command": wrong}))
    assert "has not answered for 1 s: it has to write out each line at once" in caplog.text
