"""Command lines: what Hydra would accept or do in its own way is refused in one message with exit code 2, or works."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import pipeline.stages
from pipeline.common import knobs
from pipeline.config import foreign_names
from pipeline.config.paths import CONF_DIR
from pipeline.config.rules.objectives import RULES
from pipeline.config.schema import RunConfig
from pipeline.config.stages import READS, STAGES
from pipeline.data.load.objectives.registry import OBJECTIVES
from pipeline.launch import snapshot
from pipeline.models.config_classes import CONFIG_CLASSES
from tests.helpers import ROOT, one_in, with_stage

FILES = {
    "experiment/short.yaml": "# @package _global_\ntraining: {steps: 3}\noptimizer: {warmup_steps: 1}\n",
    "experiment/typo.yaml": "# @package _global_\ntraining: {stepz: 3}\n",
    "experiment/added.yaml": "# @package _global_\nfoo: 3\n",
    "experiment/missing.yaml": "# @package _global_\ndefaults: [{override /model: lama-tiny}]\n",
    "experiment/evaluated.yaml": "# @package _global_\ndefaults: [{override /stage: evaluate}]\n",
    "experiment/named.yaml": "# @package _global_\nstage: {name: evaluate}\n",
    "model/own.yaml": "defaults: [/schema/model/llama@_here_, _self_]\nlayers: 2\nhidden: 64\nheads: 4\nkv_heads: 4\nffn_hidden: 64\n",
    "model/nofamily.yaml": "layers: 3\n",
    "model/broken.yaml": "layers: [2\n",
    "notes.txt": "no configuration",
}


@dataclasses.dataclass
class Ended:
    """How a command ended: its exit code, what it printed, and the configurations of the stages that it ran."""

    code: int
    printed: str
    runs: list[Any]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, call_main: Callable[..., tuple[int, str]]) -> Callable[..., Ended]:
    """`command(*words)` runs a command line in this process, by default of stage=pretrain; its stages do nothing."""
    runs: list[Any] = []
    monkeypatch.setattr(pipeline.stages, "run", lambda config, _: runs.append(config))

    def run(*words: str, stage: str | None = "pretrain") -> Ended:
        runs.clear()
        code, printed = call_main(*(with_stage(words) if stage else words))
        assert "Traceback" not in printed
        return Ended(code, printed, list(runs))

    return run


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's folder of configuration files."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


#: Words of a command line -> what the refusal says, parts divided by |.
REFUSED = [
    (
        "+training.stepz=7 ++optimizer.foo.bar=1 +foo=1 +training.batch_warmup=[] +parallelism.tensor_parallel_degree=8"
        " training.recompute=full",
        "training.stepz=7: no such key|did you mean training.steps|optimizer.foo.bar=1: no such key|did you mean optimizer"
        "|foo=1: no such key|was renamed to training.batch_rampup|parallelism.tensor_parallel_degree=8: no such key"
        "|write parallel.tensor=8|training.recompute=full: no such key|set training.activation_checkpointing to selective, full or offload",
    ),
    ("+training.stepz=7 -m optimizer.lr=1e-4,2e-4", "1 problem:|training.stepz=7: no such key|did you mean training.steps"),
    (
        "--tensor-model-parallel-size=8 dry_run=true --train-iters 9 --dry-run --stage=pretrain --lr=1e-4 --no-such-option",
        "unrecognized arguments: --tensor-model-parallel-size=8 --train-iters --dry-run --stage=pretrain --lr=1e-4 --no-such-option"
        "|write parallel.tensor=8; write training.steps=9; write dry_run=true, without dashes; write stage=pretrain, without dashes"
        "; write optimizer.lr=1e-4, without dashes; --no-such-option is no key; write KEY=VALUE",
    ),
    (
        "optimizr.lr=1 parallel.tensr=2 training.steps=many model=lama-tiny stage=pretrian data.instructions.truncate=true"
        " optimizer.lr=1e-4,3e-4 parallel.tensor=1",
        "7 problems:|optimizr.lr=1: no such key\n    fix: did you mean optimizer.lr|parallel.tensr=2: no such key"
        "|training.steps=many: Value 'many' of type 'str' could not be converted to Integer|did you mean model=llama-tiny"
        "|did you mean stage=pretrain|data.instructions.truncate=true: is no longer a key"
        "|set data.instructions.too_long to truncate, drop or refuse|contains several values|add -m",
    ),
    (
        "optimizer.lr=-1 parallel.zero_stage=4 training.micro_batch_size=0 parallel.schedule=gpipe optimizer.beta2=0.9"
        " training.global_batch_size=1000000000000",
        "5 problems:|training.global_batch_size=1000000000000: must be at least 1 and at most 10000000"
        "|optimizer.lr=-1.0: must be above 0"
        "|parallel.zero_stage=4: must be at least 0 and at most 3|training.micro_batch_size=0: must be at least 1"
        "|parallel.schedule=gpipe: must be one of 1f1b, interleaved, zbv",
    ),
    (
        "parallel.tensor=3 parallel.pipeline=64 training.sequence_length=100000 training.epochs=2 training.steps=0",
        "parallel.tensor=3: must divide model.heads|model.layers=4|world size"
        "|training.epochs=2.0: is read by stage=finetune only|set training.steps|training.steps=0: must be at least 1",
    ),
    (
        "++data.blend={web:{weight:1,wieght:2}} training.sequence_warmup=[{until_step:1,value:2,until:3}] hardware=h100"
        " +model@foo=llama-tiny ~training.steps ~data.blend.web",
        "sets wieght: no such key|did you mean weight|sets until: no such key|did you mean until_step|hardware=h100: no such key"
        "|did you mean cluster.hardware|model@foo=llama-tiny: no such key|~training.steps: removes a key|data.blend.web=: no such key",
    ),
    (
        "data.blend.web.wieght=2 data.blend.books.weight=much",
        "2 problems:|data.blend.web.wieght=2: no such key|did you mean data.blend.web.weight|data.blend.books.weight=much: Value 'much'",
    ),
    ("--config-dir=OWN model=broken", "1 problem:|model=broken: its file does not compose: while parsing|correct the file"),
    (
        "~model stage.name=evaluate +stage=evaluate hydra/launcher=slurm hydra.nope=3 hydra.searchpath=[file:///tmp]",
        "~model: removes a group|set model=|stage.name=evaluate: is set by the group|write stage=evaluate"
        "|+stage=evaluate: is chosen, not added|write stage=evaluate|hydra/launcher=slurm: launches the runs of a sweep|add -m"
        "|hydra.nope=3: is refused by Hydra|write --config-dir=FOLDER",
    ),
    (
        "++stage.name=evaluate model=llama-tiny,gpt-tiny dry_run.rank=5 dry_run.world_size=5 tracking.name=a=b run_dir=~/x",
        "stage.name=evaluate: is set by the group|write stage=evaluate|contains several values|add -m"
        "|dry_run.rank=5: has no effect without dry_run=true|dry_run.world_size=5: has no effect without dry_run=true"
        "|quote the value for Hydra and for the shell: \"tracking.name='a=b'\"|contains characters with a special meaning"
        "|write run_dir=$HOME/x",
    ),
    ("stage={}", "stage={}: must be one of"),
    ("model=llama-tiny,lama-tiny -m", "1 problem:|model=lama-tiny: must be one of|did you mean model=llama-tiny"),
    ("hydra/launcher=brew -m", "hydra/launcher=brew: is refused by Hydra"),
    (
        "dry_run=true dry_run.rank=5 tracking.name=$(x) data.input=[,x] optimizer.lr==3 run_dir=OWN/notes.txt cluster.hardware=nope",
        "dry_run.rank=5: must be less than the world size 1|for the shell: 'tracking.name="
        "|close all brackets, quote the items for Hydra|write optimizer.lr=3|notes.txt: is a file, not a folder"
        "|set run_dir to another path|cluster.hardware=nope: must be one of a100-40",
    ),
    (
        "--config-name=foo --config-path=conf --experimental-rerun=x --resolve --package=optimizer",
        "--config-name: is not supported|--config-dir=FOLDER experiment=NAME|--config-path: is not supported"
        "|--config-dir=FOLDER experiment=NAME|--experimental-rerun: is not supported|--resolve: requires --cfg"
        "|--package: requires --cfg",
    ),
    ("--config-dir=nowhere", "--config-dir=nowhere: is not a folder"),
    ("stage=plan stage.table=rows.csv", "stage.table=rows.csv: is no longer a key|tools/plan_table ROWS.csv OUT.csv"),
    ("stage=evaluate stage.apply_chat_template=true", "stage.apply_chat_template=True: is read with stage.tasks only"),
    ("stage=quantize", "write stage=convert stage.quantize=int4"),
    ("--help optimzer", "--help=optimzer: is not a stage, a group, a model family|did you mean optimizer"),
    (
        "stage=pretrain checkpoint.every=500 checkpoint.keep_every=300",
        "no checkpoint: none is written at a multiple|a multiple of checkpoint.every",
    ),
    ("stage=pretrian --help", "did you mean pretrain"),
    ("-m training.seed=1,,2", "training.seed=1,,2: has an empty value|training.seed=1,2"),
    (
        "run_dir='~/x' model.hidden=1e9 model.ffn_hidden=99999999999999999999999999 precision=fp32 precision.reduce_dtype=bf16"
        " data.instructions.train=[chats.jsonl] data.pairs.train=[a.tsv]",
        "would create a folder named ~|write run_dir=$HOME/..."
        "|model.hidden=1e9: Value '1000000000.0' of type 'float' could not be converted to Integer"
        "|9999999999: makes weights of more bytes than PyTorch can count"
        "|precision.reduce_dtype=bf16: requires precision.dtype=bf16, not fp32"
        "|data.instructions.train=chats.jsonl: is not read by stage=pretrain|use stage=finetune"
        "|data.pairs.train=a.tsv: is not read by model.family=llama",
    ),
    (
        "run_dir=OWN/LONG checkpoint.initialize_from=OWN/LONG foo training.steps=3 --config-dir=OWN experiment=nothing",
        "has a name of 300 bytes; a file system allows 255, less 32 for temporary files|set run_dir to a shorter path"
        "|checkpoint.initialize_from=/|has a name of 300 bytes|'foo': is not of the form key=value"
        "|experiment=nothing: must be one of added, curriculum, demo, |FOLDER/experiment/nothing.yaml with --config-dir=FOLDER",
    ),
    (
        "run_dir=OWN/DEEP --config-dir=OWN experiment=typo",
        "bytes; Linux allows 4,095, less 256 for the files in it|its file sets training.stepz: no such key|did you mean training.steps",
    ),
    (
        "stage=plan run_dir=OWN/notes.txt cluster.hardware=h100 stage.plot=OWN stage.out=OWN/notes.txt/x.json",
        "notes.txt: is a file, not a folder|set run_dir to another path|stage.plot=OWN: is a folder, not a file|must end in .png"
        "|stage.out=OWN/notes.txt/x.json: is inside of OWN/notes.txt",
    ),
    (
        "run_dir=OWN/notes.txt/a/b precision=fp8 model.layers=1 --config-dir=OWN experiment=added",
        "is inside of OWN/notes.txt, which is a file|multiplies no 8-bit numbers"
        "|set precision.fp8_exclude_layers=0, or precision=bf16|its file sets foo: no such key",
    ),
    (
        "run_dir=OWN/link precision=fp16 precision.initial_loss_scale=1e300 --config-dir=OWN experiment=missing",
        "is a symbolic link to nothing|must be at least 1 and at most 1e+30|Could not find 'model/lama-tiny'",
    ),
    ("stage=convert stage.output=OWN/notes.txt", "stage.output=OWN/notes.txt: is a file, not a folder"),
    (
        "stage=shard data.input=[x] data.part_megabytes=1e-12 tokenizer.vocab_size=1000000000",
        "2 problems:|data.part_megabytes=1e-12: must be at least 0.001"
        "|tokenizer.vocab_size=1000000000: must be at least 257 and at most 10000000",
    ),
    ("stage=shard data.input=[x] data.shards=", "data.shards='': must name a folder|remove an unset variable"),
    (
        "stage=shard data.input=[OWN/LONG] data.shards=OWN/LONG",
        "data.input=/|data.shards=/|has a name of 300 bytes; a file system allows 255",
    ),
    (
        "stage=train_tokenizer tokenizer.path=OWN/notes.txt/a tokenizer.special_tokens=['']",
        "tokenizer.path=OWN/notes.txt/a: is inside of|tokenizer.special_tokens=['']: contains an empty token",
    ),
    ("stage=plan cluster.hardware=h100 cluster.tasks_per_node=0", "cluster.tasks_per_node=0: must be at least 1"),
    ("dry_run=true cluster.nodes=0", "1 problem:|cluster.nodes=0: must be at least 1"),
    ("stage=generate stage.prompts=x stage.temperature=1e-300", "divides the logits, and must be 0 or at least 1e-06"),
    ("stage=generate stage.prompts=x stage.output=OWN/LONG", "stage.output=/|has a name of 300 bytes"),
    ("--cfg=job --package=optimizr", "package 'optimizr' not found"),
    ("--cfg=job training.stepz=3", "training.stepz=3: no such key"),
    ("--cfg=job -m", "--cfg: contradicts --multirun"),
    ("--info=nope", "invalid choice"),
    ("--config-dir=OWN experiment=named", "stage.name=evaluate: is not the stage whose keys were composed"),
    ("--config-dir=OWN model=nofamily", "model=?: has no family"),
    ("stage=[shard,pretrain]", "stage=[shard,pretrain]: must be one of"),
    ("stage=null", "stage=null: must be one of"),
    ("--stage shard", "write stage=shard, without dashes"),
    ("stage=tokenize data.tokens=OWN/notes.txt", "data.tokens=OWN/notes.txt: is a file"),
    ("--config-dir=OWN experiment=typo -m optimizer.lr=1e-4,2e-4", "1 problem:|its file sets training.stepz: no such key"),
]


@pytest.mark.parametrize("words, said", [*REFUSED[:8], *one_in(3, REFUSED[8:])])
def test_refused(command: Callable[..., Ended], own: Path, words: str, said: str) -> None:
    (own / "link").symlink_to(own / "nothing")
    for name, text in {"LONG": "x" * 300, "DEEP": "/".join(["y" * 200] * 25), "OWN": str(own)}.items():
        words, said = words.replace(name, text), said.replace(name, text)
    ended = command(*words.split())
    assert ended.code == 2, ended.printed
    assert not ended.runs
    for text in said.split("|"):
        assert text in ended.printed


def test_a_stage_is_named(command: Callable[..., Ended], own: Path) -> None:
    """By the command line or by its experiment; what Hydra prints needs none."""
    ended = command("training.stepz=3", stage=None)
    assert (ended.code, ended.runs) == (2, [])
    for text in ("2 problems:", "stage=?: is required", "write stage=NAME, NAME being one of shard, ", "training.stepz=3: no such key"):
        assert text in ended.printed
    ended = command(f"--config-dir={own}", "experiment=evaluated", "run_dir=x", stage=None)
    assert [config.stage.name for config in ended.runs] == ["evaluate"], ended.printed
    assert command("--cfg=job", stage=None).code == 0


PHASES = "data.blend={a:{}} data.phases=[{until_tokens:999999,weights:{a:1}},{weights:{a:2}}] data.phases.1.weights.a=3"


@pytest.mark.parametrize(
    "words, steps",
    [
        ("--config-dir OWN experiment=short", [3]),
        ("experiment=short --config-dir=OWN -m training.steps=300,400", [300, 400]),
        ("experiment=[demo] training.steps=200", [200]),
        ("-m --config-dir OWN experiment=[curriculum,short],[demo]", [3, 500]),
        ("experiment=null", [1000]),
        ("--config-dir=OWN model=own", [1000]),
        ("data.blend={web:{weight:1},books:{weight:2}} ~data.blend.books", [1000]),
        (f"lora.rank=4 lora.rank_pattern.a=1 {PHASES}", [1000]),
    ],
)
def test_accepted(command: Callable[..., Ended], own: Path, words: str, steps: list[int]) -> None:
    ended = command(*words.replace("OWN", str(own)).split())
    assert ended.code == 0, ended.printed
    assert [config.training.steps for config in ended.runs] == steps


def test_keys_of_a_corpus(command: Callable[..., Ended]) -> None:
    """data.blend.NAME.KEY adds the corpus or changes that of another word, in any run of a sweep."""
    ended = command("data.blend.web.weight=3", "data.blend.books.weight=2", "data.blend.books.max_epochs=4")
    assert ended.code == 0, ended.printed
    blend = ended.runs[0].data.blend
    assert (blend["web"].weight, blend["books"].weight, blend["books"].max_epochs) == (3, 2, 4)
    swept = command("-m", "data.blend={web:{weight:1},books:{}}", "data.blend.web.max_epochs=2", "data.blend.web.weight=3,4")
    found = [[(entry.weight, entry.max_epochs) for entry in run.data.blend.values()] for run in swept.runs]
    assert found == [[(3, 2), (None, None)], [(4, 2), (None, None)]]


@pytest.mark.parametrize(
    "words, said",
    [
        ("--cfg job training.steps=300", "steps: 300"),
        ("--cfg=job --resolve --package=optimizer", "# @package optimizer"),
        ("--cfg hydra", "hydra:"),
        ("--config-dir=OWN experiment=short --info=searchpath", "file://OWN"),
        ("training.steps=300 --info", "steps: 300"),
        ("--version", "tannschen 0."),
        ("--help optimizer", "optimizer.beta1=0.9                            float        decay rate of the first moment"),
        ("--help stage=generate", "stage.max_tokens=256"),
        ("stage=evaluate --help", "stage.stride=None                              int | None "),
        ("stage=convert -h", "run_dir=runs/default"),
        ("--help smollm3", "keys of model family smollm3:"),
        ("--help warmup_steps", "optimizer.warmup_steps=100"),
        ("--help tensor_model_parallel_size", "tensor_model_parallel_size of another framework or program: write parallel.tensor=VALUE"),
        ("--help micro-batch-size", "training.micro_batch_size="),
        ("--help tensorboard", "tools/watch and stage=report draw them"),
        ("--help s3", "s3://BUCKET/FOLDER in data.input"),
        ("--help walltime", "set cluster.time"),
        ("--help load", "load of another framework or program: leave it out: checkpoint.resume=auto continues run_dir"),
        ("-sc install=bash", "complete -o nospace -o default -F hydra_bash_completion"),
    ],
)
def test_what_hydra_prints(command: Callable[..., Ended], own: Path, words: str, said: str) -> None:
    ended = command(*words.replace("OWN", str(own)).split())
    assert ended.code == 0
    assert not ended.runs
    assert said.replace("OWN", str(own)) in ended.printed


def test_help_lists_stages_and_keys(command: Callable[..., Ended]) -> None:
    text = command("--help", stage=None).printed
    for said in ("stage=shard", "stage=convert", "parallel.zero_stage=1", "at most 3", "cluster=alps|devcluster|", "training.steps=1000"):
        assert said in text
    assert "\x1b" not in text


def test_jobs_of_a_sweep_read_own_files(command: Callable[..., Ended], own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read a copy, which has them beside those of conf/; of two files with the same name, Hydra reads that of conf/."""
    monkeypatch.chdir(ROOT)
    sweep = ("-m", "hydra/launcher=slurm", "cluster=devcluster", "dry_run=true", f"run_dir={tmp_path}/sweep")
    texts = [command(*sweep, *words).printed for words in ((), (f"--config-dir={own}", "experiment=short"))]
    copies = [next(line for line in text.splitlines() if "PIPELINE_CONF=" in line) for text in texts]
    assert copies[0] != copies[1]
    assert "experiment=short" in texts[1]
    (own / "experiment" / "demo.yaml").write_text("training: {steps: 1}\n")
    snapshot.write_conf_copy(tmp_path / "copy", [own])
    for name in ("config.yaml", "experiment/demo.yaml"):
        assert (tmp_path / "copy" / name).read_text() == (CONF_DIR / name).read_text()
    assert (tmp_path / "copy" / "experiment" / "short.yaml").is_file()
    assert not (tmp_path / "copy" / "notes.txt").exists()


