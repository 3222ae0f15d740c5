"""A chain of Slurm jobs, one for each stage (stage=submit): composed, checked and rendered here, submitted by stages/submit.py."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.common.errors import UserError, Violation
from pipeline.config import compose
from pipeline.config.cluster import ClusterConfig
from pipeline.config.command_line import Command, key_of, quoted
from pipeline.config.rules import check
from pipeline.config.schema import RunConfig
from pipeline.config.stages import GPU_STAGES, STAGES, TRAINING_STAGES, Evaluate
from pipeline.launch import certified, in_use, job, moldable

#: Arguments that no job of the chain gets as they are.
_OWN = r"[+~]*(stage|submit|dry_run|run_dir)[.=]"


@dataclass(frozen=True)
class Link:
    """A job of the chain.

    Attributes:
        arguments: of `python -m pipeline` on this machine, without that of the stage.
        cluster: its sbatch options.
        world_size: number of ranks on the nodes that it asks for; of certify, those of the job that it is about.
    """

    stage: str
    arguments: tuple[str, ...]
    config: RunConfig
    cluster: ClusterConfig
    world_size: int


def idle_gpus(links: Sequence[Link]) -> Iterator[str]:
    """Yield a line for each data stage that gets several nodes with GPUs, and for each evaluation that gets more than its model needs."""
    of_training = {link.cluster.partition: link.cluster.nodes for link in links if link.stage in TRAINING_STAGES and link.cluster.hardware}
    for link in links:
        if link.stage not in GPU_STAGES and link.cluster.nodes > 1 and link.cluster.partition in of_training:
            where = f" of the partition {link.cluster.partition}" if link.cluster.partition else ""
            fix = f"'submit.overrides.{link.stage}=[cluster.partition=NAME,cluster.nodes=1,cluster.time=04:00:00]' names others"
            yield f"{link.stage} uses no GPU, and gets {link.cluster.nodes} nodes{where} with GPUs; {fix}"
        layout, on_one = link.config.parallel, link.config.parallel.model_ranks <= link.cluster.tasks_per_node
        if link.stage in ("evaluate", "generate") and link.cluster.nodes > 1 and on_one and layout.zero_stage < 3:
            fix = f"'submit.overrides.{link.stage}=[cluster.nodes=1]' asks for one"
            yield f"{link.stage} gets {link.cluster.nodes} nodes, and one holds the model in this layout; {fix}"


def links(config: RunConfig, arguments: Sequence[str]) -> list[Link]:
    """Compose and check the jobs of a chain.

    Args:
        config: of stage=submit, as far as it is valid.

    Raises:
        UserError: with the problems of all jobs, each naming its stages.
    """
    stages = [stage for stage in dict.fromkeys(config.submit.stages) if stage in STAGES]
    given = [word for word in arguments if re.match(r"[+~]*stage\.", word)]
    by_stage: dict[str, list[Violation]] = {}
    made: dict[str, Link] = {}
    for stage in sorted(stages, key=lambda stage: stage == "certify"):  # after the job that it is about
        try:
            made[stage] = _link(config, stage, arguments, made.get("pretrain"))
        except UserError as error:
            by_stage[stage] = list(error.violations)
    chain = [made[stage] for stage in stages if stage in made]
    for number, link in enumerate(chain):
        by_stage[link.stage] = list(_link_violations(link, chain[:number], chain[number + 1 :]))
    UserError.raise_for([*(_of_one_stage(word, stages) for word in given), *merged(by_stage, stages)])
    return chain


def merged(by_stage: Mapping[str, Sequence[Violation]], stages: Sequence[str]) -> list[Violation]:
    """Return the problems of the jobs of a chain, each once, with the names of its stages.

    Args:
        by_stage: stage -> its problems.
    """
    where: dict[str, list[str]] = {}
    for stage in stages:
        for violation in by_stage.get(stage, ()):
            where.setdefault(str(violation), []).append(stage)
    first = {str(violation): violation for violations in by_stage.values() for violation in violations}
    return [_in_stages(first[text], list(dict.fromkeys(names)), len(stages)) for text, names in where.items()]


def problems(command: Command) -> list[Violation]:
    """Return what is wrong with a command line of stage=submit that does not compose; empty if nothing is found."""
    overrides = [word for word in command.overrides if re.match(r"[+~]*(stage=|submit[.=]|run_dir=|hydra\.searchpath=)", word)]
    violations, valid = compose.diagnose(dataclasses.replace(command, overrides=overrides, violations=[]))
    try:
        config = compose.to_run_config(valid)
        violations += check.violations(config, 1)
        links(config, command.arguments)
    except UserError as error:
        violations += error.violations
    return violations


def _link(config: RunConfig, stage: str, arguments: Sequence[str], pretrain: Link | None) -> Link:
    """Compose and check the job of a stage; that of certify has the settings of the training job that it is about."""
    overrides = list(config.submit.overrides.get(stage, []))
    words = [*config.submit.overrides.get("pretrain", []), *overrides] if stage == "certify" else overrides
    if stage == "certify" and pretrain and not any(key_of(word) == "stage.world_size" for word in overrides):
        words = [f"stage.world_size={pretrain.world_size}", *words]
    replaced = {key_of(word) for word in words}
    kept = [word for word in arguments if not re.match(_OWN, word) and key_of(word) not in replaced]
    last = {key_of(word): word for word in words}  # of a key that certify and pretrain set, the value of certify
    run_dir = [] if "run_dir" in replaced else [f"run_dir={quoted(config.run_dir)}"]

    given = (*kept, *last.values(), *run_dir)

    def sized(composed: RunConfig) -> tuple[RunConfig, int]:
        return moldable.expected(composed, given, overrides)

    composed = compose.checked([f"stage={stage}", *given], sized)
    return Link(stage, given, composed, moldable.job_options(composed, overrides), sized(composed)[1])


def _link_violations(link: Link, before: Sequence[Link], after: Sequence[Link]) -> Iterator[Violation]:
    """Yield what is wrong with a job beside its settings: its options, its memory, the model of its checkpoint, its place in the chain."""
    yield from job.violations(link.cluster, link.stage, Path.cwd())
    yield from _model_violations(link, before)
    yield from moldable.violations(link.config, link.arguments)
    yield from moldable.memory_violations(link.config, link.arguments)
    if link.stage == "pretrain" and not any(other.stage == "certify" for other in before):  # else pretrain itself asks for it
        yield from certified.violations(link.config, link.world_size)
    for key, folder in _inputs(link.config):
        writers = [other.stage for other in after if folder == _output(other.config)]
        if writers and not folder.exists() and not any(folder == _output(other.config) for other in before):
            fix = f"name {writers[0]} before {link.stage} in submit.stages"
            yield Violation(key, folder, f"is read by {link.stage} before {writers[0]} writes it", fix)


def _model_violations(link: Link, before: Sequence[Link]) -> Iterator[Violation]:
    """Yield the rules of an evaluation whose checkpoint an earlier job of the chain trains: its model is that of this job."""
    stage = link.config.stage
    if isinstance(stage, Evaluate) and not stage.tasks:
        for other in before:
            if other.stage == "pretrain" and other.config.run_dir == link.config.run_dir:
                yield from check.evaluation_violations(dataclasses.replace(link.config, model=other.config.model), link.world_size)


def _output(config: RunConfig) -> Path | None:
    """The folder that a stage writes for later ones."""
    tokens = config.data.instructions.tokens or config.data.tokens
    folders = {"shard": config.data.shards, "train_tokenizer": config.tokenizer.path, "tokenize": tokens}
    folders |= dict.fromkeys(TRAINING_STAGES, config.run_dir)
    return Path(folders[config.stage.name]).absolute() if config.stage.name in folders else None


def _inputs(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """Yield (key, folder) of what a stage reads and earlier ones write."""
    keys = {
        "train_tokenizer": ("data.shards",),
        "tokenize": ("data.shards", "tokenizer.path"),
        "convert_tokens": ("data.tokens",),
        "pretrain": ("data.tokens",),
        "evaluate": ("run_dir",),
        "generate": ("run_dir",),
        "convert": ("run_dir",),
    }
    if examples := config.data.instructions.tokens:
        keys["tokenize"] = ("tokenizer.path",)
        if config.stage.name == "finetune":
            yield "data.instructions.tokens", Path(examples).absolute()
    values = {"data.shards": config.data.shards, "data.tokens": config.data.tokens, "tokenizer.path": config.tokenizer.path}
    values["run_dir"] = config.run_dir
    for key in keys.get(config.stage.name, ()):
        yield key, Path(values[key]).absolute()


def _of_one_stage(word: str, stages: Sequence[str]) -> Violation:
    """The violation of stage.KEY, which not every stage has."""
    key, _, value = word.lstrip("+~").partition("=")
    having = [stage for stage in stages if key.removeprefix("stage.").partition(".")[0] in STAGES[stage][0].__dataclass_fields__]
    fix = " or ".join(f"'submit.overrides.{stage}=[{key}={value}]'" for stage in having)
    rule = "is a key of one stage, and the chain has several" if having else f"is a key of none of {', '.join(stages)}"
    return Violation(key, value, rule, f"write {fix}" if having else "remove it")


def _in_stages(violation: Violation, where: Sequence[str], count: int) -> Violation:
    """A violation that names the stages in which it occurs."""
    names = "all stages" if len(where) == count > 2 else f"{'stages' if len(where) > 1 else 'stage'} {', '.join(where)}"
    return dataclasses.replace(violation, rule=f"{violation.rule} (in {names})")


def rendered(chain: Sequence[Link], run_dir: Path, job_ids: Sequence[int] = (), *, snapshot: Path | None = None) -> list[str]:
    """Render the jobs.

    Args:
        run_dir: of the chain; it gets the logs.
        job_ids: of the jobs that are submitted already; the others are named JOB_OF_STAGE.
        snapshot: of the submission; its folder conf/ has the configuration files that the jobs read.
    """
    texts = []
    for number, link in enumerate(chain):
        previous = None if not number else str(job_ids[number - 1]) if number <= len(job_ids) else f"JOB_OF_{chain[number - 1].stage}"
        texts.append(job.render(_job(link, run_dir, previous, snapshot), link.cluster))
    return texts


def _job(link: Link, run_dir: Path, previous: str | None, snapshot: Path | None) -> job.Job:
    """The job of a link."""
    return job.here(
        name=in_use.job_name(link.stage, run_dir),
        stage=link.stage,
        overrides=tuple(word for word in link.arguments if not word.startswith("--config-dir")),  # conf has its files
        output=job.log_file(run_dir, f"slurm-{link.stage}"),
        conf=snapshot / "conf" if snapshot else None,
        snapshot=snapshot,
        after=previous,
    )
