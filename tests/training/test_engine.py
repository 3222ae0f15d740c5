"""Engines on four ranks: exact resume, resume in another layout, and skipped steps on non-finite gradients."""

import contextlib
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pipeline.checkpoint import load_any_layout
from pipeline.checkpoint.native import TrainState
from pipeline.checkpoint.reader import Checkpoint
from pipeline.common.errors import UserError
from pipeline.training import resume
from pipeline.training.lr_schedule import learning_rate
from tests.world import causal, configured, saved, share, tiny, trainer, unsharded

TINY = tiny("model=gpt-tiny", "model.layers=2", "model.ffn_hidden=64", "training.micro_batch_size=4", "training.ema=0.9")


def make(*overrides):
    """The configuration and this rank's trainer."""
    return trainer(*TINY, *overrides)


def train(config, trainer, steps):
    """The losses and gradient norms of these steps, on tokens that depend on the step."""
    numbers = []
    for step in steps:
        shape = (config.training.global_batch_size, config.training.sequence_length + 1)
        batch = torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(step))
        loss, result = trainer.train(*causal(*share(trainer, batch)))
        numbers.append((float(loss), float(result.gradient_norm), float(result.lr), float(result.skipped)))
    return numbers


def _save_and_continue(folder, first, second):
    """Train four steps in a layout and save; continue there, and from the checkpoint in another layout."""

    config, trainer = make(*first)
    train(config, trainer, range(4))
    state = TrainState(4, 64, trainer.engine.updates(), *trainer.engine.loss_scale.state())
    path = saved(folder, config, trainer, state)
    straight = train(config, trainer, range(4, 7)), unsharded(trainer, "ema")
    config, trainer = make(*second, "training.seed=99")  # other initial weights: all state must come from the checkpoint
    checkpoint = Checkpoint(path)
    resume.load(trainer, checkpoint)
    opened = checkpoint.counters.opened
    assert len(set(opened)) == len(opened), "each file is opened once, and only files of the checkpoint"
    if "parallel.zero_stage=0" not in second:
        assert checkpoint.counters.bytes < sum(file.stat().st_size for file in path.glob("*.safetensors")), "a rank reads its part"
    loaded = train(config, trainer, range(4, 7)), unsharded(trainer, "ema")
    return straight, loaded


SAME = [
    pytest.param(("precision=fp32", "parallel.zero_stage=0"), marks=pytest.mark.long),
    pytest.param(("precision=bf16", "parallel.zero_stage=0", "parallel.tensor=2"), marks=pytest.mark.long),
    pytest.param(("precision=fp32", "parallel.zero_stage=1", "parallel.pipeline=2"), marks=pytest.mark.long),
    pytest.param(("precision=bf16", "parallel.zero_stage=2"), marks=pytest.mark.long),
    pytest.param(
        ("precision=fp16", "precision.loss_scale_window=3", "parallel.zero_stage=0", "parallel.pipeline=2"), marks=pytest.mark.long
    ),
    ("precision=fp16", "precision.loss_scale_window=3", "parallel.zero_stage=3", "parallel.tensor=2"),
    pytest.param(("precision=fp32", "parallel.zero_stage=3"), marks=pytest.mark.long),
    pytest.param(("precision=bf16", "parallel.zero_stage=3", "parallel.tensor=2"), marks=pytest.mark.long),
]


@pytest.mark.parametrize("layout", SAME, ids=" ".join)
def test_a_loaded_state_continues_bit_for_bit(world, tmp_path, layout):
    for (straight, average), (loaded, same) in world.run(_save_and_continue, tmp_path, layout, layout):
        assert straight == loaded
        assert all(torch.equal(average[name], same[name]) for name in average | same)


OTHER = [
    (
        ("model.layers=3", "parallel.zero_stage=1", "parallel.tensor=2"),
        ("model.layers=3", "parallel.zero_stage=2", "parallel.pipeline=2", "parallel.layers_per_stage=[1,2]"),
    ),
    (("parallel.zero_stage=3",), ("parallel.zero_stage=0", "parallel.tensor=2", "parallel.pipeline=2")),
    (
        ("model.layers=4", "parallel.zero_stage=0", "parallel.pipeline=2", "parallel.schedule=zbv", "training.micro_batch_size=2"),
        ("model.layers=4", "parallel.zero_stage=3", "parallel.tensor=4"),
    ),
]


GROUPS = [
    (("parallel.zero_stage=1", "parallel.zero_group=2"), ("parallel.zero_stage=1",)),
    (("parallel.zero_stage=3",), ("parallel.zero_stage=3", "parallel.zero_group=2")),
    (("parallel.zero_stage=2", "parallel.zero_group=2"), ("parallel.zero_stage=0", "parallel.tensor=2", "parallel.pipeline=2")),
]


