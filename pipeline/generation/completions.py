"""The output folder: completions in the order of the prompts, written part by part, so that an interrupted job continues."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline.common import artifact, json_lines
from pipeline.common.artifact import Manifest
from pipeline.common.atomic_files import atomic_file
from pipeline.common.json_lines import BadLine
from pipeline.common.unfinished import Unfinished
from pipeline.generation.generator import Completion, Stopping
from pipeline.generation.prompts import Prompt, PromptFile, PromptReader

COMPLETIONS, REJECTED = "completions.jsonl", "rejected.jsonl"


def note_name(part: int) -> str:
    """Name of the completion record of a part."""
    return f"part-{part:06d}"


class BroadcastRanks:
    """The ranks of torch.distributed with what common/unfinished.py needs of a communicator."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return the root's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, root)
        return box[0]


class PromptParts:
    """The parts of the prompts that this rank processes.

    Args:
        numbers: the parts of this rank; one is asked for when rows of the batch are free.
        write: whether this rank writes the parts; of the ranks that share a model, one does.
    """

    def __init__(
        self,
        prompts: PromptFile,
        reader: PromptReader,
        stopping: Stopping,
        unfinished: Unfinished,
        numbers: Iterable[int],
        *,
        logprobs: bool,
        write: bool = True,
    ) -> None:
        self.prompts, self.reader, self.stopping, self.unfinished = prompts, reader, stopping, unfinished
        self.numbers, self.logprobs, self.write = numbers, logprobs, write
        self._open: dict[int, tuple[int, Prompt]] = {}
        self._results: dict[int, dict[str, Any]] = {}

    def read(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the line number and the tokens of each prompt."""
        for part in self.numbers:
            result: dict[str, Any] = {"completions": {}, "rejected": [], "missing": 0}
            prompts = []
            for number, line in self.prompts.read(part):
                try:
                    prompts.append(self.reader.parse(number, line))
                except BadLine as error:
                    result["rejected"].append({"line": number, "error": str(error)})
            self._results[part] = {**result, "missing": len(prompts)}
            self._open |= {prompt.line: (part, prompt) for prompt in prompts}
            self._write_if_complete(part)
            for prompt in prompts:
                yield prompt.line, prompt.tokens

    def add(self, completion: Completion) -> None:
        """Add a completion; its part is written with the last one."""
        part, prompt = self._open.pop(completion.index)
        generated: dict[str, Any] = {
            "text": self.stopping.cut(self.reader.completion(completion.prompt, completion.tokens)),
            "finish_reason": completion.finish_reason,
            "prompt_tokens": len(completion.prompt),
            "tokens": len(completion.tokens),
        }
        if prompt.text is not None:
            generated = {"prompt": prompt.text, **generated}
        if self.logprobs:
            generated |= {"token_ids": completion.tokens, "logprobs": completion.logprobs}
        result = self._results[part]
        result["completions"][prompt.line] = prompt.fields | {"generated": generated}
        result["missing"] -= 1
        self._write_if_complete(part)

    def _write_if_complete(self, part: int) -> None:
        result = self._results[part]
        if result["missing"] == 0:
            lines = [result["completions"][line] for line in sorted(result["completions"])]
            if self.write:
                self.unfinished.write(note_name(part), {"completions": lines, "rejected": result["rejected"]})
            del self._results[part]


def missing(unfinished: Unfinished, parts: Sequence[int]) -> list[int]:
    """Return the parts that are not finished."""
    return [part for part in parts if unfinished.note(note_name(part)) is None]


def wait_for_parts(unfinished: Unfinished, parts: Sequence[int], seconds: float = 0.2) -> None:
    """Wait until all ranks have written their parts: a collective would time out if one of them needs hours longer than the others."""
    for part in parts:
        while not (unfinished.folder / f"{note_name(part)}.json").is_file():
            time.sleep(seconds)


def publish(folder: Path, settings: dict[str, Any], unfinished: Unfinished, parts: Sequence[int]) -> dict[str, Any]:
    """Join the parts, and write the manifest. Returns the totals."""
    totals = {"completions": 0, "rejected": 0, "prompt_tokens": 0, "tokens": 0}
    with atomic_file(folder / COMPLETIONS, "w") as completions, atomic_file(folder / REJECTED, "w") as rejected:
        for part in parts:
            note = unfinished.note(note_name(part))
            for line in note["completions"]:
                completions.write(json_lines.dump(line) + "\n")
                totals["completions"] += 1
                totals["prompt_tokens"] += line["generated"]["prompt_tokens"]
                totals["tokens"] += line["generated"]["tokens"]
            for line in note["rejected"]:
                rejected.write(json_lines.dump(line) + "\n")
                totals["rejected"] += 1
    files = {name: artifact.entry(folder / name) for name in (COMPLETIONS, REJECTED)}
    artifact.write(folder, Manifest("generate", settings, files, totals))
    unfinished.clear()
    return totals
