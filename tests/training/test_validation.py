"""The loss of a sample of the validation split, on two corpora with different losses, beside a plain loop over the same windows."""

import functools
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipeline.certification.reference import initialize
from pipeline.checkpoint.native import TrainState
from pipeline.data.load.corpus import Corpus, Windows
from pipeline.data.load.objectives.causal import Causal
from pipeline.data.load.shard_checksums import Shard
from pipeline.data.load.token_stream import TokenStream
from pipeline.data.load.validation_split import ValidationSamples, choose
from pipeline.models import registry
from pipeline.training.metrics import Metrics
from pipeline.training.validation import MeanLoss, Validation, validate
from tests.world import configured, tiny, trainer

LENGTH = 8
SETTINGS = tiny("model=llama-tiny", "model.layers=2", "model.init_std=0.3", f"training.sequence_length={LENGTH}")
#: Corpus -> (tokens, UTF-8 bytes of text). The losses of "code", the first in order, are larger.
CORPORA = {"code": (100 * LENGTH + 1, 2000), "prose": (300 * LENGTH, 9700)}


def tokens_of(corpus):
    """Random tokens of a corpus; prose has long runs of three tokens, after which the untrained model expects the same again."""
    generator = np.random.default_rng(len(corpus))
    count, _ = CORPORA[corpus]
    runs = generator.choice([19, 36, 50], count)[np.arange(count) // 50]
    return (runs if corpus == "prose" else generator.integers(0, 67, count)).astype("<u2")


@pytest.fixture
def folder(tmp_path):
    """The tokens of both corpora, written before any rank reads them."""
    for corpus in CORPORA:
        (tmp_path / corpus).write_bytes(tokens_of(corpus).tobytes())
    return tmp_path


def opened(folder):
    """The split of both corpora."""
    shards = []
    for corpus, (count, text_bytes) in CORPORA.items():
        path = folder / corpus
        entry = {"tokens": count, "text_bytes": text_bytes, "documents": 9, "offset": 0, "dtype": "uint16", "bytes": 2 * count}
        shards.append(Shard(path, {**entry, "corpus": corpus}))
    corpus = Corpus("", shards, {"end_of_document": 0, "vocab_size": 67}, "")
    stream = TokenStream(shards)
    return Causal(ValidationSamples(corpus, stream, Windows(stream, [corpus], LENGTH), list(CORPORA)))


def validated(folder, layout, batches, *more):
    words = [f"parallel.{word}" for word in layout.split()]
    config, mine = trainer(*SETTINGS, *words, *more)
    return validate(mine, opened(folder), config.training, batches=batches, prefetch=2)


@functools.cache
def plain_losses():
    """The mean loss of every window, by the model and PyTorch's cross-entropy."""
    config = configured(*SETTINGS)
    model = registry.build(config.model)
    initialize(model, config.model, config.training.seed)
    tokens = torch.from_numpy(np.concatenate([tokens_of(corpus) for corpus in CORPORA]).astype(np.int64))
    windows = tokens[: (len(tokens) - 1) // LENGTH * LENGTH + 1].unfold(0, LENGTH + 1, LENGTH)
    with torch.no_grad():
        return F.cross_entropy(model(windows[:, :-1]).transpose(1, 2), windows[:, 1:], reduction="none").mean(dim=1).double()


def bits_per_byte(losses, bytes_per_token):
    return float(losses.mean()) / math.log(2) / bytes_per_token


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("zero_stage=1", ("training.global_batch_size=32",)),
        pytest.param("zero_stage=1", (), marks=pytest.mark.long),
        pytest.param("tensor=2", (), marks=pytest.mark.long),
        ("context=2 zero_stage=0", ()),
        ("pipeline=2 zero_stage=0", ()),
    ],
)
def test_a_sample_has_the_loss_of_its_windows_in_every_layout(worlds, folder, layout, more):
    batches = 2 if more else 4
    found = worlds(2).run(validated, folder, layout, batches, *more)
    assert found[0] == found[1]
    result, losses = found[0], plain_losses()
    chosen = choose([101, 299], 64)
    expected = losses[chosen]
    assert (result.samples, result.available, result.targets) == (64, 400, 64 * LENGTH)
    assert result.loss == pytest.approx(float(expected.mean()), rel=1e-6)
    assert result.standard_error == pytest.approx(float(expected.std() / 8 * math.sqrt(1 - 64 / 400)), rel=1e-4)
    assert list(result.corpora) == ["code", "prose"]
    for name, members in (("code", chosen < 101), ("prose", chosen >= 101)):
        assert result.corpora[name].loss == pytest.approx(float(losses[chosen[members]].mean()), rel=1e-6)
        assert result.corpora[name].targets == members.sum() * LENGTH
    prose = bits_per_byte(losses[chosen[chosen >= 101]], 9700 / (300 * LENGTH))
    assert result.corpora["prose"].bits_per_byte == pytest.approx(prose, rel=1e-6)


