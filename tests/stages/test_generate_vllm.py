"""stage=generate with stage.engine=vllm. vLLM does not run without a GPU: stand_in_vllm.py has its names and arguments that are used."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeline.common.errors import UserError
from pipeline.common.unfinished import Unfinished
from pipeline.generation import vllm_engine
from tests.conversion.test_huggingface_export import tokenizer_folder  # noqa: F401 - a fixture
from tests.helpers import free_port, pipeline, python, start_ranks
from tests.stages import stand_in_vllm
from tests.stages.test_generate import LINES, read, run, settings  # noqa: F401 - a fixture

#: The folder of the package of an installed vLLM, or of an unpacked wheel.
INSTALLED = os.environ.get("TANNSCHEN_VLLM") or ((spec := find_spec("vllm")) and Path(spec.origin).parent)
SAMPLED = ("stage.temperature=1", "stage.top_p=0.9", "stage.top_k=50", "stage.seed=3", "stage.max_tokens=5", "stage.ignore_eos=true")


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> tuple[str, str]:
    """What Python runs in place of `-m pipeline`, where vLLM is the stand-in."""
    folder = tmp_path_factory.mktemp("packages")
    shutil.copy(stand_in_vllm.__file__, folder / "vllm.py")
    return "-c", f"import sys; sys.path.append({str(folder)!r}); from pipeline.__main__ import main_and_leave; main_and_leave()"


def with_vllm(program: tuple[str, str], *arguments: str, expect: int = 0) -> str:
    code, printed = python(*program, *arguments, "stage.engine=vllm")
    assert code == expect, printed
    return printed


def generated(folder: Path) -> list[dict]:
    return [line["generated"] for line in read(folder / "completions.jsonl")]


def test_completions_are_those_of_our_engine(run, program):  # noqa: F811 - the fixture
    """Greedy, with log-probabilities, a text at which completions stop and a penalty. The export is written once."""
    rules = ("stage.logprobs=true", "stage.stop=[e]", "stage.repetition_penalty=1.3")
    pipeline(*settings(run, *rules, output="ours"))
    printed = with_vllm(program, *settings(run, *rules, "stage.cache_gigabytes=0.5", output="theirs"))
    assert "wrote the export" in printed
    assert "vLLM: 1 GPUs, 16 sequences, 500000000 bytes" in printed
    expected, found = generated(run / "ours"), generated(run / "theirs")
    assert {each["finish_reason"] for each in expected} == {"stop", "length"}
    for ours, theirs in zip(expected, found, strict=True):
        assert theirs.pop("logprobs") == pytest.approx(ours.pop("logprobs"), abs=1e-4)
        assert theirs == ours
    assert (run / "theirs/rejected.jsonl").read_text() == (run / "ours/rejected.jsonl").read_text()
    manifest = json.loads((run / "theirs/manifest.json").read_text())
    assert manifest["settings"]["stage.engine"] == "vllm"
    assert "stage.engine" not in json.loads((run / "ours/manifest.json").read_text())["settings"]

    written = (run / "hf/manifest.json").stat().st_mtime_ns
    assert "wrote the export" not in with_vllm(program, *settings(run, "stage.ignore_eos=true", output="again"))
    assert (run / "hf/manifest.json").stat().st_mtime_ns == written
    assert "nothing to do" in with_vllm(program, *settings(run, "stage.ignore_eos=true", output="again"))


@pytest.mark.long
def test_samples_are_equal_for_any_number_of_ranks_and_after_an_interruption(run, program):  # noqa: F811 - the fixture
    """A finished part is not generated again. Of the ranks of a tensor group, one has an engine."""
    (run / "many.jsonl").write_text("".join(f'{{"prompt": "{number} Nadeln"}}\n' for number in range(70)))
    with_vllm(program, *settings(run, *SAMPLED, "stage.batch_size=2", output="one-vllm", prompts="many.jsonl"))
    expected = (run / "one-vllm/completions.jsonl").read_text().splitlines()
    assert len(set(expected)) == 70
    interrupted = Unfinished(run / "two-vllm", json.loads((run / "one-vllm/manifest.json").read_text())["settings"])
    interrupted.write("settings", interrupted.settings)
    kept = [{"prompt": "kept", "generated": {"text": "kept", "prompt_tokens": 1, "tokens": 1}}]
    interrupted.write("part-000001", {"completions": kept, "rejected": []})
    for output, more in (("two-vllm", ()), ("tensor-vllm", ("parallel.tensor=2",))):
        words = settings(run, *SAMPLED, *more, "stage.engine=vllm", output=output, prompts="many.jsonl")
        with open(run / f"{output}.log", "w") as log:
            ranks = start_ranks(2, *words, program=program, output=log.fileno())
            codes = [rank.wait(300) for rank in ranks]
        printed = (run / f"{output}.log").read_text()
        assert codes == [0, 0], printed
        found = (run / output / "completions.jsonl").read_text().splitlines()
        assert found == ([*expected[:2], json.dumps(kept[0]), *expected[4:]] if output == "two-vllm" else expected)
        assert printed.count("vLLM: ") == (1 if more else 2)


def test_refusals(run, program, tmp_path):  # noqa: F811 - the fixture
    """What vLLM cannot do is refused by name, and nothing is written; so are its own refusals, and an export of something else."""
    keys = ("stage.beams=2", "stage.prompt_lookup=true", "parallel.pipeline=2", "parallel.expert=2", "precision.fp8=rowwise")
    printed = with_vllm(program, *settings(run, *keys, "stage.min_p=0.1", "stage.top_p=0.9", output="no"), expect=2)
    for key in (*keys, "stage.min_p=0.1"):
        assert f"- {key}: ".replace("=true", "=True") in printed
    assert "stage.temperature=0.001: must be 0 or at least 0.01" in with_vllm(
        program, *settings(run, "stage.temperature=0.001", output="no"), expect=2
    )
    assert "is read with stage.engine=vllm only" in pipeline(*settings(run, "stage.export=x", output="no"), expect=2)
    if find_spec("vllm") is None:
        printed = pipeline(*settings(run, "stage.engine=vllm", f"tokenizer.path={tmp_path}", output="no"), expect=2)
        assert "stage.engine=vllm: requires vLLM, which is not installed" in printed
        assert "2 problems" in printed
    assert not (run / "no").exists()

    half = tmp_path / "half"
    pipeline("stage=convert", f"run_dir={run}", f"tokenizer.path={run / 'imported'}", "stage.dtype=fp16", f"stage.output={half}")
    printed = with_vllm(program, *settings(run, f"stage.export={half}", output="no"), expect=2)
    assert f"stage.dtype=fp32: {half} was created with stage.dtype=fp16" in printed
    printed = with_vllm(program, *settings(run, "stage.batch_size=7", f"stage.export={tmp_path / 'new'}", output="no"), expect=2)
    assert "refused on request" in printed
    assert (tmp_path / "new/manifest.json").is_file()


def test_an_engine_has_the_gpus_of_its_ranks(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert vllm_engine.gpus_of(2, 2) == ["6", "7"]
    assert vllm_engine.gpus_of(5, 1) == ["5"]
    with pytest.raises(UserError, match="this rank sees 4, of which it begins with 7"):
        vllm_engine.gpus_of(3, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert vllm_engine.gpus_of(0, 2) == []


@pytest.mark.long
def test_a_process_of_vllm_does_not_join_our_ranks(monkeypatch):
    """It creates a process group of its own, which fails with the variables of torchrun."""
    port = free_port()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    group = f"init_process_group('gloo', init_method='tcp://127.0.0.1:{port}', rank=0, world_size=1, timeout=timedelta(seconds=5))"
    code = f"from datetime import timedelta; import torch.distributed as dist; dist.{group}"
    with vllm_engine._environment(["3"]):
        subprocess.run([sys.executable, "-c", f"{code}; import os; assert os.environ['CUDA_VISIBLE_DEVICES'] == '3'"], check=True)
    assert os.environ["RANK"] == "1"


def fields_of(folder: Path, file: str, name: str) -> set[str]:
    """The fields of a class, and the arguments of its constructor and of `generate`, of a source that is not imported."""
    (found,) = (
        node
        for node in ast.walk(ast.parse((folder / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    names = {node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    functions = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "generate")]
    return names | {argument.arg for each in functions for argument in (*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs)}


@pytest.mark.skipif(INSTALLED is None, reason="vLLM is not installed, and TANNSCHEN_VLLM names no folder with its package")
def test_the_names_and_arguments_are_those_of_vllm():
    folder = Path(INSTALLED)
    known = fields_of(folder, "entrypoints/llm.py", "LLM") | fields_of(folder, "engine/arg_utils.py", "EngineArgs")
    for function in (stand_in_vllm.LLM.__init__, stand_in_vllm.LLM.generate):
        assert inspect.signature(function).parameters.keys() <= known
    for file, kind in (
        ("sampling_params.py", stand_in_vllm.SamplingParams),
        ("outputs.py", stand_in_vllm.CompletionOutput),
        ("outputs.py", stand_in_vllm.RequestOutput),
    ):
        assert {field.name for field in dataclasses.fields(kind)} <= fields_of(folder, file, kind.__name__)
    assert {"LLM", "SamplingParams", "TokensPrompt"} <= {
        node.value for node in ast.walk(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) if isinstance(node, ast.Constant)
    }
