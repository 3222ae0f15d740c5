"""stage=finetune on the command line: chats, resuming, frozen weights, and what is refused."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.checkpoint.native import complete
from pipeline.checkpoint.reader import Checkpoint
from pipeline.common.errors import UserError
from pipeline.models.families.llama import LlamaConfig
from pipeline.models.families.mixtral import MixtralConfig
from pipeline.training import finetuning
from tests.conversion.test_huggingface_export import export, random_model, tokenizer_folder  # noqa: F401 - a fixture
from tests.helpers import pipeline, run_directory, run_ranks
from tests.world import configured

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}{% if m['role'] == 'assistant' %}<|endoftext|>{% else %}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
)
NUMBERS = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier"}


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer_folder) -> Path:  # noqa: F811 - the fixture
    """A run directory with an imported model and chats."""
    folder = tmp_path_factory.mktemp("base")
    (tokenizer_folder / "chat_template.jinja").write_text(TEMPLATE)
    config = LlamaConfig(layers=2, hidden=32, heads=4, kv_heads=4, ffn_hidden=48, vocab_size=300, max_positions=64)
    export(folder / "stock", random_model(config), config, tokenizer_folder)
    pipeline("stage=convert", f"stage.input={folder / 'stock'}", f"run_dir={folder}")
    chance = random.Random(0)
    for name, count in (("train", 200), ("validation", 20)):
        chats = [[chance.choice(list(NUMBERS)) for _ in range(2)] for _ in range(count)]
        lines = [
            {"messages": [message for word in chat for message in ({"role": "user", "content": word}, assistant(NUMBERS[word]))]}
            for chat in chats
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def settings(base: Path, run_dir: Path, *more: str) -> tuple[str, ...]:
    return (
        "stage=finetune",
        f"run_dir={run_dir}",
        f"checkpoint.initialize_from={base}",
        f"tokenizer.path={base / 'imported'}",
        f"data.instructions.train=[{base / 'train.jsonl'}]",
        f"data.instructions.validation=[{base / 'validation.jsonl'}]",
        "precision=fp32",
        "training.sequence_length=64",
        "training.global_batch_size=8",
        "training.steps=30",
        "training.validation_batches=1",
        "optimizer.lr=0.02",
        "optimizer.warmup_steps=3",
        "optimizer.weight_decay=0.1",
        "tracking=disabled",
        "parallel.zero_stage=0",
        *more,
    )


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in metrics(run_dir) if "loss" in line]


def begun(run_dir: Path, step: int) -> Path:
    """A run directory beside that of a run, which had this checkpoint: the run as it was when it had made these steps."""
    name = f"checkpoints/step-{step:08d}"
    folder = run_directory(run_dir.with_name("begun"))
    (run_dir / name).rename(folder / name)
    return folder


def answer_log_probabilities(model: Any, base: Path, messages: list[dict[str, str]]) -> torch.Tensor:
    """Log-probabilities of the tokens of the last message, by a stock model and its chat template; answers are tokenized alone."""
    text = AutoTokenizer.from_pretrained(base / "stock", chat_template=TEMPLATE)
    tokens: list[int] = []
    shown = ""
    for number in [place for place, message in enumerate(messages) if message["role"] == "assistant"]:
        prompt = text.apply_chat_template(messages[:number], add_generation_prompt=True, tokenize=False)
        tokens += text(prompt[len(shown) :], add_special_tokens=False)["input_ids"]
        answer, shown = len(tokens), text.apply_chat_template(messages[: number + 1], tokenize=False)
        tokens += text(shown[len(prompt) :], add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        found = model(torch.tensor([tokens])).logits.log_softmax(-1)[0, :-1]
    return found.gather(1, torch.tensor(tokens)[1:, None])[answer - 1 :, 0]


def evaluated(base: Path, run_dir: Path, *more: str) -> dict[str, Any]:
    paths = (f"run_dir={run_dir}", f"tokenizer.path={base / 'imported'}")
    sizes = ("precision=fp32", "training.sequence_length=64", "training.global_batch_size=8")
    pipeline("stage=evaluate", *paths, *sizes, *more)
    return json.loads((run_dir / "evaluation.json").read_text())


def test_a_model_learns_the_answers_and_continues(base, tmp_path):
    """In two jobs as in one, with frozen weights unchanged; then it answers, and is evaluated."""
    frozen = 'training.frozen=["embed.*","blocks.0.*"]'
    printed = pipeline(*settings(base, tmp_path / "run", frozen, "checkpoint.every=10", "checkpoint.keep=9"))
    assert "starting with the weights of" in printed
    assert "200 examples in" in printed
    found = losses(tmp_path / "run")
    assert found[-1] < 0.5 < 2 < found[0]
    assert metrics(tmp_path / "run")[-1]["validation_loss"] < 0.5
    scores = evaluated(base, tmp_path / "run", f"data.instructions.validation=[{base / 'validation.jsonl'}]", "stage.batches=1")
    assert scores["validation_loss"] == pytest.approx(metrics(tmp_path / "run")[-1]["validation_loss"], rel=1e-4)

    (trained, start) = (Checkpoint(complete(folder)[-1]) for folder in (tmp_path / "run", base))
    changed = {name for name in trained.names() if not torch.equal(trained.tensor(name), start.tensor(name))}
    assert changed == {name for name in trained.names() if not name.startswith(("embed.", "blocks.0."))}
    assert "nothing to do" in pipeline(*settings(base, tmp_path / "run", frozen))

    # A checkpoint that both wrote: with ZeRO 2 on one rank, and without frozen weights' moments.
    resumed = begun(tmp_path / "run", 20)
    pipeline(*settings(base, resumed, frozen, "parallel.zero_stage=2"))
    assert losses(resumed) == pytest.approx(found[20:], rel=1e-5)

    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "three"}]}\n')
    paths = (f"run_dir={tmp_path / 'run'}", f"tokenizer.path={base / 'imported'}", "precision=fp32")
    pipeline("stage=generate", *paths, f"stage.prompts={tmp_path / 'prompts.jsonl'}", "stage.max_tokens=8")
    assert json.loads((tmp_path / "run/generated/completions.jsonl").read_text())["generated"]["text"] == "drei"


@pytest.mark.long
def test_an_alpaca_file_and_a_shipped_template_are_all_that_a_chat_needs(base, tmp_path):
    """Epochs, in two jobs as in one; then the run directory alone is enough to chat and to export."""
    chance, run = random.Random(0), tmp_path / "run"
    lines = [{"instruction": word, "input": "", "output": NUMBERS[word]} for word in (chance.choice(list(NUMBERS)) for _ in range(150))]
    (tmp_path / "alpaca.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"instruction": "\\ud800", "output": "x"}\n'
    )
    tuned = (
        *("training.steps=0", "training.epochs=8", "tokenizer.chat_template=plain", "data.quarantine_limit=0.1", "checkpoint.keep=9"),
        *(f"data.instructions.train=[{tmp_path / 'alpaca.jsonl'}]", "data.instructions.validation=[]", "checkpoint.every=20"),
    )
    printed = pipeline(*settings(base, run, *tuned))
    assert "150 lines of the format: Alpaca" in printed
    assert "line 151: has the character \\ud800" in printed
    found = losses(run)
    assert f"training.epochs=8 of {len(found)} sequences: {len(found)} steps" in printed, "8 sequences a step, 8 epochs"
    resumed = begun(run, 20)
    pipeline(*settings(base, resumed, *tuned))
    assert losses(resumed) == pytest.approx(found[20:], rel=1e-5)

    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "three"}]}\n')
    pipeline("stage=generate", f"run_dir={run}", "precision=fp32", f"stage.prompts={tmp_path / 'prompts.jsonl'}", "stage.max_tokens=8")
    generated = json.loads((run / "generated/completions.jsonl").read_text())["generated"]
    assert (generated["text"], generated["finish_reason"]) == ("drei", "stop")
    pipeline("stage=convert", f"run_dir={run}")
    chat = [{"role": "user", "content": "three"}]
    tokens = AutoTokenizer.from_pretrained(run / "hf").apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert len(tokens) == generated["prompt_tokens"]


@pytest.mark.long
def test_a_model_gets_a_longer_context(base, tmp_path):
    """LongLoRA: attention in groups, embeddings and norms beside the adapters, in two jobs; then the merged model."""
    import peft  # takes seconds

    run = tmp_path / "run"
    long = (
        *("training.context_factor=2", "training.sequence_length=128", "training.attention_group=32", "checkpoint.every=10"),
        *("lora.rank=4", "lora.modules_to_save=[embed.*,*norm]", "optimizer.lr=0.02", "training.global_batch_size=4"),
    )
    printed = pipeline(*settings(base, run, *long, "training.sequence_length=192"), expect=2)
    assert "training.sequence_length=192: must not exceed model.max_positions=128" in printed
    pipeline(*settings(base, run, *long))
    found = losses(run)
    assert found[-1] < 0.5 * found[0]
    index = json.loads((complete(run)[-1] / "index.json").read_text())
    assert (index["config"]["model"]["rope_factor"], index["config"]["model"]["max_positions"]) == (2.0, 128)
    assert "nothing to do" in pipeline(*settings(base, run, *long))
    printed = pipeline(*settings(base, run, *long, "training.context_factor=4", "training.steps=40"), expect=2)
    assert "training.context_factor=4.0: " in printed
    pipeline("stage=convert", "stage.format=peft", f"run_dir={run}", f"tokenizer.path={base / 'imported'}")
    pipeline("stage=convert", f"run_dir={run}", f"tokenizer.path={base / 'imported'}")
    merged = AutoModelForCausalLM.from_pretrained(run / "hf").eval()
    tokens = torch.randint(300, (1, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = merged(tokens).logits
        config = json.loads((run / "hf/config.json").read_text())
        longer = AutoModelForCausalLM.from_pretrained(base / "stock", config=type(merged.config)(**config)).eval()
        adapted = peft.PeftModel.from_pretrained(longer, run / "adapter").eval()
        torch.testing.assert_close(adapted(tokens).logits, expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_is_trained_exported_and_used(base, tmp_path):
    """LoRA in two jobs as in one; the adapter in PEFT's format, merged into full weights, and as the start of a run."""
    import peft  # takes seconds

    lora, run = ("lora.rank=4", "lora.alpha=16", "lora.dropout=0.05"), tmp_path / "run"
    pipeline(*settings(base, run, *lora, "parallel.zero_stage=1", "checkpoint.every=20", "checkpoint.keep=9"))
    found = losses(run)
    assert found[-1] < 0.75 * found[0]
    resumed = begun(run, 20)
    printed = pipeline(*settings(base, resumed, "lora.rank=2"), expect=2)
    assert "lora.rank=2: " in printed
    assert "was made with 4" in printed
    pipeline(*settings(base, resumed, *lora))
    assert losses(resumed) == pytest.approx(found[20:], rel=1e-4)

    paths = (f"tokenizer.path={base / 'imported'}", "precision=fp32")
    pipeline("stage=convert", *paths, f"run_dir={run}", "stage.format=peft")
    lines = [json.loads(line)["messages"] for line in (base / "validation.jsonl").read_text().splitlines()]
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base / "stock"), run / "adapter").eval()
    answers = [answer_log_probabilities(adapted, base, chat[: end + 1]) for chat in lines for end in (1, 3)]
    scores = evaluated(base, run, f"data.instructions.validation=[{base / 'validation.jsonl'}]")
    assert scores["validation_loss"] == pytest.approx(-float(torch.cat(answers).mean()), rel=1e-4)

    pipeline("stage=convert", *paths, f"run_dir={run}")
    assert "has none" in pipeline("stage=convert", *paths, f"run_dir={base}", "stage.format=peft", expect=2)
    pipeline("stage=convert", *paths, f"run_dir={base}", f"stage.adapter={run / 'adapter'}", f"stage.output={tmp_path / 'merged'}")
    stock = AutoModelForCausalLM.from_pretrained(base / "stock")
    tokens = torch.arange(1, 40)[None]
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(stock, run / "adapter").eval()(tokens).logits
        for folder in (run / "hf", tmp_path / "merged"):
            merged = AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits
            torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-4)

    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "three"}]}\n')
    generate = ("stage=generate", *paths, f"stage.prompts={tmp_path / 'prompts.jsonl'}", "stage.max_tokens=8", "stage.logprobs=true")
    adapter = f"stage.adapter={run / 'adapter'}"
    pipeline(*generate, f"run_dir={run}")
    pipeline(*generate, f"run_dir={base}", adapter, f"stage.output={tmp_path / 'two'}")
    one, two = (json.loads((folder / "completions.jsonl").read_text())["generated"] for folder in (run / "generated", tmp_path / "two"))
    assert one["token_ids"] == two["token_ids"]
    assert one["logprobs"] == pytest.approx(two["logprobs"], abs=1e-4)
    assert "was trained with another base" in pipeline(*generate, f"run_dir={run}", adapter, f"stage.output={tmp_path / 'no'}", expect=2)

    pipeline(*settings(base, tmp_path / "more", f"lora.adapter={run / 'adapter'}", "training.steps=1", "optimizer.warmup_steps=1"))
    assert losses(tmp_path / "more")[0] < 0.85 * found[0]


