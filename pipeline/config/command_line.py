"""The command line: Hydra's grammar and options, with refusals of those that would start something else than what was meant."""

from __future__ import annotations

import dataclasses
import difflib
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from pipeline.common import knobs
from pipeline.common.errors import UserError, Violation
from pipeline.config import deepspeed_json, foreign_names
from pipeline.config.paths import CONF_DIR
from pipeline.config.schema import RunConfig
from pipeline.config.stages import STAGES

#: What precedes a folder in Hydra's search path.
FILE = "file://"
#: The config groups, which are folders of conf/: keys of the configuration, and experiments, which set keys of several groups.
GROUPS = ("experiment", *(item.name for item in dataclasses.fields(RunConfig) if (CONF_DIR / item.name).is_dir()))
#: Keys whose values are dictionaries with names that a user defines.
NAMED = (*(key for key, _, value in knobs.walk(RunConfig()) if isinstance(value, dict)), "stage.where")
#: Those of them whose entries are dataclasses.
ENTRIES = tuple(key for key, knob, value in knobs.walk(RunConfig()) if isinstance(value, dict) and knob.item)

_OWN_FILES = "write an experiment file, and choose it by --config-dir=FOLDER experiment=NAME (FOLDER/experiment/NAME.yaml)"
#: Options of Hydra that are refused -> what to do instead.
_UNSUPPORTED = {
    "config_name": _OWN_FILES,
    "config_path": _OWN_FILES,
    "experimental_rerun": "write the arguments of the run again; run_dir/config.yaml has all of its settings",
}


@dataclass(frozen=True)
class Command:
    """A command line.

    Attributes:
        overrides: in Hydra's grammar, without illegal ones. That of --config-dir is `hydra.searchpath`.
        violations: of the illegal ones, and of a stage that is not named.
        options: of Hydra, such as --multirun or --cfg job.
        is_sweep: whether the overrides may have several values.
        shows: whether Hydra prints something and no stage runs.
        arguments: the overrides with the illegal ones, and --config-dir, as compose.task_arguments returns them.
    """

    overrides: list[str]
    violations: list[Violation]
    options: list[str]
    is_sweep: bool
    shows: bool
    arguments: tuple[str, ...] = ()

    @property
    def submits(self) -> bool:
        """Whether the command is stage=submit, whose settings are those of other stages."""
        return "stage=submit" in self.overrides and not self.is_sweep

    @property
    def needs_hydra(self) -> bool:
        """Whether Hydra itself must run the command, instead of composing one configuration."""
        return bool(self.options) or any(re.match(r"[+~]*hydra(?!\.searchpath=)", override) for override in self.overrides)


def parse(arguments: Sequence[str]) -> Command:
    """Read a command line.

    Raises:
        UserError: an option is none of Hydra's, or is not supported.
    """
    options = _parse_options(arguments)
    is_sweep = options.multirun or "hydra.mode=MULTIRUN" in options.overrides
    folders = _own_folders(options)
    # experiment=null is the default, which Hydra accepts in a file only.
    overrides = [_normalized(override) for override in options.overrides if override != "experiment=null"]
    overrides, refused_settings = deepspeed_json.expanded([*_entries(overrides), *overrides], [CONF_DIR, *folders])
    UserError.raise_for(_options(options))
    if options.shell_completion:  # Hydra reads the words, which are no overrides
        return Command(overrides, [], ["--shell-completion"], is_sweep=False, shows=True)
    violations = {override: list(_violations(override, [CONF_DIR, *folders], is_sweep=is_sweep)) for override in overrides}
    shows = bool(options.cfg or options.info or options.hydra_help)
    missing = [] if shows else list(_missing_stage(overrides, [CONF_DIR, *folders]))
    search = [f"hydra.searchpath=[{quoted(FILE + str(folder))}]" for folder in folders]
    words = [f"--{name}" for name in ("multirun", "resolve") if getattr(options, name)]
    words += [f"--{name}={value}" for name in ("cfg", "package", "info") if (value := getattr(options, name)) is not None]
    return Command(
        [*search, *(override for override in overrides if not violations[override])],
        [*(violation for of_override in violations.values() for violation in of_override), *refused_settings, *missing],
        words,
        is_sweep,
        shows,
        (*(f"--config-dir={folder}" for folder in folders), *overrides),
    )


def _without_dashes(option: str, following: str) -> str:
    """What to write instead of an option that is none."""
    name, _, value = option.lstrip("-").partition("=")
    name = name.replace("-", "_")
    if advice := foreign_names.advice(name, value or following or "VALUE"):
        return advice
    keys = [key for key, _, _ in knobs.walk(RunConfig())]
    groups = [field.name for field in dataclasses.fields(RunConfig)]
    named = [key for key in (*groups, *keys) if key == name or key.endswith(f".{name}")]
    return f"write {named[0]}={value or following or 'true'}, without dashes" if named else f"{option} is no key; write KEY=VALUE"


