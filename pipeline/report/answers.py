"""The questions of a person who looks at a run, with their answers in words. Page, terminal view and watch show the same ones."""

from __future__ import annotations

import math
import re
import textwrap
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pipeline.common.texts import count
from pipeline.report.history import CorpusProgress, Health, History
from pipeline.report.run import LOSS_STEPS, Run, State, duration

#: Characters of a reason in a sentence or a table.
SHORT = 110
#: Corpora that are named in a sentence, and kinds of lost node-hours.
_NAMED = 4
#: Settings that changed at a restart and are named in a sentence.
_SETTINGS = 8
_GOOD = (State.RUNNING, State.STARTING, State.FINISHED)
_BAD = (State.FAILED, State.SILENT)


@dataclass(frozen=True)
class Answer:
    """An answer.

    Attributes:
        level: good, bad, or empty for neither.
    """

    question: str
    text: str
    level: str = ""


def answers(history: History) -> list[Answer]:
    """Return the answers about a run."""
    run = history.run
    return [
        Answer("Is it alive?", alive(run), _level(run)),
        Answer("When does it end?", end(run)),
        loss(run, history.health),
        Answer("What changed at the last restart?", restart(run)),
        Answer("How many node-hours were lost, and to what?", lost(history)),
        Answer("Which corpus was seen how often?", data(history.seen)),
    ]


def _level(run: Run) -> str:
    return "good" if run.state in _GOOD else "bad" if run.state in _BAD else ""


def alive(run: Run) -> str:
    """The state, its reason, the job and the last sign of life."""
    parts = [f"{run.state}: {short(run.reason)}" if run.reason else str(run.state)]
    parts += [f"job {run.job} on {run.nodes or 0} nodes"] if run.job else []
    parts += [f"last written {moment(run.last_sign)}"] if run.last_sign is not None and run.state is not State.RUNNING else []
    return "; ".join(parts)


def end(run: Run) -> str:
    """Progress, and the time that is left."""
    if run.steps is None:
        return f"step {run.step:,}; the number of steps is not known"
    progress = f"step {run.step:,} of {run.steps:,} ({100 * run.step / max(run.steps, 1):.1f} %)"
    if run.state is State.FINISHED:
        return f"{progress}, ended {moment(run.last_sign)}"
    if run.seconds_left is None or run.last_sign is None or run.seconds_per_step is None:
        return f"{progress}; not known before {'its next steps' if run.state is State.STARTING else 'it runs again'}"
    at = run.last_sign + run.seconds_left
    text = f"{progress}, {duration(run.seconds_left)} left at {run.seconds_per_step:.3g} s a step: {moment(at)}"
    return f"{text}, after the time limit of its job ({moment(run.limit)})" if run.limit is not None and run.limit < at else text


def loss(run: Run, health: Health | None) -> Answer:
    """The trend of the loss, and what is unusual."""
    question = "Is the loss healthy?"
    skipped = f"{count(run.skipped, 'step')} skipped" if run.skipped else ""
    if run.trouble:
        return Answer(question, "; ".join(filter(None, (run.trouble, skipped))), "bad")
    if run.loss is None or health is None:
        return Answer(question, "; ".join(filter(None, ("too few steps to tell", skipped))), "bad" if skipped else "")
    change = health.last - health.before
    trend = "flat" if abs(change) <= 2 * health.error else "falling" if change < 0 else "rising"
    noise = f"{change:+.4f} +- {health.error:.4f} from the {health.steps:,} steps before to the last {health.steps:,}"
    spikes = "steps of loss spikes were left" if any(start.rewound for start in run.starts) else "no spikes"
    spikes = f"{count(len(health.spikes), 'spike')}, the last at step {health.spikes[-1]:,}" if health.spikes else spikes
    diverged = health.last > health.begin + 2 * health.error
    above = f"above the {health.begin:.4f} of its first {health.steps:,} steps" if diverged else ""
    lost_steps = f"{count(health.not_finite, 'step')} without a finite loss" if health.not_finite else ""
    text = f"{run.loss:.4f} over the last {min(LOSS_STEPS, health.count)} steps, {trend} ({noise}); {spikes}"
    bad = trend == "rising" or diverged or skipped or lost_steps or (health.spikes and run.step - health.spikes[-1] < health.steps)
    return Answer(question, "; ".join(filter(None, (text, above, skipped, lost_steps))), "bad" if bad else "good")


def restart(run: Run) -> str:
    """What differs between the last two starts."""
    if not run.starts:
        return "not known: no events"
    if len(run.starts) == 1:
        return "it was started once"
    before, after = run.starts[-2], run.starts[-1]
    gone, new = sorted({*before.nodes} - {*after.nodes}), sorted({*after.nodes} - {*before.nodes})
    changes = [f"nodes {len(before.nodes)} -> {len(after.nodes)}"] if len(before.nodes) != len(after.nodes) else []
    changes += [f"without {', '.join(gone[:_NAMED])}"] if gone else []
    changes += [f"with {', '.join(new[:_NAMED])}"] if new else []
    known = before.layout and after.layout
    changes += [f"layout {before.layout} -> {after.layout}"] if known and before.layout != after.layout else []
    both = before.version and after.version and before.version != after.version
    changes += [f"version {before.version} -> {after.version}"] if both else []
    changes += [short(setting) for setting in after.changed[:_SETTINGS]]
    changes += [f"{len(after.changed) - _SETTINGS} more settings"] if len(after.changed) > _SETTINGS else []
    head = f"start {len(run.starts)} at {moment(after.begin)} from step {after.step:,}, because: {short(after.cause) or 'unknown'}"
    return f"{head}; {'; '.join(changes) or 'same nodes, layout and settings'}"


