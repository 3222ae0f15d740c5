"""Imports run one way, torch stays out of what must be light, and DeepSpeed and process groups have one owner each."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers import ROOT, environment

#: From the top down, one package a line: a package imports only from packages below it.
ORDER = (
    "__main__",
    "stages",
    "certification",
    "rehearsal",
    "launch",
    "report",
    "planner",
    "evaluation",
    "quantization",
    "training",
    "generation",
    "conversion",
    "checkpoint",
    "data",
    "preflight",
    "parallel",
    "config",
    "models",
    "layers",
    "common",
)
LEVEL = {package: level for level, package in enumerate(ORDER)}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted((ROOT / "pipeline").rglob("*.py"))}


@functools.cache
def nodes(module: str) -> list[tuple[ast.AST, bool]]:
    """The nodes of a module that import, or name something, and whether only the type checker sees them (`if TYPE_CHECKING:`)."""
    found: list[tuple[ast.AST, bool]] = []
    waiting: list[tuple[ast.AST, bool]] = [(ast.parse(SOURCES[module].read_text(encoding="utf-8")), False)]
    for node, for_types in waiting:
        for_types |= isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        waiting += [(child, for_types) for child in ast.iter_child_nodes(node)]
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute | ast.Name):
            found.append((node, for_types))
    return found


@functools.cache
def imports(module: str, *, run: bool = False) -> list[str]:
    """Every module that a module imports, at its top or inside a function; names imported from a package count as its modules.

    Args:
        run: leave out what only the type checker sees.
    """
    names: list[str] = []
    for node, for_types in nodes(module):
        if run and for_types:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively; write the whole name"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                names.append(whole if whole in SOURCES else node.module or "")
    return names


def package(module: str) -> str:
    return [*module.split("."), "__init__"][1]


def test_every_package_has_its_place_in_the_order() -> None:
    assert {package(module) for module in SOURCES} - {"__init__"} == set(ORDER)


def test_packages_import_only_from_packages_below_them() -> None:
    upward = [
        f"{module} imports {other}"
        for module in SOURCES
        for other in imports(module)
        if other in SOURCES and package(other) != package(module) and LEVEL[package(other)] < LEVEL.get(package(module), -1)
    ]
    assert not upward


def test_no_stage_imports_another() -> None:
    found = [(module, other) for module in SOURCES for other in imports(module) if package(module) == "stages" and other in SOURCES]
    assert not [pair for pair in found if package(pair[1]) == "stages"]


def test_no_import_cycle_of_modules() -> None:
    graph = {module: {other for other in imports(module, run=True) if other in SOURCES and other != module} for module in SOURCES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_only_its_engine_and_the_import_of_its_checkpoints_know_deepspeed() -> None:
    known = {m for m in SOURCES if any(i.split(".")[0] == "deepspeed" for i in imports(m))}
    assert known == {"pipeline.training.deepspeed_engine", "pipeline.conversion.deepspeed_import"}


def test_process_groups_are_made_in_parallel_alone() -> None:
    makers = {"init_process_group", "new_group", "init_device_mesh"}
    found = {
        module
        for module in SOURCES
        for node, _ in nodes(module)
        if isinstance(node, ast.Attribute | ast.Name) and (node.attr if isinstance(node, ast.Attribute) else node.id) in makers
    }
    assert {package(module) for module in found} == {"parallel"}


def test_launch_and_config_load_no_torch() -> None:
    light = [module for module in SOURCES if package(module) in ("launch", "report", "config", "common")]
    program = f"import sys\nfor name in {light}: __import__(name)\nprint(*{{'torch', 'deepspeed', 'transformers'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == ""


def test_every_rank_of_sharding_is_as_small_as_it_can_be() -> None:
    """A center runs hundreds of them."""
    program = "import sys, pipeline.stages.shard\nprint(*{'torch', 'tokenizers', 'transformers', 'datasets'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    "arguments, code",
    [
        (["--help"], 0),
        (["stage=pretrain", "optimizer.lr=-1"], 2),
        (["-m", "stage=pretrain", "optimizer.lr=1e-4,3e-4", "hydra/launcher=slurm", "cluster=devcluster", "dry_run=true"], 0),
        (["stage=submit", "submit.stages=[shard,pretrain,convert]", "dry_run=true"], 0),
        pytest.param(
            [
                *("stage=submit", "submit.stages=[pretrain]", "model=llama3-8b", "cluster=devcluster"),
                *("parallel.pipeline=2", "parallel.schedule=zbv", "dry_run=true"),
            ],
            0,
            marks=pytest.mark.long,
        ),
    ],
    ids=["help", "check", "render", "submit", "submit pipeline"],
)
def test_no_torch_is_loaded(arguments: list[str], code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "pipeline", *arguments]
    command += [f"run_dir={tmp_path}"] if code == 0 and len(arguments) > 1 else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == code, done.stderr
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "pipeline" in loaded
    assert not loaded & {"torch", "deepspeed", "transformers"}
    assert arguments != ["--help"] or "numpy" not in loaded


#: What PyTorch imports when the first operation is recorded, as a plan does.
RECORDING = {"torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor", "sympy"}
#: What start-up does without, by the first part of its name or the whole of it: compilers, and what other stages or settings need.
SLOW_TO_IMPORT = {
    *RECORDING,
    *("onnx", "transformers", "pandas", "matplotlib", "scipy", "numba", "wandb"),
    *("setuptools", "distutils", "pyarrow", "sacrebleu", "lm_eval"),
}
SMALL = (
    *("model.layers=1", "model.hidden=32", "model.heads=2", "model.kv_heads=2", "model.ffn_hidden=32", "model.vocab_size=512"),
    *("training.steps=1", "training.sequence_length=16", "training.micro_batch_size=2", "training.global_batch_size=2"),
    *("training.validation_batches=1", "optimizer.warmup_steps=0", "tracking.wandb=disabled"),
)


def imported(*arguments: object) -> list[str]:
    """The modules that a command imports, in order, and its log lines."""
    command = [sys.executable, "-X", "importtime", "-m", "pipeline", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120, env=environment())
    return [line.rpartition("|")[2].strip() if line.startswith("import time:") else line for line in done.stderr.splitlines()]


@pytest.mark.parametrize(
    "arguments, unused",
    [
        pytest.param(("stage=pretrain", *SMALL), SLOW_TO_IMPORT, marks=pytest.mark.long),
        (("stage=pretrain", "parallel.zero_stage=0", *SMALL), SLOW_TO_IMPORT | {"deepspeed"}),
        pytest.param(("stage=pretrain", "dry_run=true", *SMALL), (SLOW_TO_IMPORT - RECORDING) | {"deepspeed"}, marks=pytest.mark.long),
    ],
    ids=["ZeRO 1", "ZeRO 0", "dry run"],
)
def test_start_up_imports_only_what_it_uses(arguments: tuple[str, ...], unused: set[str], tokens: Path, tmp_path: Path) -> None:
    lines = imported(*arguments, f"data.tokens={tokens}", f"run_dir={tmp_path}/run")
    assert "torch" in lines
    assert not {line for line in lines if {line, line.split(".")[0]} & unused}
    (first,) = (number for number, line in enumerate(lines) if f"run_dir={tmp_path}/run, tannschen 0." in line)
    assert first < lines.index("torch._C"), "the first line appears before PyTorch is imported"