def _parse_options(arguments: Sequence[str]) -> Namespace:
    """Separate Hydra's options from the overrides, in any order."""
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        unknown = [word for word in message.partition("unrecognized arguments: ")[2].split() if word.startswith("--")]
        following = {before: after for before, after in pairwise(arguments) if "=" not in before and re.match(r"[\w.,/]+$", after)}
        guesses = "".join(f"{_without_dashes(word, following.get(word, ''))}; " for word in unknown)  # --stage shard
        message = f"unrecognized arguments: {' '.join(unknown)}" if unknown else message  # the overrides behind them are none
        raise UserError.of("argument", " ".join(arguments), message, f"{guesses}python -m pipeline --hydra-help lists the options")

    parser.error = refuse
    options: Namespace = parser.parse_intermixed_args(arguments)
    return options


def _missing_stage(overrides: Sequence[str], folders: Sequence[Path]) -> Iterator[Violation]:
    """Yield a violation if neither the command line nor its experiment names a stage: the default is there for what Hydra prints."""
    if any(key_of(override) == "stage" for override in overrides):
        return
    names = [
        name for override in overrides if key_of(override) == "experiment" for name in re.findall(r"[\w.-]+", override.partition("=")[2])
    ]
    files = [folder / "experiment" / f"{name}.yaml" for name in names for folder in folders]
    if not any(re.search(r"/stage\b", file.read_text(encoding="utf-8", errors="replace")) for file in files if file.is_file()):
        yield Violation("stage", "?", "is required: it names what runs", f"write stage=NAME, NAME being one of {', '.join(STAGES)}")


def _own_folders(options: Namespace) -> list[Path]:
    """The folder of --config-dir."""
    if options.config_dir is None:
        return []
    folder = Path(options.config_dir).absolute()
    if not folder.is_dir():
        raise UserError.of("argument", f"--config-dir={options.config_dir}", "is not a folder", "name one with experiment/NAME.yaml")
    return [folder]


def _normalized(override: str) -> str:
    """Convert an override to Hydra's grammar: dry_run=true to its full key, and keys of user-defined names to ++key.

    A number in a key is a text to Hydra: cluster.layouts.4=LIST becomes cluster.layouts={4:LIST}.
    """
    override = _with_quoted_items(re.sub("^dry_run=", "dry_run.enabled=", override))
    override = re.sub(r"^([+]{0,2}cluster[.]layouts)[.](\d+)=(.*)$", r"\1={\2:\3}", override, flags=re.DOTALL)
    return f"++{override}" if override.startswith(tuple(f"{key}{mark}" for key in NAMED for mark in "=.")) else override


def _with_quoted_items(override: str) -> str:
    """Quote the items of a list of overrides or of options, [parallel.tensor=1], as Hydra's grammar requires because of the sign "="."""
    key, _, value = override.partition("=")
    if not re.fullmatch(
        r"[+]*((evaluation|cluster)\.sbatch|cluster\.(srun|launch|setup)|evaluation\.overrides|submit\.overrides\.\w+|cluster\.layouts\.\d+)",
        key,
    ) or not re.fullmatch(r"\[.*\]", value, re.DOTALL):
        return override
    items, depth, quote = [""], 0, ""
    for char in value[1:-1]:
        if char == quote:
            quote = ""
        elif not quote and char in "'\"":
            quote = char
        depth += 0 if quote else (char in "[{(") - (char in "]})")
        if depth < 0:
            return override
        if char == "," and not depth and not quote:
            items.append("")
        else:
            items[-1] += char
    if depth or quote:
        return override
    words = [item.strip() for item in items]
    return f"{key}=[{','.join(quoted(word) if '=' in word and word[0] not in chr(34) + chr(39) else word for word in words)}]"


def _entries(overrides: Sequence[str]) -> Iterator[str]:
    """Yield overrides that add the entries which only keys such as data.blend.NAME.weight name.

    Hydra itself would add a plain dictionary, which has no schema. In a sweep it keeps one override of a key: the one that the user wrote.
    """
    for key in ENTRIES:
        names = [match[1] for override in overrides if (match := re.match(rf"[+]*{re.escape(key)}\.([^.=]+)\.", override))]
        if names and key not in map(key_of, overrides):
            yield f"++{key}={{{','.join(f'{name}:{{}}' for name in dict.fromkeys(names))}}}"


