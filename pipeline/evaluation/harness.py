"""EleutherAI's lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) on native weights. The only file that imports it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.common.errors import UserError
from pipeline.config.stages import Evaluate
from pipeline.data.tokenize import chat_template
from pipeline.data.tokenize.chat_encoding import ChatEncoder
from pipeline.data.tokenize.chat_template import ChatTemplate
from pipeline.data.tokenize.chats import ChatError
from pipeline.data.tokenize.tokenizer import PromptEncoder, TextEncoder, load, special_token, warn_of_spelled
from pipeline.evaluation.likelihood import Question, Scored
from pipeline.generation.generator import Stopping
from pipeline.generation.sampling import Sampling

log = logging.getLogger("pipeline")

#: questions -> scores
Score = Callable[[list[Question]], list[Scored]]
#: prompts (number, tokens), sampling, and the arguments of `stopping` -> texts
Complete = Callable[[list[tuple[int, list[int]]], Sampling, dict[str, Any]], list[str]]


class Text:
    """Encodes and decodes as stock transformers with the tokenizer of the export; in chats, text that spells a special token is that token.

    Attributes:
        end: the token that ends a text.
        ends: the tokens that end a completion: `end`, and those of an imported model.
        chats: the template of chats; None if questions are no chats.
        beginning: the token before a text without context: that of tokenizer.bos, bos_token of tokenizer_config.json unless tokenizer.bos
            differs from the tokenizer, or `end`.
    """

    def __init__(self, encoder: TextEncoder, ends: Iterable[int] = (), chats: ChatTemplate | None = None) -> None:
        self._tokenizer = load(encoder.path.parent)
        self.texts = PromptEncoder(load(encoder.path.parent), encoder.around, encoder.spelled if chats is None else "token")
        named = special_token(encoder.path.parent, "bos_token") if encoder.follows_tokenizer else None
        beginning = encoder.first_of([named]) if encoder.bos is None and named else encoder.bos
        self.end = encoder.end_of_document
        self.ends = frozenset((self.end, *ends))
        self.beginning = self.end if beginning is None else beginning
        self.chats = chats
        if chats is not None and (turn := chat_template.end_of_turn(chats, ChatEncoder(self._tokenizer))) is not None:
            self.ends |= {turn}

    def encode(self, text: str, *, special: bool | None = None) -> list[int]:
        """The tokens of a text and, if `special`, those around it; None adds them unless the text begins with one already."""
        if special is None:
            special = not text.startswith(self._tokenizer.id_to_token(self.beginning) or "\0")
        return self.texts.encode([text], complete=special)[0]

    def decode(self, tokens: Any) -> str:
        """Return the text of tokens, without special tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


def stopping(text: Text, *, max_tokens: int, strings: list[str]) -> Stopping:
    """Return when a completion ends: at one of the strings, at a token that ends a text, or after max_tokens."""
    return Stopping(max_tokens, text.ends, tuple(strings), text.decode)


def evaluate(stage: Evaluate, text: Text, max_positions: int, score: Score, complete: Complete) -> dict[str, Any]:
    """Evaluate the tasks of `stage.tasks`.

    Args:
        max_positions: longest sequence of the model, tokens.

    Returns:
        task or group -> its metrics ("acc", "acc_stderr", ...), the number of shots ("num_fewshot") and of documents ("samples").

    Raises:
        UserError: lm-eval is not installed, or a task is unknown or cannot be loaded.
    """
    if not Path(stage.task_folder or "").is_dir():
        fix = "set it to the folder with the .yaml files of the tasks"
        raise UserError.of("stage.task_folder", stage.task_folder, "is not a folder", fix)
    with _offline():
        try:
            from lm_eval import simple_evaluate
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            rule = f"require lm-eval, which cannot be imported: {error}"
            raise UserError.of("stage.tasks", _list(stage.tasks), rule, "pip install -c tools/constraints.txt -e '.[lm-eval]'") from error
        manager = TaskManager(include_path=stage.task_folder, include_defaults=False)
        if unknown := [task for task in stage.tasks if task not in manager.all_tasks]:
            rule = f"{', '.join(unknown)}: there is no such task in stage.task_folder={stage.task_folder}"
            fix = f"choose from {', '.join(sorted(manager.all_tasks))}" if manager.all_tasks else "add .yaml files of tasks to this folder"
            raise UserError.of("stage.tasks", _list(stage.tasks), rule, fix)
        for task in stage.tasks:
            try:
                manager.load([task])
            except Exception as error:  # of YAML, of Jinja, or of the library that reads data sets
                rule = f"{task} of {stage.task_folder} cannot be loaded: {type(error).__name__}: {error}"
                fix = "correct the task file; its data must be local, for example dataset_path: json with data_files in dataset_kwargs"
                raise UserError.of("stage.tasks", task, rule, fix) from error
        results = simple_evaluate(
            model=_language_model(text, max_positions, score, complete),
            tasks=list(stage.tasks),
            num_fewshot=stage.few_shot,
            limit=stage.limit,
            task_manager=manager,
            bootstrap_iters=1000,
            apply_chat_template=stage.apply_chat_template,
            fewshot_as_multiturn=stage.apply_chat_template and stage.fewshot_as_multiturn is not False,
            system_instruction=stage.system_instruction,
            log_samples=False,
        )
    if text.chats is None:
        warn_of_spelled("stage.tasks", text.texts.spelled)
    return {task: _metrics(task, results) for task in results["results"]}


