"""stage=generate on the command line, with an imported model."""

import csv
import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from pipeline.common.unfinished import Unfinished
from pipeline.generation.prompts import PromptFile
from pipeline.models.families.t5 import T5Config
from tests.conversion.test_huggingface_export import export, random_model, tokenizer_folder  # noqa: F401 - a fixture
from tests.helpers import pipeline, run_ranks, start_ranks
from tests.models.small_decoders import CONFIGS

TEMPLATE = (
    "{% for m in messages %}<|endoftext|>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if not messages[0].content %}{{ raise_exception('no content') }}{% endif %}"
)
LINES = [
    {"prompt": "Im Wald", "id": 7},
    {"prompt": "steht ein <|endoftext|> Tännchen, es hat von lauter Nadeln"},
    {"messages": [{"role": "user", "content": "ein grünes Kleid"}]},
    {"prompt": ""},
    {"prompt": "x == 3"},
]
#: Lines that are refused, with a part of the reason.
BAD = {
    "{broken": "is not JSON",
    b'{"prompt": "\xff"}': "is not JSON",
    "[1]": "must be an object",
    '{"prompt": "a", "messages": []}': 'either "prompt" or "messages"',
    '{"prompt": 5}': '"prompt" must be a text',
    '{"messages": "hello"}': '"messages" must be a list',
    '{"messages": [{"role": "user", "content": ""}]}': "the chat template fails: no content",
    json.dumps({"prompt": "Kleid " * 50}): "leaves no room for a completion",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer_folder) -> Path:  # noqa: F811 - the fixture
    """A run directory with an imported model, and a file of prompts with bad lines between them."""
    folder = tmp_path_factory.mktemp("run")
    config = replace(CONFIGS["llama-grouped"], max_positions=60)
    (tokenizer_folder / "chat_template.jinja").write_text(TEMPLATE)
    export(folder / "stock", random_model(config), config, tokenizer_folder)
    pipeline("stage=convert", f"stage.input={folder / 'stock'}", f"run_dir={folder}")
    good = [json.dumps(line).encode() for line in LINES]
    bad = [line if isinstance(line, bytes) else line.encode() for line in BAD]
    (folder / "prompts.jsonl").write_bytes(b"\n".join([good[0], b"", *bad, *good[1:]]))
    return folder


def settings(run: Path, *more: str, output: str = "generated", prompts: str = "prompts.jsonl") -> list[str]:
    common = ["stage=generate", f"run_dir={run}", f"tokenizer.path={run / 'imported'}", "precision=fp32", "stage.max_tokens=12"]
    return [*common, f"stage.prompts={run / prompts}", f"stage.output={run / output}", *more]


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def greedy(run) -> str:
    """What is printed of the greedy completions in `generated`."""
    return pipeline(*settings(run))


def test_completions_are_those_of_transformers(run, greedy):
    assert "5 completions" in greedy
    assert "lines without a completion: 8" in greedy
    stock, text = AutoModelForCausalLM.from_pretrained(run / "stock"), AutoTokenizer.from_pretrained(run / "stock")
    found = read(run / "generated/completions.jsonl")
    assert [{key: value for key, value in line.items() if key != "generated"} for line in found] == LINES
    for line, result in zip(LINES, found, strict=True):
        if "messages" in line:
            ids = text.apply_chat_template(line["messages"], add_generation_prompt=True, return_dict=True)["input_ids"]
        else:
            ids = text(line["prompt"], split_special_tokens=True)["input_ids"] or [0]
        generated = result["generated"]
        assert generated["prompt_tokens"] == len(ids)
        expected = stock.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0, len(ids) :]
        assert generated["text"] == text.decode(expected, skip_special_tokens=True)
    rejected = read(run / "generated/rejected.jsonl")
    assert [line["line"] for line in rejected] == [*range(3, 3 + len(BAD))]
    assert all(reason in line["error"] for reason, line in zip(BAD.values(), rejected, strict=True))


