"""Supervised fine-tuning data: which tokens are answers, packing without leaks, and unusable lines."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from pipeline.common.errors import UserError
from pipeline.common.json_lines import BadLine
from pipeline.data.load.instructions import open_files
from pipeline.data.load.objectives.objective import IGNORE
from pipeline.data.load.objectives.supervised import Supervised
from pipeline.data.load.prompts_and_answers import ExampleReader, PairReader
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.generation.prompts import PromptReader
from tests.checkpoint.test_huggingface_export import random_model, tokenizer_folder  # noqa: F401 - a fixture
from tests.models.small_decoders import CONFIGS

#: A template whose answers are marked as transformers requires it, and the same without marks.
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}assistant:\n{% generation %}{{ m['content'] }}<|endoftext|>{% endgeneration %}"
    "{% else %}{{ m['role'] }}: {{ m['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CHATS = [
    [{"role": "user", "content": "Im Wald"}, {"role": "assistant", "content": "steht ein Tännchen"}],
    [
        {"role": "system", "content": "x == 3"},
        {"role": "user", "content": "assistant: grün?"},
        {"role": "assistant", "content": "ein grünes Kleid 🎄"},
        {"role": "user", "content": "und"},
        {"role": "assistant", "content": "123 <|x|>"},
    ],
]


@pytest.fixture(scope="module")
def folder(tokenizer_folder) -> Path:  # noqa: F811 - the fixture
    """The folder of a tokenizer without a template."""
    (tokenizer_folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return tokenizer_folder


def reader(folder: Path, template: str | None, longest: int = 100) -> ExampleReader:
    """The reader of a folder with a template."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return ExampleReader(folder, 0, longest)


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "plain"])
def test_answers_of_chats_are_those_of_transformers(folder, template):
    ours = reader(folder, template).read([json.dumps({"messages": chat}).encode() for chat in CHATS])
    (folder / "chat_template.jinja").write_text(MARKED)
    stock = AutoTokenizer.from_pretrained(folder)
    for chat, found in zip(CHATS, ours, strict=True):
        expected = stock.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
        assert found.tokens.tolist() == expected["input_ids"]
        assert found.is_answer.tolist() == [bool(flag) for flag in expected["assistant_masks"]]
        assert found.tokens[-1] == 0, "the end-of-document token, which the template has written, is not added twice"


def test_answers_that_differ_within_the_chat_are_refused(folder):
    """A template that shows only the last answer: what precedes an answer differs."""
    hiding = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] if loop.last or m['role'] == 'user' else '...' }}\n{% endfor %}"
    good, bad = reader(folder, hiding).read([json.dumps({"messages": chat}).encode() for chat in CHATS])
    assert good.is_answer.any()
    assert "messages 1 to 3 differently" in str(bad)


def test_a_completion_is_the_answer_and_its_prompt_is_that_of_generate(folder):
    prompt, completion = "Im Wald <|endoftext|> ", "steht ein"
    (found, empty) = reader(folder, None).read([json.dumps({"prompt": text, "completion": completion}).encode() for text in (prompt, "")])
    prompts = PromptReader(folder, max_positions=100, vocab_size=300, end_of_document=0)
    before = prompts.parse(1, json.dumps({"prompt": prompt}).encode()).tokens
    after = TextEncoder(folder, "<|endoftext|>").encode([completion])[0].tolist()
    assert found.tokens.tolist() == [*before, *after, 0]
    assert found.is_answer.tolist() == [False] * len(before) + [True] * (len(after) + 1)
    assert empty.tokens.tolist() == [0, *after, 0], "as in generate, an empty prompt is the end-of-document token"


PAIRS = [
    {"prompt": "x == ", "chosen": "3:", "rejected": "123"},
    {"messages": CHATS[0][:1], "chosen": "steht", "rejected": "grün"},
    {"prompt": CHATS[0][:1], "chosen": CHATS[0][1:], "rejected": [{"role": "assistant", "content": "grün"}]},
]
BAD_PAIRS = {
    '"chosen" and "rejected" are the same': {"prompt": "x", "chosen": "y", "rejected": "y"},
    'has no "rejected"': {"prompt": "x", "chosen": "y"},
    '"rejected" must be a text that is not empty, as "prompt" is a text': {"prompt": "x", "chosen": "y", "rejected": ""},
    '"chosen" message 2 has the role user': {"prompt": CHATS[0][:1], "chosen": CHATS[0][:1], "rejected": CHATS[0][1:]},
    "tokens with both answers; training.sequence_length=99": {"prompt": "x" * 45, "chosen": "y", "rejected": "z" * 20},
    'must be an object with "chosen"': ["x"],
}


def test_pairs_of_answers_are_two_examples(folder):
    plain = reader(folder, PLAIN)
    pair = PairReader(folder, 0, 100)
    lines = [json.dumps(line).encode() for line in [*PAIRS, *BAD_PAIRS.values()]]
    found = pair.examples(lines)
    for each, expected in zip(
        found,
        [
            [{"prompt": "x == ", "completion": answer} for answer in ("3:", "123")],
            *[[{"messages": [*CHATS[0][:1], {"role": "assistant", "content": answer}]} for answer in ("steht", "grün")]],
            [{"messages": CHATS[0]}, {"messages": [*CHATS[0][:1], {"role": "assistant", "content": "grün"}]}],
        ],
        strict=False,
    ):
        for ours, theirs in zip(each, plain.read([json.dumps(line).encode() for line in expected]), strict=True):
            assert ours.tokens.tolist() == theirs.tokens.tolist()
            assert ours.is_answer.tolist() == theirs.is_answer.tolist()
    for reason, line in zip(BAD_PAIRS, found[len(PAIRS) :], strict=True):
        assert isinstance(line, BadLine)
        assert reason in str(line)


