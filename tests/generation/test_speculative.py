"""Speculative decoding: the same greedy tokens, and the same distribution of samples, as without it."""

import itertools
from dataclasses import replace

import pytest
import torch

from pipeline.generation.generator import Completion, Generator, Stopping
from pipeline.generation.proposers import DraftModel, PromptLookup
from pipeline.generation.runner import Runner
from pipeline.generation.sampling import Sampling, distribution
from pipeline.generation.speculative import SpeculativeGenerator
from pipeline.models.families.gpt import GPTConfig
from tests.conversion.test_huggingface_export import random_model
from tests.generation.conftest import POSITIONS, prompts
from tests.helpers import one_in


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


class Known(PromptLookup):
    """Proposes the completions, with a wrong token at every third place."""

    def __init__(self, completions: dict[int, Completion]) -> None:
        super().__init__()
        self.completions = completions

    def propose(self, held, counts, numbers, seen):  # noqa: ARG002 - of PromptLookup
        guesses = []
        for each, count in zip(held, counts, strict=True):
            start = 0 if each is None else len(each.tokens)
            right = [] if each is None else self.completions[each.index].tokens[start : start + count]
            guesses.append(([token if (start + place) % 3 else token + 1 for place, token in enumerate(right)], None))
        return guesses


@pytest.mark.parametrize(
    "name, kind",
    one_in(
        2,
        [
            *[("llama-grouped", "lookup"), ("mistral", "lookup"), ("mistral", "draft"), ("deepseek-yarn", "lookup")],
            *[("qwen3-next", "known"), ("nemotron-h", "known"), ("granite-hybrid", "known"), ("granite-hybrid", "lookup")],
        ],
    ),
)
def test_greedy_completions_do_not_change(name, kind, pair):
    """Full rings, rejected and accepted tokens, rows that end at different times and take new prompts."""
    config, model, _ = pair(name)
    given = prompts(config.vocab_size, 5, 30, 1, 12)
    plain = Runner(model, POSITIONS)
    stopping = Stopping(24)
    expected = {each.index: each for each in Generator(plain, Sampling(), stopping, batch_size=3, logprobs=True).run(enumerate(given))}
    plain.detach()
    proposer = PromptLookup() if kind == "lookup" else Known(expected)
    if kind == "draft":
        proposer = DraftModel(Runner(noisy(model, 0.01), POSITIONS, lookahead=4), Sampling())
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


SAMPLING = Sampling(temperature=0.9, top_k=5, seed=2)
COMPLETIONS = 2000


def samples(generator) -> list[list[int]]:
    """Completions of three tokens of the same prompt, in order."""
    found = {each.index: each.tokens for each in generator.run((index, PROMPT) for index in range(COMPLETIONS))}
    return [found[index] for index in range(COMPLETIONS)]


def chi_square(config, found: list[list[int]]) -> float:
    """Of the second and third token, whose distribution under the model is computed; the first is chosen without a guess."""
    every, model = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=3))), random_model(config)
    with torch.no_grad():
        logits = model(torch.cat([torch.tensor(PROMPT).expand(len(every), -1), every[:, :2]], dim=1))[:, len(PROMPT) - 1 :]
    chances = distribution(logits.flatten(0, 1), SAMPLING, None).view(len(every), 3, VOCABULARY).gather(2, every[:, :, None]).prod(dim=1)
    expected = COMPLETIONS * chances.view((VOCABULARY,) * 3).sum(dim=0)
    counts = torch.zeros_like(expected)
    for tokens in found:
        counts[tuple(tokens[1:])] += 1
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


@pytest.mark.parametrize("kind", one_in(2, ["draft", "lookup"]))
def test_samples_have_the_distribution_of_the_target(kind):
    model = random_model(TINY)
    proposer = PromptLookup() if kind == "lookup" else DraftModel(Runner(noisy(model, 0.4), 16, lookahead=3), SAMPLING)
    generator = generator_of(model, proposer, SAMPLING, Stopping(3), tokens=2, positions=16, batch_size=500)
    assert chi_square(TINY, samples(generator)) < CRITICAL
    assert 0.1 < generator.accepted / generator.proposed < 0.95


class Scripted(PromptLookup):
    """Proposes a known completion; from a length on, its last token is another one."""

    def __init__(self, completion: list[int], right: int) -> None:
        super().__init__()
        self.completion, self.right, self.counts = completion, right, []

    def propose(self, held, counts, numbers, seen):  # noqa: ARG002 - of PromptLookup
        self.counts += counts[:1]
        start = len(held[0].tokens)
        guess = self.completion[start : start + counts[0]]
        return [(guess if start < self.right else [*guess[:-1], *((each + 1) % VOCABULARY for each in guess[-1:])], None)]


def test_more_tokens_are_proposed_while_all_are_accepted_and_fewer_after_others():
    config = replace(TINY, max_positions=64)
    model = random_model(config)
    (plain,) = Generator(Runner(model, 64), Sampling(), Stopping(60), batch_size=1).run([(0, [1])])
    proposer = Scripted(plain.tokens, right=21)
    (found,) = generator_of(model, proposer, Sampling(), Stopping(60), tokens=7, positions=64).run([(0, [1])])
    assert found.tokens == plain.tokens
    assert proposer.counts[:6] == [4, 6, 7, 7, 6, 5]


def test_prompt_lookup_proposes_what_followed_the_longest_match():
    lookup = PromptLookup(longest=2)
    held = [Completion(0, [1, 2, 3, 9, 2, 5], [7, 1, 2]), Completion(1, [4, 5, 6]), None]
    assert lookup.propose(held, [2, 3, 0], [None] * 3, None) == [([3, 9], None), ([], None), ([], None)]
    held[0].tokens += [3]  # the index grows with the completion
    assert lookup.propose(held, [2, 3, 0], [None] * 3, None)[0] == ([9, 2], None)
    lookup.clear(0)
    held[0] = Completion(2, [8, 9], [8])
    assert lookup.propose(held, [2, 3, 0], [None] * 3, None)[0] == ([9, 8], None)


def test_a_repetition_penalty_does_not_change_with_speculation(pair):
    """Greedy completions with the penalty are those without a proposer, in rows that take new prompts."""
    config, model, _ = pair("llama-grouped")
    given = prompts(config.vocab_size, 5, 30, 1, 12)
    sampling, stopping = Sampling(repetition_penalty=1.3), Stopping(24)
    plain = Runner(model, POSITIONS)
    expected = {each.index: each.tokens for each in Generator(plain, sampling, stopping, batch_size=2).run(enumerate(given))}
    plain.detach()
    draft = DraftModel(Runner(noisy(model, 0.01), POSITIONS, lookahead=4), sampling)
    for proposer in (PromptLookup(), draft):
        generator = generator_of(model, proposer, sampling, stopping, batch_size=2)
        assert {each.index: each.tokens for each in generator.run(enumerate(given))} == expected
        generator.runner.detach()
