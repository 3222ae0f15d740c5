"""A run that is out of memory says what was planned, what was used, and which settings need less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.common import ends
from pipeline.common.errors import RunFailed
from pipeline.common.ranks import Ranks
from pipeline.config import compose, hardware
from pipeline.config.schema import RunConfig
from pipeline.planner import out_of_memory
from pipeline.planner.out_of_memory import Used
from pipeline.planner.plan import plan
from tests.helpers import one_in, python, start_ranks
from tests.training import one_rank
from tests.world import composition

#: The package, whose second step is out of memory.
FAULTY = """
import itertools, runpy
from pipeline.training.trainer import Trainer
steps, train = itertools.count(), Trainer.train
def faulty(*arguments):
    if next(steps) == 1:
        ERROR
    return train(*arguments)
Trainer.train = faulty
runpy.run_module("pipeline", run_name="__main__", alter_sys=True)
"""
GPU = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.03 GiB is free. Including "
    "non-PyTorch memory, this process has 78.07 GiB memory in use."
)
HOST = "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."


def configured(*settings: str) -> RunConfig:
    return compose.to_run_config(composition(("stage=pretrain", "model=gpt-tiny", *settings)))


@pytest.mark.parametrize(
    "error, hardware_settings, reason, details",
    one_in(
        2,
        [
            (
                f"import torch; raise torch.OutOfMemoryError({GPU!r})",
                ("cluster.hardware=h100",),
                "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB",
                ("planned peak of a rank", "activations", "training.micro_batch_size=2"),
            ),
            (f"import torch; raise torch.OutOfMemoryError({GPU!r})", (), "out of memory: CUDA out of memory.", ("parallel.zero_stage, ",)),
            ("raise MemoryError", (), "out of memory on the host: MemoryError", ("cluster.memory",)),
            (f"raise RuntimeError({HOST!r})", (), "out of memory on the host: [enforce fail", ("cluster.memory",)),
        ],
    ),
    ids=["known GPU", "unknown GPU", "Python", "CPU tensors"],
)
def test_a_run_that_is_out_of_memory_ends_with_one_message(
    tokens: Path, tmp_path: Path, error: str, hardware_settings: tuple[str, ...], reason: str, details: tuple[str, ...]
) -> None:
    words = (*one_rank.TINY, *hardware_settings, "stage=pretrain", f"data.tokens={tokens}", f"run_dir={tmp_path / 'run'}")
    code, said = python("-c", FAULTY.replace("ERROR", error), *words, env={ends.VARIABLE: str(tmp_path)}, timeout=100)
    assert code == 1
    assert "Traceback" not in said
    assert all(text in said for text in details), said
    (end,), _ = ends.read(tmp_path)
    assert end.reason.startswith(reason)
    assert end.where, "the line of the error"


def test_the_error_of_a_rank_is_reported_while_another_waits_for_it(tokens: Path, tmp_path: Path) -> None:
    """Destroying the process group would wait for the other rank, as NCCL does. That rank waits for this one in a collective."""
    faulty = FAULTY.replace("next(steps) == 1", "next(steps) == 1 and RANK == '1'").replace(
        "ERROR", f"raise torch.OutOfMemoryError({GPU!r})"
    )
    blocking = "import os, time, torch\nRANK = os.environ['RANK']\ntorch.distributed.destroy_process_group = lambda *_: time.sleep(1e4)\n"
    words = (*one_rank.TINY, "training.micro_batch_size=2", f"data.tokens={tokens}", f"run_dir={tmp_path / 'run'}")
    with open(tmp_path / "said", "wb") as output, pytest.MonkeyPatch.context() as patch:
        patch.setenv(ends.VARIABLE, str(tmp_path))
        ranks = start_ranks(2, *words, output=output.fileno(), program=("-c", blocking + faulty))
        code = ranks[1].wait(60)
        for rank in ranks:
            rank.kill()
    said = (tmp_path / "said").read_text()
    assert code == 1, said
    assert "out of memory: CUDA out of memory" in said
    assert [end.rank for end in ends.read(tmp_path)[0] if end.reason.startswith("out of memory")] == [1]


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), out_of_memory.explained(configured(), Ranks()):
        raise RuntimeError("shapes")


def test_what_can_be_allocated_nowhere_is_explained() -> None:
    with pytest.raises(RunFailed, match="on the host"), out_of_memory.explained(configured(), Ranks()):
        torch.empty(1 << 60, dtype=torch.uint8)


def test_settings_are_ordered_by_their_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_memory, "SECONDS", float("inf"))
    config = configured(
        "training.global_batch_size=512", "training.micro_batch_size=64", "training.sequence_length=1024", "parallel.zero_stage=0"
    )
    gpu = hardware.load("h100")
    head, *rows = out_of_memory.fixes(config, 8, gpu)
    assert head == "settings that need less, each alone"
    totals = [float(row.split()[1]) for row in rows]
    assert totals == sorted(totals)
    assert {"training.micro_batch_size=32", "training.activation_checkpointing=full", "parallel.zero_stage=3", "parallel.tensor=2"} <= {
        row.split()[0] for row in rows
    }
    assert max(totals) * 1e9 < plan(config, 8, gpu).estimate.memory.total


def test_planned_beside_used() -> None:
    planned = plan(configured(), 1, hardware.load("h100"))
    used = Used(allocated=60_000_000_000, reserved=75_000_000_000, outside=2_000_000_000, capacity=80_000_000_000)
    assert str(used) == "60.0 GB allocated, 75.0 GB reserved, 2.0 GB outside, of 80.0 GB"
    text = "\n".join(out_of_memory.table(planned, used))
    assert f"{planned.estimate.memory.total / 1e9:.2f} GB of {planned.hardware.memory_gb:.1f} GB" in text
    assert "expandable_segments" in text, "a fifth of the memory is reserved and not allocated"
    assert "expandable_segments" not in "\n".join(out_of_memory.table(planned, Used(74, 75, 2, 80)))


def test_an_error_that_a_pipeline_schedule_wraps_is_found() -> None:
    def explained() -> None:
        with out_of_memory.explained(configured(), Ranks()):
            try:
                raise torch.OutOfMemoryError(GPU)
            except torch.OutOfMemoryError as error:
                raise RuntimeError("[Stage 1] failed to run forward") from error

    with pytest.raises(RunFailed, match=r"out of memory: CUDA out of memory[.] Tried to allocate 2[.]00 GiB"):
        explained()
    with pytest.raises(RuntimeError, match="another"), out_of_memory.explained(configured(), Ranks()):
        raise RuntimeError("another")
