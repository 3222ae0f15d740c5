"""Generation with a cache: equal to stock transformers, to the model without a cache, and independent of the batch."""

import pytest
import torch

from pipeline.generation.cache import KeyValueCache, detach
from pipeline.generation.generator import Generator, Stopping, prefill_count
from pipeline.generation.runner import Runner
from pipeline.generation.sampling import Sampling
from pipeline.models.gpt.config import GPTConfig
from tests.conversion.test_huggingface_export import random_model
from tests.generation.conftest import POSITIONS, prompts

#: A model of every decoder family: rings, latents, ALiBi, learned positions, layers without positions, norms of queries, experts.
DECODERS = (
    *("apertus", "bloom-six-heads", "deepseek-yarn", "gemma3", "gpt", "gpt1", "llama-grouped", "mistral", "mixtral", "olmo2", "opt"),
    *("opt-projected", "qwen2.5", "qwen3", "smollm3"),
)


def generate(model, given, *, tokens=64, batch_size=2, sampling=Sampling(), stopping=None, logprobs=True):  # noqa: B008 - frozen
    stopping = stopping or Stopping(tokens)
    generator = Generator(Runner(model, POSITIONS), sampling, stopping, batch_size=batch_size, logprobs=logprobs)
    found = {completion.index: completion for completion in generator.run(list(enumerate(given)))}
    detach(model.blocks.values())
    return [found[index] for index in range(len(given))]


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_completions_are_those_of_transformers(name, pair):
    """64 tokens, of prompts of different lengths; log-probabilities equal those without a cache."""
    config, ours, stock = pair(name)
    given = prompts(config.vocab_size, 5, 19)
    padded = torch.tensor([[0] * 14 + given[0], given[1]])
    mask = torch.ones_like(padded)
    mask[0, :14] = 0
    expected = stock.generate(padded, attention_mask=mask, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
    completions = generate(ours, given)
    assert [completion.tokens for completion in completions] == expected[:, 19:].tolist()
    for completion in completions:
        whole = torch.tensor([*completion.prompt, *completion.tokens])
        with torch.no_grad():
            logprobs = ours(whole[None, :-1])[0].log_softmax(dim=1)[len(completion.prompt) - 1 :]
        expected_logprobs = logprobs.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected_logprobs, rtol=1e-5, atol=1e-5)


def test_banded_attention_equals_the_model_without_a_cache():
    """Layers with a window of 6 and without, which no Hugging Face class computes."""
    config = GPTConfig(layers=2, hidden=48, heads=4, ffn_hidden=96, vocab_size=300, max_positions=POSITIONS, banded_window=6)
    model = random_model(config)
    (completion,) = generate(model, prompts(300, 9), tokens=30)
    whole = torch.tensor([*completion.prompt, *completion.tokens])[None]
    with torch.no_grad():
        assert model(whole[:, :-1])[0, 8:].argmax(dim=1).tolist() == completion.tokens


SAMPLED = Sampling(temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=5)


@pytest.mark.parametrize("name", ["llama-grouped", "mistral"])
def test_samples_depend_neither_on_the_batch_nor_on_the_order(name, pair):
    """Rows take new prompts while others continue; idle rows are dropped at the end."""
    config, model, _ = pair(name)
    given = prompts(config.vocab_size, 3, 30, 1, 12, 7, 22, 2)
    alone = [each.tokens for each in generate(model, given, tokens=20, batch_size=1, sampling=SAMPLED)]
    assert len({tuple(tokens) for tokens in alone}) == len(given)
    stopping = Stopping(20, end_tokens=frozenset([alone[1][3], alone[4][7]]))  # completions of different lengths
    ends = [next((i for i, token in enumerate(tokens) if token in stopping.end_tokens), 20) for tokens in alone]
    assert len(set(ends)) > 2
    for size in (3, 7):
        together = generate(model, given, batch_size=size, sampling=SAMPLED, stopping=stopping)
        assert [each.tokens for each in together] == [tokens[:end] for tokens, end in zip(alone, ends, strict=True)]
        assert [each.finish_reason for each in together] == ["length" if end == 20 else "stop" for end in ends]
        assert all(len(each.logprobs) == len(each.tokens) for each in together)
    other = generate(model, given, tokens=20, batch_size=7, sampling=Sampling(temperature=1.2, seed=6))
    assert [each.tokens for each in other] != alone


def test_a_sequence_ends_at_the_last_position(pair):
    config, model, _ = pair("gpt")
    first, second = generate(model, prompts(config.vocab_size, POSITIONS - 1, POSITIONS - 9), tokens=64)
    assert (len(first.tokens), len(second.tokens)) == (1, 9)
    assert first.finish_reason == second.finish_reason == "length"


def test_stop_strings():
    stopping = Stopping(9, strings=("end", "\n\n"), decode=lambda tokens: "".join(map(chr, tokens)))
    assert not stopping.contains_string([*b"the en"])
    assert stopping.contains_string([*b"the end"])
    assert stopping.cut("one\n\ntwo end") == "one"
    assert stopping.cut("no stop") == "no stop"


def test_prompts_of_one_pass_are_limited():
    assert prefill_count([10, 20, 30]) == 3
    assert prefill_count([4096, 4096, 1]) == 2
    assert prefill_count([1, 9000]) == 1
    assert prefill_count([9000]) == 1


def test_storage_is_one_row_of_key_heads_a_ring_or_a_latent(pair):
    """Elements of a token and layer: grouped-query attention, a sliding window of 8, multi-head latent attention."""
    slots = {}
    for name in ("llama-grouped", "mistral", "deepseek-yarn"):
        config, model, _ = pair(name)
        runner = Runner(model, POSITIONS)
        runner.start(2)
        runner.reserve(POSITIONS)
        runner.forward([0, 1], prompts(config.vocab_size, 20, 3))
        layer = runner.cache.layers[0]
        slots[name] = layer.keys.numel() + (0 if layer.values is None else layer.values.numel())
        detach(model.blocks.values())
    assert slots == {
        "llama-grouped": 2 * (POSITIONS + 1) * 2 * 2 * 8,  # rows, slots, keys and values, heads, width
        "mistral": 2 * (8 + 1 + 1) * 2 * 2 * 16,
        "deepseek-yarn": 2 * (POSITIONS + 1) * (16 + 8),
    }


def test_a_cache_refuses_more_tokens_than_it_holds(pair):
    _, model, _ = pair("gpt")
    cache = KeyValueCache(model.blocks.values(), 1, 4)
    detach(model.blocks.values())
    with pytest.raises(AssertionError, match="5 tokens exceed the capacity of 4"):
        cache.begin(torch.tensor([0]), torch.tensor([5]), torch.device("cpu"))
