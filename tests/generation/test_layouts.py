"""Generation on several ranks: log-probabilities and tokens equal those of one process."""

from dataclasses import replace

import pytest
import torch

from pipeline.generation.generator import Generator, Stopping
from pipeline.generation.proposers import DraftModel
from pipeline.generation.runner import Runner
from pipeline.generation.sampling import Sampling
from pipeline.generation.seq2seq import Seq2SeqRunner
from pipeline.generation.speculative import SpeculativeGenerator
from pipeline.models.families.t5 import T5Config
from tests.conversion.test_huggingface_export import InMemory, random_model
from tests.generation import test_speculative
from tests.generation.conftest import prompts
from tests.helpers import one_in
from tests.models.small_decoders import CONFIGS

T5 = T5Config(hidden=48, heads=4, ffn_hidden=96, vocab_size=301, max_positions=60, layers=2, head_width=8)
#: A vocabulary that does not divide into two pieces.
MODELS = {
    name: replace(CONFIGS[name], max_positions=60, vocab_size=301)
    for name in ("gpt", "mistral", "deepseek-yarn", "bloom", "olmo2", "gpt-oss", "gemma4")
}
CASES = one_in(
    2, [*((name, "tensor") for name in MODELS), *((name, "pipeline") for name in ("gpt", "mistral", "deepseek-yarn")), ("t5", "tensor")]
)
SAMPLING = Sampling(temperature=0.8, seed=4)
TWO_LAYERS = replace(test_speculative.TINY, layers=2)


def completions(runner):
    """Of three prompts in two rows."""
    generator = Generator(runner, SAMPLING, Stopping(12), batch_size=2, logprobs=True)
    return sorted((each.index, each.tokens, each.logprobs) for each in generator.run(enumerate(prompts(301, 9, 20, 3))))


def runner_on_ranks(config, *axes, lookahead=1, model=None):
    """This rank's part of a model with random weights."""
    from pipeline.config.layout import Layout
    from pipeline.generation import weights
    from pipeline.generation.runner import decoder_runner
    from pipeline.parallel import mesh as meshes
    from tests.world import configured

    run = weights.for_generation(configured("stage=generate", *(f"parallel.{axis}=2" for axis in axes), "precision=fp32"), config)
    mesh = meshes.build_mesh(Layout.of(run, 2 ** len(axes)), torch.device("cpu"))
    part = weights.load(InMemory(model or random_model(config)), run, mesh)
    if config.family == "t5":
        return Seq2SeqRunner(next(part.stage_modules()), 60, start=2)
    return decoder_runner(part, config, mesh, lookahead=lookahead)


def on_ranks(config, axis):
    """The completions of this rank."""
    return completions(runner_on_ranks(config, axis))


def drafted(runner, small):
    """Completions with a draft model, and the share of proposals that was accepted."""
    proposer = DraftModel(small, test_speculative.SAMPLING)
    generator = SpeculativeGenerator(runner, test_speculative.SAMPLING, Stopping(3), batch_size=500, proposer=proposer, tokens=2)
    return test_speculative.samples(generator), generator.accepted / generator.proposed


def drafted_on_ranks(axis):
    small = test_speculative.noisy(random_model(TWO_LAYERS), 0.4)
    return drafted(runner_on_ranks(TWO_LAYERS, axis, lookahead=3), runner_on_ranks(TWO_LAYERS, axis, lookahead=3, model=small))


@pytest.mark.long
@pytest.mark.parametrize("axis", ["tensor", pytest.param("pipeline", marks=pytest.mark.long)])
def test_speculative_samples_have_the_distribution_of_the_target(axis, worlds):
    model = random_model(TWO_LAYERS)
    small = test_speculative.noisy(model, 0.4)
    expected, accepted = drafted(*(Runner(each, 16, lookahead=3) for each in (model, small)))
    assert 0.1 < accepted < 0.95
    for found, share in worlds(2).run(drafted_on_ranks, axis):
        assert found == expected
        assert share == accepted
    assert test_speculative.chi_square(TWO_LAYERS, expected) < test_speculative.CRITICAL


@pytest.mark.parametrize("name, axis", CASES)
def test_layouts_equal_one_process(name, axis, worlds):
    config = T5 if name == "t5" else MODELS[name]
    model = random_model(config).eval()
    expected = completions(Seq2SeqRunner(model, 60, start=2) if name == "t5" else Runner(model, 60))
    for found in worlds(2).run(on_ranks, config, axis):
        assert [(index, tokens) for index, tokens, _ in found] == [(index, tokens) for index, tokens, _ in expected]
        for (_, _, ours), (_, _, theirs) in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-5)


EXPERTS = {name: replace(CONFIGS[name], max_positions=60, experts=8) for name in ("mixtral", "deepseek-yarn", "gpt-oss")}
RULES = [Sampling(), Sampling(temperature=1.0, top_p=0.9, seed=4)]
#: The axes beside the expert axis, each of two ranks.
SHARED = [
    ("mixtral", (), RULES[0]),
    pytest.param("mixtral", ("tensor",), RULES[1], marks=pytest.mark.long),
    pytest.param("deepseek-yarn", ("pipeline",), RULES[1], marks=pytest.mark.long),
    *(pytest.param(name, (), RULES[1], marks=pytest.mark.long) for name in ("mixtral", "gpt-oss", "deepseek-yarn")),
]


def shares():
    """Prompts of two groups of ranks in three runs: one group is finished long before the other, or has nothing to do."""
    given = list(enumerate(prompts(300, 3, 20, 1, 30, 2, 9)))
    return [(given[:1], given[1:]), ([], given[:2]), (given[3:], given[:3])]


def completed(runner, sampling, share):
    """Of a share, in two rows."""
    return {each.index: each.tokens for each in Generator(runner, sampling, Stopping(12), batch_size=2).run(share)}


def on_expert_ranks(config, axes, sampling):
    """The group of this rank, the completions of its shares, and the elements of its experts."""
    runner = runner_on_ranks(config, "expert", *axes)
    group = runner.rounds.group.rank()
    found = [completed(runner, sampling, pair[group]) for pair in shares()]
    return group, found, sum(parameter.numel() for name, parameter in runner.model.named_parameters() if ".experts." in name)


@pytest.mark.parametrize("name, axes, sampling", SHARED)
def test_ranks_that_share_experts_equal_one_process(name, axes, sampling, worlds):
    model = random_model(EXPERTS[name]).eval()
    expected = completed(Runner(model, 60), sampling, shares()[0][0] + shares()[0][1])
    assert len(set(map(tuple, expected.values()))) == 6
    answers = worlds(2 * 2 ** len(axes)).run(on_expert_ranks, EXPERTS[name], axes, sampling)
    for group, found, _ in answers:
        assert found == [{index: expected[index] for index, _ in pair[group]} for pair in shares()]
    assert {group for group, _, _ in answers} == {0, 1}
    assert sum(held for _, _, held in answers) == sum(
        parameter.numel() for key, parameter in model.named_parameters() if ".experts." in key
    )
