"""Chats of users: what a template gets of them, what is refused, and their tokens beside those of generate and of transformers."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from pipeline.common import json_lines
from pipeline.common.errors import UserError
from pipeline.common.json_lines import BadLine
from pipeline.common.unfinished import Unfinished
from pipeline.data.load.prompts_and_answers import Example, ExampleReader, PairReader
from pipeline.data.tokenize import chat_template
from pipeline.data.tokenize.chat_template import ChatTemplate
from pipeline.data.tokenize.chats import Chat
from pipeline.generation.completions import note_name, publish
from pipeline.generation.prompts import PromptReader

#: Shows everything that a chat may have, and stumbles over content that is null, as many templates do.
SHOWING = (
    "{% if shout %}!{% endif %}"
    "{% if tools %}tools {{ tools | tojson }}\n{% endif %}{% if documents %}documents {{ documents | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m['content'] }}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
#: The same without the parts that only some templates have.
SILENT = (
    "{% for m in messages %}{{ m['role'] + ':\n' + m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<unk>", "<|end|>", *(token for tokens in chat_template.SHIPPED.values() for token in tokens)]
TEXT = ['Im Wald steht ein Tännchen\n\n im grünen Kleid:  user assistant system {"a": 1} <tool_call> [1, 2]\n'] * 20


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet))
    return tokenizer


def llama3_split() -> Tokenizer:
    """Line breaks before a word are one token, as at the end of a text: no token of a prompt depends on the answer."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet))
    return tokenizer


def metaspace_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=120, special_tokens=SPECIAL))
    return tokenizer


def llama2_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=120, special_tokens=SPECIAL))
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.train_from_iterator(TEXT, trainers.UnigramTrainer(vocab_size=100, special_tokens=SPECIAL, unk_token="<unk>"))
    return tokenizer


