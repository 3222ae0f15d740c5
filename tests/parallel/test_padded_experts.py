"""Experts with as many rows as their capacity: numerics on several ranks, no wait for the device, and what runs beside the all-to-alls."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config.rules.check import violations
from tests.parallel.test_expert import _groups, _piece, reads_and_losses
from tests.world import configured, tiny

EXPERTS, HIDDEN, FFN, ROWS = 8, 6, 12, 4
#: Operators -> what an event is called.
NAMES = {"all_to_all_single": "send", "all_gather_into_tensor": "gather", "reduce_scatter_tensor": "reduce", "bmm": "product"}


class Events(TorchDispatchMode):
    """Products and collectives in order, each wait with the name of what it waits for, and reads of values."""

    def __init__(self):
        super().__init__()
        self.found, self.bytes, self._pending = [], [], {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        short = function.name().partition("::")[2].partition(".")[0]
        if short == "wait_tensor":
            self.found.append(f"{self._pending[arguments[0].untyped_storage().data_ptr()]} arrives")
        elif short in NAMES:
            self.found.append(NAMES[short])
            if short != "bmm":
                self._pending[result.untyped_storage().data_ptr()] = NAMES[short]
            if NAMES[short] == "send":
                self.bytes.append(arguments[0].nbytes)
        assert short not in ("_local_scalar_dense", "nonzero", "masked_select"), "waits for the device"
        return result


def _experts(expert, tensor, parts):
    """Results of ExpertParallelExperts on each rank's rows, and of unsharded experts on the same rows; the events of both passes."""
    from pipeline.layers.experts import Experts
    from pipeline.parallel.expert_parallel import ExpertParallelExperts, _own_part

    group, tensor_group = _groups(expert, tensor)
    which, piece = group.rank(), tensor_group.rank()
    generator = torch.Generator().manual_seed(0)
    whole = Experts(EXPERTS, HIDDEN, FFN).double()
    mine = Experts(EXPERTS // expert, HIDDEN, FFN // tensor).double()
    with torch.no_grad():
        for own, full in zip(mine.parameters(), whole.parameters(), strict=True):
            full.copy_(torch.randn(full.shape, generator=generator, dtype=torch.float64))
            own.copy_(_piece(full, which, expert, piece, tensor))
    x = torch.randn(parts, EXPERTS, ROWS, HIDDEN, generator=generator.manual_seed(which + 1), dtype=torch.float64)
    leaf, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    columns = _own_part(leaf.flatten(0, 2), tensor_group).view(parts, EXPERTS, ROWS, -1)
    with Events() as events:
        y = torch.stack(ExpertParallelExperts(mine, group, tensor_group).dispatch_padded(columns.unbind())())
        events.found.append("backward")
        y.sin().sum().backward()
    expected = torch.stack([whole.forward_padded(part) for part in reference])
    expected.sin().sum().backward()
    for gradient in (parameter.grad for parameter in whole.parameters()):
        dist.all_reduce(gradient, group=group)

    def own(full):
        return _own_part(full.detach().flatten(0, 2), tensor_group)

    compared = [(y.detach().flatten(0, 2), own(expected)), (own(leaf.grad), own(reference.grad))]
    compared += [(a.grad, _piece(b.grad, which, expert, piece, tensor)) for a, b in zip(mine.parameters(), whole.parameters(), strict=True)]
    return compared, events.found, events.bytes


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_padded_experts_of_several_ranks_equal_the_experts(world, tensor, parts):
    """And each part of the rows is sent once there and once back, in both passes."""
    for compared, _, sent in world.run(_experts, 4 // tensor, tensor, parts):
        for ours, expected in compared:
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
        assert sent == [8 * EXPERTS * ROWS * HIDDEN // tensor] * 4 * parts


def test_a_part_travels_while_another_one_is_computed(world):
    _, events, _ = world.run(_experts, 4, 1, 2)[0]
    forward, backward = events[: events.index("backward")], events[events.index("backward") + 1 :]
    computed = ["product"] * 3
    # The second part arrives after the first one was computed; the first one returns beside the second one.
    assert forward == ["send", "send", "send arrives", *computed, "send", "send arrives", *computed, "send", "send arrives", "send arrives"]
    computed = ["product"] * 6
    assert backward == [
        "send",
        "send",
        "send arrives",
        *computed,
        "send",
        "send arrives",
        *computed,
        "send",
        "send arrives",
        "send arrives",
    ]


def test_columns_of_a_part_are_gathered_and_reduced_beside_products_of_another_one(world):
    _, events, _ = world.run(_experts, 2, 2, 2)[0]
    forward, backward = events[: events.index("backward")], events[events.index("backward") + 1 :]
    assert forward == [
        *("send", "send", "send arrives", "gather", "gather arrives", "product", "product"),
        *("send arrives", "gather", "product", "reduce", "gather arrives", "product", "product"),
        *("reduce arrives", "send", "product", "reduce", "reduce arrives", "send", "send arrives", "send arrives"),
    ]
    assert backward == [
        *("send", "send", "send arrives", "gather", "gather arrives", "product", "product"),
        *("send arrives", "gather", *["product"] * 4, "reduce", "gather arrives", "product", "product"),
        *("reduce arrives", "send", *["product"] * 4, "reduce", "reduce arrives", "send", "send arrives", "send arrives"),
    ]


MIXTRAL = tiny(
    *("model=mixtral-tiny", "model.kv_heads=2", "training.z_loss=0.05", "training.balance_loss=0.1", "model.layers=2", "training.steps=3"),
    *("model.ffn_hidden=24", "parallel.zero_stage=1", "parallel.expert=2", "model.capacity_factor=1.0", "training.global_batch_size=8"),
)


@pytest.mark.parametrize(
    "recompute, layout",
    [
        ("selective", ()),
        pytest.param("none", ("parallel.tensor=2", "parallel.expert_tensor=1"), marks=pytest.mark.long),
        *(pytest.param(recompute, (), marks=pytest.mark.long) for recompute in ("none", "full")),
    ],
    ids=["selective", "whole experts", "none", "full"],
)
def test_no_pass_waits_for_numbers_of_rows(world, recompute, layout):
    """The losses are those of the same capacity without padding, which waits."""
    settings = (f"training.activation_checkpointing={recompute}", *layout)
    reads, expected = world.run(reads_and_losses, *MIXTRAL, *settings)[0]
    assert reads > 0
    found, losses = world.run(reads_and_losses, *MIXTRAL, *settings, "parallel.expert_padding=true", "parallel.expert_parts=2")[0]
    assert found == 0
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model=llama-tiny", "parallel.expert_padding=true"), "requires an MoE model; model.family=llama has no experts"),
        (
            ("model=mixtral-tiny", "parallel.expert=2", "parallel.expert_parts=2"),
            "requires parallel.expert_padding=true: the parts have equal sizes",
        ),
    ],
)
def test_mistakes_are_refused(overrides, words):
    found = violations(configured("stage=pretrain", "training.global_batch_size=12", "training.micro_batch_size=1", *overrides), 6)
    assert [violation.rule for violation in found] == [words]
