"""Generation with a cache: equal to stock transformers, to the model without a cache, and independent of the batch."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pipeline.config.stages import Generate
from pipeline.generation import decoding
from pipeline.generation import generator as generator_module
from pipeline.generation.cache import KeyValueCache, detach
from pipeline.generation.decoding import CacheRoom
from pipeline.generation.generator import Generator, Stopping, prefill_count
from pipeline.generation.pages import PAGE, PageTable
from pipeline.generation.runner import Runner
from pipeline.generation.sampling import Sampling
from pipeline.models.families.gpt import GPTConfig
from tests.conversion.test_huggingface_export import random_model
from tests.generation.conftest import POSITIONS, prompts
from tests.helpers import one_in
from tests.models.small_decoders import CONFIGS, OTHERS

#: A model of every decoder family: rings, latents, ALiBi, learned positions, layers without positions, norms of queries, experts.
DECODERS = (
    *("apertus", "bloom-six-heads", "deepseek-yarn", "gemma3", "gpt", "gpt1", "llama-grouped", "mistral", "mixtral", "olmo2", "opt"),
    *("opt-projected", "qwen2.5", "qwen3", "smollm3", "granite", "olmo3", "olmoe", "phi3", "qwen3-moe", "gpt-neox"),
    *("gemma2", "gemma4", "gemma4-keys", "nemotron", "nemotron-h", "nemotron-h-dense", "granite-hybrid", "glm4-moe", "qwen3-next"),
    *("qwen3.5-moe", "gpt-oss", *OTHERS),
)
#: Those whose caches and positions are those of all of them.
KINDS = {
    *("bloom-six-heads", "deepseek-yarn", "gpt", "llama-grouped", "mixtral", "gemma4-keys", "nemotron-h", "qwen3-next", "gpt-oss", "opt"),
}


def generate(model, given, *, tokens=64, batch_size=2, sampling=Sampling(), stopping=None, logprobs=True):  # noqa: B008 - frozen
    stopping = stopping or Stopping(tokens)
    generator = Generator(Runner(model, POSITIONS), sampling, stopping, batch_size=batch_size, logprobs=logprobs)
    found = {completion.index: completion for completion in generator.run(list(enumerate(given)))}
    detach(model.blocks.values())
    return [found[index] for index in range(len(given))]


@pytest.mark.parametrize("name", [name if name in KINDS else pytest.param(name, marks=pytest.mark.long) for name in DECODERS])
def test_greedy_completions_are_those_of_transformers(name, pair):
    """Of prompts of different lengths, beyond each window; log-probabilities equal those without a cache."""
    config, ours, stock = pair(name)
    given, tokens = prompts(config.vocab_size, 5, 19), 32
    padded = torch.tensor([[0] * 14 + given[0], given[1]])
    mask = torch.ones_like(padded)
    mask[0, :14] = 0
    expected = stock.generate(padded, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    completions = generate(ours, given, tokens=tokens)
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


@pytest.mark.parametrize("name", one_in(2, ["mistral", "llama-grouped"]))
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


def test_the_ends_of_a_template_and_of_an_imported_model_both_end_a_completion(monkeypatch, tmp_path):
    monkeypatch.setattr("pipeline.conversion.imported.original_of", lambda *_: SimpleNamespace(ends=[7, 8]))
    for settings, expected in (({}, {5, 7, 8}), ({"ignore_eos": True}, set())):
        assert decoding.stopping(Generate(name="generate", **settings), tmp_path, tmp_path, [5], str).end_tokens == expected


def test_prompts_of_one_pass_are_limited():
    assert prefill_count([10, 20, 30]) == 3
    assert prefill_count([4096, 4096, 1]) == 2
    assert prefill_count([1, 9000]) == 1
    assert prefill_count([9000]) == 1


def test_storage_of_a_token_is_key_heads_a_ring_or_a_latent(pair):
    """Elements of a token and layer: grouped-query attention, a sliding window of 8, multi-head latent attention."""
    slots = {}
    for name in ("llama-grouped", "mistral", "deepseek-yarn"):
        config, model, _ = pair(name)
        runner = Runner(model, POSITIONS)
        promised = runner.bytes_of(20) + runner.bytes_of(3)
        runner.start(2)
        runner.prefill([0, 1], prompts(config.vocab_size, 20, 3))
        assert runner.cache.allocated == promised
        layer = runner.cache.layers[0]
        slots[name] = layer.keys.numel() + (0 if layer.values is None else layer.values.numel())
        runner.detach()
    assert slots == {
        "llama-grouped": (3 + 1) * PAGE * 2 * 2 * 8,  # pages of two rows, slots, keys and values, heads, width
        "mistral": (2 + 1) * PAGE * 2 * 2 * 16,  # a ring of 8 + 1 slots
        "deepseek-yarn": (3 + 1) * PAGE * (16 + 8),
    }


def test_keys_and_values_that_layers_share_are_stored_once(pair):
    """Three of six layers store keys and values of two heads: two in two pages of a ring, 16 columns, and one in three pages, 24."""
    config, model, _ = pair("gemma4")
    runner = Runner(model, POSITIONS)
    promised = runner.bytes_of(20)
    runner.start(1)
    runner.prefill([0], prompts(config.vocab_size, 20))
    assert len(runner.cache.layers) == 3
    assert runner.cache.allocated == promised == 4 * PAGE * 2 * 2 * (2 * 2 * 16 + 3 * 24)
    runner.detach()


#: The default tier has the kinds of caches once: rings beside shared keys and values, latents, states of linear attention and of Mamba-2.
CACHES = ("gemma4", "llama-grouped", "deepseek-yarn", "mistral", "qwen3-next", "bloom-six-heads", "nemotron-h", "gemma3")


@pytest.mark.parametrize("name", one_in(2, CACHES))
def test_parts_of_prompts_beside_other_tokens_change_nothing(name, pair, monkeypatch):
    """Prompts are read five tokens at a time: rings overflow within a part, and rows that decode go on beside them."""
    config, model, _ = pair(name)
    given = prompts(config.vocab_size, 3, 30, 5, 1, 23)
    expected = generate(model, given, tokens=12, batch_size=5)
    monkeypatch.setattr(generator_module, "PASS_TOKENS", 5)
    found = generate(model, given, tokens=12, batch_size=3)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), rtol=1e-5, atol=1e-5)


class Measured(Runner):
    """Records, after each pass, the bytes of the cache and those of its tokens, and counts the positions that the blocks compute."""

    def begin_measuring(self):
        self.sizes, self.computed, self.given = [], 0, 0
        self.model.blocks["0"].register_forward_pre_hook(lambda _, inputs: self.count(inputs[0].shape[:2].numel()))
        return self

    def count(self, positions):
        self.computed += positions

    def forward(self, rows, tokens, wanted=None):
        logits = super().forward(rows, tokens, wanted)
        self.given += sum(map(len, tokens))
        held = sum(layer.token_bytes for layer in self.cache.layers) * int(self.cache.lengths.sum())
        self.sizes.append((self.cache.allocated, held))
        return logits


def test_memory_and_positions_with_mixed_lengths_are_those_of_the_tokens():
    """16 rows of 100 to 1,500 tokens: the cache is at most 1.1 x its tokens in every pass, and no position is computed for padding."""
    config = replace(CONFIGS["llama-grouped"], max_positions=2048)
    model = random_model(config).eval()
    lengths = [100 + 1400 * (number * 7 % 24) // 24 for number in range(24)]
    runner = Measured(model, 2048).begin_measuring()
    given = prompts(config.vocab_size, *lengths)
    generator = Generator(runner, Sampling(), Stopping(12), batch_size=16)
    assert len(list(generator.run(enumerate(given)))) == 24
    full = [(allocated, held) for allocated, held in runner.sizes if held]
    assert max(allocated / held for allocated, held in full) <= 1.1
    assert runner.computed == runner.given == sum(lengths) + 24 * 11


def test_a_prompt_waits_for_room_in_the_cache(pair):
    """With memory for two rows of the longest, completions are the same, and the cache never exceeds it."""
    config, model, _ = pair("llama-grouped")
    given = prompts(config.vocab_size, 30, 50, 5, 41, 23)
    expected = [each.tokens for each in generate(model, given, tokens=20, batch_size=5)]
    runner = Measured(model, POSITIONS).begin_measuring()
    limit = 2.2 * runner.bytes_of(70)
    room = CacheRoom([runner], POSITIONS, limit, lambda values: values)
    generator = Generator(runner, Sampling(), Stopping(20), batch_size=5, share=room.share)
    found = {each.index: each.tokens for each in generator.run(enumerate(given))}
    runner.detach()
    assert [found[index] for index in range(5)] == expected
    assert 0.5 * limit < max(allocated for allocated, _ in runner.sizes) <= limit


class Numbers:
    """A pool whose pages contain one number each."""

    def __init__(self):
        self.values = torch.zeros(0, dtype=torch.int64)

    def copy(self, sources, targets):
        self.values[targets] = self.values[sources]

    def resize(self, pages, sources, targets):
        self.copy(sources, targets)
        self.values = torch.nn.functional.pad(self.values, (0, max(0, pages - len(self.values))), value=-1)[:pages]


@pytest.mark.parametrize("limit", [None, 3 * PAGE + 1])
def test_pages_keep_their_contents(limit):
    """Random growth, truncation, reordering and repetition of rows: every page of a row holds what was written to it."""
    choice, table, pool = random.Random(0), PageTable(4, limit), Numbers()
    table.pools.append(pool)
    lengths, written = [0] * 4, [[] for _ in range(4)]
    for step in range(300):
        if step % 9 == 8:
            rows = [choice.randrange(len(lengths)) for _ in range(choice.randint(1, 6))]
            table.keep(rows)
            lengths, written = [lengths[row] for row in rows], [list(written[row]) for row in rows]
        else:
            lengths = [choice.choice([length, length + 1, length + 30, length // 2, 0]) for length in lengths]
            table.fit(lengths)
        used = [table.pages(length) for length in lengths]
        assert sum(used) <= table.size <= sum(used) * 17 // 16 + 1
        owned = []
        for row, count in enumerate(used):
            mine = table.of(torch.tensor([row]), lengths[row], torch.device("cpu"))[0].tolist()
            owned += mine
            kept = written[row][:count]
            assert pool.values[mine[: len(kept)]].tolist() == kept
            written[row] = kept + [1000 * step + 10 * row + new for new in range(count - len(kept))]
            pool.values[mine] = torch.tensor(written[row], dtype=torch.int64)
        assert len(set(owned)) == len(owned)


def test_a_cache_refuses_more_tokens_than_it_holds(pair):
    _, model, _ = pair("gpt")
    cache = KeyValueCache(model.blocks.values(), 1, 4)
    detach(model.blocks.values())
    with pytest.raises(AssertionError, match="5 tokens exceed the capacity of 4"):
        cache.begin([0], [5], torch.device("cpu"))
