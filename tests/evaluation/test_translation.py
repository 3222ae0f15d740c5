"""BLEU and chrF of completions."""

import json
import logging
import socket

import pytest

from pipeline.common import artifact
from pipeline.common.errors import UserError
from pipeline.config.stages import Generate
from pipeline.evaluation import record, translation

GOOD = "The fir tree stands in the forest."


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Nothing is downloaded."""
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("connects to the network"))


def test_lines_have_different_numbers_of_references():
    """A translation that equals any of its references is perfect; a missing one is not an empty reference."""
    found = translation.scores(["bleu", "chrf"], [GOOD, GOOD], [["Something else altogether here.", GOOD], [GOOD]])
    assert {name: round(score.value, 6) for name, score in found.items()} == {"bleu": 100, "chrf": 100}
    assert found["bleu"].signature.startswith("nrefs:var|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    # Every n-gram of four of five words matches: brevity penalty exp(1 - 5/4).
    short = translation.scores(["bleu"], ["a b c d"], [["a b c d e"]])["bleu"]
    assert short.value == pytest.approx(100 * 2.718281828 ** (1 - 5 / 4))


def test_scores_are_recorded_for_lines_with_a_reference(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    lines = [{"reference": GOOD, "generated": {"text": f" {GOOD}\u2028\n"}}, {"reference": "", "generated": {"text": "x"}}]
    (tmp_path / "completions.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    artifact.write(tmp_path, artifact.Manifest("generate", {"stage.beams": 4}, {}, {}))
    translation.write(tmp_path, 30, tmp_path / "new test.jsonl", tmp_path, ["chrf"])
    assert record.read(tmp_path) == {30: {"new_test chrf": pytest.approx(100), "new_test samples": 1}}
    assert "new_test: chrf 100.00 over 1 completions (nrefs:1|" in caplog.text
    saved = json.loads(record.path_of(tmp_path, 30, "translation-new_test").read_text())["settings"]
    assert saved["stage.beams"] == 4
    assert saved["signatures"]["chrf"].startswith("nrefs:1|")


def test_prompts_without_references(tmp_path, caplog):
    path = tmp_path / "prompts.jsonl"
    stage = Generate(name="generate", prompts=str(path), metrics=["bleu"])
    path.write_text('{"prompt": "a", "reference": "b"}\n{"prompt": "a"}\n\n{"prompt": "a", "reference": [1]}\nx\n')
    translation.check(stage)
    assert 'have no "reference" and are not scored: 2, 4, 5' in caplog.text
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(UserError, match=r"no line of stage.prompts=.* has one"):
        translation.check(stage)
