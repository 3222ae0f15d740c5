"""Speculative decoding: the same greedy tokens, and the same distribution of samples, as without it."""

import itertools

import pytest
import torch

from pipeline.generation.generator import Completion, Generator, Stopping
from pipeline.generation.runner import Runner
from pipeline.generation.sampling import Sampling, distribution
from pipeline.generation.speculative import DraftModel, PromptLookup, SpeculativeGenerator
from pipeline.models.gpt.config import GPTConfig
from tests.checkpoint.test_huggingface_export import random_model
from tests.generation.conftest import POSITIONS, prompts


def generator_of(model, proposer, sampling, stopping, *, tokens=3, positions=POSITIONS, batch_size=4, logprobs=False):
    runner = Runner(model, positions, lookahead=tokens + 1)
    options = {"batch_size": batch_size, "logprobs": logprobs}
    return SpeculativeGenerator(runner, sampling, stopping, proposer=proposer, tokens=tokens, **options)


def noisy(model, scale: float):
    """A copy of a model with other weights, which makes similar predictions."""
    import copy

    found, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return found


@pytest.mark.parametrize(
    "name, kind", [("llama-grouped", "lookup"), ("mistral", "draft"), ("mistral", "lookup"), ("deepseek-yarn", "lookup")]
)
def test_greedy_completions_do_not_change(name, kind, pair):
    """Full rings, rejected and accepted tokens, rows that end at different times and take new prompts."""
    config, model, _ = pair(name)
    given = prompts(config.vocab_size, 5, 30, 1, 12)
    plain = Runner(model, POSITIONS)
    stopping = Stopping(24)
    expected = {each.index: each for each in Generator(plain, Sampling(), stopping, batch_size=3, logprobs=True).run(enumerate(given))}
    plain.detach()
    proposer = PromptLookup() if kind == "lookup" else DraftModel(Runner(noisy(model, 0.01), POSITIONS, lookahead=4), Sampling())
    generator = generator_of(model, proposer, Sampling(), stopping, batch_size=3, logprobs=True)
    found = {each.index: each for each in generator.run(enumerate(given))}
    generator.runner.detach()
    for index, each in expected.items():
        assert found[index].tokens == each.tokens
        torch.testing.assert_close(torch.tensor(found[index].logprobs), torch.tensor(each.logprobs), rtol=1e-5, atol=1e-5)
    assert kind == "lookup" or 0 < generator.accepted < generator.proposed


VOCABULARY, PROMPT = 6, [1, 4, 2, 1, 4, 2, 1]
TINY = GPTConfig(layers=1, hidden=16, heads=2, ffn_hidden=32, vocab_size=VOCABULARY, max_positions=16)
#: The 99.9 % quantile of chi-square with 6^2 - 1 degrees of freedom.
CRITICAL = 66.6


@pytest.mark.parametrize("kind", ["draft", "lookup"])
def test_samples_have_the_distribution_of_the_target(kind):
    """Chi-square over the second and third token of 2,000 completions; the first is chosen without a guess."""
    model, sampling = random_model(TINY), Sampling(temperature=0.9, top_k=5, seed=2)
    draft = noisy(model, 0.4)
    every = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=3)))
    with torch.no_grad():
        logits = model(torch.cat([torch.tensor(PROMPT).expand(len(every), -1), every[:, :2]], dim=1))[:, len(PROMPT) - 1 :]
    chances = distribution(logits.flatten(0, 1), sampling, []).view(len(every), 3, VOCABULARY).gather(2, every[:, :, None]).prod(dim=1)
    expected = chances.view((VOCABULARY,) * 3).sum(dim=0)
    proposer = PromptLookup() if kind == "lookup" else DraftModel(Runner(draft, 16, lookahead=3), sampling)
    generator = generator_of(model, proposer, sampling, Stopping(3), tokens=2, positions=16, batch_size=500)
    counts = torch.zeros_like(expected)
    for completion in generator.run((index, PROMPT) for index in range(2000)):
        counts[tuple(completion.tokens[1:])] += 1
    assert 0.1 < generator.accepted / generator.proposed < 0.95
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    statistic = ((counts - 2000 * expected)[possible] ** 2 / (2000 * expected[possible])).sum()
    assert statistic < CRITICAL


def test_prompt_lookup_proposes_what_followed_the_longest_match():
    lookup = PromptLookup(longest=2)
    held = [Completion(0, [1, 2, 3, 9, 2, 5], [7, 1, 2]), Completion(1, [4, 5, 6]), None]
    assert lookup.propose(held, [2, 3, 0], [None] * 3) == [([3, 9], None), ([], None), ([], None)]