def test_samples_are_equal_for_any_number_of_ranks_and_after_an_interruption(run):
    """A finished part is not generated again: one with another text is kept."""
    (run / "many.jsonl").write_text("".join(f'{{"prompt": "{number} Nadeln"}}\n' for number in range(70)))
    sampled = ("stage.temperature=1", "stage.top_p=0.9", "stage.seed=3", "stage.max_tokens=5", "stage.ignore_eos=true")
    pipeline(*settings(run, *sampled, "stage.batch_size=3", output="one", prompts="many.jsonl"))
    expected = (run / "one/completions.jsonl").read_text()
    assert len(set(expected.splitlines())) == 70
    assert "nothing to do" in pipeline(*settings(run, *sampled, output="one", prompts="many.jsonl"))
    assert "stage.seed=4" in pipeline(*settings(run, *sampled, "stage.seed=4", output="one", prompts="many.jsonl"), expect=2)
    manifest = json.loads((run / "one/manifest.json").read_text())
    interrupted = Unfinished(run / "two", manifest["settings"])
    interrupted.write("settings", interrupted.settings)
    kept = [{"prompt": "kept", "generated": {"text": "kept", "prompt_tokens": 1, "tokens": 1}}]
    interrupted.write("part-000001", {"completions": kept, "rejected": []})
    run_ranks(2, *settings(run, *sampled, output="two", prompts="many.jsonl"))
    lines = expected.splitlines()
    assert (run / "two/completions.jsonl").read_text().splitlines() == [*lines[:2], json.dumps(kept[0]), *lines[4:]]
    assert sorted(path.name for path in (run / "two").iterdir()) == ["completions.jsonl", "manifest.json", "rejected.jsonl"]


@pytest.mark.long
def test_two_thousand_samples_are_the_same_after_two_kills(run, tmp_path):
    """The ranks of a job are killed after a quarter and after half of the parts; both of them take parts until none are left."""
    (run / "2000.jsonl").write_text("".join(f'{{"prompt": "{number} Nadeln"}}\n' for number in range(2000)))
    sampled = ("stage.temperature=1", "stage.seed=3", "stage.max_tokens=4", "stage.ignore_eos=true", "stage.batch_size=64")
    pipeline(*settings(run, *sampled, output="whole-2000", prompts="2000.jsonl"))
    arguments = settings(run, *sampled, output="killed", prompts="2000.jsonl")
    parts = len(PromptFile(run / "2000.jsonl").parts)
    for share in (4, 2):
        printed = open(tmp_path / "printed", "w")  # noqa: SIM115 - of processes that are killed
        ranks = start_ranks(2, *arguments, output=printed.fileno())
        while len(list((run / "killed/.unfinished").glob("part-*.json"))) < parts // share:
            assert all(rank.poll() is None for rank in ranks)
            time.sleep(0.01)
        for rank in ranks:
            rank.kill()
            rank.wait()
        assert not (run / "killed/manifest.json").exists()
    run_ranks(2, *arguments)
    assert (run / "killed/completions.jsonl").read_bytes() == (run / "whole-2000/completions.jsonl").read_bytes()
    assert len(read(run / "killed/completions.jsonl")) == 2000


@pytest.mark.long
def test_ranks_that_share_a_model_write_the_same(run):
    """Two tensor, then two pipeline ranks, with log-probabilities; a layout that does not fit the checkpoint is refused."""
    pipeline(*settings(run, "stage.logprobs=true", output="whole"))
    expected = read(run / "whole/completions.jsonl")
    for axis in ("tensor", "pipeline"):
        run_ranks(2, *settings(run, "stage.logprobs=true", f"parallel.{axis}=2", output=axis))
        found = read(run / axis / "completions.jsonl")
        for ours, theirs in zip(found, expected, strict=True):
            assert ours["generated"]["token_ids"] == theirs["generated"]["token_ids"]
            assert ours["generated"]["logprobs"] == pytest.approx(theirs["generated"]["logprobs"], abs=1e-5)
    assert "world size=1: must be divisible" in pipeline(*settings(run, "parallel.tensor=2", output="no"), expect=2)


