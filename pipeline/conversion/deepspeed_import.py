"""The weights of a DeepSpeed checkpoint: fp32 masters of ZeRO 1 to 3, joined over the data-parallel ranks; without ZeRO, its module.

DeepSpeed's own reader (deepspeed.utils.zero_to_fp32) reads and verifies the files. It is made to map them instead of reading them, and to
unpickle only what safe_pickle.py allows. Its join of ZeRO 1 and 2 holds the whole model in memory; here a weight is joined when it is read.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, serialization
from torch.utils.serialization import config as serialization_config

from pipeline.common.errors import UserError, Violation
from pipeline.common.host_memory import release
from pipeline.conversion import safe_pickle
from pipeline.conversion.foreign_weights import Source

_MODEL, _OPTIMIZER = "_model_states.pt", "_optim_states.pt"
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def tag_folder(folder: Path) -> Path | None:
    """Return the folder with the files of one step: the folder itself, the one that its file `latest` names, or the only one.

    Raises:
        UserError: `latest` names a folder that does not exist, or there are several and no `latest`.
    """
    if any(folder.glob(f"*{_MODEL}")) or any(folder.glob(f"*{_OPTIMIZER}")):
        return folder
    tags = sorted({path.parent.name for path in folder.glob(f"*/*{_MODEL}")})
    if (folder / "latest").is_file():
        tag = (folder / "latest").read_text(encoding="utf-8", errors="replace").strip()
        if tag and Path(tag).name == tag and (folder / tag).is_dir():
            return folder / tag
        if tags:
            rule = f"names {tag!r}, which is not there; there are {', '.join(tags)}"
            raise UserError.of("stage.input", folder / "latest", rule, f"name one: stage.input={folder / tags[-1]}")
        return None
    if len(tags) > 1:
        rule = f"has no file latest, and the checkpoints {', '.join(tags)}"
        raise UserError.of("stage.input", folder, rule, f"name one: stage.input={folder / tags[-1]}")
    return folder / tags[0] if tags else None


def files(folder: Path) -> list[Path]:
    """Return the files of a step."""
    return sorted([*folder.glob(f"*{_MODEL}"), *folder.glob(f"*{_OPTIMIZER}")])


class DeepSpeedFolder(Source):
    """The weights of one step, by the names of the module that DeepSpeed trained."""

    def __init__(self, folder: Path) -> None:
        """Read and verify what the files say of themselves; tensors are mapped.

        Raises:
            UserError: a file is missing, damaged, of another step, or of a kind of parallelism that DeepSpeed's reader does not join.
        """
        self.path = folder
        _check_kinds(folder)
        if any(folder.glob(f"*{_OPTIMIZER}")):
            self._tensors = _open_zero(folder)
        else:
            self._tensors = _open_module(folder)

    def names(self) -> list[str]:
        """Names of the weights."""
        return list(self._tensors)

    def meta(self, name: str) -> list[Tensor]:
        """Shape and dtype of a weight."""
        shape, dtype, _ = self._tensors[name]
        return [torch.empty(shape, dtype=dtype, device="meta")]

    def shards(self, name: str) -> list[Tensor]:
        """The weight."""
        return [self._tensors[name][2]().detach()]  # parameters require gradients

    def joined(self) -> dict[str, Tensor]:
        """All weights, joined by DeepSpeed's reader in memory; empty without ZeRO, whose files need no join."""
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        if not any(self.path.glob(f"*{_OPTIMIZER}")):
            return {}
        with _safely(self.path):
            tensors: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(self.path.parent), tag=self.path.name)
        return tensors


#: shape, dtype, and a function that returns the value
_Lazy = tuple[tuple[int, ...], torch.dtype, Callable[[], Tensor]]


def _check_kinds(folder: Path) -> None:
    """Refuse what zero_to_fp32 does not join, or joins wrongly."""
    names = [path.name for path in files(folder)]
    ranks = {int(match[1]) for name in names if (match := re.search(r"mp_rank_(\d+)", name))}
    if len(ranks) > 1:
        rule = f"has the shards of {len(ranks)} tensor-parallel ranks, which DeepSpeed's reader does not join"
        raise UserError.of("stage.input", folder, rule, "convert it with the tool that trained it, for example to Hugging Face")
    if experts := [name for name in names if "_expert_" in name]:
        rule = f"has experts in files of their own ({experts[0]}), which DeepSpeed's reader does not join"
        raise UserError.of("stage.input", folder, rule, "convert it with the tool that trained it, for example to Hugging Face")


def _open_module(folder: Path, *, zero: bool = False) -> dict[str, _Lazy]:
    """Return the weights of the module, as training computes with them.

    Raises:
        UserError: the file has none, or the checkpoint was written with ZeRO and `zero` is false.
    """
    (path,) = sorted(folder.glob(f"*{_MODEL}"))[:1]
    state = safe_pickle.load(path)
    if not isinstance(state, dict) or not isinstance(module := state.get("module"), dict):
        raise UserError.of("stage.input", path, "has no entry module", "use a folder that DeepSpeed's save_checkpoint wrote")
    if state.get("param_shapes") and not zero:
        rule = f"was written with ZeRO, and its files *{_OPTIMIZER} are missing, which have the fp32 weights"
        raise UserError.of("stage.input", folder, rule, "copy the whole folder of the checkpoint")
    return {name: _whole(value) for name, value in module.items() if torch.is_tensor(value)}


