"""The order in which the training loop calls its callbacks, and what it keeps."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.checkpoint.native import TrainState
from pipeline.common.errors import ToBeContinued
from pipeline.training import loop, step_control
from pipeline.training.callback import Callback, Step
from pipeline.training.step_control import StepControl
from pipeline.training.weight_update import StepResult
from tests.world import configured


class Loader:
    """Batches of one token; `alive` has a weak reference to each."""

    stalls = 0

    def __init__(self, steps: int) -> None:
        self.steps, self.alive = steps, []

    def remaining(self, state: TrainState) -> Iterator[Any]:
        for _ in range(state.step, self.steps):
            tokens = torch.zeros(1, 1, dtype=torch.int64)
            self.alive.append(weakref.ref(tokens))
            yield tokens, {}
            del tokens

    def batch_size(self, step: int) -> int:
        return 1

    def after(self, state: TrainState) -> TrainState:
        return TrainState(state.step + 1, state.samples + 1)


class Trainer:
    def __init__(self, loader: Loader, seconds: float = 0.0) -> None:
        self.loader, self.seconds, self.most = loader, seconds, 0

    def train(self, tokens, batch, requests, step):
        self.most = max(self.most, sum(reference() is not None for reference in self.loader.alive))
        time.sleep(self.seconds)
        zero = torch.zeros(())
        return zero, StepResult(zero, zero, zero, requests=torch.tensor([float(flag) for flag in requests]))


class Named(Callback):
    def __init__(self, name: str, called: list[str], saves: tuple[int, ...] = ()) -> None:
        self.name, self.called, self.saves = name, called, saves

    def requests(self):
        self.called.append(f"{self.name} requests")
        return ()

    @contextmanager
    def during_step(self, number: int):
        self.called.append(f"{self.name} before")
        yield
        self.called.append(f"{self.name} queued")

    def after_step(self, step: Step) -> None:
        self.called.append(f"{self.name} after {step.state.step}")

    def wants_save(self, step: Step) -> bool:
        return step.state.step in self.saves

    def before_save(self, step: Step) -> None:
        self.called.append(f"{self.name} before save")

    def save(self, step: Step) -> None:
        self.called.append(f"{self.name} save")

    def end(self, step: Step) -> None:
        self.called.append(f"{self.name} end")


def test_the_order_of_hooks():
    called: list[str] = []
    loader = Loader(2)
    loop.train(TrainState(), loader, Trainer(loader), [Named("a", called), Named("b", called, saves=(1,))])
    assert called[:6] == ["a requests", "b requests", "a before", "b before", "b queued", "a queued"]
    assert called[6:12] == ["a after 1", "b after 1", "a before save", "b before save", "b save", "a save"]
    assert called[-4:] == ["a after 2", "b after 2", "b end", "a end"]


def test_the_batch_of_a_step_is_freed_before_the_next_one():
    loader = Loader(4)
    trainer = Trainer(loader)
    loop.train(TrainState(), loader, trainer, [])
    assert trainer.most == 1


def test_a_save_does_not_count_toward_the_time_until_the_next_one(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(step_control.time, "monotonic", lambda: clock.now)
    config = configured("stage=pretrain", "model=gpt-tiny", "checkpoint.every_minutes=0.5", f"run_dir={tmp_path}")
    saved: list[int] = []

    class Slow(Callback):
        def after_step(self, step: Step) -> None:
            clock.now += 10

        def save(self, step: Step) -> None:
            saved.append(step.state.step)
            clock.now += 40

    loader = Loader(12)
    loop.train(TrainState(), loader, Trainer(loader), [StepControl(config, 0), Slow()])
    assert saved == [5, 10]


@pytest.mark.parametrize("asked", [(), ("time",)], ids=["phase", "signal"])
def test_the_end_of_a_phase_is_told(tmp_path, caplog, asked):
    caplog.set_level("INFO", "pipeline")
    config = configured("stage=pretrain", "model=gpt-tiny", f"run_dir={tmp_path}")

    class Asking(Callback):
        def requests(self):
            return asked

    loader = Loader(4)
    with pytest.raises(ToBeContinued):
        loop.train(TrainState(), loader, Trainer(loader), [StepControl(config, 0, last_step=2), Asking()])
    assert "the same command continues on other nodes" in caplog.text