def _load_in_another(folder, first, second):
    """Save in a layout and load in another one: whether all state is the same, and the bytes of every rank's file."""

    config, trainer = make("precision=bf16", *first)
    train(config, trainer, range(2))
    before = {kind: unsharded(trainer, kind) for kind in ("weight", "exp_avg", "exp_avg_sq", "ema")}
    path = saved(folder, config, trainer, TrainState(2, 32, 2))
    _, other = make("precision=bf16", *second, "training.seed=99")
    load_any_layout.load(Checkpoint(path), other.engine.fragments())
    other.engine.loaded(2)
    after = {kind: unsharded(other, kind) for kind in before}
    equal = [torch.equal(value, after[kind][name]) for kind, state in before.items() for name, value in state.items()]
    return all(equal), len(equal), [file.stat().st_size for file in sorted(path.glob("rank-*.safetensors"))]


@pytest.mark.parametrize("first, second", [pytest.param(*GROUPS[0], marks=pytest.mark.long), *GROUPS[1:]], ids=str)
def test_a_checkpoint_is_the_same_with_groups_of_zero(world, tmp_path, first, second):
    for equal, tensors, sizes in world.run(_load_in_another, tmp_path, first, second):
        assert equal
        assert tensors > 100
        assert max(sizes) < 0.3 * sum(sizes), "each of the four ranks writes its share"


@pytest.mark.parametrize(
    "first, second", [OTHER[0], *(pytest.param(*case, marks=pytest.mark.long) for case in (*OTHER[1:3], *GROUPS[:2]))], ids=str
)
def test_a_state_continues_in_another_layout(world, tmp_path, first, second):
    found = world.run(_save_and_continue, tmp_path, ("precision=fp32", *first), ("precision=fp32", *second))
    for (straight, average), (loaded, same) in found:
        assert torch.allclose(torch.tensor(straight), torch.tensor(loaded), rtol=1e-4, atol=0)
        for name in (average | same).keys() - {name for name in average if name.endswith("key.bias")}:  # its gradient is rounding
            assert (average[name] - same[name]).norm() <= 1e-4 * average[name].norm(), name


def _save_by_node(folder):
    """Save in a file for each of two nodes, load into another layout: the names of the files, and whether the weights are the same."""

    config, trainer = make("precision=fp32", "parallel.zero_stage=1", "parallel.tensor=2")
    before = unsharded(trainer)
    with mock.patch("socket.gethostname", return_value=f"node{dist.get_rank() % 2}"):
        path = saved(folder, config, trainer, files="node")
    _, other = make("precision=fp32", "parallel.zero_stage=0", "training.seed=99")
    load_any_layout.load(Checkpoint(path), other.engine.fragments())
    after = unsharded(other)
    return sorted(file.name for file in path.iterdir()), all(torch.equal(before[name], after[name]) for name in before)


def test_a_file_for_each_node(world, tmp_path):
    files = ["index.json", "node-00000.safetensors", "node-00001.safetensors", "parts.npy"]
    for names, equal in world.run(_save_by_node, tmp_path):
        assert names == files
        assert equal


FULL = [(2, "record-00002.json"), (0, "parts.npy"), (0, "index.json"), (0, "catalog.json")]


def _save_on_a_full_disk(folder):
    """Save where one rank cannot write one of FULL: the messages on this rank, and what is left."""

    config, trainer = make("precision=fp32", "parallel.zero_stage=0")
    replace, found = os.replace, []
    for number, (rank, file) in enumerate(FULL):

        def full(source, target, file=file):
            if file in str(target):
                raise OSError(28, "No space left on device")
            replace(source, target)

        run_dir = Path(folder) / str(number)
        patch = mock.patch("os.replace", full) if dist.get_rank() == rank else contextlib.nullcontext()
        with pytest.raises(UserError) as raised, patch:
            saved(run_dir, config, trainer)
        found.append((str(raised.value), sorted(path.name for path in (run_dir / "checkpoints").iterdir())))
    return found


def test_every_rank_reports_a_record_index_or_catalog_that_cannot_be_written(world, tmp_path):
    for found in world.run(_save_on_a_full_disk, tmp_path):
        for (_, file), (message, left) in zip(FULL, found, strict=True):
            assert "could not be written: [Errno 28] No space left on device" in message
            assert left == ([] if file == "catalog.json" else ["catalog.json"])


def _load_damaged(folder):
    """Save, damage the last rank's file, load: the message on this rank."""

    config, trainer = make("precision=fp32", "parallel.zero_stage=2")
    path = saved(folder, config, trainer)
    if dist.get_rank() == 0:
        file = path / "rank-00003.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    dist.barrier()
    with pytest.raises(UserError) as raised:
        load_any_layout.load(Checkpoint(path), trainer.engine.fragments())
    return str(raised.value)


