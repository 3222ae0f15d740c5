"""optimizer.qk_clip: against a plain loop in layouts, without effect below the threshold, and what it does not support.

Resumed runs and skipped steps: test_optimizers.py.
"""

import pytest
import torch

from pipeline.config.rules import check
from pipeline.layers.largest_logits import BLOCK, largest_logits
from pipeline.layers.mask import Mask
from tests.training.expected import train_plain
from tests.training.layouts import EPS, text
from tests.world import configured, in_layout, share_of, tiny, trainer, unsharded

STEPS = 3
#: More than two blocks of queries, and a remainder.
TOKENS = 2 * BLOCK + 17
SMALL = ("training.micro_batch_size=4", "optimizer.warmup_steps=0", "optimizer.lr=0.01", EPS)
GPT = ("model=gpt-tiny", "model.layers=2", "model.ffn_hidden=64", *SMALL)
#: Query heads share keys.
LLAMA = ("model=llama-tiny", "model.layers=2", "model.ffn_hidden=64", *SMALL)
DEEPSEEK = ("model=deepseek-tiny", "training.seed=1", "model.layers=2", "training.micro_batch_size=8", *SMALL[1:])
#: With sinks, and layers with a window.
GPT_OSS = (
    "model=gpt-oss-tiny",
    "model.layers=2",
    "model.window=5",
    "model.kv_heads=2",
    "model.ffn_hidden=24",
    "training.balance_loss=0",
    *SMALL,
)


def _train(*overrides):
    config, mine = trainer(*tiny(*overrides))
    numbers, largest = [], []
    for step in range(STEPS):
        batch = share_of(mine, *text(config, step))
        mine.evaluate(*batch)  # not measured
        loss, result = mine.train(*batch, step=step)
        numbers.append((float(loss), float(result.gradient_norm)))
        largest.append(float(result.more.get("attention_logit_max", torch.zeros(()))))
    return numbers, largest, unsharded(mine)


def _largest(worlds, words):
    """The largest logit of the first step."""
    return worlds(2).run(_train, *words, "optimizer.qk_clip=1e6")[0][1][0]


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (GPT, ("zero_stage=3", "zero_stage=0 pipeline=2")),
        (DEEPSEEK, ("zero_stage=0 tensor=2 training.activation_checkpointing=full",)),
        pytest.param(GPT_OSS, ("zero_stage=1 tensor=2",), marks=pytest.mark.long),
        pytest.param(GPT, ("zero_stage=0", "zero_stage=1 tensor=2"), marks=pytest.mark.long),
        pytest.param(LLAMA, ("zero_stage=2",), marks=pytest.mark.long),
        pytest.param(DEEPSEEK, ("zero_stage=3",), marks=pytest.mark.long),
        pytest.param((*GPT, "optimizer=muon"), ("zero_stage=1",), marks=pytest.mark.long),
    ],
    ids=["gpt", "deepseek", "gpt-oss", "more gpt", "llama", "more deepseek", "muon"],
)
def test_a_layout_equals_a_plain_loop(worlds, model, layouts):
    without = _largest(worlds, model)
    words = (*model, f"optimizer.qk_clip={0.7 * without}")  # some heads of some steps are above it, and some are not
    config = configured(*tiny(*words))
    expected = train_plain(config, [text(config, step) for step in range(STEPS)])
    for layout in layouts:
        numbers, largest, weights = worlds(2).run(_train, *words, *in_layout(layout))[0]
        assert largest[0] == pytest.approx(without, rel=1e-5)
        torch.testing.assert_close(torch.tensor(numbers), torch.tensor([each[:2] for each in expected.numbers]), rtol=1e-5, atol=0)
        for name in weights.keys() - {name for name in weights if name.endswith("key.bias")}:  # its gradient is rounding
            assert (weights[name] - expected.weights[name]).norm() < 2e-5 * expected.weights[name].norm(), (layout, name)


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        (Mask(), None),
        (Mask(causal=False), None),
        (Mask(), 20),
        (Mask(documents=torch.arange(2 * TOKENS).view(2, TOKENS) // 50), None),
        (Mask(causal=False, key_documents=torch.arange(2 * TOKENS).view(2, TOKENS) // 400 - 1), None),
        (Mask(prefix=torch.tensor([300, 10])), None),
    ],
    ids=["causal", "all", "window", "documents", "padded keys", "prefix"],
)
def test_the_largest_logit_is_that_of_the_pairs_that_attend(mask, window):
    """Several blocks of queries, and shared key heads, against the whole matrix of logits."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, TOKENS, 8, generator=generator), torch.randn(2, 2, TOKENS, 8, generator=generator)
    logits = q @ k.repeat_interleave(2, dim=1).transpose(2, 3) / 8**0.5
    allowed = mask.visible(TOKENS, TOKENS, q.device, window)
    if allowed is None:
        allowed = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() if mask.causal else torch.ones(1, 1, dtype=torch.bool)
    expected = logits.masked_fill(~allowed, 0.0).amax(dim=(0, 2, 3))
    torch.testing.assert_close(largest_logits(q, k, mask, window=window), expected)
    torch.testing.assert_close(largest_logits(q, k, mask, window=window, scale=1.0), expected * 8**0.5)
    assert allowed.all() or not torch.allclose(expected, logits.amax(dim=(0, 2, 3))), "the mask hides the largest one of a head"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("parallel.context=2",), "requires all keys of a sequence on one rank"),
        (("parallel.offload=optimizer", "parallel.zero_stage=1"), "scales master weights on the device"),
        (("optimizer=schedule_free",), "are averages of all updates"),
        (("training.frozen=[embed.*]",), "adapters (lora.rank) and training.frozen leave as they are"),
        (("model=qwen3-tiny",), "its queries and keys have norms"),
        (("model=olmo3-tiny",), "its queries and keys have norms"),
        (("model=deepseek-tiny",), None),
        (("optimizer=muon",), None),
    ],
)
def test_what_is_not_supported_is_refused(settings, message):
    config = configured("stage=pretrain", "model=llama-tiny", *settings, "optimizer.qk_clip=100")
    found = [str(violation) for violation in check.violations(config, 4)]
    assert any(message in text and "optimizer.qk_clip=100" in text for text in found) if message else not found, found


def test_nothing_changes_below_the_threshold(worlds):
    numbers, largest, weights = worlds(2).run(_train, *GPT, "optimizer.qk_clip=1e6")[0]
    same, _, others = worlds(2).run(_train, *GPT)[0]
    assert numbers == same
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
    clipped = worlds(2).run(_train, *GPT, f"optimizer.qk_clip={largest[0] / 2}")[0][2]
    changed = {name.split(".", 2)[-1] for name in weights if not torch.equal(weights[name], clipped[name])}
    assert {"attention.query.weight", "attention.key.weight"} <= changed