@pytest.mark.long
def test_adapters_of_experts_are_trained_and_merged(base, tokenizer_folder, tmp_path):  # noqa: F811 - the fixture
    """The merged export has the validation loss of the run; a second job continues with the same bits; PEFT's format is refused."""
    config = MixtralConfig(layers=2, hidden=32, heads=4, kv_heads=4, ffn_hidden=48, vocab_size=300, max_positions=64, experts=4)
    moe, run = tmp_path / "moe", tmp_path / "run"
    moe.mkdir()
    export(moe / "stock", random_model(config), config, tokenizer_folder)
    pipeline("stage=convert", f"stage.input={moe / 'stock'}", f"run_dir={moe}")
    lora = ("lora.rank=4", "lora.alpha=16", "lora.targets=[*.experts.*]", "training.steps=6", "training.validation_batches=null")
    more = (f"checkpoint.initialize_from={moe}", "checkpoint.every=4", "checkpoint.keep=9", "parallel.zero_stage=1")
    pipeline(*settings(base, run, *lora, *more))
    resumed = begun(run, 4)
    pipeline(*settings(base, resumed, *lora, *more))
    assert losses(resumed) == losses(run)[4:]
    last = [Checkpoint(complete(folder)[-1]) for folder in (run, resumed)]
    for name in last[0].names():
        assert torch.equal(*(checkpoint.tensor(name) for checkpoint in last)), name
    changed = [name for name in last[0].names() if ".experts.lora." in name and name.endswith(".b")]
    assert len(changed) == 6
    assert all(last[0].tensor(name).any() for name in changed)

    paths = (f"run_dir={run}", f"tokenizer.path={base / 'imported'}")
    refused = pipeline("stage=convert", *paths, "stage.format=peft", expect=2)
    assert "stage.format=peft: is not supported for adapters of routed experts (blocks.0.mlp.experts.down)" in refused
    pipeline("stage=convert", *paths)
    merged = AutoModelForCausalLM.from_pretrained(run / "hf").eval()
    lines = [json.loads(line)["messages"] for line in (base / "validation.jsonl").read_text().splitlines()]
    answers = [answer_log_probabilities(merged, base, chat[: end + 1]) for chat in lines for end in (1, 3)]
    trained = evaluated(base, run, f"data.instructions.validation=[{base / 'validation.jsonl'}]")["validation_loss"]
    assert trained == pytest.approx(-float(torch.cat(answers).mean()), rel=1e-4)
    assert metrics(run)[-1]["validation_loss"] == pytest.approx(trained, rel=1e-4)


