"""Generation on several ranks: log-probabilities and tokens equal those of one process."""

from dataclasses import replace

import pytest
import torch

from pipeline.generation.generator import Generator, Stopping
from pipeline.generation.runner import Runner
from pipeline.generation.sampling import Sampling
from pipeline.generation.seq2seq import Seq2SeqRunner
from pipeline.models.t5.config import T5Config
from tests.checkpoint.test_huggingface_export import InMemory, random_model
from tests.generation.conftest import prompts
from tests.models.small_decoders import CONFIGS

T5 = T5Config(hidden=48, heads=4, ffn_hidden=96, vocab_size=301, max_positions=60, layers=2, head_width=8)
#: A vocabulary that does not divide into two pieces.
MODELS = {name: replace(CONFIGS[name], max_positions=60, vocab_size=301) for name in ("gpt", "mistral", "deepseek-yarn", "bloom", "olmo2")}
CASES = [*((name, "tensor") for name in MODELS), *((name, "pipeline") for name in ("gpt", "mistral", "deepseek-yarn")), ("t5", "tensor")]
SAMPLING = Sampling(temperature=0.8, seed=4)


def completions(runner):
    """Of three prompts in two rows."""
    generator = Generator(runner, SAMPLING, Stopping(12), batch_size=2, logprobs=True)
    return sorted((each.index, each.tokens, each.logprobs) for each in generator.run(enumerate(prompts(301, 9, 20, 3))))


def on_ranks(config, axis):
    """The completions of this rank."""
    from pipeline.config.layout import Layout
    from pipeline.generation import weights
    from pipeline.parallel import mesh as meshes
    from pipeline.parallel.relay import Relay
    from tests.world import configured

    run = weights.for_generation(configured("stage=generate", f"parallel.{axis}=2", "precision=fp32"), config)
    mesh = meshes.build_mesh(Layout.of(run, 2), torch.device("cpu"))
    model = next(weights.load(InMemory(random_model(config)), run, mesh).stage_modules())
    if config.family == "t5":
        return completions(Seq2SeqRunner(model, 60, start=2))
    relay = Relay(mesh) if axis == "pipeline" else None
    return completions(Runner(model, 60, relay=relay, vocab_size=config.vocab_size, hidden=config.hidden))


@pytest.mark.parametrize("name, axis", CASES)
def test_layouts_equal_one_process(name, axis, worlds):
    config = T5 if name == "t5" else MODELS[name]
    model = random_model(config).eval()
    expected = completions(Seq2SeqRunner(model, 60, start=2) if name == "t5" else Runner(model, 60))
    for found in worlds(2).run(on_ranks, config, axis):
        assert [(index, tokens) for index, tokens, _ in found] == [(index, tokens) for index, tokens, _ in expected]
        for (_, _, ours), (_, _, theirs) in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-5)
