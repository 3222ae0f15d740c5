"""lm-eval on native weights: the log-likelihoods and texts are those of its stock Hugging Face model on the export."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline.common import ranks
from pipeline.common.errors import UserError
from pipeline.data.tokenize import chat_template
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.evaluation import harness, likelihood
from pipeline.evaluation.likelihood import Question, Scored, completions, log_likelihoods
from pipeline.evaluation.tasks import Replicas
from pipeline.generation.runner import Runner
from pipeline.parallel import mesh as meshes
from pipeline.stages import evaluate
from tests.conversion.test_huggingface_export import InMemory, export, random_model, tokenizer_folder  # noqa: F401 - a fixture
from tests.helpers import pipeline
from tests.models.small_decoders import CONFIGS
from tests.world import configured

pytest.importorskip("lm_eval")

LONG = "Im Wald steht ein Tännchen, es hat von lauter Nadeln ein grünes Kleid. " * 3
PAIRS = [("Im Wald ", "steht ein"), ("", "Tännchen"), (LONG, " 123"), (LONG, " 456"), ("x ==", " 3:"), ("x <|endoftext|>", "grün")]
ENDS = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}


@pytest.mark.parametrize("name", ["llama-grouped", pytest.param("gpt", marks=pytest.mark.long)])
def test_requests_have_the_results_of_the_stock_model(name, tmp_path, tokenizer_folder, monkeypatch):  # noqa: F811 - the fixture
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    monkeypatch.setattr(likelihood, "BATCH_TOKENS", 100)  # several batches
    config = replace(CONFIGS[name], max_positions=40)
    model = random_model(config).eval()
    export(tmp_path, model, config, tokenizer_folder)
    runner, text = Runner(model, 40), harness.Text(TextEncoder(tmp_path, "<|endoftext|>", spelled="token"))

    def score(questions):
        return log_likelihoods(runner, config.vocab_size, questions)

    def complete(prompts, sampling, ends):
        return completions(runner, sampling, harness.stopping(text, **ends), prompts)

    ours = harness._language_model(text, 40, score, complete)
    stock = HFLM(pretrained=str(tmp_path), device="cpu", dtype="float32", batch_size=2)
    cases = {
        "loglikelihood": PAIRS,
        "loglikelihood_rolling": [(LONG,), ("Im Wald",)],
        "generate_until": [("Im Wald", ENDS), ("x", ENDS), (LONG, ENDS)],
    }
    for kind, arguments in cases.items():
        requests = [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]
        found, expected = (getattr(each, kind)(requests, disable_tqdm=True) for each in (ours, stock))
        if kind == "loglikelihood":
            assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
            found, expected = ([value for value, _ in each] for each in (found, expected))
        assert found == (expected if kind == "generate_until" else pytest.approx(expected, abs=1e-4))
    with pytest.raises(UserError, match="is less than the 41 tokens"):
        score([Question([0], [1] * 41)])
    with pytest.raises(UserError, match="leaves no room for a prompt and the 40 tokens"):
        complete([(0, [1])], harness.Sampling(), {"max_tokens": 40, "strings": []})


TASK = """task: numbers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}]
"""
WRITES = """task: writes
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4}}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
metric_list: [{{metric: exact_match}}]
"""


def asked(model, tasks: Path, **more) -> list:
    """The arguments of all requests that lm-eval makes of a model for the task numbers."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = simple_evaluate(model=model, tasks=["numbers"], num_fewshot=2, task_manager=manager, bootstrap_iters=0, **more)
    return [sample["arguments"] for sample in found["samples"]["numbers"]]


@pytest.mark.long
@pytest.mark.parametrize("shipped", ["chatml", "plain"])
def test_questions_as_chats_are_those_of_the_stock_model(shipped, tmp_path, tokenizer_folder, monkeypatch):  # noqa: F811 - the fixture
    """apply_chat_template, fewshot_as_multiturn and system_instruction, and a text that is continued."""
    from lm_eval.models.huggingface import HFLM

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    config = CONFIGS["gpt"]
    folder = export(tmp_path / "stock", random_model(config).eval(), config, tokenizer_folder)
    source = Path(chat_template.__file__).with_name("chat_templates") / f"{shipped}.jinja"  # without chatml's special tokens
    (folder / chat_template.FILE).write_text(source.read_text())
    text = harness.Text(TextEncoder(folder, "<|endoftext|>"), chats=chat_template.load(folder))
    ours = harness._language_model(
        text, 64, lambda questions: [Scored(0.0, False)] * len(questions), lambda prompts, *_: ["x"] * len(prompts)
    )
    stock = HFLM(pretrained=str(folder), device="cpu", dtype="float32")
    (tmp_path / "tasks").mkdir()
    lines = [{"question": f"{number} +", "choices": [" x", " y"], "answer": number % 2} for number in range(4)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "tasks/numbers.yaml").write_text(TASK.format(file=tmp_path / "questions.jsonl"))
    monkeypatch.setattr(type(stock), "_loglikelihood_tokens", lambda _, requests, **__: [(0.0, False)] * len(requests))
    for multiturn in (True, False):
        options = {"apply_chat_template": True, "fewshot_as_multiturn": multiturn, "system_instruction": "Add."}
        found = asked(ours, tmp_path / "tasks", **options)
        assert found == asked(stock, tmp_path / "tasks", **options)
        assert "Add." in str(found)
    for last in ("Kleid", "Kleid  "):
        begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": last}]
        assert ours.apply_chat_template(begun, False) == stock.apply_chat_template(begun, False)


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer_folder) -> Path:  # noqa: F811 - the fixture
    """A run directory with an imported model."""
    folder = tmp_path_factory.mktemp("run")
    config = CONFIGS["llama-grouped"]
    export(folder / "stock", random_model(config), config, tokenizer_folder)
    pipeline("stage=convert", f"stage.input={folder / 'stock'}", f"run_dir={folder}")
    return folder


