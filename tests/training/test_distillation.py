"""Distillation: the loss in a layout equals a plain loop, and stage.distill writes what a teacher in any layout predicts."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.certification.reference import initialize
from pipeline.common.artifact import MANIFEST
from pipeline.common.errors import UserError
from pipeline.config.rules import check
from pipeline.data.load.objectives import registry
from pipeline.data.load.teacher import record
from pipeline.evaluation import teacher_answers
from pipeline.layers.loss import IGNORE
from pipeline.layers.teacher import Teacher, top_log_probabilities
from pipeline.models import registry as models
from tests.layers.test_teacher import plain_losses
from tests.training.expected import train_plain
from tests.training.layouts import FOUR, some_targets
from tests.training.one_rank import lines, run
from tests.world import configured, in_layout, share_of, tiny, train_steps, trainer

STEPS, K, WEIGHT = 3, 5, 0.7
SETTINGS = ("model=llama-tiny", "data.packing=best_fit", "data.teacher=unread", f"training.teacher_weight={WEIGHT}", *FOUR)


def batch_of(config: Any, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Padding, uneven numbers of targets, and a random teacher."""
    tokens, batch = some_targets(config, step)
    logits = torch.randn(*tokens.shape, config.model.vocab_size, generator=torch.Generator().manual_seed(step)) * 2
    ids, logs = top_log_probabilities(logits, K).split([K, K + 1], dim=-1)
    return tokens, {**batch, "teacher_tokens": ids.int(), "teacher_log_probabilities": logs.half()}