@pytest.mark.long
def test_preferences_are_learned_by_an_adapter(base, tmp_path):
    """DPO: the loss begins at ln 2 and falls, also on the validation pairs, and PEFT loads the adapter."""
    import peft  # takes seconds

    lines = [{"messages": [{"role": "user", "content": word}], "chosen": NUMBERS[word], "rejected": "null"} for word in NUMBERS] * 8
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"prompt": "x"}\n')
    files = (f"data.instructions.train=[{tmp_path / 'pairs.jsonl'}]", f"data.instructions.validation=[{tmp_path / 'pairs.jsonl'}]")
    run = tmp_path / "run"
    dpo = ("training.objective=dpo", "training.dpo_beta=0.3", "lora.rank=4", "optimizer.lr=0.005", "training.steps=12", *files)
    printed = pipeline(*settings(base, run, *dpo), expect=2)
    assert 'pairs.jsonl, line 33: has no "chosen"' in printed
    pipeline(*settings(base, run, *dpo, "data.quarantine_limit=0.1"))
    found = losses(run)
    assert found[0] == pytest.approx(math.log(2), rel=1e-5)
    assert found[-1] < 0.5
    assert metrics(run)[-1]["validation_loss"] < 0.5
    pipeline("stage=convert", f"run_dir={run}", f"tokenizer.path={base / 'imported'}", "stage.format=peft")
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base / "stock"), run / "adapter").eval()

    # Held-out pairs, of the run and of its adapter beside the base; the beta is that of the run.
    pairs = [{"messages": [{"role": "user", "content": a}], "chosen": NUMBERS[b], "rejected": "null"} for a in NUMBERS for b in NUMBERS]
    pairs += [{**pair, "chosen": "null", "rejected": pair["chosen"]} for pair in pairs[:5]]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in pairs))
    rewards = []
    for pair in pairs:
        chats = [[*pair["messages"], assistant(pair[kind])] for kind in ("chosen", "rejected")]
        policy = [answer_log_probabilities(adapted, base, chat).sum() for chat in chats]
        with adapted.disable_adapter():
            reference = [answer_log_probabilities(adapted, base, chat).sum() for chat in chats]
        rewards.append([0.3 * float(mine - other) for mine, other in zip(policy, reference, strict=True)])
    chosen, rejected = torch.tensor(rewards).unbind(1)
    held_out = f"data.instructions.validation=[{tmp_path / 'held_out.jsonl'}]"
    of_run = evaluated(base, run, held_out)
    of_adapter = evaluated(base, base, held_out, "training.objective=dpo", "training.dpo_beta=0.3", f"stage.adapter={run / 'adapter'}")
    for found in (of_run, of_adapter):
        assert found["validation_loss"] == pytest.approx(-float(F.logsigmoid(chosen - rejected).mean()), rel=1e-4)
        assert found["validation_rewards_margin"] == pytest.approx(float((chosen - rejected).mean()), rel=1e-4)
        assert found["validation_rewards_accuracy"] == pytest.approx(float((chosen > rejected).float().mean()))
        assert "perplexity" not in found
    shutil.copytree(base / "checkpoints/step-00000000", run / "checkpoints/step-00000000")
    paths = (f"run_dir={run}", f"tokenizer.path={base / 'imported'}", "training.sequence_length=64")
    assert "step-00000000 is left out" in pipeline("stage=evaluate", *paths, held_out, "stage.checkpoint=all")
    paths = (f"run_dir={base}", f"tokenizer.path={base / 'imported'}", "training.sequence_length=64")
    assert "has no adapter" in pipeline("stage=evaluate", *paths, "training.objective=dpo", held_out, expect=2)
    assert "data.instructions.validation=[]: names no file" in pipeline("stage=evaluate", *paths, "training.objective=supervised", expect=2)


