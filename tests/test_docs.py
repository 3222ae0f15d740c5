"""The commands in all READMEs compose, their links, paths and keys exist, and the map of the code is complete."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.common import knobs
from pipeline.config import layout
from pipeline.config.command_line import NAMED, parse, sweep_values
from pipeline.config.paths import CONF_DIR
from pipeline.config.rules import check
from pipeline.config.schema import RunConfig
from pipeline.config.stages import STAGES
from pipeline.models.config_classes import CONFIG_CLASSES
from tests.helpers import ROOT, environment, free_port, pipeline
from tests.world import configured

#: Where is what, on one page.
MAP = ROOT / "pipeline/README.md"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / ".github/CONTRIBUTING.md",
    ROOT / "tools/README.md",
    MAP,
    ROOT / "conf/README.md",
    ROOT / "tools/audit/README.md",
    ROOT / "tools/bench/README.md",
    ROOT / "tools/study/README.md",
    *sorted((ROOT / "pipeline").glob("*/README.md")),
]
#: With what one tool has printed, which names tensors.
LINKED = [*DOCUMENTS, ROOT / "tools/mutants/README.md"]
README = DOCUMENTS[0].read_text(encoding="utf-8")
TEXT = "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
#: Lines of the ```bash blocks, without comments.
LINES = list(dict.fromkeys(line for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()))
#: Commands that start a stage: these lines, and commands within sentences.
COMMANDS = [*LINES, *re.findall(r"`([^`\n]*(?:-m pipeline |\.sbatch )[^`\n]*)`", TEXT)]


def words(command: str) -> list[str]:
    """A command as the shell reads it, the outermost `$(...)` and assignments taken off."""
    return shlex.split(re.sub(r"^\w+=\$\((.*)\)$", r"\1", command), comments=True)


def option(command: list[str], name: str, default: int) -> int:
    """The number that a launcher gets: `--name=4`, or `-n 4`."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word.startswith(f"{name}="):
            return int(word.partition("=")[2])
        if word == name:
            return int(following)
    return default


def started() -> Iterator[tuple[list[str], int]]:
    """Every start of a stage in the README: the overrides, and the ranks it would have."""
    for command in COMMANDS:
        line = words(command)
        if "pipeline" in line:
            ranks = option(line, "-n", 1) * option(line, "--nproc_per_node", 1)
            yield line[line.index("pipeline") + 1 :], ranks
        for position, word in enumerate(line):
            if stage := re.fullmatch(r"slurm/(\w+)\.sbatch", word):
                nodes = option(line, "--nodes", 1) * option(line, "--ntasks-per-node", 1)
                yield [f"stage={stage[1]}", *line[position + 1 :]], option(line, "--ntasks", nodes)


def is_complete(overrides: list[str]) -> bool:
    """Whether a command can be composed: it is not `--help`, and has no placeholder."""
    return overrides != ["--help"] and not any("NAME" in word or "..." in word for word in overrides)


STARTS = [
    (list(overrides), ranks) for overrides, ranks in dict.fromkeys((tuple(o), r) for o, r in started()) if is_complete(list(overrides))
]
SWEEPS = [overrides for overrides, _ in STARTS if "-m" in overrides]


@functools.cache
def example(name: str) -> Path:
    """A file that a README writes by `echo '...' > NAME`, in a temporary folder."""
    (content,) = re.findall(rf"^echo '(.*)' > {re.escape(name)}$", "\n".join(path.read_text() for path in DOCUMENTS), re.MULTILINE)
    path = Path(tempfile.mkdtemp()) / name
    path.write_text(content)
    return path


@functools.cache
def checked(overrides: tuple[str, ...], ranks: int) -> RunConfig:
    """The configuration as the entry composes and checks it."""
    command = parse([word.replace("=ds_config.json", f"={example('ds_config.json')}") for word in overrides])
    assert not command.violations
    config = configured(*command.overrides)
    check.check(config, layout.job_size(config, ranks))
    return config


def test_every_stage_is_shown() -> None:
    assert {checked(tuple(o), r).stage.name for o, r in STARTS if "-m" not in o} == set(STAGES)
    assert SWEEPS


@pytest.mark.parametrize("overrides, ranks", [pytest.param(o, r, id=" ".join(o)) for o, r in STARTS if "-m" not in o])
def test_commands_are_legal(overrides: list[str], ranks: int) -> None:
    checked(tuple(overrides), ranks)


@pytest.mark.parametrize("overrides", SWEEPS, ids=" ".join)
def test_points_of_sweeps_are_legal(overrides: list[str]) -> None:
    """The first point, and the one that has the last value of every list."""
    lists = [sweep_values(word) for word in overrides if word != "-m" and not word.startswith("hydra/launcher=")]
    assert any(len(values) > 1 for values in lists)
    for place in (0, -1):
        checked(tuple(values[place] for values in lists), 1)


