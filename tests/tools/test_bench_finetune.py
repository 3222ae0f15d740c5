"""Both implementations of tools/bench_finetune do the same work. In this process: its imports take longer than the training."""

import math

import pytest

from tools.bench import finetune_implementations, train_implementations

pytestmark = pytest.mark.long


def test_lora_and_peft_do_the_same_work(monkeypatch):
    monkeypatch.setattr(train_implementations.Timer, "count_as_model", lambda *_: None)  # it patches torch
    sizes = {"model": "llama-tiny", "dtype": "fp32", "batch": 2, "sequence": 16, "steps": 2, "clock": "wall", "rank": 4}
    lora, peft = (finetune_implementations.run(finetune_implementations.Options(name, **sizes)) for name in ("lora", "peft"))
    assert lora["loss"] == pytest.approx(peft["loss"], abs=1e-4)
    assert lora["loss"] > 0.9 * math.log(8192)
    assert min(lora["tokens_per_second"], peft["tokens_per_second"]) > 0