@pytest.mark.long
def test_preferences_are_learned_by_all_weights(base, tmp_path):
    """The reference's log-probabilities are computed once, also for a second run and after a restart on two ranks; SimPO has none."""
    lines = [{"messages": [{"role": "user", "content": word}], "chosen": NUMBERS[word], "rejected": "null"} for word in NUMBERS] * 8
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:10]))
    files = (f"data.instructions.train=[{tmp_path / 'pairs.jsonl'}]", f"data.instructions.validation=[{tmp_path / 'held_out.jsonl'}]")
    tuned = ("training.objective=dpo", "optimizer.lr=0.002", "training.steps=12", "checkpoint.every=4", "checkpoint.keep=9", *files)
    one, other, again = (tmp_path / name for name in ("one", "other", "again"))
    printed = pipeline(*settings(base, one, *tuned))
    assert "computing the reference log-probabilities of 32 pairs" in printed
    found = losses(one)
    assert found[0] == pytest.approx(math.log(2), rel=1e-5)
    assert found[-1] < 0.5
    assert metrics(one)[-1]["validation_loss"] < 0.6

    # What is stored is what the stock model gives, in the order of the file.
    stored = sorted((one / "reference").glob("*/answers.npy"), key=lambda path: path.stat().st_size)
    assert [len(np.load(path)) for path in stored] == [10, 32]
    stock = AutoModelForCausalLM.from_pretrained(base / "stock").eval()
    for answers, line in zip(np.load(stored[1])[:4], lines, strict=False):
        chats = [[*line["messages"], assistant(line[kind])] for kind in ("chosen", "rejected")]
        expected = [float(answer_log_probabilities(stock, base, chat).sum()) for chat in chats]
        assert answers.tolist() == pytest.approx(expected, rel=1e-4)

    # Another run reads them; a resumed one too, on two ranks, and is refused without them.
    shared = f"data.instructions.reference={one / 'reference'}"
    printed = pipeline(*settings(base, other, *tuned, shared, "training.preference_loss=ipo"))
    assert "computing the reference" not in printed
    shutil.copytree(one / "checkpoints/step-00000004", again / "checkpoints/step-00000004")
    assert "the weights of the run are no longer those of its reference" in pipeline(*settings(base, again, *tuned), expect=2)
    run_ranks(2, *settings(base, again, *tuned, shared))
    assert losses(again) == pytest.approx(found[4:], rel=1e-4)
    weights = (f"checkpoint.initialize_from={one}", f"tokenizer.path={base / 'imported'}")
    printed = pipeline(*settings(base, tmp_path / "third", *tuned, shared, *weights), expect=2)
    assert "has the log-probabilities of another reference" in printed
    damaged = bytearray(stored[1].read_bytes())
    damaged[-1] ^= 1
    stored[1].write_bytes(damaged)
    assert "is corrupt" in pipeline(*settings(base, tmp_path / "fourth", *tuned, shared), expect=2)

    free = ("training.preference_loss=simpo", "training.dpo_beta=2", "training.simpo_margin=1")
    pipeline(*settings(base, tmp_path / "simpo", *tuned, *free))
    assert not (tmp_path / "simpo/reference").exists()
    assert losses(tmp_path / "simpo")[-1] < 0.5 * losses(tmp_path / "simpo")[0]
    scores = evaluated(base, tmp_path / "simpo", files[1], "stage.batches=1")
    assert scores["validation_loss"] == pytest.approx(metrics(tmp_path / "simpo")[-1]["validation_loss"], rel=1e-3)
    printed = pipeline(*settings(base, tmp_path / "no", *tuned, "training.preference_loss=orpo", shared), expect=2)
    assert "is not read by a loss without a reference model" in printed
    printed = pipeline(*settings(base, tmp_path / "no", "training.preference_loss=ipo"), expect=2)
    assert "training.preference_loss=ipo: has no effect with the objective supervised" in printed