LINES = [{"prompt": f"{number} Nadeln" * (number % 4 + 1), "completion": f" {'grün ' * (number % 7)}Kleid"} for number in range(40)]


def opened(folder: Path, path: Path, *, length: int = 60, pack: bool = True, seed: int | None = None, limit: float = 0.0) -> Supervised:
    encoder = TextEncoder(folder, "<|endoftext|>")
    options = {"key": "data.instructions.train", "length": length, "pack": pack, "seed": seed, "limit": limit, "report": path.parent}
    return Supervised(open_files([str(path)], ExampleReader(folder, 0, length + 1), encoder, **options), length)


@pytest.mark.parametrize("pack", [True, False])
def test_an_epoch_has_every_example_once(folder, tmp_path, pack):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    expected = [example.tokens.tolist() for example in reader(folder, None).read([json.dumps(line).encode() for line in LINES])]
    objective = opened(folder, path, pack=pack, seed=3)
    count = int(objective.samples.counts[0])
    assert (count < 40) == pack
    orders = []
    for epoch in range(2):
        arrays, found = objective.arrays(np.arange(count) + epoch * count), []
        for row in range(count):
            for document in range(arrays["documents"][row].max() + 1):
                here = arrays["documents"][row] == document
                tokens, targets = arrays["tokens"][row, here], arrays["targets"][row, here]
                assert arrays["positions"][row, here].tolist() == list(range(len(tokens)))
                assert (targets[:-1] == tokens[1:])[targets[:-1] != IGNORE].all()
                found.append([*tokens.tolist(), int(targets[-1])])
        assert sorted(found) == sorted(expected)
        orders.append(found)
        padding = arrays["documents"] < 0
        assert (arrays["targets"][padding] == IGNORE).all()
    assert orders[0] != orders[1]


@pytest.mark.parametrize("name", ["gpt", "llama-grouped", "bloom"])
def test_packed_examples_do_not_see_each_other(folder, tmp_path, name):
    """The loss of every target is that of the example alone: learned positions, rotary positions and ALiBi."""
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES[:6]))
    config = CONFIGS[name]
    model = random_model(config)

    def losses(pack: bool) -> list[float]:
        objective = opened(folder, path, length=config.max_positions, pack=pack)
        arrays = objective.arrays(np.arange(int(objective.samples.counts[0])))
        batch = {key: torch.from_numpy(value).long() for key, value in arrays.items()}
        tokens, targets = batch.pop("tokens"), batch.pop("targets")
        with torch.no_grad():
            logits = model(tokens, **batch).log_softmax(dim=2)
        chosen = targets != IGNORE
        return sorted(logits[chosen].gather(1, targets[chosen][:, None]).flatten().tolist())

    packed, alone = losses(True), losses(False)
    assert len(packed) == len(alone) > 20
    assert packed == pytest.approx(alone, abs=1e-5)


BAD = {
    b"{broken": "is not JSON",
    b'{"prompt": "\xff", "completion": "a"}': "is not JSON",
    b"[1]": "must be an object with",
    b'{"prompt": "a", "completion": "b", "messages": []}': "has the keys of several formats",
    b'{"prompt": "a"}': 'has a "prompt" and no "completion"',
    b'{"prompt": "a", "completion": ""}': '"completion" must be a text that is not empty',
    b'{"messages": [{"role": "user", "content": "a"}]}': "has no answer",
    b'{"messages": []}': '"messages" must be a list',
    b'{"messages": [{"role": "user", "content": 1}, {"role": "assistant"}]}': 'message 1 has a "content"',
    json.dumps({"prompt": "a" * 200, "completion": "b"}).encode(): "training.sequence_length=60 has room for 61",
}
STRICT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}\n{% endfor %}"


def test_unusable_lines_are_reported_with_their_number(folder, tmp_path, caplog):
    caplog.set_level("INFO", "pipeline")
    path = tmp_path / "train.jsonl"
    good = [json.dumps(line).encode() for line in LINES]
    path.write_bytes(b"\n".join([good[0], b"", *BAD, *good[1:]]))
    found = reader(folder, STRICT, longest=61).read(list(BAD))
    assert all(isinstance(line, BadLine) and reason in str(line) for line, reason in zip(found, BAD.values(), strict=True)), found
    with pytest.raises(UserError, match=r"10 of 50 lines are unusable: .*line 3: is not JSON.*line 12: has 20. tokens") as error:
        opened(folder, path)
    assert "raise data.quarantine_limit=0" in str(error.value)
    assert opened(folder, path, limit=0.2).samples.examples == 40
    assert "skipped 10 unusable lines" in caplog.text
    assert "40 examples in" in caplog.text
    with pytest.raises(UserError, match="is not a file"):
        opened(folder, tmp_path / "none.jsonl")
    assert "has no chat template" in str(reader(folder, None).read([json.dumps({"messages": CHATS[0]}).encode()])[0])
