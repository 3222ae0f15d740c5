"""stage=certify: a certificate for a layout that equals the plain loop, exit code 1 for one that does not, 2 for what it refuses."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.certification import certificate, tolerances
from pipeline.certification.comparison import QUANTITIES, Difference, Outcome, differences
from pipeline.certification.distributed import RanksFailedError
from tests.certification import faults
from tests.certification.faults import with_fault
from tests.helpers import one_in
from tests.test_imports import SOURCES, imports

#: A job of 16 ranks whose small version has four.
JOB = (
    *("stage=certify", "model=llama-tiny", "parallel.tensor=4", "parallel.zero_stage=2", "stage.world_size=16", "stage.steps=3"),
    *("training.global_batch_size=32", "training.sequence_length=64", "optimizer.schedule=wsd"),
)
NORM = "blocks.0.mlp_norm.weight"


@pytest.fixture
def certify(worlds, monkeypatch, tmp_path, call_main):
    """`certify(*overrides)`: the exit code of the command line, what it printed, and the certificate. Ranks are those of the tests."""

    planted: Any = None

    def in_world(size: int, function: Callable[..., None], *arguments: object, seconds: float, watch: Callable[[], None]) -> None:
        assert seconds == 600
        worlds(size).run(*(function,) if planted is None else (with_fault, planted, function), *arguments)
        watch()

    def run(*overrides: str, ranks: Callable[..., None] = in_world, fault: Any = None) -> tuple[int, str, dict[str, Any]]:
        nonlocal planted
        planted = fault
        monkeypatch.setattr(certificate, "preload", lambda: None)
        monkeypatch.setattr(certificate, "run_ranks", ranks)
        path = tmp_path / "certificate.json"
        return *call_main(*overrides, f"run_dir={tmp_path}"), json.loads(path.read_text()) if path.exists() else {}

    return run


def test_a_layout_that_equals_the_plain_loop(certify) -> None:
    code, printed, written = certify(*JOB)
    assert code == 0, printed
    assert written["certified"] is True
    # Three steps of the plain loop to set the clipping threshold, in fp32, fp64 and bf16, of three perturbed ones, and of the ranks in
    # fp32 and bf16.
    done, total = map(int, re.search(r"certify: (\d+) of (\d+) training steps, .* done", printed).groups())
    assert done == total
    assert (done - 27) % 6 == 0  # another seed takes six more
    assert [comparison["precision"] for comparison in written["comparisons"]] == ["fp32", "bf16"]
    for comparison in written["comparisons"]:
        assert list(comparison["differences"]) == list(QUANTITIES)
        for quantity, found in comparison["differences"].items():
            assert 0 < found["value"] <= comparison["tolerances"][quantity], quantity
    assert max(written["comparisons"][0]["tolerances"].values()) <= 1e-4
    assert {"key": "parallel.tensor", "from": 4, "to": 2} in written["small"]["shrunk"]
    assert written["small"]["layout"]["data"] == 2
    assert written["planned"]["layout"]["data"] == 4
    assert list(written["parts"]) == ["bounds", "copies", "state", "validation", "data", "precision", "shapes"]
    assert any("stock transformers" in line for line in written["parts"]["state"]["covered"])
    assert written["parts"]["data"]["not_covered"] == ["no data was checked: data.tokens=work/tokens is not there"]
    assert written["planned"]["overrides"][:2] == ["stage=certify", "model=llama-tiny"]
    assert written["planned"]["config"]["model"]["layers"] == 4
    assert written["versions"]["torch"].startswith(torch.__version__.partition("+")[0])


@pytest.mark.long
def test_a_job_that_trains_some_weights_only(certify) -> None:
    words = ("parallel.tensor=2", "stage.world_size=4", "training.frozen=[blocks.0.mlp.*, embed.*]", "stage.skip=[state,data,shapes]")
    code, printed, written = certify(*JOB, *words)
    assert code == 0, printed
    assert [comparison["precision"] for comparison in written["comparisons"]] == ["fp32", "bf16"]


#: A longer context with other positions, rate and layout.
CHANGE = (
    'training.phases=[{until_step: 400}, {until_step: 600, sequence_length: 128, overrides: ["model.rope_theta=500000", '
    '"optimizer.lr=6e-4", "parallel.tensor=1", "parallel.pipeline=2"]}, {sequence_length: 64}]'
)
PHASES = (
    *JOB,
    CHANGE,
    "optimizer.lr=3e-4",
    "stage.world_size=4",
    "parallel.tensor=2",
    "precision=fp32",
    "stage.steps=6",
    "training.steps=900",
)
FEW_PARTS = "stage.skip=[bounds,copies,state,validation,data,shapes]"


@pytest.mark.long
def test_phases_and_the_changes_between_them(certify) -> None:
    code, printed, written = certify(*PHASES, FEW_PARTS)
    assert code == 0, printed
    assert list(written["phases"]) == ["1", "2"]
    assert written["phases"]["1"]["small"]["layout"]["pipeline"] == 2
    assert written["phases"]["1"]["comparisons"]
    covered = written["parts"]["phases"]["covered"]
    assert [line.partition(":")[0] for line in covered] == [
        "from training.phases.0 to 1, tensor 2 x data 2 -> pipeline 2 x data 2",
        "from training.phases.1 to 2, pipeline 2 x data 2 -> pipeline 2 x data 2",
    ]


@pytest.mark.long
@pytest.mark.parametrize("fault", [faults.rate_of_the_first_phase, faults.positions_of_the_first_phase])
def test_a_setting_that_stays_in_the_next_phase_is_not_certified(certify, fault: Callable[[], Any]) -> None:
    code, printed, _ = certify(*PHASES, FEW_PARTS, fault=fault)
    assert code == 1
    assert re.search(r"phases: from training.phases.0 to 1: \w+ in fp32: differs by", printed), printed


#: Two ranks, and no part that does not depend on the optimizer.
TWO_RANKS = ("parallel.tensor=2", "stage.world_size=2", "precision=fp32", "stage.skip=[validation,data,shapes]")


@pytest.mark.long
@pytest.mark.parametrize("name", ["muon", "lion", "ademamix", "schedule_free"])
def test_another_optimizer_is_compared_with_its_plain_loop(certify, name: str) -> None:
    more = ("optimizer.schedule=constant",) if name == "schedule_free" else ()
    code, printed, written = certify(*JOB, *TWO_RANKS, f"optimizer={name}", *more)
    assert code == 0, printed
    (comparison,) = written["comparisons"]
    assert list(comparison["differences"]) == list(QUANTITIES)
    assert "all bits" in " ".join(written["parts"]["state"]["covered"])
    exact = {"loss", "norm", "gradient"} if name == "lion" else QUANTITIES  # one other sign changes the weights, and the moments after it
    assert all(comparison["tolerances"][quantity] <= 1e-4 for quantity in exact), comparison["tolerances"]


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_moments_in_bf16_are_compared_in_the_precision_of_the_job(certify, precision: str) -> None:
    code, printed, written = certify(*JOB, *TWO_RANKS, "optimizer.state_dtype=bf16", f"precision={precision}")
    assert code == 0, printed
    assert len(written["comparisons"]) == (1 if precision == "fp32" else 2)
    assert ("optimizer.state_dtype" in " ".join(written["parts"]["precision"]["not_covered"])) == (precision == "fp32")


@pytest.mark.long
@pytest.mark.parametrize("name", ["muon", pytest.param("lion", marks=pytest.mark.long)])
def test_a_wrong_gradient_of_another_optimizer_is_not_certified(certify, name: str) -> None:
    code, printed, _ = certify(*JOB, *TWO_RANKS, f"optimizer={name}", fault=faults.wrong_gradient_of_one_piece)
    assert code == 1, printed
    assert "begins at step 1, backward, blocks.1.attention.query.weight, tensor rank 0" in printed


#: Faults that are planted together -> what is said of each; the first row is in the default tier.
PLANTED = [
    {
        faults.wrong_gradient: (
            rf"- begins at step 1, backward, {NORM}: \d.\de-0[23]\n(.*\n)*.*gradient in fp32: differs by \d.\de-0[23] \({NORM}\)"
        ),
        faults.validation_averages_sequences: r"validation: fp32: the loss of the split is \d.\d+ in the layout, \d.\d+ over all",
    },
    {faults.wrong_gradient_of_one_piece: (r"- begins at step 1, backward, blocks.1.attention.query.weight, tensor rank 0: 1.0e-02\n")},
    {faults.clipped_on_one_tensor_rank: rf"copies: fp32: step 1: {NORM} \(.*exp_avg, .*\) differs along the tensor axis: ranks 0 and 1"},
    {faults.second_moments_are_not_loaded: r"state: fp32: step 2, loaded in the same layout: \S+ \(exp_avg_sq\)"},
    {faults.schedule_restarts_at_resume: (r"state: fp32: step 3, continued from step 2: \S+ \(.*\) differs from the uninterrupted run")},
]


@pytest.mark.parametrize("planted", one_in(len(PLANTED), PLANTED), ids=lambda planted: next(iter(planted)).__name__)
def test_a_fault_is_not_certified(certify, tmp_path: Path, planted: dict[Callable[[], Any], str]) -> None:
    words = ("parallel.tensor=2", "stage.world_size=4", "precision=fp32")
    code, printed, written = certify(*JOB, *words, fault=functools.partial(faults.together, *planted))
    assert code == 1, printed
    assert [expected for expected in planted.values() if not re.search(expected, printed)] == [], printed
    assert "Traceback" not in printed
    assert written["certified"] is False
    assert [path.name for path in tmp_path.iterdir()] == ["certificate.json"]


@pytest.mark.long
def test_a_fault_in_the_precision_of_the_job(certify) -> None:
    words = (*JOB, "parallel.tensor=2", "stage.world_size=4", "stage.skip=[copies,state,validation,data,shapes]")
    code, printed, written = certify(*words, fault=faults.gradients_scaled_in_bf16)
    assert code == 1
    assert re.search(r"norm in bf16: differs by 5.0e-01", printed), printed
    assert "in fp32: differs" not in printed
    assert written["parts"]["copies"]["not_covered"] == ["left out by stage.skip=copies"]


@pytest.mark.parametrize(
    "fault, words, expected",
    [
        (faults.loss_of_last_chunk, (), r"begins at step 1, backward, head.weight"),
        pytest.param(
            faults.further_targets_wrap_around,
            ("model=deepseek-tiny", "model.mtp_depth=1", "parallel.tensor=1", "parallel.expert=2"),
            r"begins at step 1, forward: the loss differs by",
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_in_what_the_loss_is_made_of(certify, fault: Callable[[], Any], words: tuple[str, ...], expected: str) -> None:
    skipped = "stage.skip=[copies,state,data,shapes]"
    code, printed, _ = certify(*JOB, "parallel.tensor=2", "stage.world_size=4", "precision=fp32", skipped, *words, fault=fault)
    assert code == 1
    assert re.search(expected, printed), printed


@pytest.mark.long
def test_sums_of_gradients_that_are_rounded(certify) -> None:
    words = (*JOB, "parallel.zero_stage=1", "parallel.tensor=2", "stage.world_size=4", "stage.skip=[copies,state,validation,data,shapes]")
    code, printed, _ = certify(*words, fault=faults.gradients_summed_in_bf16)
    assert code == 1
    assert re.search(r"precision: bf16: the gradient of \S+ depends on the number of equal micro-batches, by \d.\de-0[34]", printed), (
        printed
    )
    assert "differs by" not in printed


@pytest.mark.long
def test_a_wrong_backward_pass_of_a_layer_that_the_plain_loop_shares(certify) -> None:
    words = (*JOB, "parallel.tensor=2", "stage.world_size=4", "precision=fp32", "stage.skip=[copies,validation,data,shapes]")
    with faults.half_a_gradient_in_a_shared_layer():
        code, printed, _ = certify(*words, fault=faults.half_a_gradient_in_a_shared_layer)
    assert code == 1
    assert "export: the gradient of model.layers.1.mlp.down_proj.weight differs by 5.0e-01 from that of LlamaForCausalLM" in printed
    assert "in fp32: differs" not in printed


@pytest.mark.parametrize(
    "fault, words, expected",
    [
        pytest.param(
            faults.state_not_decayed_between_chunks, ("model=qwen3-next-tiny",), "gradient in fp32: differs", marks=pytest.mark.long
        ),
        (faults.last_round_not_updated, ("optimizer=muon", "optimizer.schedule=constant"), "weight in fp32: differs"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_between_parts_of_a_fixed_size(certify, fault: Callable[[], Any], words: tuple[str, ...], expected: str) -> None:
    """The ranks compute several parts, the plain loop, which has the fault, too, a single one."""
    with fault():
        code, printed, _ = certify(*JOB, *TWO_RANKS, "stage.skip=[copies,state,validation,data,shapes]", *words, fault=fault)
    assert code == 1, printed
    assert expected in printed


@pytest.mark.parametrize(
    "fault, words, expected",
    [
        pytest.param(faults.largest_logits_not_bounded, ("optimizer.qk_clip=100",), "weight in fp32: differs", marks=pytest.mark.long),
        pytest.param(
            faults.scores_not_capped,
            ("model=gemma2-tiny",),
            "bounds: model.attn_logit_softcapping=50.0 has no effect",
            marks=pytest.mark.long,
        ),
        pytest.param(faults.gate_clamped_at_twice_the_bound, ("model=gpt-oss-tiny",), "export: ", marks=pytest.mark.long),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bound_that_the_activations_of_a_small_model_do_not_reach(
    certify, fault: Callable[[], Any], words: tuple[str, ...], expected: str
) -> None:
    """It is made smaller until they do; what the plain loop shares is compared with the stock class."""
    job = (*JOB, *TWO_RANKS, "stage.skip=[copies,validation,data,shapes]", *words)
    code, printed, written = certify(*job)
    assert code == 0, printed
    assert "changes gradients or weights of the small job" in written["parts"]["bounds"]["covered"][0]
    with fault():
        code, printed, _ = certify(*job, fault=fault)
    assert code == 1, printed
    assert expected in printed


def test_what_a_few_steps_do_not_reach_is_named(certify) -> None:
    job = ("model=qwen3-next-tiny", "parallel.tensor=2", "stage.world_size=2", "precision=fp16", "training.spike_factor=6")
    _, printed, written = certify(*JOB, *job, "stage.skip=[copies,state,validation,data,shapes,precision]")
    assert [line.partition(":")[0] for line in written["parts"]["bounds"]["not_covered"]] == [
        "training.spike_factor",
        "training.delta_rule",
        "training.max_skipped_steps",
    ], printed
    assert "loss scale" in written["parts"]["bounds"]["not_covered"][-1]


@pytest.mark.long
def test_an_encoder_is_compared_with_the_stock_class(certify) -> None:
    encoder = ("model=modernbert-tiny", "model.local_attention=8", "parallel.tensor=2", "stage.world_size=2", "precision=fp32")
    words = (*JOB, *encoder, "stage.skip=[copies,validation,data,shapes]")
    code, printed, written = certify(*words)
    assert code == 0, printed
    assert "gradients of ModernBertForMaskedLM of stock transformers" in " ".join(written["parts"]["state"]["covered"])
    with faults.window_on_one_side():
        code, printed, _ = certify(*words, fault=faults.window_on_one_side)
    assert code == 1
    assert "export: convert: ModernBertForMaskedLM computes other logits" in printed
    assert "in fp32: differs" not in printed


@pytest.mark.parametrize(
    "planted",
    [
        {
            faults.data_ranks_read_the_same: "data: step 1: the data ranks read other tokens than one process",
            faults.decay_begins_one_step_late: "shapes: the learning rate of step",
        },
        pytest.param(
            {
                faults.targets_have_holes: "data: step 1: other positions than padding have no target",
                faults.far_positions_are_rounded: "shapes: rotary: the rotation of position 41 is not 41 times that of position 1",
            },
            marks=pytest.mark.long,
        ),
        {faults.pieces_leave_a_gap: "shapes: blocks.0.attention.key.weight: its pieces along dim 0 leave a gap"},
    ],
    ids=lambda planted: next(iter(planted)).__name__,
)
def test_faults_at_the_size_of_the_job(certify, tokens: Path, planted: dict[Callable[[], Any], str]) -> None:
    """They are planted in this process, which has the parts that need no ranks."""
    with faults.together(*planted):
        code, printed, _ = certify(*JOB, "stage.skip=[copies,state,validation,precision]", f"data.tokens={tokens}")
    assert code == 1, printed
    assert [expected for expected in planted.values() if expected not in printed] == [], printed


def test_ranks_that_fail(certify) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RanksFailedError("rank 1: RuntimeError: a collective differs", "Traceback ...")

    code, printed, written = certify(*JOB, ranks=fail)
    assert code == 1
    assert "not certified" in printed
    assert "rank 1: RuntimeError" in printed
    assert "Traceback" not in printed
    assert written["details"] == "Traceback ..."
    assert written["failures"] == ["rank 1: RuntimeError: a collective differs"]
    assert written["comparisons"] == []


def test_the_command_line_names_the_folder_of_own_files(certify, tmp_path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RanksFailedError("rank 1: stopped", "")

    (tmp_path / "own/experiment").mkdir(parents=True)
    (tmp_path / "own/experiment/mine.yaml").write_text("# @package _global_\noptimizer: {lr: 0.01}\n")
    words = (f"--config-dir={tmp_path / 'own'}", "experiment=mine", *JOB)
    _, _, written = certify(*words, ranks=fail)
    assert written["planned"]["overrides"] == [*words, f"run_dir={tmp_path}"]
    assert written["planned"]["config"]["optimizer"]["lr"] == 0.01


@pytest.mark.parametrize(
    "words, expected",
    [
        (
            ("model=deepseek-tiny", "precision=fp8", "parallel.tensor=1", "training.global_batch_size=64"),
            "requires matrices whose sizes are multiples of 16; a rank's piece of blocks.1.attention.key_value_down is 72 x 192",
        ),
        (("parallel.tensor=3",), "parallel.tensor=3"),
        (("stage.world_size=6",), "world size=6"),
        (("stage.stepps=4",), "did you mean stage.steps"),
        (("parallel.schedule=zbv", "parallel.pipeline=2", "training.compile=on"), "training.compile=on"),
        (("model=mixtral-tiny", "model.capacity_factor=1.5", "parallel.tensor=1", "parallel.context=2"), "model.capacity_factor=1.5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(certify, words: tuple[str, ...], expected: str) -> None:
    code, printed, written = certify(*JOB, *words)
    assert code == 2
    assert expected in printed
    assert not written


def test_differences() -> None:
    def outcome(gradient: float, key: float) -> Outcome:
        tensors = {"norm.weight": torch.tensor([gradient, 2.0]), "blocks.0.attention.key.bias": torch.tensor([key])}
        return Outcome([1.0, 2.0], [1.0, 4.0], {kind: dict(tensors) for kind in ("gradient", "moment", "weight")})

    zero = {"blocks.0.attention.key.bias": None}
    found = differences(outcome(1.5, 1.0), outcome(1.0, 9.0), zero=zero, drift=4.0)
    assert (found["drift"].value, found["drift"].where) == (2.0, "blocks.0.attention.key.bias")
    assert found["zero"].value == pytest.approx(1 / (5 + 81) ** 0.5)
    assert found["gradient"].value == pytest.approx(0.5 / 5**0.5)
    assert found["gradient"].where == "norm.weight"
    assert found["loss"].value == 0
    assert differences(outcome(float("nan"), 1.0), outcome(1.0, 1.0))["weight"].value == float("inf")
    lost = outcome(1.0, 1.0)
    del lost.tensors["moment"]["norm.weight"]
    assert differences(lost, outcome(1.0, 1.0))["moment"].value == float("inf")


def test_a_plain_loop_that_diverges_certifies_nothing() -> None:
    def outcome(loss: float) -> Outcome:
        return Outcome([loss], [loss], {kind: {"norm.weight": torch.full((2,), loss)} for kind in ("gradient", "moment", "weight")})

    exact = dict.fromkeys(QUANTITIES, Difference(math.inf, "step 1"))
    assert len(tolerances.compare_fp32(outcome(math.nan), outcome(math.nan), exact).failures()) == len(QUANTITIES)
    assert len(tolerances.compare_low("bf16", outcome(math.nan), outcome(math.nan), [outcome(1.0)]).failures()) == len(QUANTITIES)
    assert not tolerances.compare_low("bf16", outcome(1.001), outcome(1.0), [outcome(1.0005)]).failures()


def test_the_reference_shares_no_code_with_the_engines() -> None:
    seen: set[str] = set()
    queue = ["pipeline.certification.reference"]
    while queue:
        module = queue.pop()
        seen.add(module)
        queue += {other for other in imports(module, run=True) if other in SOURCES} - seen
    assert "pipeline.layers.moe" in seen
    shared = {module for module in seen if module.startswith(("pipeline.parallel", "pipeline.training.", "pipeline.checkpoint"))}
    assert shared == set()