def _options(options: Namespace) -> Iterator[Violation]:
    """Yield the violations of Hydra's options."""
    for name, fix in _UNSUPPORTED.items():
        if getattr(options, name):
            yield Violation("argument", f"--{name.replace('_', '-')}", "is not supported", fix)
    for name in ("resolve", "package"):
        if getattr(options, name) and options.cfg is None:
            yield Violation("argument", f"--{name}", "requires --cfg", "add --cfg=job, which prints the configuration, or remove it")
    actions = [name for name in ("run", "multirun", "cfg", "info") if getattr(options, name)]
    for other in actions[1:]:
        yield Violation("argument", f"--{other}", f"contradicts --{actions[0]}", "choose one of them")


def _violations(override: str, folders: Sequence[Path], *, is_sweep: bool) -> Iterator[Violation]:
    """Yield the violations of an override that composes, or that Hydra refuses with words of its own."""
    key, equals, value = override.partition("=")
    name = key.lstrip("+~")
    if key.startswith("~"):
        yield from _removal(name)
    elif not equals or not key:
        fix = "write key=value; an unset shell variable or a space inside a value can be the cause"
        yield Violation("argument", repr(override), "is not of the form key=value", fix)
    elif name in GROUPS:
        yield from _group(key, value, folders, is_sweep=is_sweep)
    elif name == "stage.name":
        yield Violation("stage.name", value, "is set by the group stage", f"write stage={value}")
    elif name == "hydra.searchpath":
        yield Violation(name, value, "is set by --config-dir", "write --config-dir=FOLDER")
    elif name.startswith("hydra/launcher") and not is_sweep:
        fix = "add -m, which submits each run as a job; or remove it: the stage runs on this machine"
        yield Violation(name, value, "launches the runs of a sweep, and this is none", fix)


def _removal(key: str) -> Iterator[Violation]:
    """Only names that a user defined may be removed (~data.blend.NAME)."""
    if not key.startswith(tuple(f"{named}." for named in NAMED)):
        kind = "a group" if key in GROUPS else "a key"
        yield Violation("argument", f"~{key}", f"removes {kind}, and each has a value", f"leave it out for the default, or set {key}=VALUE")


def _group(key: str, value: str, folders: Sequence[Path], *, is_sweep: bool) -> Iterator[Violation]:
    """The value of a group is one of its files; several experiments may be composed, or none."""
    group = key.lstrip("+")
    if key != group:
        yield Violation(key, value, "is chosen, not added", f"write {group}={value}")
        return
    legal = {path.relative_to(folder / group).with_suffix("").as_posix() for folder in folders for path in (folder / group).rglob("*.yaml")}
    options = sorted(legal)
    for option in _chosen(group, value, is_sweep=is_sweep):
        if option not in options:
            fix = foreign_names.STAGES.get(option) if group == "stage" else None
            fix = fix or nearest(f"{group}=", option, options)
            if group in ("cluster", "experiment"):
                fix += f" A file of your own is FOLDER/{group}/{option}.yaml with --config-dir=FOLDER"
            yield Violation(group, option, f"must be one of {', '.join(options)}", fix)


def _chosen(group: str, value: str, *, is_sweep: bool) -> list[str]:
    """The options that the value of a group names, as far as Hydra does not check them itself."""
    if group == "experiment" and re.fullmatch(r"\[.*\]", value):  # with -m, lists may be the values of a sweep
        lists = (override.partition("=")[2] for override in sweep_values(f"{group}={value}"))
        return [option for words in lists for option in re.split(r"\s*,\s*", words[1:-1].strip())]
    if re.fullmatch(r"[^\[{].*,.*|\w+\(.*\)", value):  # several values, of which Hydra refuses those that are no sweep
        values = (override.partition("=")[2] for override in sweep_values(f"{group}={value}"))
        return [option for option in values if is_sweep and not option.startswith("glob(")]
    return [value.strip("'\"")]


def key_of(override: str) -> str:
    """Return the key of an override."""
    return override.lstrip("+~").partition("=")[0]


def sweep_values(override: str) -> list[str]:
    """Expand the override of a sweep: `a=1,2` -> a=1, a=2."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return [override]
    return [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()] if parsed.is_discrete_sweep() else [override]


def nearest(prefix: str, name: str, known: list[str]) -> str:
    """Return advice with the closest legal names, or where to find all of them."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    leaf = name.rpartition(".")[2]
    close += [key for key in known if key.rpartition(".")[2] == leaf and key not in close][:3]
    if close:
        return "did you mean " + " or ".join(f"{prefix}{c}" for c in close) + "?"
    return "python -m pipeline --help lists every key" if not prefix else f"choose one of {', '.join(known)}."


def quoted(text: str) -> str:
    """Quote a value for Hydra's override grammar."""
    if re.fullmatch(r"[\w/.@:+-]+", text, re.ASCII):
        return text
    escaped = re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + match[2].replace("'", "\\'"), text)
    return f"'{escaped}'"