def lost(history: History) -> str:
    """Node-hours used, and lost by kind."""
    if history.run.node_hours is None:
        return "not known: no events"
    kinds = [f"{short(spent.kind, 60)}: {spent.node_hours:.2f}" for spent in history.spent if spent.lost]
    more = [f"{len(kinds) - _NAMED} more kinds"] if len(kinds) > _NAMED else []
    listed = f" ({'; '.join([*kinds[:_NAMED], *more])})" if kinds else ""
    return f"{history.lost:.2f} of {history.run.node_hours:.2f}{listed}"


def data(seen: tuple[CorpusProgress, ...]) -> str:
    """The corpora, most samples first."""
    if not seen:
        return "not known"
    total = sum(corpus.samples for corpus in seen) or 1
    shown = sorted(seen, key=lambda corpus: -corpus.samples)
    texts = []
    for corpus in shown[:_NAMED]:
        epochs = "" if corpus.epochs is None else f", {corpus.epochs:.3g} epochs"
        texts.append(f"{corpus.corpus or 'all data'} {100 * corpus.samples / total:.1f} %{epochs}")
    texts += [f"{len(seen) - _NAMED} more"] if len(seen) > _NAMED else []
    return "; ".join(texts)


def short(text: str, most: int = SHORT) -> str:
    """A text in one line, without the source file with which PyTorch begins an error, cut at a number of characters."""
    line = " ".join(re.sub(r"\[/[^]]*\.(?:cc|cpp|h):\d+\]", "", text).split())
    return line if len(line) <= most else f"{line[: most - 1].rstrip()}…"


def moment(seconds: float | None) -> str:
    """A local time with its zone: 2026-11-23 22:17 UTC."""
    return "at an unknown time" if seconds is None else time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(seconds))


def lines(history: History, width: int) -> Iterator[str]:
    """Yield the terminal view of a run: its answers, its last validation and error, and what is damaged.

    Args:
        width: columns of the terminal.
    """
    yield history.run.run_dir
    yield from _wrapped([*answers(history), *_more(history.run)], width)


def lines_now(run: Run, width: int) -> Iterator[str]:
    """Yield the part of the terminal view for which the end of the files is enough."""
    loss_now = run.trouble or (
        "-" if run.loss is None else f"{run.loss:.4f} over the last {LOSS_STEPS} steps; gradient norm {run.grad_norm or math.nan:.3g}"
    )
    skipped = f"; {count(run.skipped, 'step')} skipped" if run.skipped else ""
    hours = "not known: no events" if run.node_hours is None else f"{run.node_hours:.2f}"
    shown = [
        Answer("Is it alive?", alive(run), _level(run)),
        Answer("When does it end?", end(run)),
        Answer("Loss", loss_now + skipped, "bad" if skipped or run.trouble else ""),
        Answer("What changed at the last restart?", restart(run)),
        Answer("Node-hours", hours),
    ]
    yield from _wrapped([*shown, *_more(run)], width)


def _more(run: Run) -> list[Answer]:
    shown = last_validation(run)
    shown += [Answer("Speed", f"{run.tokens_per_second:,.0f} tokens/s")] if run.tokens_per_second else []
    shown += last_error(run)
    return [*shown, *(Answer("Files", problem, "bad") for problem in run.problems)]


def last_validation(run: Run) -> list[Answer]:
    """The last validation, if there was one."""
    return [Answer("Last validation", validation(run))] if run.validation_loss is not None else []


def last_error(run: Run) -> list[Answer]:
    """The last error; one that a run has overcome asks for no attention."""
    if not run.error:
        return []
    question, level = ("Last error", "bad") if run.state in _BAD else ("Last error, overcome", "")
    return [Answer(question, short(run.error, 400), level)]


def _wrapped(answers: Iterable[Answer], width: int) -> Iterator[str]:
    """Answers as lines; those that ask for attention begin with "!"."""
    for answer in answers:
        yield f"{'!' if answer.level == 'bad' else ' '} {answer.question}"
        yield from textwrap.wrap(answer.text, max(width, 24), initial_indent="    ", subsequent_indent="    ") or [""]


def validation(run: Run) -> str:
    """The last validation loss with its standard error and step."""
    if run.validation_loss is None:
        return "-"
    error = "" if not run.validation_loss_stderr else f" +- {run.validation_loss_stderr:.4f}"
    return f"{run.validation_loss:.4f}{error} at step {run.validation_step:,}"