class Plain(nn.Module):
    """The loss in plain PyTorch, on all logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, **batch: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens, **({"documents": batch["documents"]} if "documents" in batch else {})).flatten(0, 1)
        counted = batch["targets"].flatten() != IGNORE
        taught = Teacher(batch["teacher_tokens"], batch["teacher_log_probabilities"].float())
        return plain_losses(logits, batch["targets"].clamp(min=0), taught, WEIGHT)[counted].mean()


def initial(config: Any) -> nn.Module:
    model = models.build(config.model)
    initialize(model, config.model, config.training.seed)
    return model


@functools.cache
def reference() -> tuple[list[tuple[float, ...]], torch.Tensor]:
    """Loss and gradient norm of each step; and what the initial model predicts for the first batch."""
    config = configured(*tiny(*SETTINGS))
    tokens, batch = batch_of(config, 0)
    with torch.no_grad():
        predicted = top_log_probabilities(initial(config)(tokens, documents=batch["documents"]), K)
    model = Plain(initial(config))
    return train_plain(config, [batch_of(config, step) for step in range(STEPS)], model=model, own_loss=True).numbers, predicted


def train(layout: str) -> tuple[list[tuple[float, ...]], torch.Tensor]:
    config, mine = trainer(*tiny(*SETTINGS, *in_layout(layout)))
    predicted = mine.top_tokens(*share_of(mine, *batch_of(config, 0)), K)
    return train_steps(mine, config, batch_of, STEPS), predicted


LAYOUTS = [
    "zero_stage=1 tensor=2 pipeline=2",
    pytest.param("zero_stage=2 tensor=2 context=2", marks=pytest.mark.long),
    pytest.param("zero_stage=3 context=2 context_kind=ulysses", marks=pytest.mark.long),
    pytest.param("zero_stage=0 tensor=2 sequence_parallel=false", marks=pytest.mark.long),
    pytest.param("zero_stage=0 pipeline=2 schedule=zbv training.micro_batch_size=2", marks=pytest.mark.long),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_equal_a_plain_loop(world, layout):
    numbers, predicted = reference()
    counted = batch_of(configured(*tiny(*SETTINGS)), 0)[1]["targets"] != IGNORE
    for found, top in world.run(train, layout):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(numbers), rtol=1e-5, atol=0)
        assert top[counted][:, :K].equal(predicted[counted][:, :K])
        torch.testing.assert_close(top[counted], predicted[counted], rtol=1e-5, atol=1e-5)


def test_a_head_with_further_tokens_has_this_loss():
    """In an evaluation, which has no loss of the further tokens."""
    sizes = ("model=deepseek-tiny", "model.layers=2", "model.mtp_depth=1", "data.teacher=unread", f"training.teacher_weight={WEIGHT}")
    config = configured(*tiny(*sizes))
    tokens, batch = batch_of(config, 0)
    model, inputs = initial(config), {name: value for name, value in batch.items() if name != "documents"}
    for module in model.modules():
        if hasattr(module, "teacher_weight"):
            module.teacher_weight = WEIGHT
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, **inputs), Plain(model)(tokens, **inputs))


STUDENT = ("model=llama-tiny", "model.kv_heads=1", "model.layers=2", "optimizer.schedule=constant")


@pytest.fixture(scope="module")
def taught(tokens, tmp_path_factory) -> Path:
    """A teacher, and what it predicts for 6 steps of a run: "answers" in six files, written by two jobs, of which one was interrupted."""
    folder, written = tmp_path_factory.mktemp("taught"), []
    run("pretrain", folder / "teacher", f"data.tokens={tokens}", "training.steps=2")
    question = ("evaluate", folder / "teacher", f"data.tokens={tokens}", "training.steps=6", "stage.distill_top_k=6")

    def interrupted(*arguments: Any) -> None:
        written.append(arguments[1])
        if len(written) == 4:
            raise KeyboardInterrupt
        write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher_answers, "FILE_BYTES", 1)
        run(*question, f"stage.distill={folder}/straight")
        write = teacher_answers._write
        patch.setattr(teacher_answers, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(*question, f"stage.distill={folder}/answers")
        for word, before in (("training.seed=5", "seed=0"), ("training.document_mask=true", "document_mask=False")):
            with pytest.raises(UserError, match=rf"unfinished run with training\.{before}"):
                run(*question, f"stage.distill={folder}/answers", word)
        run(*question, f"stage.distill={folder}/answers")
    assert written == [f"{number:05d}" for number in (0, 1, 2, 3, 3, 4, 5)]
    run(*question, f"stage.distill={folder}/answers")  # complete: nothing to do
    return folder


def test_an_interrupted_job_goes_on_and_the_files_are_those_of_one_job(taught):
    for file in [*(f"{number:05d}.bin" for number in range(6)), MANIFEST]:
        assert (taught / "answers" / file).read_bytes() == (taught / "straight" / file).read_bytes()
    assert sorted(path.name for path in (taught / "answers").iterdir()) == sorted([MANIFEST, *(f"{n:05d}.bin" for n in range(6))])
    totals = json.loads((taught / "answers" / MANIFEST).read_text())["totals"]
    assert totals == {"samples": 24, "length": 32, "top_k": 6, "vocabulary": 320}
    assert record(320, 64).itemsize / 64 < 4.04
    assert record(128_256, 64).itemsize / 64 < 6.04


@pytest.mark.long
def test_the_student_of_another_family_reads_what_the_teacher_predicts(taught, tokens, tmp_path):
    """The loss of the first step is that of plain PyTorch, and the files have what the teacher's weights predict."""
    settings = (f"data.tokens={tokens}", f"data.teacher={taught}/answers", f"training.teacher_weight={WEIGHT}")
    config = run("pretrain", tmp_path / "run", *STUDENT, *settings, "training.steps=6")
    data = registry.open_training(config)
    arrays = data.arrays(np.arange(4))
    inputs = {name: torch.from_numpy(array.astype(np.float64 if "log" in name else np.int64)) for name, array in arrays.items()}
    text = inputs.pop("tokens")
    with torch.no_grad():
        assert lines(tmp_path / "run")[1]["loss"] == pytest.approx(float(Plain(initial(config))(text, **inputs)), rel=1e-5)
    again = run("pretrain", tmp_path / "again", *STUDENT, *settings, "training.steps=3")
    again = run("pretrain", tmp_path / "again", *STUDENT, *settings, "training.steps=6")
    assert [line["loss"] for line in lines(tmp_path / "again").values()] == [line["loss"] for line in lines(tmp_path / "run").values()]
    assert again.data.teacher == config.data.teacher
    # A phase joins samples to longer sequences.
    longer = "training.phases=[{until_step: 2}, {sequence_length: 64}]"
    run("pretrain", tmp_path / "longer", *STUDENT, *settings, longer, "model.max_positions=64", "training.steps=4")
    found = [[line["loss"] for line in lines(tmp_path / name).values()][:2] for name in ("longer", "run")]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize("words", [(), ("training.goldfish_k=4",)])
