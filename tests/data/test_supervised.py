"""Supervised fine-tuning data: which tokens are answers, packing without leaks, and unusable lines."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from pipeline.common.errors import UserError
from pipeline.common.json_lines import BadLine
from pipeline.data.load.instructions import open_files
from pipeline.data.load.objectives.objective import IGNORE
from pipeline.data.load.objectives.supervised import Supervised
from pipeline.data.load.prompts_and_answers import ExampleReader, PairReader
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.evaluation import harness
from pipeline.generation.prompts import PromptReader
from pipeline.training.run import with_steps
from tests.conversion.test_huggingface_export import random_model, tokenizer_folder  # noqa: F401 - a fixture
from tests.models.small_decoders import CONFIGS
from tests.world import configured

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


def test_text_that_spells_an_entry_of_a_unigram_model_stays_text(tmp_path):
    """Prompts and completions cannot end where a user writes </s>; the tokens that the post-processor adds remain."""
    entries = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((piece, -2.0) for piece in "▁ab<>/s")]
    tokenizer = Tokenizer(models.Unigram(entries, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    spelled = [tokenizer.token_to_id(piece) for piece in ("▁", "a", "▁", "<", "/", "s", ">", "▁", "b")]
    text = "a </s> b"
    (example,) = ExampleReader(tmp_path, 2, 100).read([json.dumps({"prompt": text, "completion": text}).encode()])
    assert example.tokens.tolist() == [1, *spelled, *spelled, 2]
    prompts = PromptReader(tmp_path, max_positions=100, vocab_size=20, end_of_document=2)
    assert prompts.parse(1, json.dumps({"prompt": text}).encode()).tokens == [1, *spelled]
    assert prompts.parse(1, json.dumps({"prompt": "ab"}).encode()).tokens == [1, *(tokenizer.token_to_id(piece) for piece in "▁ab")]
    # One key for all stages, and what stock transformers does.
    stock = AutoTokenizer.from_pretrained(tmp_path)
    for choice, around in (("text", spelled), ("token", stock(text, add_special_tokens=False)["input_ids"])):
        encoder = TextEncoder(tmp_path, "</s>", spelled=choice)
        one = ExampleReader(tmp_path, 2, 100, texts=encoder.prompts)
        (example,) = one.read([json.dumps({"prompt": text, "completion": text}).encode()])
        assert example.tokens[: 1 + 2 * len(around)].tolist() == [1, *around, *around]
        assert one.notes.spelled == {"</s>": 2}
        prompts = PromptReader(tmp_path, max_positions=100, vocab_size=20, end_of_document=2, texts=encoder.prompts)
        assert prompts.parse(1, json.dumps({"prompt": text}).encode()).tokens == [1, *around]
        assert harness.Text(encoder).encode(text) == [1, *around]
        assert encoder.encode([text])[0].tolist() == spelled, "documents never have it"
    assert encoder.prompts.encode(["<s> a"], complete=True) == [stock("<s> a", add_special_tokens=False)["input_ids"]], "not twice"


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
    examples = reader(folder, None).read([json.dumps(line).encode() for line in LINES])
    expected = [example.tokens.tolist() for example in examples]
    answers = {tuple(example.tokens): example.is_answer[1:].tolist() for example in examples}
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
                assert (targets != IGNORE).tolist() == answers[tuple(found[-1])], "a target is the next token, if that is one of an answer"
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
    with pytest.raises(UserError, match=r"tokenizer.chat_template=None: is required: the examples are chats"):
        reader(folder, None).read([json.dumps({"messages": CHATS[0]}).encode()])


def test_every_line_that_is_not_used_is_listed(folder, tmp_path, caplog):
    path, listed = tmp_path / "train.jsonl", tmp_path / "unusable-train.jsonl"
    good = [json.dumps(line).encode() for line in LINES]
    bad = [json.dumps({"prompt": str(number)}).encode() for number in range(30)]
    path.write_bytes(b"\n".join([*good, *bad]))
    with pytest.raises(UserError, match=r"30 of 70 lines are unusable: .*; and 20 more \(.*unusable-train.jsonl lists all\)"):
        opened(folder, path)
    found = [json.loads(line) for line in listed.read_text().splitlines()]
    assert found == [{"file": str(path), "line": 41 + number, "error": 'has a "prompt" and no "completion"'} for number in range(30)]
    opened(folder, path, limit=0.5)
    assert f"({listed} lists all)" in caplog.text
    path.write_bytes(b"\n".join(good))
    opened(folder, path)
    assert not listed.exists(), "that of an earlier attempt"


def test_a_file_with_records_of_two_formats_is_refused(folder, tmp_path, caplog):
    caplog.set_level("INFO", "pipeline")
    (folder / "chat_template.jinja").write_text(PLAIN)
    path = tmp_path / "train.jsonl"
    lines = [*LINES[:3], {"instruction": "x", "output": "y"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=r"has records of several formats: 3 prompt and completion, 1 Alpaca"):
        opened(folder, path)
    path.write_text("".join(json.dumps({**line, "id": 1}) + "\n" for line in LINES[:3]))
    opened(folder, path)
    assert "train.jsonl: 3 lines of the format: prompt and completion" in caplog.text
    assert "these keys are not used: id (3)" in caplog.text


LONG = [{"prompt": "a" * 10, "completion": "b" * count} for count in (5, 100, 5)] + [{"prompt": "a" * 70, "completion": "b"}]


@pytest.mark.parametrize("too_long, examples", [("truncate", 3), ("drop", 2), ("refuse", 0)])
def test_examples_that_are_too_long(folder, tmp_path, caplog, too_long, examples):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LONG))
    whole = ExampleReader(folder, 0, 1000).read([json.dumps(line).encode() for line in LONG])
    encoder, options = TextEncoder(folder, "<|endoftext|>"), {"pack": True, "seed": None, "limit": 0.0, "report": tmp_path}

    def read():
        return open_files([str(path)], ExampleReader(folder, 0, 41, too_long), encoder, key="data.instructions.train", length=40, **options)

    if not examples:
        with pytest.raises(UserError, match=r"2 of 4 lines are unusable: .*line 2: has .* tokens; training.sequence_length=40"):
            read()
        return
    found = [example for row in read().sequences(np.arange(read().counts[0])) for example in row]
    assert sorted(example.tokens.tolist() for example in found) == sorted(
        example.tokens[:41].tolist() for example in (whole[:3] if too_long == "truncate" else [whole[0], whole[2]])
    )
    counted = "1 are cut" if too_long == "truncate" else "0 are cut"
    assert counted in caplog.text
    assert f"{4 - examples} are left out" in caplog.text
    listed = [json.loads(line)["line"] for line in (tmp_path / "unusable-train.jsonl").read_text().splitlines()]
    assert listed == ([4] if too_long == "truncate" else [2, 4])


def test_a_pair_that_is_too_long_is_cut_where_it_is_longer(folder):
    lines = [{"prompt": "aaaa", "chosen": "b" * 3, "rejected": "c" * 100}, {"prompt": "aaaa", "chosen": "b" * 90, "rejected": "c" * 100}]
    lines += [{"prompt": "aaaa", "chosen": "b" * 90 + "c", "rejected": "b" * 90 + "d"}]
    encoded = [json.dumps(line).encode() for line in lines]
    whole = PairReader(folder, 0, 1000).examples(encoded)
    (one, both, same) = PairReader(folder, 0, 41, "truncate").examples(encoded)
    assert [len(example.tokens) for example in one] == [len(whole[0][0].tokens), 42 - len(whole[0][0].tokens)]
    assert [len(example.tokens) for example in both] == [21, 21]
    for cut, full in zip([*one, *both], [*whole[0], *whole[1]], strict=True):
        assert cut.tokens.tolist() == full.tokens[: len(cut.tokens)].tolist()
    assert "cuts the part in which they differ" in str(same)


@pytest.mark.parametrize("epochs, batch, steps", [(None, 8, 15), (1.0, 40, 1), (0.5, 8, 3), (0.1, 1, 4), (2.0, 7, 12), (1.0, 1000, 1)])
def test_epochs_are_as_many_steps_as_read_every_sequence(folder, tmp_path, caplog, epochs, batch, steps):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    objective = opened(folder, path, pack=False)
    given = () if epochs is None else (f"training.epochs={epochs}",)
    config = configured("stage=finetune", f"training.global_batch_size={batch}", *given)
    found = with_steps(config, objective, 0)
    assert found.training.steps == steps
    assert with_steps(found, objective, 0) == found
    assert ("is more than an epoch of 40 sequences" in caplog.text) == (batch > 40)
    ramped = configured("stage=finetune", "training.global_batch_size=8", "training.batch_rampup=[{until_step: 4, value: 2}]")
    assert with_steps(ramped, objective, 0).training.steps == 4 + (120 - 8) // 8
    with pytest.raises(UserError, match=r"plus optimizer.decay_steps=0 must not exceed training.steps"):
        with_steps(configured("stage=finetune", "optimizer.warmup_steps=999"), objective, 0)