def _open_zero(folder: Path) -> dict[str, _Lazy]:
    """Return the weights of a checkpoint with ZeRO."""
    from deepspeed.utils import zero_to_fp32

    steps = {}
    for path in files(folder):
        state = safe_pickle.load(path)  # names a damaged file, or one whose objects are refused
        if path.name.endswith(_MODEL):
            steps[path.name] = state.get("global_steps")
    if len(set(steps.values())) > 1:
        rule = f"mixes files of several steps: {', '.join(f'{name} of step {step}' for name, step in steps.items())}"
        raise UserError.of("stage.input", folder, rule, "copy the files of one step into a folder of their own")
    with _safely(folder):
        states = zero_to_fp32.parse_model_states(zero_to_fp32.get_model_state_files(str(folder)))
        optimizer_files = zero_to_fp32.get_optim_files(str(folder))
        stage, ranks, groups, paddings = zero_to_fp32.parse_optim_states(optimizer_files, str(folder))
        first = states[0]
        if stage == 3 and len(states) != ranks:
            raise ValueError(f"{ranks} files *{_MODEL} are expected and {len(states)} are there")
        if any(item.param_shapes != first.param_shapes for item in states):
            raise ValueError(f"the files *{_MODEL} are of different models")
        trained = _zero3(zero_to_fp32, groups, states) if stage == 3 else _zero2(groups, first.param_shapes, paddings)
        frozen = {name: _frozen(name, tuple(shape), states, stage) for name, shape in (first.frozen_param_shapes or {}).items()}
    buffers = {name: _whole(value) for name, value in first.buffers.items()}
    tensors: dict[str, _Lazy] = {**trained, **frozen, **buffers}
    tensors.update({name: tensors[same] for name, same in first.shared_params if same in tensors})
    # DeepSpeed's reader omits the frozen weights of ZeRO 1; the module has them.
    return {**(_open_module(folder, zero=True) if stage < 3 else {}), **tensors}


@contextlib.contextmanager
def _safely(folder: Path) -> Iterator[None]:
    """Make DeepSpeed's reader map files and unpickle only allowed classes; it passes weights_only=False to torch.load.

    Its enum and loss scalers are created as they are, since it uses them.

    Raises:
        UserError: in place of the reader's errors.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with (
            serialization.safe_globals([ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address]),
            serialization_config.patch("load.mmap", True),  # type: ignore[attr-defined]
            contextlib.redirect_stdout(io.StringIO()),  # it reports on both
            contextlib.redirect_stderr(io.StringIO()),
        ):
            yield
    except (ValueError, FileNotFoundError, NotImplementedError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
        fix = "copy the whole folder of the checkpoint"
        raise UserError([Violation("stage.input", folder, f"cannot be read by DeepSpeed's reader: {error}", fix)]) from error
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def _zero3(zero_to_fp32: Any, groups: list[list[Tensor]], states: list[Any]) -> dict[str, _Lazy]:
    """ZeRO 3: every rank holds a part of every weight; DeepSpeed's GatheredTensor joins them on demand."""
    gathered: dict[str, Any] = {}
    zero_to_fp32._zero3_merge_trainable_params(gathered, len(groups), groups, states)

    def join(value: Any) -> Tensor:
        weight: Tensor = value.contiguous()
        for group in (group for rank in groups for group in rank):
            release(group)
        return weight

    return {name: (tuple(value.shape), value.dtype, functools.partial(join, value)) for name, value in gathered.items()}


def _zero2(groups: list[list[Tensor]], shapes: list[dict[str, Any]], paddings: list[list[int]] | None) -> dict[str, _Lazy]:
    """ZeRO 1 and 2: each group of parameters is one flat vector, and every rank holds a part of it.

    Args:
        groups: rank -> group of parameters -> the rank's part.
        shapes: group -> name -> shape, in the order of the vector.
        paddings: group -> elements after each weight, which align the next one; None for earlier releases, which have none.
    """
    tensors: dict[str, _Lazy] = {}
    for number, names in enumerate(shapes):
        parts = [rank[number] for rank in groups]
        start = 0
        for position, (name, shape) in enumerate(names.items()):
            count = math.prod(shape)
            tensors[name] = tuple(shape), parts[0].dtype, functools.partial(_slice, parts, start, tuple(shape))
            start += count + (paddings[number][position] if paddings is not None else 0)
        available, unit = sum(part.numel() for part in parts), 2 * len(groups)  # the vector is padded to a multiple of that
        if math.ceil(start / unit) != math.ceil(available / unit):
            raise ValueError(f"group {number} has {available} elements, and its weights need {start}")
    return tensors


def _whole(value: Tensor) -> _Lazy:
    """Return a tensor that is a view of a mapped file."""
    return tuple(value.shape), value.dtype, lambda: value


def _slice(parts: list[Tensor], first: int, shape: tuple[int, ...]) -> Tensor:
    """Join the elements of a weight, which follow each other in the concatenation of the ranks' parts."""
    last = first + math.prod(shape)
    pieces, offset = [], 0
    for part in parts:
        low, high = max(first - offset, 0), min(last - offset, part.numel())
        if low < high:
            pieces.append(part[low:high])
        offset += part.numel()
    return (pieces[0] if len(pieces) == 1 else _joined(pieces)).view(shape)


def _joined(pieces: list[Tensor]) -> Tensor:
    """Concatenate views of mapped files."""
    whole = torch.cat(pieces)
    for piece in pieces:
        release(piece)
    return whole


def _frozen(name: str, shape: tuple[int, ...], states: list[Any], stage: int) -> _Lazy:
    """Return a weight that was not trained: with ZeRO 3 every rank holds a part of it."""
    fragments = [state.frozen_param_fragments[name] for state in states]

    def join() -> Tensor:
        flat = fragments[0].flatten() if stage < 3 else _joined([fragment.flatten() for fragment in fragments])
        return flat[: math.prod(shape)].view(shape)

    return shape, fragments[0].dtype, join