def test_task_files_are_evaluated(run, tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    lines = [{"question": f"{number} +", "choices": [" x", " y", " Wald"], "answer": number % 3} for number in range(7)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in (("numbers", TASK), ("writes", WRITES), ("broken", TASK.replace("numbers", "broken"))):
        (tasks / f"{name}.yaml").write_text(text.format(file=tmp_path / ("no" if name == "broken" else "questions.jsonl")))

    def evaluated(*more: str) -> dict:
        common = ("stage=evaluate", f"run_dir={run}", f"tokenizer.path={run / 'imported'}", "precision=fp32")
        try:
            evaluate.run(configured(*common, f"stage.task_folder={tasks}", *more), ranks.detect({}))
        finally:
            meshes.destroy_process_group()  # after an error, the process would have ended
        return json.loads((run / "evaluations/step-00000000-tasks.json").read_text())["scores"]

    with caplog.at_level("INFO", "pipeline"):
        found = evaluated("stage.tasks=[numbers,writes]", "stage.few_shot=1", "stage.checkpoint=all")
        assert "numbers  acc" in caplog.text
        assert found["numbers"].keys() >= {"acc", "acc_stderr"}
        assert (found["numbers"]["samples"], found["writes"]["num_fewshot"]) == (7, 1)
        assert found == evaluated("stage.tasks=[numbers,writes]", "stage.few_shot=1", "stage.checkpoint=all")
        assert "1 of 1 checkpoints are evaluated already" in caplog.text
    for task, said in (("nmbers", "choose from broken, numbers, writes"), ("broken", "broken of .* cannot be loaded: FileNotFoundError")):
        with pytest.raises(UserError, match=said):
            evaluated(f"stage.tasks=[{task}]")
    printed = pipeline("stage=evaluate", f"run_dir={run}", "stage.tasks=[numbers]", "parallel.context=2", expect=2)
    assert "stage.task_folder=None: is required" in printed
    assert "parallel.context=2: is not supported by stage.tasks" in printed


QUESTIONS = [Question([1, 2, 3, *range(number)], [5, number]) for number in range(1, 8)]


def scores_of(replicas, runner):
    """The scores of questions, and completions of their contexts."""

    def compute(items, generate=False):
        if generate:
            return completions(runner, harness.Sampling(), harness.Stopping(4, decode=str), items)
        return log_likelihoods(runner, CONFIGS["llama-grouped"].vocab_size, items)

    def work():
        return again.map(QUESTIONS), again.map([(n, q.context) for n, q in enumerate(QUESTIONS)], generate=True)

    again = replicas(compute)
    return again.lead(work), again


def on_ranks(axis):
    """The results of this rank, and how a mistake ends."""
    from pipeline.config.layout import Layout
    from pipeline.generation import weights
    from pipeline.parallel.pipeline_relay import Relay

    config = CONFIGS["llama-grouped"]
    sizes = () if axis == "data" else (f"parallel.{axis}=2",)
    settings = weights.for_generation(configured("stage=generate", *sizes, "precision=fp32"), config)
    mesh = meshes.build_mesh(Layout.of(settings, 2), torch.device("cpu"))
    model = next(weights.load(InMemory(random_model(config)), settings, mesh).stage_modules())
    relay = Relay(mesh) if axis == "pipeline" else None
    runner = Runner(model, config.max_positions, relay=relay, vocab_size=config.vocab_size, hidden=config.hidden)
    results, replicas = scores_of(lambda compute: Replicas(mesh, compute), runner)
    with pytest.raises(UserError, match="tokens of a continuation"):
        replicas.lead(lambda: replicas.map([*QUESTIONS, Question([1], [1] * 999)]))
    return results


@pytest.mark.parametrize("axis", ["data", "tensor", "pipeline"])
def test_layouts_have_the_scores_of_one_process(axis, worlds):
    alone = SimpleNamespace(lead=lambda work: work(), map=None)
    runner = Runner(random_model(CONFIGS["llama-grouped"]).eval(), CONFIGS["llama-grouped"].max_positions)

    def one(compute):
        alone.map = compute
        return alone

    (scores, texts), _ = scores_of(one, runner)
    found, other = worlds(2).run(on_ranks, axis)
    assert other is None
    assert found[1] == texts
    assert [each.greedy for each in found[0]] == [each.greedy for each in scores]
    assert [each.value for each in found[0]] == pytest.approx([each.value for each in scores], abs=1e-5)