def test_a_composed_configuration_is_frozen(command: Callable[..., Ended]) -> None:
    (config,) = command("training.sequence_warmup=[{until_step:1,value:128}]").runs
    nodes = [config, config.training.sequence_warmup[0], *(getattr(config, item.name) for item in dataclasses.fields(RunConfig))]
    for node in nodes:
        for item in dataclasses.fields(node) if dataclasses.is_dataclass(node) else ():
            with pytest.raises(FrozenInstanceError):
                setattr(node, item.name, None)


@pytest.mark.parametrize("line, offered", [("me stage=pret", "stage=pretrain"), ("me stage=evaluate stage.str", "stage.stride=")])
def test_completion(command: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, line: str, offered: str) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert command("-sc", "query=bash").printed.split() == [offered]


def test_the_help_of_a_stage_has_the_groups_that_it_reads(command: Callable[..., Ended]) -> None:
    assert READS.keys() == STAGES.keys()
    for stage, groups in READS.items():
        printed = command(f"stage={stage}", "--help").printed
        for key, _, _ in knobs.walk(STAGES[stage][0](name=stage), "stage."):
            assert f"  {key}=" in printed
        for group in groups:
            assert f"keys of group {group}" in printed


def test_the_page_of_all_keys(command: Callable[..., Ended], tmp_path: Path) -> None:
    """Each key with its meaning, who reads it, and the files that set it; the same key of other stages is a row of its own."""
    assert " keys" in command("--help", str(tmp_path / "keys.html"), stage=None).printed
    text = unescape((tmp_path / "keys.html").read_text())
    rows = {key: " ".join(re.sub("<[^>]+>", " ", row).split()) for key, row in re.findall(r'<tr id="(.*?)">(.*?)</tr>', text, re.DOTALL)}
    keys = {key for key, _, _ in knobs.walk(RunConfig())} | {f"stage.{item.name}" for item in dataclasses.fields(STAGES["ledger"][0])}
    assert keys - {"stage.name"} - rows.keys() == set()
    for word in (
        "= 0.0003",
        "peak learning rate",
        "float, above 0 and at most 10",
        "4 readers",
        "stage=rehearse",
        "experiment=demo: 0.004",
        "in other frameworks: learning_rate",
    ):
        assert word in rows["optimizer.lr"]
    assert "use_distributed_optimizer" in rows["parallel.zero_stage"], "also names whose values differ"
    assert "model family llama" in text
    assert text.count('<tr id="stage.checkpoint">') > 1


def test_every_objective_has_rules() -> None:
    assert set(RULES) == set(OBJECTIVES)


def test_names_of_other_frameworks_lead_to_keys_that_exist() -> None:
    keys = {key for key, _, _ in knobs.walk(RunConfig())}
    keys |= {key for family in CONFIG_CLASSES.values() for key, _, _ in knobs.walk(family(), "model.")}
    keys |= {key for key, _, _ in knobs.walk(STAGES["convert"][0](), "stage.")}
    named = {*foreign_names.SAME.values(), *re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", " ".join(foreign_names.OTHER.values()))}
    assert named - keys - {"run_dir", "hydra.launcher.at_once"} == set()
    assert {key.rpartition(".")[2] for key in keys} & {*foreign_names.SAME, *foreign_names.OTHER} == set(), "a key has the same name"