@pytest.mark.long
def test_a_run_from_packed_shards_is_that_from_files(base, tmp_path):
    """The same losses on one rank from files, and from shards in two jobs, the second of which has two ranks."""
    direct, packed = tmp_path / "direct", tmp_path / "packed"
    tuned = ("training.steps=8", "checkpoint.every=4", "checkpoint.keep=9", "data.shard_megabytes=0.004")
    pipeline(*settings(base, direct, *tuned))
    train, validation = (f"data.instructions.{split}=[{base / split}.jsonl]" for split in ("train", "validation"))
    words = ("stage=tokenize", train, validation, f"tokenizer.path={base / 'imported'}", "training.sequence_length=64", tuned[-1])
    pipeline(*words, f"data.instructions.tokens={tmp_path / 'tokens'}")
    assert len(list((tmp_path / "tokens").glob("train-*.tar"))) > 3
    shards = (f"data.instructions.tokens={tmp_path / 'tokens'}", "data.instructions.train=[]", "data.instructions.validation=[]")
    pipeline(*settings(base, packed, *tuned, *shards))
    assert losses(packed) == losses(direct)
    assert metrics(packed)[-1]["validation_loss"] == metrics(direct)[-1]["validation_loss"]
    files, folder = (evaluated(base, packed, word, tuned[-1], "stage.batches=1") for word in (validation, shards[0]))
    assert files["validation_loss"] == folder["validation_loss"] == pytest.approx(metrics(packed)[-1]["validation_loss"], rel=1e-4)
    shutil.rmtree(packed / "checkpoints/step-00000008")
    run_ranks(2, *settings(base, packed, *tuned, *shards))
    assert losses(packed)[-4:] == pytest.approx(losses(direct)[4:], rel=1e-4)