def test_a_template_makes_prompts(run):
    """The completion is that of the rendered text; a line without the field is rejected, and a syntax error refused."""
    (run / "t.jinja").write_text("{% for e in examples %}{{ e.x }} {% endfor %}{{ x }}\n")
    (run / "x.jsonl").write_text('{"x": "steht ein"}\n{"y": 1}\n')
    (run / "e.jsonl").write_text('{"x": "Im Wald"}\n')
    files = (f"stage.template={run / 't.jinja'}", f"stage.examples={run / 'e.jsonl'}")
    pipeline(*settings(run, *files, "stage.few_shot=1", output="shots", prompts="x.jsonl"))
    (run / "plain.jsonl").write_text('{"prompt": "Im Wald steht ein"}\n')
    pipeline(*settings(run, output="plain-shots", prompts="plain.jsonl"))
    (shot,), (plain,) = read(run / "shots/completions.jsonl"), read(run / "plain-shots/completions.jsonl")
    assert shot == {"x": "steht ein", "generated": {"prompt": "Im Wald steht ein", **plain["generated"]}}
    (rejected,) = read(run / "shots/rejected.jsonl")
    assert rejected == {"line": 2, "error": "stage.template fails in line 1: 'x' is undefined"}
    (run / "t.jinja").write_text("{{ x }}\n{% if %}")
    printed = pipeline(*settings(run, *files, "stage.few_shot=0", "stage.metrics=[bleu]", output="no", prompts="x.jsonl"), expect=2)
    assert "line 2 is not valid in a Jinja template" in printed
    assert "no line of stage.prompts" in printed
    assert "2 problems" in printed


def test_a_tokenizer_with_more_entries_than_the_embedding_is_not_imported(run, tmp_path):
    shutil.copytree(run / "stock", tmp_path / "stock")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "stock")
    tokenizer.add_tokens([f"<extra {number}>" for number in range(CONFIGS["llama-grouped"].vocab_size)])
    tokenizer.save_pretrained(tmp_path / "stock")
    printed = pipeline("stage=convert", f"stage.input={tmp_path / 'stock'}", f"run_dir={tmp_path / 'run'}", expect=2)
    assert f"has a tokenizer of {len(tokenizer)} entries, and {CONFIGS['llama-grouped'].vocab_size} rows of the embedding" in printed
    assert not (tmp_path / "run/checkpoints").exists()


def test_refusals(run, tmp_path):
    printed = pipeline(*settings(run, "stage.stop=['']", "parallel.context=2", "stage.top_p=0", "stage.metrics=[meteor]"), expect=2)
    for said in ("stage.metrics=['meteor']: must be one of bleu, chrf", "stage.top_p=0", "stage.stop", "parallel.context=2"):
        assert said in printed
    missing = ("stage=generate", f"run_dir={tmp_path}", f"tokenizer.path={tmp_path}")
    assert "stage.prompts=None: is required" in pipeline(*missing, expect=2)
    printed = pipeline(*missing, f"stage.prompts={tmp_path}/none.jsonl", expect=2)
    assert "3 problems" in printed
    assert "none.jsonl: cannot be read" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_cache_that_does_not_fit_is_refused_with_the_nearest_setting_that_does(run):
    """The setting that the message names works; no prompt of the batch is processed before."""
    (run / "lengths.jsonl").write_text("".join(json.dumps({"prompt": "ein " * count}) + "\n" for count in (1, 2, 9, 3, 4, 5)))
    small = settings(run, "stage.max_tokens=8", "stage.ignore_eos=true", output="small", prompts="lengths.jsonl")
    cases = {"4e-5": "stage.batch_size=5", "8e-6": "stage.max_tokens=8"}
    for size, named in cases.items():
        limited = [*small, "stage.batch_size=5", f"stage.cache_gigabytes={size}", f"stage.output={run / size}"]
        printed = pipeline(*limited, expect=2)
        assert re.search(rf"{named}: 5 sequences of up to \d+ tokens \(the longest prompt has \d+\) need \d.* GB of KV cache", printed)
        assert f"; {float(size):.3g} GB are available" in printed
        fix = re.search(r"set (stage.batch_size=\d)(?: and (stage.max_tokens=\d))?", printed)
        assert not (run / size / "completions.jsonl").exists()
        shutil.rmtree(run / size)
        assert "6 completions" in pipeline(*limited, *filter(None, fix.groups()))
    printed = pipeline(*small, "stage.cache_gigabytes=1e-6", f"stage.output={run / 'none'}", expect=2)
    assert "shorten the longest prompt" in printed