def test_a_teacher_that_is_the_student_has_no_divergence(taught, tokens, tmp_path, words):
    """Weights that begin as the teacher's: the divergence is what fp16 has rounded."""
    settings = (f"data.tokens={tokens}", f"data.teacher={taught}/answers", f"checkpoint.initialize_from={taught}/teacher")
    run("pretrain", tmp_path / "run", *settings, "training.steps=1", *words)
    assert abs(lines(tmp_path / "run")[1]["loss"]) < 1e-5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("training.steps=7",), "has the predictions of 24 samples, and the run reads 28"),
        (("training.seed=5",), "training.seed=5"),
        (("training.sequence_length=16",), "training.sequence_length=16"),
        (("data.packing=best_fit",), "data.tokens, data.blend, data.packing and data.infill"),
        (("data.teacher=/absent",), "data.teacher=/absent: has no predictions of a teacher"),
    ],
)
def test_the_predictions_are_those_of_the_samples(taught, tokens, tmp_path, words, said):
    with pytest.raises(UserError) as raised:
        run("pretrain", tmp_path / "run", f"data.tokens={tokens}", f"data.teacher={taught}/answers", "training.steps=6", *words)
    assert said in str(raised.value)


def test_a_damaged_file_is_found(taught, tokens, tmp_path):
    file = taught / "straight" / "00002.bin"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    settings = (f"data.tokens={tokens}", f"data.teacher={taught}/straight", "training.steps=6")
    try:
        with pytest.raises(UserError, match=r"(?s)00002.bin.*stage=evaluate stage.distill again"):
            run("pretrain", tmp_path / "run", *settings, "data.verify=all")
        file.write_bytes(content[:-1])
        with pytest.raises(UserError, match=r"data.teacher=.*00002.bin: is truncated"):
            run("pretrain", tmp_path / "run", *settings)
    finally:
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("stage=pretrain", "training.teacher_weight=0.5"), "training.teacher_weight=0.5: has no effect with data.teacher=None"),
        (("stage=pretrain", "model=bert-tiny", "data.teacher=x"), "data.teacher=x: has no effect with the objective masked"),
        (("stage=certify", "data.teacher=x"), "data.teacher=x: is not read by stage=certify"),
    ],
)
def test_what_has_no_effect_is_refused(words, said):
    with pytest.raises(UserError) as raised:
        check.check(configured(*words), 1)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("stage.distill_top_k=321",), "stage.distill_top_k=321: must not exceed the vocabulary size 320"),
        (("stage.distill=null", "stage.distill_top_k=5"), "stage.distill_top_k=5: has no effect with stage.distill=None"),
        (("stage.checkpoint=all",), "stage.checkpoint=all: is no teacher"),
        (("stage.stride=4",), "stage.stride=4: has no effect with stage.distill"),
    ],
)
def test_what_a_teacher_cannot_do(taught, tokens, tmp_path, words, said):
    with pytest.raises(UserError) as raised:
        run("evaluate", taught / "teacher", f"data.tokens={tokens}", f"stage.distill={tmp_path}/x", "training.steps=2", *words)
    assert said in str(raised.value)