@pytest.mark.long
def test_an_adapter_is_trained_on_weights_in_4_bits(base, tmp_path):
    """QLoRA in two jobs as in one; peft loads the adapter on the original base, and the merged export has the rounded base."""
    import peft  # takes seconds

    qlora, run = ("lora.rank=4", "lora.alpha=16", "lora.quantize=nf4"), tmp_path / "run"
    printed = pipeline(*settings(base, run, *qlora, "checkpoint.every=20", "checkpoint.keep=9"))
    assert "nf4: 14 weights of this rank in 0.0 MB instead of 0.1 MB" in printed
    found = losses(run)
    assert found[-1] < 0.75 * found[0]
    resumed = begun(run, 20)
    assert "lora.quantize=none: " in pipeline(*settings(base, resumed, *qlora[:2]), expect=2)
    pipeline(*settings(base, resumed, *qlora))
    assert losses(resumed) == pytest.approx(found[20:], rel=1e-4)

    paths = (f"tokenizer.path={base / 'imported'}", f"run_dir={run}")
    pipeline("stage=convert", *paths, "stage.format=peft")
    pipeline("stage=convert", *paths)
    merged, stock = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (run / "hf", base / "stock"))
    tokens = torch.arange(1, 40)[None]
    with torch.no_grad():
        plain = stock(tokens).logits
        adapted = peft.PeftModel.from_pretrained(stock, run / "adapter").eval()(tokens).logits
        gap = (merged(tokens).logits - adapted).norm()  # only that of the rounded base
        assert 0 < gap < 0.3 * (adapted - plain).norm()
    validation = f"data.instructions.validation=[{base / 'validation.jsonl'}]"
    assert evaluated(base, run, validation, "stage.batches=1")["validation_loss"] == pytest.approx(
        metrics(run)[-1]["validation_loss"], rel=1e-4
    )
    assert "lora.quantize=nf4: requires adapters" in pipeline(*settings(base, tmp_path / "no", "lora.quantize=nf4"), expect=2)


