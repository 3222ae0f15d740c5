"""Encoder-decoders with a cache, and beam search: equal to stock transformers."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from pipeline.conversion import huggingface_export
from pipeline.generation.beam import BeamGenerator
from pipeline.generation.generator import Generator, Stopping
from pipeline.generation.runner import Runner
from pipeline.generation.sampling import Sampling
from pipeline.generation.seq2seq import Seq2SeqRunner
from tests.conversion.test_huggingface_export import InMemory, random_model
from tests.generation.conftest import POSITIONS, prompts
from tests.models.test_encoder_decoder import CONFIGS

GIVEN = prompts(300, 30, 7, 1)


@pytest.fixture(scope="module")
def stock_of(tmp_path_factory):
    """`stock_of(name)`: our model and the stock class."""
    made = {}

    def get(name):
        if name not in made:
            config, folder = replace(CONFIGS[name], max_positions=POSITIONS), tmp_path_factory.mktemp("export")
            model = random_model(config)
            huggingface_export.write_weights(folder, InMemory(model), config, dtype=torch.float32, shard_bytes=10**9)
            huggingface_export.write_configs(folder, config, dtype=torch.float32, end_of_document_id=0)
            made[name] = model, AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        return made[name]

    return get


def by_stock(stock, tokens, **options):
    """The completions of each prompt on its own, without start and end tokens."""
    settings = {
        "max_new_tokens": tokens,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "decoder_start_token_id": 2,
    } | options
    with_mask = ((torch.tensor([given]), torch.ones(1, len(given), dtype=torch.int64)) for given in GIVEN)
    return [stock.generate(ids, attention_mask=mask, **settings)[0, 1:].tolist() for ids, mask in with_mask]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_completions_are_those_of_transformers(name, stock_of):
    """Three prompts in two rows: a row takes the third one."""
    model, stock = stock_of(name)
    runner = Seq2SeqRunner(model, POSITIONS, start=2)
    generator = Generator(runner, Sampling(), Stopping(24), batch_size=2, logprobs=True)
    found = {completion.index: completion for completion in generator.run(enumerate(GIVEN))}
    runner.detach()
    assert [found[index].tokens for index in range(3)] == by_stock(stock, 24)
    for completion in found.values():
        decoder = torch.tensor([[2, *completion.tokens[:-1]]])
        with torch.no_grad():
            logprobs = model(torch.tensor([completion.prompt]), decoder_tokens=decoder)[0].log_softmax(dim=1)
        expected = logprobs.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name, penalty", [("t5", 0.0), ("transformer", 0.6)])
def test_beam_search_is_that_of_transformers(name, penalty, stock_of):
    """An end token that some beams choose, so that completions of different lengths compete."""
    model, stock = stock_of(name)
    plain, lengths = by_stock(stock, 10, num_beams=3), set()
    for end in (plain[0][1], plain[1][3]):
        expected = by_stock(stock, 10, num_beams=3, length_penalty=penalty, eos_token_id=end)
        runner = Seq2SeqRunner(model, POSITIONS, start=2)
        stopping = Stopping(10, end_tokens=frozenset([end]))
        generator = BeamGenerator(runner, stopping, beams=3, length_penalty=penalty, batch_size=6)
        found = [completion.tokens for completion in generator.run(enumerate(GIVEN))]
        assert found == [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in expected]
        lengths |= set(map(len, found))
        runner.detach()
    assert lengths - {10}, "no end token was chosen"


def test_beam_search_of_a_decoder_is_that_of_transformers(pair):
    config, model, stock = pair("mistral")
    given = prompts(config.vocab_size, 4, 11)
    runner = Runner(model, POSITIONS)
    generator = BeamGenerator(runner, Stopping(20), beams=4, length_penalty=1.0, batch_size=8)
    found = [completion.tokens for completion in generator.run(enumerate(given))]
    runner.detach()
    for tokens, prompt in zip(found, given, strict=True):
        options = {"max_new_tokens": 20, "do_sample": False, "num_beams": 4, "eos_token_id": None, "pad_token_id": 0}
        expected = stock.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **options)
        assert tokens == expected[0, len(prompt) :].tolist()