TOKENIZERS = {
    "byte_level": byte_level,
    "llama3_split": llama3_split,
    "metaspace_bpe": metaspace_bpe,
    "llama2_bpe": llama2_bpe,
    "unigram": unigram,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder of each tokenizer, without a template."""
    found = {}
    for name, make in TOKENIZERS.items():
        found[name] = tmp_path_factory.mktemp(name)
        make().save(str(found[name] / "tokenizer.json"))
        (found[name] / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}'
        )
    return found


def with_template(folder: Path, text: str) -> Path:
    (folder / "chat_template.jinja").write_text(text)
    return folder


def message(role: str, content: object = "Hi", **more: object) -> dict:
    return {"role": role, "content": content, **more}


USER, ANSWER = message("user"), message("assistant", "Kleid")
CALL = message("assistant", None, tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}])


def chat(*messages: dict, **more: object) -> dict:
    return {"messages": list(messages), **more}


def read(folder: Path, *lines: dict, kind: type[ExampleReader] = ExampleReader, **options: object) -> list:
    return kind(folder, 0, 1000, **options).examples([json.dumps(line).encode() for line in lines])


def shown(folder: Path, found: list[Example] | BadLine) -> tuple[str, str]:
    """The text of an example, and the part that is learned."""
    assert not isinstance(found, BadLine), found
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    (example,) = found
    parts = (example.tokens, example.tokens[example.is_answer])
    return tuple(tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in parts)


USABLE = {
    "tools": (chat(USER, ANSWER, tools=[{"name": "ä<"}]), 'tools [{"name": "ä<"}]\nuser: Hi<|end|>\nassistant: Kleid<|end|>\n'),
    "tools as JSON": (chat(USER, ANSWER, tools='[{"name": "f"}]'), 'tools [{"name": "f"}]\nuser: Hi<|end|>\nassistant: Kleid<|end|>\n'),
    "documents": (chat(USER, ANSWER, documents=[{"x": 1}]), 'documents [{"x": 1}]\nuser: Hi<|end|>\nassistant: Kleid<|end|>\n'),
    "variables": (chat(USER, ANSWER, chat_template_kwargs={"shout": True}), "!user: Hi<|end|>\nassistant: Kleid<|end|>\n"),
    "parts": (chat(message("user", [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]), ANSWER), None),
    "null beside calls": (
        chat(USER, CALL, message("tool", "7"), ANSWER),
        'user: Hi<|end|>\nassistant: f{"a": 1}<|end|>\ntool: 7<|end|>\nassistant: Kleid<|end|>\n',
    ),
    "null of Arrow": (chat({**USER, "tool_calls": None, "name": None}, ANSWER, tools=None), None),
    "reasoning": (chat(USER, {**ANSWER, "thinking": "hm"}), "user: Hi<|end|>\nassistant: Kleid(hm)<|end|>\n"),
    "Alpaca": ({"instruction": "H", "input": "i", "output": "Kleid"}, "user: H\ni<|end|>\nassistant: Kleid<|end|>\n"),
    "Alpaca, no input": ({"instruction": "Hi", "input": "", "output": "Kleid", "text": "all of it"}, None),
    "ShareGPT": ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Kleid"}]}, None),
    "ShareGPT, system": (
        {"system": "S", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Kleid"}]},
        "system: S<|end|>\nuser: Hi<|end|>\nassistant: Kleid<|end|>\n",
    ),
    "conversations with roles": ({"conversations": [USER, ANSWER]}, None),
    "conversational prompt": ({"prompt": [USER], "completion": [ANSWER]}, None),
    "conversational prompt, text": ({"prompt": [USER], "completion": "Kleid"}, None),
    "UltraChat": (chat(USER, ANSWER, prompt="Hi", prompt_id="7"), None),
    "UltraFeedback, supervised": (chat(USER, ANSWER, prompt="Hi", chosen=[USER, ANSWER], rejected=[USER, ANSWER]), None),
}


@pytest.mark.parametrize("name", USABLE)
def test_a_record_reaches_the_template_whole(folders, name):
    folder = with_template(folders["byte_level"], SHOWING)
    record, text = USABLE[name]
    (found,) = read(folder, record)
    expected = (text or "user: Hi<|end|>\nassistant: Kleid<|end|>\n") + "<|endoftext|>"
    assert shown(folder, found)[0] == expected


REFUSED = {
    "message 1 has a part": chat(message("user", [{"type": "image_url", "image_url": {"url": "x"}}]), ANSWER),
    'message 2 has no "content"': chat(USER, message("assistant", None)),
    'message 1 has no "content"': chat(message("user", None), ANSWER),
    'message 1 has a "content" that is neither': chat(message("user", {"text": "Hi"}), ANSWER),
    "message 2 is an empty answer": chat(USER, message("assistant", " \n")),
    '"weight": 0.5; only 0 and 1': chat(USER, {**ANSWER, "weight": 0.5}),
    "only answers of the assistant are learned": chat({**USER, "train": True}, ANSWER),
    "every answer has weight 0": chat(USER, {**ANSWER, "weight": 0}),
    'has "weight", which is not supported': chat(USER, ANSWER, weight=2.0),
    'message 2 has "train_detail"': chat(USER, {**ANSWER, "train_detail": []}),
    'has "images", which is not supported': chat(USER, ANSWER, images=["x.png"]),
    "message 1 has the role assistant; after the begin comes system or user": chat(ANSWER),
    "message 2 has the role user; after a user message comes assistant": chat(USER, USER, ANSWER),
    "message 3 has the role assistant; after an answer comes user": chat(USER, ANSWER, ANSWER),
    "message 3 has the role system": chat(USER, ANSWER, message("system"), USER, ANSWER),
    "message 2 has the role tool; after a user message": chat(USER, message("tool"), ANSWER),
    "message 3 has the role user; after an answer with tool_calls comes tool": chat(USER, CALL, USER, ANSWER),
    "the last message has the role user": chat(USER, ANSWER, USER),
    'the role "human" (user is meant?)': chat(message("human"), message("gpt")),
    "whose arguments are JSON that cannot be used": chat(
        USER, message("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])
    ),
    '"tools" must be a list of objects': chat(USER, ANSWER, tools=["f"]),
    'sets "loud", which the chat template does not read': chat(USER, ANSWER, chat_template_kwargs={"loud": 1}),
    "several formats": {**chat(USER, ANSWER), "instruction": "x", "output": "y"},
    'has no "output"': {"instruction": "x"},
    'is "from" "bing"': {"conversations": [{"from": "bing", "value": "Hi"}]},
    '"prompt" ends with the role "assistant"': {"prompt": [USER, ANSWER], "completion": [ANSWER]},
    '"completion" must be a text': {"prompt": "Hi", "completion": [ANSWER]},
    "has the character \\ud800": chat(message("user", "a\ud800b"), ANSWER),
    "has the character \\udfff": chat(USER, ANSWER, tools=[{"\udfff": 1}]),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_record_that_would_be_learned_wrongly_is_refused(folders, reason):
    (found,) = read(with_template(folders["byte_level"], SHOWING), REFUSED[reason])
    assert isinstance(found, BadLine)
    assert reason in str(found)


@pytest.mark.parametrize(
    "record, reason",
    [
        (chat(USER, ANSWER, tools=[{"name": "f"}]), 'has "tools", which the chat template does not show'),
        (chat(USER, ANSWER, documents=[{"name": "f"}]), 'has "documents", which the chat template does not show'),
        (chat(USER, CALL), 'message 2 has "tool_calls", which the chat template does not show'),
        (chat(USER, {**ANSWER, "reasoning_content": "hm"}), "message 2 has reasoning"),
    ],
)
def test_what_a_template_does_not_show_is_refused(folders, record, reason):
    (found,) = read(with_template(folders["byte_level"], SILENT), record)
    assert reason in str(found)


def test_keys_without_a_use_are_counted(folders):
    reader = ExampleReader(with_template(folders["byte_level"], SILENT), 0, 1000)
    lines = [
        chat({**USER, "name": "Bo"}, ANSWER, id=3, source="x"),
        chat(USER, message("assistant", [{"type": "text", "text": "x", "y": 1}])),
    ]
    assert not any(isinstance(found, BadLine) for found in reader.read([json.dumps(line).encode() for line in lines]))
    assert reader.notes.ignored == {"id": 1, "source": 1, "messages.name": 1, "messages.content.y": 1}
    assert reader.notes.formats == {"messages": 2}


def marked_template() -> str:
    return (Path(chat_template.__file__).with_name("chat_templates") / "chatml.jinja").read_text()


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("key, off", [("weight", 0), ("train", False)])
def test_answers_with_weight_0_are_shown_and_not_learned(folders, marked, key, off):
    folder = with_template(folders["byte_level"], marked_template() if marked else SHOWING)
    (first, last) = read(
        folder,
        chat(USER, message("assistant", "grün", **{key: off}), USER, {**ANSWER, key: 1}),
        chat(USER, message("assistant", "grün"), USER, {**ANSWER, key: off}),
    )
    text, learned = shown(folder, first)
    assert "grün" in text
    assert "grün" not in learned
    assert learned.startswith("Kleid")
    assert "Kleid" not in shown(folder, last)[1]
    assert last[0].tokens[-1] != 0 or text.endswith("<|end|>"), "an answer that is not learned gets no end-of-document token"


def test_the_answers_within_a_prompt_are_not_learned(folders):
    folder = with_template(folders["byte_level"], marked_template())
    ((found,),) = read(folder, {"prompt": [USER, message("assistant", "grün"), USER], "completion": [ANSWER]})
    assert shown(folder, [found])[1] == "Kleid<|im_end|><|endoftext|>"


ULTRAFEEDBACK = {
    "prompt": "Hi",
    "prompt_id": "7",
    "chosen": [USER, ANSWER],
    "rejected": [USER, message("assistant", "grün")],
    "messages": [USER, ANSWER],
    "score_chosen": 8.0,
    "score_rejected": 3.0,
}


def test_pairs_as_whole_chats_are_those_with_an_explicit_prompt(folders):
    folder = with_template(folders["byte_level"], SHOWING)
    explicit = {"prompt": [USER], "chosen": [ANSWER], "rejected": [message("assistant", "grün")]}
    implicit = {key: ULTRAFEEDBACK[key] for key in ("chosen", "rejected")}
    other, differs = {**ULTRAFEEDBACK, "prompt": "Ho"}, {**implicit, "rejected": [message("user", "Ho"), ANSWER]}
    *found, wrong_prompt, wrong_chats = read(folder, explicit, implicit, ULTRAFEEDBACK, other, differs, kind=PairReader)
    for pair in found[1:]:
        for ours, theirs in zip(pair, found[0], strict=True):
            assert ours.tokens.tolist() == theirs.tokens.tolist()
            assert ours.is_answer.tolist() == theirs.is_answer.tolist()
    assert '"prompt" is none of the messages' in str(wrong_prompt)
    assert "do not begin with the same messages" in str(wrong_chats)


WORDS = ["Wald", "ein", " ", "  ", "\n", "\n\n", "Tännchen", "<|end|>", " Kleid", ".", "\t"]


@pytest.mark.parametrize("template", ["showing", "silent", *chat_template.SHIPPED])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_prompt_has_the_tokens_of_generate_whatever_the_answer_begins_with(folders, name, template):
    folder, chance = folders[name], random.Random(f"{name} {template}")
    shipped = template in chat_template.SHIPPED
    if not shipped:
        with_template(folder, {"showing": SHOWING, "silent": SILENT}[template])
    compiled = chat_template.load(folder, template if shipped else None)
    examples = ExampleReader(folder, 0, 1000, template=compiled)
    prompts = PromptReader(folder, max_positions=1000, vocab_size=1000, end_of_document=0, chats=compiled)
    for _ in range(10):
        texts = ["".join(chance.choice(WORDS) for _ in range(chance.randint(1, 5))) + "x" for _ in range(4)]
        messages = [message(("user", "assistant")[number % 2], text) for number, text in enumerate(texts)]
        (example,) = examples.read([json.dumps(chat(*messages)).encode()])
        first = np.flatnonzero(np.diff(example.is_answer.astype(int)) == 1) + 1
        for begin, length in zip(first, (1, 3), strict=False):
            prompt = prompts.parse(1, json.dumps(chat(*messages[:length])).encode()).tokens
            assert example.tokens[:begin].tolist() == prompt


@pytest.mark.parametrize("name", ["llama3_split", "unigram", "metaspace_bpe"])
@pytest.mark.parametrize("shipped", ["chatml", "llama3", "plain"])
def test_tokens_and_answers_are_those_of_transformers(folders, tmp_path, name, shipped):
    """apply_chat_template with return_assistant_tokens_mask, where no answer begins with white space."""
    chat_template.store(chat_template.load(folders[name], shipped), folders[name], tmp_path / "stock")
    stock, chance = AutoTokenizer.from_pretrained(tmp_path / "stock"), random.Random(shipped)
    words = ["Wald", "ein", "Tännchen", "Kleid."]
    for turns in range(1, 5):
        messages = [
            message(role, " ".join(chance.choice(words) for _ in range(chance.randint(1, 5))))
            for _ in range(turns)
            for role in ("user", "assistant")
        ]
        more = {}
        if turns % 2:
            messages.insert(0, message("system", "grün"))
        if shipped != "plain" and turns > 2:
            call = message("assistant", "", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {"a": [1, "ä"]}}}])
            messages[-1:-1] = [call, message("tool", "7")]
            more = {"tools": [{"type": "function", "function": {"name": "f", "description": "<ä>", "parameters": {}}}]}
        ((ours,),) = read(tmp_path / "stock", chat(*messages, **more))
        expected = stock.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True, **more)
        count = len(expected["input_ids"])
        assert ours.tokens[:count].tolist() == expected["input_ids"]
        assert ours.is_answer[:count].tolist() == [bool(flag) for flag in expected["assistant_masks"]]
        assert ours.tokens[count:].tolist() in ([], [0])
        assert chat_template.load(tmp_path / "stock").prompt(Chat(messages[:-1], [], more))[0] == stock.apply_chat_template(
            messages[:-1], add_generation_prompt=True, tokenize=False, **more
        )


ENVIRONMENT = {
    "date": "{{ strftime_now('%Y-%m') }}",
    "json": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ tools | tojson(separators=(',', ':'), sort_keys=true) }}",
    "ascii": "{{ tools | tojson(ensure_ascii=true) }}",
    "loops": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "namespace": "{% set found = namespace(n=0) %}{% for m in messages %}{% set found.n = found.n + 1 %}{% endfor %}{{ found.n }}",
    "dict": "{{ dict(a=1).a }}{{ messages[0].items() | list | length }}",
    "spaces": "{% for m in messages %}\n  {% if m.role == 'user' %}\n    {{ m.content }}\n  {% endif %}\n{% endfor %}\n",
    "marks": "{% for m in messages[1:] %}{%- generation -%}  {{ m.content }} {%- endgeneration -%} x {% endfor %}",
    "tokens": "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ documents is none }}{{ tools is defined }}",
    "undefined": "{{ nothing }}{{ nothing is defined }}{{ messages[-1].tool_calls is defined }}",
    "thinking": "{{ messages[-1].reasoning_content }}{{ messages[-1].thinking }}",
}


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_templates_are_rendered_as_by_transformers(folders, tmp_path, name):
    chat_template.store(ChatTemplate(ENVIRONMENT[name], {}), folders["byte_level"], tmp_path / "stock")
    stock = AutoTokenizer.from_pretrained(tmp_path / "stock")
    messages = [USER, {**ANSWER, "reasoning_content": "hm", "thinking": "hm"}]
    tools = [{"b": "ä<", "a": [1, None, 2.5]}]
    ours = chat_template.load(tmp_path / "stock").answers(Chat(messages, [False, True], {"tools": tools})) if name == "marks" else None
    text = ours[0] if ours else chat_template.load(tmp_path / "stock").prompt(Chat(messages, [], {"tools": tools}))[0]
    assert text == stock.apply_chat_template(messages, tools=tools, add_generation_prompt=not ours, tokenize=False)


def test_a_template_that_refuses_a_chat_says_why(folders):
    folder = with_template(folders["byte_level"], "{{ raise_exception('no ' + messages[0].content) }}")
    (found,) = read(folder, chat(USER, ANSWER))
    assert "the chat template fails: no Hi" in str(found)


def test_a_shipped_template_without_its_special_tokens_is_refused(tmp_path):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(special_tokens=["<|endoftext|>"]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"tokenizer.chat_template=chatml: needs the special tokens <\|im_start\|>, <\|im_end\|>"):
        chat_template.load(tmp_path, "chatml")
    with pytest.raises(UserError, match="neither the name of a template nor a file"):
        chat_template.load(tmp_path, "chatm")
    plain = chat_template.load(tmp_path, "plain", "<|endoftext|>")
    text, _, ((first, last),) = plain.answers(Chat([USER, ANSWER], [False, True]))
    assert text[first:last] == "Kleid<|endoftext|>"


ENDS = {
    "chatml": "<|im_end|>",
    "deepseek": "<|endoftext|>",
    "glm": "<|user|>",
    "gpt_oss": "<|return|>",
    "llama3": "<|eot_id|>",
    "phi3": "<|end|>",
    "plain": "<|endoftext|>",
    "qwen3": "<|im_end|>",
}


@pytest.mark.parametrize("name, end", ENDS.items())
def test_generate_stops_where_the_template_ends_an_answer(folders, name, end):
    folder = folders["byte_level"]
    prompts = PromptReader(folder, max_positions=9, vocab_size=1000, end_of_document=1, chats=chat_template.load(folder, name))
    assert prompts.ends == [1, Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(end)]


#: As GLM-4.5's: nothing ends an answer but the token that begins the next message.
FOLLOWED = (
    "<|end|>{% for m in messages %}{{ ('<|im_start|>' if m.role == 'user' else '<|start_header_id|>') + '\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>{% endif %}"
)


def test_the_token_that_follows_an_answer_ends_it(folders, caplog):
    folder = with_template(folders["byte_level"], FOLLOWED)
    ((found,),) = read(folder, chat(USER, ANSWER, USER, ANSWER))
    assert shown(folder, [found])[1] == "\nKleid<|im_start|>\nKleid<|endoftext|>"
    prompts = PromptReader(folder, max_positions=99, vocab_size=1000, end_of_document=1, chats=chat_template.load(folder))
    assert prompts.ends == [1, Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|im_start|>")]
    assert not caplog.text
    read(with_template(folder, SILENT.replace("<|end|>", "")), chat(USER, ANSWER, USER, ANSWER))
    assert "no special token that ends an answer" in caplog.text


@pytest.mark.parametrize("name", chat_template.SHIPPED)
def test_shipped_templates_are_trained_with_every_answer_and_its_end(folders, name):
    """Reasoning and functions are shown, or a chat with them is refused by name."""
    compiled, folder = chat_template.load(folders["byte_level"], name, "<|endoftext|>"), folders["byte_level"]
    reader = ExampleReader(folder, 0, 1000, template=compiled)
    lines = [chat(message("system"), USER, ANSWER, USER, {**ANSWER, "content": "grün"}), chat(USER, {**ANSWER, "reasoning_content": "hm"})]
    plain, reasoned = reader.read([json.dumps(line).encode() for line in lines])
    learned = shown(folder, [plain])[1]
    assert learned.index("Kleid") < learned.index(ENDS[name]) < learned.index("grün") < learned.rindex(ENDS[name]) or name == "glm"
    assert learned.count("Kleid") == learned.count("grün") == 1
    assert "Hi" not in learned
    if compiled.names & {"thinking", "reasoning_content"}:
        assert "hm" in shown(folder, [reasoned])[1]
    else:
        assert "reasoning" in str(reasoned)


def test_chats_in_another_order_are_repaired(folders):
    folder, joined = with_template(folders["byte_level"], SILENT), message("assistant", "Kleid\n\ngrün")
    broken = [
        [ANSWER, USER, ANSWER],
        [message("system"), ANSWER, USER, ANSWER],
        [USER, ANSWER, message("assistant", "grün")],
        [USER, USER, ANSWER],
    ]
    mended = [[USER, ANSWER], [message("system"), USER, ANSWER], [USER, joined], [message("user", "Hi\n\nHi"), ANSWER]]
    refused = read(folder, *(chat(*messages) for messages in broken))
    assert all("data.instructions.repair=true" in str(line) for line in refused)
    reader = ExampleReader(folder, 0, 1000, repair=True)
    found, expected = (reader.read([json.dumps(chat(*messages)).encode() for messages in chats]) for chats in (broken, mended))
    assert [line.tokens.tolist() for line in found] == [line.tokens.tolist() for line in expected]
    assert reader.notes.ignored == {"messages.repaired": 4}
    (left,) = reader.read([json.dumps(chat(USER, message("assistant", "a", weight=0), ANSWER)).encode()])
    assert "after an answer comes user" in str(left), "one is learned, and the other is not"


def test_a_lone_surrogate_is_refused_and_completions_with_one_are_published(tmp_path):
    for line in (b'{"prompt": "\\ud800"}', b'{"a": {"\\uDFFF": 1}}', b'["x", "\\ude00\\ud83d"]'):
        with pytest.raises(BadLine, match="half of a surrogate pair"):
            json_lines.parse(line)
    assert json_lines.parse(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00 \\\\ud800"}') == {"a": "😀 \\ud800"}
    with pytest.raises(BadLine, match="NaN is not a JSON number"):
        json_lines.parse(b"[NaN]")

    unfinished = Unfinished(tmp_path, {})
    lines = [{"prompt": "\ud800", "generated": {"prompt_tokens": 1, "tokens": 1, "text": "ä"}}]
    unfinished.write(note_name(0), {"completions": lines, "rejected": [{"line": 2, "error": "ä\udfff"}]})
    assert publish(tmp_path, {}, unfinished, range(1))["completions"] == 1
    assert json.loads((tmp_path / "completions.jsonl").read_text("utf-8")) == lines[0]