def test_a_model_on_the_command_line_is_that_of_the_checkpoint(base, tmp_path):
    """Its size and keys are read from the checkpoint; other ones are refused and not ignored."""
    sizes = ("model=llama-demo", "model.layers=2", "model.hidden=32", "model.heads=4", "model.kv_heads=4", "model.ffn_hidden=48")
    same = (*sizes, "model.vocab_size=300", "model.max_positions=64", "model.tie_embeddings=false")
    longer = ("training.context_factor=2", "model.rope_scaling=none")
    for words, said in (
        (("model.layers=7",), ["model.layers=7: differs from the checkpoint that the run starts from, which has model.layers=2"]),
        (("model=llama-7b",), ["model=llama-7b: differs from", "model.layers=2"]),
        (("model=gpt2",), ["model=gpt2: differs from the checkpoint that the run starts from, which has model.family=llama"]),
        (("model.max_positions=128",), ["which has model.max_positions=64", "training.context_factor makes its context longer"]),
        (("model.layers=2", "model.hidden=32"), []),
        (same, []),
        ((*same, *longer), []),
    ):
        config = configured(*settings(base, tmp_path / "run", *words))
        if said:
            with pytest.raises(UserError) as error:
                finetuning.complete(config, 1, overrides=words)
            assert all(text in str(error.value) for text in said), error.value
        else:
            assert finetuning.complete(config, 1, overrides=words).model.layers == 2
    config = configured(*settings(base, tmp_path / "run", "model=gpt2"))
    assert finetuning.complete(config, 1).model.family == "llama", "a file may name another model"


def test_refusals(base, tmp_path):
    printed = pipeline("stage=finetune", f"run_dir={tmp_path}", expect=2)
    assert "checkpoint.initialize_from=None: is required" in printed
    assert "data.instructions.train=[]: names no file" in printed
    wrong = ("parallel.context=2", "training.sequence_length=65", "data.infill.rate=1")
    printed = pipeline(*settings(base, tmp_path / "run", *wrong), expect=2)
    for said in ("parallel.context=2", "training.sequence_length=65: must not exceed model.max_positions=64", "data.infill.rate"):
        assert said in printed
    printed = pipeline(*settings(base, tmp_path / "run", "training.epochs=2"), expect=2)
    assert "training.epochs=2.0: and training.steps=30 both set the length of the run" in printed
    printed = pipeline(*settings(base, tmp_path / "run", "tokenizer.chat_template=chatml"), expect=2)
    assert "tokenizer.chat_template=chatml: needs the special tokens <|im_start|>, <|im_end|>" in printed
    printed = pipeline(*settings(base, tmp_path / "run", 'training.frozen=["*","blocks.7.*"]'), expect=2)
    assert "blocks.7.*: matches no weight" in printed
    assert "leaves nothing to train in the model" in printed
    assert "initialize_from" in pipeline(*settings(base, tmp_path / "run", f"checkpoint.fork={base}/checkpoints/step-00000000"), expect=2)
    assert "contains no checkpoint" in pipeline(*settings(tmp_path / "no", tmp_path / "run"), expect=2)
    assert not (tmp_path / "run" / "config.yaml").exists()
