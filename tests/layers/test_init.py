"""Initial weights: the same values whatever part is drawn and where, normal, independent, and only the elements that a rank holds."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.layers import init
from pipeline.layers.init import initial_tensor
from pipeline.parallel.parallelize import init_piece
from pipeline.parallel.pieces import slice_weight
from tests.world import Observed

LOOKUP = torch.ops.aten.index_select.default


@st.composite
def parts(draw):
    """A shape, and (first index, size) of a part along each dim."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    starts = [draw(st.integers(0, size)) for size in shape]
    return shape, [(start, draw(st.integers(0, size - start))) for start, size in zip(starts, shape, strict=True)]


@settings(deadline=None)
@given(parts(), st.integers(1, 20))
def test_a_part_has_the_values_of_the_full_weight(shape_and_part, chunk):
    shape, part = shape_and_part
    full = initial_tensor("a.weight", shape, 0.5, seed=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(init._CHUNK, "cpu", chunk)
        drawn = initial_tensor("a.weight", shape, 0.5, seed=3, part=part)
    assert torch.equal(drawn, full[tuple(slice(start, start + size) for start, size in part)])


def test_the_hash_is_splitmix64():
    """The first numbers of its published sequence for the seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    counters = 1234567 + torch.arange(1, 6) * init._INCREMENT
    assert [number % (1 << 64) for number in init._mix(counters, 0).tolist()] == published


@pytest.mark.parametrize("part", [None, [(5, 900), (333, 999)]], ids=["full", "part"])
def test_the_values_are_normal(part):
    values = initial_tensor("a.weight", (1000, 2000), 2.0, seed=0, part=part).double().flatten() / 2
    count = len(values)
    assert abs(values.mean()) < 3 / math.sqrt(count)
    assert abs(values.square().mean() - 1) < 3 * math.sqrt(2 / count)
    assert abs(values.pow(3).mean()) < 3 * math.sqrt(15 / count)
    assert abs(values.pow(4).mean() - 3) < 3 * math.sqrt(96 / count)
    for bound in (1.0, 2.0, 3.0, 4.0):
        expected = math.erfc(bound / math.sqrt(2))
        assert abs((values.abs() > bound).double().mean() - expected) < 4 * math.sqrt(expected / count)
    ordered = torch.special.ndtr(values.sort().values)
    distance = (ordered - (torch.arange(count) + 0.5) / count).abs().max() + 0.5 / count
    assert distance * math.sqrt(count) < 1.63, "the Kolmogorov-Smirnov statistic at 1 %"


def related():
    """Pairs of samples that must be independent."""
    one = initial_tensor("blocks.0.mlp.up.weight", (512, 512), 1.0, seed=3)
    yield "names", one, initial_tensor("blocks.1.mlp.up.weight", (512, 512), 1.0, seed=3)
    yield "seeds", one, initial_tensor("blocks.0.mlp.up.weight", (512, 512), 1.0, seed=4)
    yield "rows", one[1:], one[:-1]
    for lag in (1, 2, 3, 4, 64):
        yield f"columns at distance {lag}", one[:, lag:], one[:, :-lag]


@pytest.mark.parametrize("what, first, second", related(), ids=lambda value: value if isinstance(value, str) else "")
def test_samples_are_independent(what, first, second):
    for power in (1, 2):
        both = torch.stack([first.flatten(), second.flatten()]).double() ** power
        assert abs(torch.corrcoef(both)[0, 1]) < 4 / math.sqrt(both.shape[1]), what


def test_the_logarithm_of_uniform_values():
    """Their exponentials are uniform (Kolmogorov-Smirnov at 1 %), and a part has the values of the full weight."""
    full = initial_tensor("a.decay_rate_log", (5000,), init.LogOfUniform(0.01, 16.0), seed=0)
    places = ((full.double().exp() - 0.01) / 15.99).sort().values
    distance = (places - (torch.arange(5000) + 0.5) / 5000).abs().max() + 0.5 / 5000
    assert distance * math.sqrt(5000) < 1.63
    part = initial_tensor("a.decay_rate_log", (5000,), init.LogOfUniform(0.01, 16.0), seed=0, part=[(17, 100)])
    assert torch.equal(part, full[17:117])


def test_the_softplus_of_step_sizes():
    """Its logarithm is uniform between the bounds (Kolmogorov-Smirnov at 1 %)."""
    steps = F.softplus(initial_tensor("a.decay_bias", (5000,), init.InverseSoftplus(0.001, 0.1), seed=0).double())
    places = ((steps / 0.001).log() / math.log(100)).sort().values
    distance = (places - (torch.arange(5000) + 0.5) / 5000).abs().max() + 0.5 / 5000
    assert distance * math.sqrt(5000) < 1.63


def test_a_lower_precision_is_the_rounded_value():
    exact = initial_tensor("a.weight", (33, 65), 0.02, seed=1)
    assert torch.equal(initial_tensor("a.weight", (33, 65), 0.02, seed=1, dtype=torch.bfloat16), exact.bfloat16())


@pytest.mark.parametrize("role", ["column", "row", "vocab", "expert_column", "expert_row"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_ranks_draw_each_element_once(role, ranks):
    shape = (4, 32, 32) if role.startswith("expert") else (32, 32)
    lookups = []
    with Observed(lambda operator, _, result: lookups.append(result.numel()) if operator is LOOKUP else None):
        for rank in range(ranks):
            init_piece(slice_weight("a", shape, role, {"tensor": (ranks, rank), "expert": (1, 0)}), 0.02, 3)
    assert sum(lookups) == 2 * math.prod(shape), "two for each normal value"