def test_a_sample_is_near_the_full_split_and_the_first_batches_are_not(worlds, folder):
    losses = plain_losses()
    whole = worlds(2).run(validated, folder, "zero_stage=1", None)[0]
    assert whole.loss == pytest.approx(float(losses.mean()), rel=1e-6)
    assert (whole.standard_error, whole.samples) == (0.0, 400)
    assert whole.bits_per_byte == pytest.approx(bits_per_byte(losses, 11700 / (400 * LENGTH + 1)), rel=1e-3)
    for name, first, last in (("code", 0, 101), ("prose", 101, 400)):
        assert whole.corpora[name].targets == (last - first) * LENGTH
        assert whole.corpora[name].loss == pytest.approx(float(losses[first:last].mean()), rel=1e-6)
    sample = worlds(2).run(validated, folder, "zero_stage=1", 4)[0]
    assert abs(sample.loss - whole.loss) < 3 * sample.standard_error
    assert abs(float(losses[:64].mean()) - whole.loss) > 3 * sample.standard_error, "what earlier versions read"
    assert worlds(2).run(validated, folder, "zero_stage=1", 26)[0] == whole, "more than there are"


def test_the_bytes_of_a_window_are_those_of_its_targets(folder):
    """The last token of "code" is the input of a window, all targets of which are prose."""
    code, prose = (text_bytes / tokens for tokens, text_bytes in CORPORA.values())
    assert opened(folder).samples.bytes_per_token(np.array([99, 100])) == pytest.approx([code, prose])


def test_a_validation_is_written_with_its_size_and_by_corpus(tmp_path, caplog):
    caplog.set_level("INFO", "pipeline")
    corpora = {f"c{number}": MeanLoss(float(number), None, 100 - number) for number in range(12)}
    corpora["c11"] = MeanLoss(math.inf, None, 1)
    result = Validation(
        2.5, 0.9, 4096, standard_error=0.03125, samples=64, available=400, measures={"accuracy": 0.75}, corpora=corpora, sums=np.zeros(0)
    )
    state = TrainState(step=7, samples=0, updates=7)
    with Metrics(configured("stage=pretrain", "model=gpt-tiny", "tracking=disabled", f"run_dir={tmp_path}"), 0, state) as metrics:
        metrics.validation(7, result, {"validation_data": "abc", "tokenizer": "def"}, 1.5)
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert line.pop("corpora")["c11"] == {"validation_loss": None, "bits_per_byte": None, "validation_targets": 1}
    sizes = {"validation_loss_stderr": 0.03125, "validation_targets": 4096, "validation_samples": 64}
    sizes |= {"validation_seconds": 1.5, "validation_data": "abc", "tokenizer": "def"}
    assert line == {"step": 7, "validation_loss": 2.5, "bits_per_byte": 0.9, "accuracy": 0.75, **sizes}
    assert (
        "step 7: validation loss 2.5000 +- 0.0312 on 4,096 targets (64 of 400 samples), 0.9000 bits per byte, accuracy 0.7500"
        in caplog.text
    )
    assert "step 7, c9: validation loss 9.0000 on 91 targets" in caplog.text
    assert "the other 2 corpora are in metrics.jsonl" in caplog.text