@pytest.mark.usefixtures("greedy")
def test_speculative_decoding_and_its_refusals(run, tmp_path, tokenizer_folder):  # noqa: F811 - the fixture
    """Greedy completions with a draft model are those without; a draft with another tokenizer or vocabulary is refused."""
    printed = pipeline(*settings(run, f"stage.draft={run}", "stage.speculative_tokens=3", output="drafted"))
    assert "100 % of" in printed  # the draft is the model itself
    pipeline(*settings(run, "stage.prompt_lookup=true", output="looked-up"))
    texts = {name: (run / name / "completions.jsonl").read_text() for name in ("generated", "drafted", "looked-up")}
    assert len(set(texts.values())) == 1

    other = tmp_path / "other"
    shutil.copytree(tokenizer_folder, other)
    changed = json.loads((other / "tokenizer.json").read_text())
    changed["added_tokens"][0]["content"] = "<|end|>"
    changed["model"]["vocab"]["<|end|>"] = changed["model"]["vocab"].pop("<|endoftext|>")
    (other / "tokenizer.json").write_text(json.dumps(changed))
    printed = pipeline(*settings(run, f"stage.draft={run}", f"stage.draft_tokenizer={other}", output="no"), expect=2)
    assert "has another tokenizer" in printed
    config = replace(CONFIGS["gpt"], vocab_size=310, max_positions=50)
    export(tmp_path / "stock", random_model(config), config, tokenizer_folder)
    pipeline("stage=convert", f"stage.input={tmp_path / 'stock'}", f"run_dir={tmp_path}")
    printed = pipeline(*settings(run, f"stage.draft={tmp_path}", output="no"), expect=2)
    assert "has model.vocab_size=310; the target has 300" in printed
    assert "has model.max_positions=50; the target has 60" in printed
    assert "contains no checkpoint" in pipeline(*settings(run, f"stage.draft={tmp_path / 'none'}", output="no"), expect=2)
    assert not (run / "no/manifest.json").exists()


def test_an_encoder_decoder_translates(run, tmp_path):
    """T5 with beam search; the prompt ends with the end-of-document token, and the decoder starts with data.decoder_start.

    A second command, which generates nothing, scores the translation.
    """
    config = T5Config(hidden=48, heads=4, ffn_hidden=96, vocab_size=300, max_positions=60, layers=2, head_width=8)
    export(tmp_path / "stock", random_model(config), config, run / "imported")
    pipeline("stage=convert", f"stage.input={tmp_path / 'stock'}", f"run_dir={tmp_path}")
    more = (f"run_dir={tmp_path}", "stage.beams=3", "stage.max_tokens=7", 'data.decoder_start="<|endoftext|>"')
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Im Wald steht ein", "reference": ["In the wood", "In the forest"]}\n')
    pipeline(*settings(tmp_path, *more))
    (line,) = read(tmp_path / "generated/completions.jsonl")
    text, stock = AutoTokenizer.from_pretrained(run / "stock"), AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "stock")
    ids = torch.tensor([[*text("Im Wald steht ein")["input_ids"], 0]])
    options = {"max_new_tokens": 7, "do_sample": False, "num_beams": 3, "decoder_start_token_id": 0, "pad_token_id": 0}
    expected = stock.generate(ids, attention_mask=torch.ones_like(ids), **options)[0]
    assert line["generated"]["text"] == text.decode(expected, skip_special_tokens=True)
    printed = pipeline(*settings(tmp_path, *more, "stage.metrics=[chrf,bleu]"))
    assert "nothing to do" in printed
    assert "bleu 0.00 over 1 completions (nrefs:2|case:mixed|eff:no|tok:13a|smooth:exp|version:" in printed
    with open(tmp_path / "evaluations/table.csv", encoding="utf-8") as handle:
        assert next(csv.DictReader(handle)).keys() == {"step", "prompts chrf", "prompts bleu"}
    printed = pipeline(*settings(tmp_path, *more, "stage.temperature=1", "stage.stop=[a]"), expect=2)
    assert "stage.temperature=1.0: is not supported by beam search (stage.beams=3)" in printed
    assert "2 problems" in printed


@pytest.mark.parametrize(
    "lines, parts", [(1, 1), (65, 33), *(pytest.param(*case, marks=pytest.mark.long) for case in ((64, 64), (70, 35), (20000, 79)))]
)
def test_parts_contain_each_line_once(lines, parts, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(str, range(1, lines + 1))))
    prompts = PromptFile(path)
    assert len(prompts.parts) == parts
    found = [(number, int(line)) for part in prompts.parts for number, line in prompts.read(part)]
    assert found == [(number, number) for number in range(1, lines + 1)]
