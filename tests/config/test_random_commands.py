"""Random command lines: each is accepted, or refused with one message and exit code 2, without a traceback."""

import random

import pytest

import pipeline.stages
from pipeline.common import knobs
from pipeline.config.schema import RunConfig

KEYS = [key for key, _, _ in knobs.walk(RunConfig())] + ["model.layers", "model.hidden", "model.norm_eps"]
GROUPS = ["stage", "model", "data", "clean", "optimizer", "parallel", "precision", "cluster", "tracking", "experiment"]
VALUES = ["", "1", "-1", "0", "nan", "-inf", "1e400", "1e20", "null", "true", "x", "[]", "[1,2]", "{a:1}", "${nope}", "'a b'", "[", "{"]
VALUES += ['"', "\t", "pretrain", "llama-tiny", "bf16", "none", "auto", "/tmp/x", "a=b", "1,2", "..", "\\", "ä", "*", "9" * 40, "a" * 300]


def command(choose: random.Random) -> list[str]:
    """A command line with one to four words."""
    words = []
    for _ in range(choose.randint(1, 4)):
        key = choose.choice(KEYS if choose.random() < 0.7 else GROUPS)
        if choose.random() < 0.15:
            place = choose.randrange(len(key))
            key = key[:place] + choose.choice(["", ".", "x", " ", "=", "+", "~", "@"]) + key[place + 1 :]
        words.append(key + choose.choice(["=", "=", "=", "=", "=", "=", "=", "", "==", ":"]) + choose.choice(VALUES))
    return words


@pytest.mark.long
def test_random_command_lines(monkeypatch, call_main):
    monkeypatch.setattr(pipeline.stages, "run", lambda *_: None)
    choose = random.Random(8)
    codes = []
    for words in [
        *(command(choose) for _ in range(30)),
        ["stage=pretrain", "optimizer.lr=1e-4"],
    ]:  # the last one is legal, whatever keys there are
        try:
            code, printed = call_main(*words)
        except BaseException as error:
            pytest.fail(f"{words}: {error!r}")
        codes.append(code)
        assert code in (0, 2), (words, printed)
        assert "Traceback" not in printed, words
        assert (code == 2) == ("problem" in printed), words
    assert codes.count(2) > 20
    assert codes[-1] == 0
