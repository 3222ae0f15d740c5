"""The table of a sweep from the files of its runs, and how a local sweep goes on after a failure."""

import json
import sys
from pathlib import Path

import pytest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from pipeline.common.errors import ToBeContinued, UserError
from pipeline.common.ranks import Ranks
from pipeline.launch import hydra_sweeper, sweep_table
from pipeline.launch.sweep_table import Point

ALONE = Ranks(0, 1, 0, 1)


def write_run(run_dir: Path, losses: list[float], validations: dict[int, float], finished: bool = True) -> None:
    """The files of a run with these training losses, and validation losses at these steps."""
    run_dir.mkdir(parents=True)
    lines = [{"step": step, "loss": loss, "tokens_per_second": 100.0 * step} for step, loss in enumerate(losses, start=1)]
    lines += [{"step": step, "validation_loss": loss, "validation_loss_stderr": 0.25} for step, loss in validations.items()]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "lo')
    if finished:
        (run_dir / "manifest.json").write_text(json.dumps({"totals": {"step": len(losses)}}))


def test_the_best_run_comes_first(tmp_path):
    write_run(tmp_path / "0", [5.0, 4.0, 3.0], {2: 2.5, 3: 3.5})
    write_run(tmp_path / "1", [5.0, 4.0, 2.0], {3: 3.25})
    write_run(tmp_path / "2", [5.0], {}, finished=False)
    points = [Point(tmp_path / str(number), (f"optimizer.lr={lr}",), 3) for number, lr in enumerate((1e-3, 1e-2, 0.1, 1))]
    points[3] = Point(tmp_path / "3", ("optimizer.lr=1", "training.seed=7"), 3, "failed: data.tokens=a|b: is not a folder")
    text = sweep_table.write(tmp_path, points)
    assert text.endswith("1 of 1 others is within the noise (2 standard errors of the difference): 0")
    head, *lines = (line.split("  ") for line in text.splitlines()[:-1])
    assert [cell.strip() for cell in head if cell] == [
        *(
            "optimizer.lr",
            "training.seed",
            "validation loss",
            "best (step)",
            "training loss (last 20)",
            "steps",
            "tokens/s",
            "in the noise",
            "state",
            "run_dir",
        )
    ]
    assert [[cell.strip() for cell in line if cell][:-1] for line in lines] == [
        ["0.01", "3.2500 +- 0.2500", "3.2500 (3)", "3.6667", "3", "200", "finished"],
        ["0.001", "3.5000 +- 0.2500", "2.5000 (2)", "4.0000", "3", "200", "yes", "finished"],
        ["0.1", "5.0000", "1", "100", "step 1 of 3"],
        ["1", "7", "failed: data.tokens=a|b: is not a folder"],
    ]
    rows = json.loads((tmp_path / "table.json").read_text())
    assert [row["run_dir"] for row in rows] == [f"{tmp_path}/{number}" for number in (1, 0, 2, 3)]
    assert (rows[1]["best_validation_loss"], rows[1]["best_step"]) == (2.5, 2)
    markdown = (tmp_path / "table.md").read_text().splitlines()
    assert [line.count("|") for line in markdown] == [11] * 6 + [0, 0], "a bar in a cell does not end it"


@pytest.mark.parametrize(
    "words, params, per_byte",
    [
        (["optimizer.lr=choice(1,2)", "data.tokens=a"], {}, False),
        (["tokenizer.path=choice(a,b)"], {}, True),
        (["+data.tokens=a,b"], {}, True),
        ([], {"model.vocab_size": "choice(512,2048)"}, True),
        (["optimizer.lr=1"], None, False),
    ],
)
def test_what_a_search_minimizes(tmp_path, words, params, per_byte):
    config = OmegaConf.create({"hydra": {"overrides": {"task": words}, "sweeper": {"params": params}}})
    assert hydra_sweeper.per_byte(config) == per_byte
    write_run(tmp_path / "0", [5.0], {1: 3.25})
    point = Point(tmp_path / "0", (), 1)
    assert hydra_sweeper.result(point, [], per_byte=False).return_value == 3.25
    assert "it has no bits per byte" in str(hydra_sweeper.result(point, [], per_byte=True)._return_value)
    lines = (tmp_path / "0/metrics.jsonl").read_text()
    (tmp_path / "0/metrics.jsonl").write_text(lines.replace('"validation_loss": 3.25', '"validation_loss": 3.25, "bits_per_byte": 0.5'))
    assert hydra_sweeper.result(point, [], per_byte=True).return_value == 0.5


def run(outcome: BaseException | None = None) -> JobReturn:
    """A run of Hydra whose task ends like this; an error of a user ends it as the entry point does."""
    if isinstance(outcome, UserError | ToBeContinued):
        try:
            raise outcome
        except (UserError, ToBeContinued):
            sys.exit(2)
    status = JobStatus.COMPLETED if outcome is None else JobStatus.FAILED
    return JobReturn(status=status, _return_value=outcome)


def test_a_failed_run_does_not_end_the_sweep(tmp_path, capsys):
    outcomes = [UserError.of("data.tokens", "x", "is not a folder", "set it"), RuntimeError("out of memory\nmore"), None]
    points = [Point(tmp_path / str(number), (f"training.seed={number}",), 1) for number in range(3)]
    recorded = []
    done, code = hydra_sweeper.execute(points, [lambda one=one: run(one) for one in outcomes], ALONE, lambda *one: recorded.append(one))
    assert recorded == [(0, ""), (0, done[0].state), (1, ""), (1, done[1].state), (2, ""), (2, "")]
    assert [point.state for point in done] == ["failed: data.tokens=x: is not a folder", "failed: RuntimeError: out of memory", ""]
    assert code == 2
    said = capsys.readouterr().err
    assert f"sweep, 1 of 3: training.seed=0 ({tmp_path}/0)" in said
    assert f"sweep, 3 of 3: training.seed=2 ({tmp_path}/2)" in said


@pytest.mark.parametrize("outcome, ranks", [(ToBeContinued(75), ALONE), (RuntimeError("lost"), Ranks(0, 2, 0, 2))])
def test_a_run_that_stops_or_ranks_that_may_disagree_end_it(outcome, ranks, tmp_path):
    started = []

    def second() -> JobReturn:
        started.append(2)
        return run()

    points = [Point(tmp_path / name, (), 1) for name in "ab"]
    done, code = hydra_sweeper.execute(points, [lambda: run(outcome), second], ranks, lambda *_: None)
    assert not started
    assert code == (75 if isinstance(outcome, ToBeContinued) else 1)
    assert done[1].state == ""
    assert sweep_table.rows(done)[0][1].state == "not started"