def _metrics(task: str, results: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a task. lm-eval appends the name of a filter to their keys ("acc,none")."""
    numbers = {key: value for key, value in results["results"][task].items() if isinstance(value, int | float)}
    named = {key.removesuffix(",none").replace(",", " "): value for key, value in numbers.items()}
    samples = results["n-samples"].get(task, {}).get("effective")
    return named | {"num_fewshot": results["n-shot"].get(task), "samples": samples}


def _list(tasks: list[str]) -> str:
    return f"[{','.join(tasks)}]"


@contextmanager
def _offline() -> Iterator[None]:
    """Nothing is downloaded, and no processes are forked. What data sets are converted to is temporary, unless there is a cache."""
    with TemporaryDirectory() as folder:
        given = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DISABLE_MULTIPROC": "1"}
        given |= {} if "HF_HOME" in os.environ else {"HF_DATASETS_CACHE": folder}
        added = {name: value for name, value in given.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]


def _language_model(text: Text, max_positions: int, score: Score, complete: Complete) -> Any:
    """The model behind lm-eval's interface."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class NativeModel(TemplateLM):
        """The model of a native checkpoint."""

        backend = "causal"

        @property
        def eot_token_id(self) -> int:
            """The token that ends a text."""
            return text.end

        @property
        def prefix_token_id(self) -> int:
            """The context of a text without one."""
            return text.beginning

        @property
        def tokenizer_name(self) -> str:
            """Part of the name of cached requests."""
            return ""

        def chat_template(self, chat_template: bool | str = False) -> str:  # noqa: ARG002
            """Return the source of the template."""
            return text.chats.text if text.chats is not None else ""

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            """Return the text of a chat; without a generation prompt, its last message continues."""
            assert text.chats is not None
            try:
                return text.chats.text_of(chat_history, add_generation_prompt=add_generation_prompt)
            except ChatError as error:  # as lm-eval does for its stock model
                without = [message for message in chat_history if message["role"] != "system"]
                if len(without) == len(chat_history):
                    raise UserError.of("stage.apply_chat_template", True, str(error), "use a template that takes such chats") from error
                log.warning("the chat template refuses system messages, which are left out")
                return text.chats.text_of(without, add_generation_prompt=add_generation_prompt)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            """Return the tokens of a text."""
            return text.encode(string, special=add_special_tokens)

        def _loglikelihood_tokens(self, requests: list[tuple[Any, list[int], list[int]]], **_: Any) -> list[tuple[float, bool]]:
            scores = score([Question(context, continuation) for _, context, continuation in requests])
            return [(scored.value, scored.greedy) for scored in scores]

        def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
            """Return the log-likelihood of each text, in windows of the model's length; every token is predicted once."""
            options = {"prefix_token": text.beginning, "max_seq_len": max_positions, "context_len": 1}
            texts = [text.encode(request.args[0]) for request in requests]
            windows = [list(map(make_disjoint_window, get_rolling_token_windows(token_list=tokens, **options))) for tokens in texts]
            scores = iter(score([Question(*window) for group in windows for window in group]))
            return [sum(next(scores).value for _ in group) for group in windows]

        def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
            """Return the completion of each prompt. Requests with the same settings are generated together."""
            results: dict[int, str] = {}
            groups: dict[str, list[int]] = {}
            for number, request in enumerate(requests):
                groups.setdefault(repr(request.args[1]), []).append(number)
            for numbers in groups.values():
                settings = normalize_gen_kwargs(requests[numbers[0]].args[1], 256)
                names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
                sampling = Sampling(**{name: settings[name] for name in names if settings.get(name) is not None})
                ends = {"max_tokens": settings["max_gen_toks"], "strings": settings.get("until") or []}
                prompts = [(number, text.encode(requests[number].args[0])) for number in numbers]
                results |= zip(numbers, complete(prompts, sampling, ends), strict=True)
            return [results[number] for number in range(len(requests))]

    return NativeModel()