@pytest.mark.parametrize("overrides", [SWEEPS[0], *(pytest.param(each, marks=pytest.mark.long) for each in SWEEPS[1:])], ids=" ".join)
def test_sweeps_are_legal(overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    kept = [o for o in overrides if not o.startswith(("run_dir=", "dry_run="))]
    assert "#SBATCH" in pipeline(*kept, f"run_dir={tmp_path}", "dry_run=true")


EXPERIMENTS = sorted(file.stem for file in (CONF_DIR / "experiment").glob("*.yaml"))


def experiment_and_stage(name: str, stage: str) -> object:
    """The default tier has every experiment's training, and every stage of one experiment."""
    default = stage == "pretrain" or name == EXPERIMENTS[list(STAGES).index(stage) % len(EXPERIMENTS)]
    return pytest.param(name, stage, marks=() if default else pytest.mark.long)


#: Phases are of pretraining.
LEGAL = [(name, stage) for name in EXPERIMENTS for stage in STAGES if name != "curriculum" or stage not in ("finetune", "rehearse")]


@pytest.mark.parametrize(("name", "stage"), [experiment_and_stage(name, stage) for name, stage in LEGAL])
def test_experiments_are_legal_for_every_stage(name: str, stage: str) -> None:
    required = {
        "generate": ["stage.prompts=prompts.jsonl"],
        "submit": ["submit.stages=[shard]"],
        "rehearse": ["cluster.hardware=h100"],
    }.get(stage, [])
    parallel = configured(f"experiment={name}").parallel
    if stage in ("plan", "rehearse"):
        required = [*required, f"cluster.tasks_per_node={parallel.model_ranks}"]  # of the job that is planned
    for replicas in (1, 2):
        checked((f"experiment={name}", f"stage={stage}", *required), replicas * parallel.model_ranks)


def test_the_mistake_is_answered_as_shown() -> None:
    shown = re.search(r"^    \$ python -m pipeline (.*)\n((?:    .+\n)+)", README, re.MULTILINE)
    assert pipeline(*shown[1].split(), expect=2) == re.sub("^    ", "", shown[2], flags=re.MULTILINE)


#: Section of the tutorial -> its blocks of commands, each with the lines that are shown below it.
TUTORIAL = {
    section.partition("\n")[0]: re.findall(r"```bash\n(.*?)```\n\n?((?:    [^\n]*\n|\n(?=    ))*)", section, re.DOTALL)
    for section in (ROOT / "conf/README.md").read_text(encoding="utf-8").split("\n## ")
}
SLURM, SITE = "The same on Slurm", "64 GPUs of a site"


def follow(section: str, folder: Path, **variables: str) -> None:
    """Run the commands of a section in a folder; they succeed, and print the lines that are shown, in this order, with other numbers."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for commands, shown in TUTORIAL[section]:
        words = ["bash", "-ec" if section != SITE else "-c", commands]  # tools/doctor is right to fail on a machine that is not the site
        more = environment(PATH=path, PYTHONUNBUFFERED="1", **variables)
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        done = subprocess.run(words, cwd=folder, env=more, text=True, timeout=1200, check=False, **streams)
        printed = re.sub(r"^\d\d:\d\d:\d\d ", "", done.stdout, flags=re.MULTILINE)
        assert done.returncode == 0, f"{commands}\n{printed}"
        place = 0
        for line in filter(lambda line: line not in ("", "..."), map(str.strip, shown.splitlines())):
            found = re.compile(rf"^ *{form(line)} *$", re.MULTILINE).search(printed, place)
            assert found, f"not printed, or not in this order: {line}\n{commands}\n{printed}"
            place = found.end()


def form(line: str) -> str:
    """A line with any numbers, widths of columns, NAMEs, and text in place of `...`."""
    text = re.sub(r"\d[\d,.:]*(?:e[+-]\d+)?", "7", line)
    return re.escape(text).replace("7", r"\d[\d,.:]*(?:e[+-]\d+)?").replace("NAME", r"\S+").replace(r"\.\.\.", ".*").replace(r"\ ", " +")


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which somebody has followed the tutorial up to Slurm."""
    folder = tmp_path_factory.mktemp("tutorial")
    for name in ("conf", "pipeline", "slurm", "tools"):
        (folder / name).symlink_to(ROOT / name)
    for section in TUTORIAL:
        if section not in (SLURM, SITE):
            follow(section, folder)
    return folder


@pytest.mark.long
@pytest.mark.world
def test_the_tutorial(walked: Path) -> None:
    answers = (walked / "village/chat/generated/completions.jsonl").read_text()
    assert "Clara sells roses." in answers
    assert "Anna verkauft Brot." in answers
    assert sum(len(blocks) for section, blocks in TUTORIAL.items() if section not in (SLURM, SITE)) == 10


@pytest.mark.long
def test_the_tutorial_on_a_site(walked: Path) -> None:
    follow(SITE, walked)


@pytest.mark.long
@pytest.mark.slurm
def test_the_tutorial_on_slurm(walked: Path) -> None:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if os.geteuid() != 0 or not all(shutil.which(name, path=path) for name in ("slurmctld", "munged")):
        pytest.skip("requires root, and the packages slurm-wlm and munge")
    with tempfile.TemporaryDirectory() as base:
        variables = {"DEVCLUSTER_BASE": base, "DEVCLUSTER_PORT": str(free_port())}
        try:
            follow(SLURM, walked, **variables)
        finally:
            subprocess.run([ROOT / "tools/devcluster", "stop"], env=environment(**variables), check=True)


def test_tools_have_the_options_shown() -> None:
    shown = [words(line) for line in LINES if line.startswith("tools/")]
    assert {line[0] for line in shown} >= {"tools/demo", "tools/test", "tools/numerics", "tools/bench_train"}
    shared = (ROOT / "tools/bench/harness.py").read_text(encoding="utf-8")
    for tool, *arguments in shown:
        assert os.access(ROOT / tool, os.X_OK), tool
        source = (ROOT / tool).read_text(encoding="utf-8")
        source += shared if "harness" in source else ""
        for argument in arguments:
            if argument.startswith("--"):
                assert argument in source, f"{tool} {argument}"


def test_the_map_has_every_package() -> None:
    packages = {f"pipeline/{path.name}/" for path in (ROOT / "pipeline").iterdir() if (path / "__init__.py").exists()}
    assert {name for name in packages if f"| `{name}` |" not in MAP.read_text(encoding="utf-8")} == set()


def test_the_tools_are_described() -> None:
    described = (ROOT / "tools/README.md").read_text(encoding="utf-8")
    tools = {path.name for path in (ROOT / "tools").iterdir() if os.access(path, os.X_OK) and path.is_file()}
    assert {name for name in tools if f"tools/{name}" not in described and f"`{name}`" not in described} == set()


@pytest.mark.parametrize("document", LINKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    targets = {target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target}
    assert {target for target in targets if target and not (document.parent / target).exists()} == set()


@pytest.mark.parametrize("document", LINKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_headings(document: Path) -> None:
    targets = re.findall(r"\]\((?![\w+]+://)([^)\s#]*)#([^)\s]+)\)", document.read_text(encoding="utf-8"))
    assert {(target, name) for target, name in targets if name not in headings(document.parent / target if target else document)} == set()


def headings(document: Path) -> set[str]:
    """The names that links to headings of a document have, as GitHub forms them."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def test_paths_in_sentences_exist() -> None:
    paths = set(re.findall(r"`((?:pipeline|conf|slurm|tools|tests)/[\w./-]*)[` ]", TEXT))
    assert len(paths) > 10
    assert {path for path in paths if "NAME" not in path and not (ROOT / path).exists()} == set()


def test_keys_in_sentences_exist() -> None:
    keys = {key for key, _, _ in knobs.walk(RunConfig())}
    keys |= {key for family in CONFIG_CLASSES.values() for key, _, _ in knobs.walk(family(), "model.")}
    keys |= {key for name, (stage, _) in STAGES.items() for key, _, _ in knobs.walk(stage(name=name), "stage.")}
    groups = "|".join({key.partition(".")[0] for key in keys if "." in key})
    shown = set(re.findall(rf"(?:^|[` '])((?:{groups})\.(?!py\b|json\b)[a-z_0-9]+(?:\.[a-z_0-9]+)*)", TEXT))
    assert len(shown) > 20
    assert {key for key in shown - keys if not key.startswith(tuple(f"{named}." for named in NAMED))} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_source_files_that_are_named_exist(document: Path) -> None:
    """By their names; a path names the end of a path here."""
    files = [f"/{path.relative_to(ROOT)}" for folder in ("pipeline", "tools", "tests") for path in (ROOT / folder).rglob("*.py")]
    named = set(re.findall(r"`([\w/]+\.py)`", document.read_text(encoding="utf-8")))
    missing = {name for name in named if not any(file.endswith(f"/{name}") for file in files)}
    assert not {name for name in missing if "NAME" not in name and not name.startswith("deepspeed/")}


def test_the_top_level_is_fixed() -> None:
    """What git tracks or would add, without dot-files."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    top = {path.partition("/")[0] for path in listed.stdout.splitlines()}
    expected = {"LICENSE", "README.md", "conf", "pipeline", "pyproject.toml", "slurm", "tests", "tools"}
    assert {name for name in top if not name.startswith(".")} == expected