def test_every_rank_reports_a_damaged_file(world, tmp_path):
    for message in world.run(_load_damaged, tmp_path):
        assert "rank-00003.safetensors" in message


def _poison(overrides):
    """Two steps, one with an infinite gradient, one more: results of the engine, and whether the weights changed."""
    config, trainer = make(*overrides)
    train(config, trainer, range(2))
    before = [values.clone() for f in trainer.engine.fragments() for values in (f.tensors["weight"], f.tensors["ema"])]
    hooks = [p.register_hook(lambda g: g * torch.inf) for p, piece in trainer.model.pieces.items() if piece.name == "norm.weight"]
    poisoned = train(config, trainer, [2])
    for hook in hooks:
        hook.remove()
    now = [values for f in trainer.engine.fragments() for values in (f.tensors["weight"], f.tensors["ema"])]
    still = all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    after = train(config, trainer, [3])
    moved = [any(not torch.equal(a, b) for a, b in zip(before[kind::2], now[kind::2], strict=True)) for kind in (0, 1)] == [True, True]
    return poisoned[0][3], after[0][3], after[0][2], still, moved, trainer.engine.updates()


@pytest.mark.parametrize(
    "zero, precision",
    [
        (1, "bf16"),
        (3, "fp32"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((0, "fp32"), (0, "bf16"), (1, "fp32"), (3, "bf16"))),
    ],
)
def test_a_non_finite_gradient_skips_the_step(world, zero, precision):

    overrides = (f"precision={precision}", f"parallel.zero_stage={zero}")
    config = configured(*TINY, *overrides)
    for skipped, then, lr, still, moved, updates in world.run(_poison, overrides):
        assert (skipped, then, still, moved, updates) == (1, 0, True, True, 3)
        assert lr == pytest.approx(learning_rate(2, config.optimizer, config.training)), "a skipped step does not advance the schedule"


def _loss_scales(overrides):
    """The loss scale of five steps; the gradient of the fourth is infinite on one rank."""
    config, trainer = make(*overrides, "precision=fp16", "precision.initial_loss_scale=1024", "precision.loss_scale_window=2")
    scales = []
    for step in range(5):
        factor = torch.inf if step == 3 and dist.get_rank() == dist.get_world_size() - 1 else 1
        hook = next(iter(trainer.model.pieces)).register_hook(lambda gradient, factor=factor: gradient * factor)
        scales.append(float(trainer.engine.loss_scale.factor))
        train(config, trainer, [step])
        hook.remove()
    return scales


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("parallel.zero_stage=0", "parallel.pipeline=2"), marks=pytest.mark.long),
        ("parallel.zero_stage=2", "parallel.tensor=2"),
    ],
    ids=str,
)
def test_all_ranks_adapt_the_same_loss_scale(world, layout):
    """Doubled after two finite steps, halved after the infinite one."""
    assert world.run(_loss_scales, layout) == [[1024, 1024, 2048, 2048, 1024]] * 4


def _losses(overrides):
    config, trainer = make(*overrides)
    return train(config, trainer, range(6))


ENGINES = [("parallel.zero_stage=0",), ("parallel.zero_stage=1", "parallel.tensor=2"), ("parallel.zero_stage=3",)]
LOW = [("bf16", ENGINES[1]), ("fp16", ENGINES[2])]
MORE_LOW = [("bf16", ENGINES[0]), ("fp16", ENGINES[0]), ("fp16", ENGINES[1]), ("bf16", ENGINES[2])]


@pytest.mark.long
@pytest.mark.parametrize("cases", [LOW, MORE_LOW], ids=["some", "others"])
def test_16_bits_agree_between_engines_and_with_fp32(world, cases):
    plain = torch.tensor(world.run(_losses, ("precision=fp32", "parallel.zero_stage=0"))[0])
    for overrides in [(f"precision={dtype}", *layout) for dtype, layout in cases]:
        low = torch.tensor(world.run(_losses, overrides)[0])
        assert torch.allclose(low[:, 0], plain[:, 0], rtol=0.01)
        assert torch.allclose(low[:, 1], plain[:, 1], rtol=0.05)


@pytest.mark.long
def test_compiled_tensor_parallel_blocks_train_alike(worlds):
    """Requires a C++ compiler; on a GPU the blocks are compiled by default."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    settings = ("precision=fp32", "parallel.zero_stage=0", "parallel.tensor=2")
    plain = worlds(2).run(_losses, settings)
    compiled = worlds(2).run(_losses, (*settings, "training.compile=on"))
    assert torch.allclose(torch.tensor(compiled), torch.tensor(plain), rtol=1e-4)
