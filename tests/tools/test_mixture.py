"""tools/mixture: blends that are drawn, and runs with planted losses whose best blend is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tools.audit import mixture_law
from tools.audit.mixture_law import MixtureLaw

LAW = MixtureLaw(np.array([0.8, 0.7, 0.9]), np.array([[-1.2, 0.1, 0.2], [0.2, -0.9, 0.0], [0.3, 0.1, -0.4]]))
NAMES = ("books", "code", "web")


@pytest.fixture
def tool(call_tool) -> Callable[..., tuple[int, str]]:
    return partial(call_tool, "mixture")


def write(folder: Path, shares: np.ndarray, *, steps: int = 10, validated: int = 10, **data: object) -> None:
    """A run whose bits per byte follow from its shares."""
    blend = {name: {"weight": 3 * float(share), "tokens": None} for name, share in zip(NAMES, shares, strict=True)}
    model, training = {"hidden": 64, "layers": 2}, {"steps": steps, "global_batch_size": 4, "sequence_length": 32}
    settings = {"blend": blend, "blend_weights": "samples", "tokens": "work/tokens", "phases": [], **data}
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": model, "training": training, "data": settings}))
    measured = {name: {"bits_per_byte": float(loss)} for name, loss in zip(NAMES, LAW.losses(shares[None])[0], strict=True)}
    lines = [{"step": 1, "loss": 2.0}, {"step": validated, "validation_loss": 1.0, "corpora": measured}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    event = {"event": "run_start", "step": 0, "time": "2026-11-28T00:00:00+00:00", "corpora": {"books": 100, "code": 2000, "web": 9000}}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")


@pytest.fixture
def runs(tmp_path) -> Path:
    for number, shares in enumerate(np.random.default_rng(0).dirichlet(np.ones(3), 20)):
        write(tmp_path / "runs" / f"{number}", shares)
    return tmp_path / "runs"


def grid(values: np.ndarray, caps: np.ndarray) -> float:
    """The lowest mean of the losses over all shares in steps of a hundredth."""
    steps = [(a, b, 100 - a - b) for a in range(101) for b in range(101 - a)]
    shares = np.array([share for share in np.array(steps) / 100 if (share <= caps + 1e-9).all()])
    return float((LAW.losses(shares) @ values).min())


@pytest.mark.parametrize("options", [(), ("--targets", "code=3", "web=1"), ("--budget", "100000", "--max-epochs", "4")], ids=str)
def test_the_best_weights_of_a_known_law(runs, tmp_path, tool, options):
    code, said = tool("fit", runs, *options, "--out", tmp_path / "best.yaml")
    assert code == 0, said
    blend = yaml.safe_load((tmp_path / "best.yaml").read_text())["data"]["blend"]
    best = np.array([blend[name]["weight"] for name in NAMES])
    values = np.array([0, 0.75, 0.25]) if "--targets" in options else np.full(3, 1 / 3)
    caps = np.array([0.128, 1, 1]) if "--budget" in options else np.ones(3)  # 4 epochs of 100 sequences of 32 tokens
    assert best.sum() == pytest.approx(1, abs=2e-4)
    assert (best <= caps + 1e-4).all()
    assert float((LAW.losses(best[None])[0]) @ values) == pytest.approx(grid(values, caps), abs=2e-3)
    assert "rank correlation 1.000" in said


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=6), st.data())
def test_shares_are_the_nearest_ones(point, data):
    caps = np.array(data.draw(st.lists(st.floats(0.05, 1), min_size=len(point), max_size=len(point))))
    caps *= max(1.0, 1.0 / caps.sum())
    (found,) = mixture_law._projected(np.array([point]), caps)
    assert found.sum() == pytest.approx(1, abs=1e-6)
    assert (found >= 0).all()
    assert (found <= caps + 1e-9).all()
    inner = (found > 1e-6) & (found < caps - 1e-6)
    if inner.any():  # those between the bounds are moved by the same amount, others by no more than the bounds ask for
        moved = np.array(point) - found
        assert np.ptp(moved[inner]) < 1e-6
        assert (moved[found <= 1e-6] <= moved[inner][0] + 1e-6).all()
        assert (moved[found >= caps - 1e-6] >= moved[inner][0] - 1e-6).all()


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ({"validated": 9}, (), "has no bits per byte of its corpora at step 10"),
        ({"steps": 12, "validated": 12}, (), "training.steps: the runs have 10, 12"),
        ({"blend_weights": "epochs"}, (), "needs data.blend with weights of samples"),
        ({}, ("--targets", "news=1"), "--targets news: is no validation corpus; choose among books, code, web"),
        ({}, ("--budget", "1e9"), "is more than --max-epochs of all corpora"),
    ],
)
def test_what_is_refused(runs, tool, change, options, said):
    write(runs / "more", np.array([0.2, 0.3, 0.5]), **change)
    code, text = tool("fit", runs, *options)
    assert code == 2
    assert said in " ".join(text.split())
    assert tool("fit", runs / "0", runs / "1")[0] == 2


def test_blends_are_drawn_around_the_sizes_of_the_corpora(two, tmp_path, tool):
    code, said = tool("draw", two, "--runs", "5", "--out", tmp_path / "mixes")
    assert code == 0, said
    files = sorted((tmp_path / "mixes" / "experiment").glob("*.yaml"))
    assert len(files) == 5
    drawn = [yaml.safe_load(file.read_text())["data"]["blend"] for file in files]
    shares = [{name: corpus["weight"] for name, corpus in blend.items()} for blend in drawn]
    assert all(sum(share.values()) == pytest.approx(1, abs=1e-3) for share in shares)
    entries = [entry for entry in json.loads((two / "manifest.json").read_text())["files"].values() if entry.get("split") == "train"]
    books = sum(entry["tokens"] for entry in entries if entry["corpus"] == "books") / sum(entry["tokens"] for entry in entries)
    assert shares[0]["books"] == pytest.approx(books, abs=1e-3)
    assert len({share["books"] for share in shares}) == 5
    assert "experiment=[ladder,mix-000],[ladder,mix-001]" in said
