"""Generation by an installed vLLM (https://docs.vllm.ai), from the Hugging Face export of a checkpoint: the only file that imports it.

Of the ranks of a tensor group, the first one creates an engine, which runs on the GPUs of the group in processes of its own. Prompts,
their parts, the ends of completions and the output are those of our engine; what vLLM computes is the tokens.

The names and arguments are those of vLLM 0.31; tests/stages/test_generate_vllm.py compares them with an installed one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from pipeline.common import artifact
from pipeline.common.errors import RunFailed, UserError, collect_errors
from pipeline.common.mpi import SingleProcessComm
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Convert, Generate
from pipeline.conversion import huggingface_export, huggingface_folder, stock_logits
from pipeline.conversion.export_files import export_folder, write_manifest
from pipeline.conversion.huggingface_folder import ExportSource
from pipeline.generation.generator import Completion, Stopping
from pipeline.generation.sampling import Sampling
from pipeline.models import registry
from pipeline.parallel import mesh as meshes
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import DTYPES

log = logging.getLogger("pipeline")

#: precision.dtype -> its name in vLLM.
NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
#: Prompts of a call for each sequence of a forward pass: at the end of a call, the batch runs empty.
CALL = 8
#: Variables of the launcher of our ranks, which PyTorch would read in the processes of vLLM.
LAUNCHER = frozenset(
    (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    )
)
#: Its processes are started anew, not forked from this one, which has a process group; nothing is sent or downloaded.
OPTIONS = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_FIX = "install vLLM in an environment with this package (pip install vllm==0.31.0), or set stage.engine=native"


def check_installed() -> None:
    """Refuse to begin without vLLM.

    Raises:
        UserError: it is not installed.
    """
    if find_spec("vllm") is None:
        raise UserError.of("stage.engine", "vllm", "requires vLLM, which is not installed", _FIX)


class VllmEngine:
    """Generates completions with vLLM; has the interface of Generator.

    Args:
        llm: vllm.LLM; None on the ranks of a tensor group that leave their GPUs to the first one.
        max_positions: longest sequence, tokens.
        prompts: maximum number of prompts of a call.
    """

    def __init__(self, llm: Any, stage: Generate, stops: Stopping, max_positions: int, prompts: int) -> None:
        self._llm, self._stage, self._stops, self._max_positions, self._prompts = llm, stage, stops, max_positions, prompts

    def run(self, prompts: Iterable[tuple[int, Sequence[int]]]) -> Iterator[Completion]:
        """Yield the completions of prompts (index, tokens). The processes of vLLM end with this one.

        Raises:
            RunFailed: vLLM did not complete a prompt.
        """
        if self._llm is None:
            return
        from vllm import SamplingParams, TokensPrompt

        source = iter(prompts)
        while call := list(islice(source, self._prompts)):
            inputs = [TokensPrompt(prompt_token_ids=list(tokens)) for _, tokens in call]
            rooms = [self._max_positions - len(tokens) for _, tokens in call]
            params = [
                SamplingParams(**sampling_arguments(self._stage, self._stops, index, room))
                for (index, _), room in zip(call, rooms, strict=True)
            ]
            outputs = self._llm.generate(inputs, params, use_tqdm=False)
            for (index, tokens), output in zip(call, outputs, strict=True):
                yield self._completion(index, tokens, output.outputs[0])

    def _completion(self, index: int, prompt: Sequence[int], output: Any) -> Completion:
        """Return a completion without the token that ends it, which vLLM returns as its last one."""
        tokens, reason = list(output.token_ids), output.finish_reason
        logprobs = [entry[token].logprob for token, entry in zip(tokens, output.logprobs, strict=True)] if self._stage.logprobs else []
        end = next((place for place, token in enumerate(tokens) if token in self._stops.end_tokens), None)
        if end is None and reason not in ("stop", "length"):
            raise RunFailed(f"vLLM ended the completion of line {index} with finish_reason={reason}")
        return Completion(index, prompt, tokens[:end], logprobs[:end], reason if end is None else "stop")


def open_engine(
    config: RunConfig, stage: Generate, source: ExportSource, mesh: Mesh, stops: Stopping, local_rank: int, lines: int
) -> VllmEngine:
    """Create the engine of a tensor group, on its first rank. Every rank calls this: rank 0 writes the export if there is none.

    Args:
        config: with the model of the checkpoint.
        local_rank: of this rank; its GPU is the first one of the engine.
        lines: number of prompts; a group takes its share of them in a call at most.

    Raises:
        UserError: the export is that of another checkpoint, vLLM cannot be imported or refuses the model or the settings, or this rank
            does not see the GPUs of its group.
        CheckFailed: the export is wrong.
    """
    folder = meshes.on_rank_0(lambda: prepare(config, stage, source))
    positions, share = config.model.max_positions, -(-lines // mesh.layout.batch_shards)
    prompts = min(CALL * stage.batch_size, share)
    if mesh.coordinates.tensor > 0:
        return VllmEngine(None, stage, stops, positions, prompts)
    with _environment(gpus_of(local_rank, config.parallel.tensor)):
        try:
            import vllm

            llm = vllm.LLM(**engine_arguments(config, stage, folder))
        except ImportError as error:
            raise UserError.of("stage.engine", "vllm", f"requires vLLM, which cannot be imported: {error}", _FIX) from error
        except ValueError as error:  # also what pydantic finds
            rule = f"vLLM {vllm.__version__} refuses {folder}: {error}"
            raise UserError.of("stage.engine", "vllm", rule, "change what it names, or set stage.engine=native") from error
    return VllmEngine(llm, stage, stops, positions, prompts)


def engine_arguments(config: RunConfig, stage: Generate, folder: Path) -> dict[str, Any]:
    """Return the arguments of vllm.LLM."""
    size = stage.cache_gigabytes
    return {
        "model": str(folder),
        "dtype": NAMES[config.precision.dtype],
        "tensor_parallel_size": config.parallel.tensor,
        "max_model_len": config.model.max_positions,
        "max_num_seqs": stage.batch_size,
        "generation_config": "vllm",  # not that of the export: all settings are given
        "logprobs_mode": "raw_logprobs",  # before the rules of sampling
        **({} if size is None else {"kv_cache_memory_bytes": int(size * 1e9)}),
    }


def sampling_arguments(stage: Generate, stops: Stopping, index: int, room: int) -> dict[str, Any]:
    """Return the arguments of vllm.SamplingParams for a prompt; config/rules/stage.py refuses the settings that have none.

    Args:
        index: number of the prompt, which selects its random numbers.
        room: how many tokens can follow it.
    """
    return {
        "max_tokens": min(stops.max_tokens, room),
        "temperature": stage.temperature,
        "top_k": stage.top_k or -1,
        "top_p": stage.top_p,
        "min_p": stage.min_p,
        "repetition_penalty": stage.repetition_penalty,
        "seed": Sampling(seed=stage.seed).random(index).getrandbits(63) if stage.temperature else None,
        "stop": list(stops.strings),
        "stop_token_ids": sorted(stops.end_tokens),
        "ignore_eos": True,  # the ends are those of stop_token_ids
        "detokenize": bool(stops.strings),
        "logprobs": 0 if stage.logprobs else None,  # of the chosen token only
    }


def gpus_of(first: int, count: int) -> list[str]:
    """Return the GPUs of an engine, as in CUDA_VISIBLE_DEVICES; none if this process sees none (vLLM for CPUs).

    Args:
        first: number of the first one among those that this process sees; modulo their number, as in parallel/device.py.

    Raises:
        UserError: this process does not see them.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = list(map(str, range(torch.cuda.device_count()))) if named is None else [number for number in named.split(",") if number]
    if not visible:
        return []
    chosen = visible[first % len(visible) :][:count]
    if len(chosen) < count:
        rule = f"is the number of GPUs of an engine of vLLM, and this rank sees {len(visible)}, of which it begins with {chosen[0]}"
        fix = "start the ranks of a tensor group on one node, such that each sees all GPUs of the node"
        raise UserError.of("parallel.tensor", count, rule, fix)
    return chosen


@contextmanager
def _environment(gpus: Sequence[str]) -> Iterator[None]:
    """The variables that the processes of vLLM start with."""
    before = dict(os.environ)
    for name in before:
        if name in LAUNCHER or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    os.environ.update(OPTIONS, **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


KEY = "stage.export"


def folder_of(config: RunConfig, stage: Generate) -> Path:
    """Return the folder of the export: stage.export, or that of stage=convert."""
    return Path(stage.export or Path(config.run_dir) / "hf")


def check(config: RunConfig, stage: Generate, source: ExportSource) -> bool:
    """Return whether the export exists; one in fp32 serves any precision.dtype, which vLLM rounds it to.

    Raises:
        UserError: the folder holds something else, or the checkpoint cannot be exported.
    """
    folder, precision, checkpoint = folder_of(config, stage), config.precision.dtype, source.weights.path
    if not (folder / artifact.MANIFEST).is_file():
        collect_errors(
            lambda: artifact.check_empty(folder, key=KEY, stage="convert"),
            lambda: registry.mapping_of(source.model),
            lambda: huggingface_export.check_weights(source.weights, source.model, "stage.checkpoint", checkpoint),
        )
        return False
    exported = artifact.read(folder, key=KEY, stage="convert").settings
    dtype = "fp32" if exported.get("stage.dtype") == "fp32" else precision
    gigabytes = exported.get("stage.shard_gigabytes", Convert.shard_gigabytes)
    settings = huggingface_folder.settings_of(config.tokenizer, stage, checkpoint, source.tokenizer, dtype=dtype, shard_gigabytes=gigabytes)
    artifact.find_complete(folder, key=KEY, stage="convert", settings=settings)
    return True


def prepare(config: RunConfig, stage: Generate, source: ExportSource) -> Path:
    """Return the folder of the export, which is written, and appears at once, if it does not exist. One rank calls this.

    Raises:
        UserError: as in check.
        CheckFailed: a written file does not hold the weights of the checkpoint, or the export computes other logits.
    """
    folder = folder_of(config, stage)
    if check(config, stage, source):
        return folder
    precision, gigabytes = config.precision.dtype, Convert.shard_gigabytes
    of_checkpoint = partial(huggingface_folder.settings_of, config.tokenizer, stage, source.weights.path, source.tokenizer)
    settings = of_checkpoint(dtype=precision, shard_gigabytes=gigabytes)
    with export_folder(folder, settings, SingleProcessComm(), key=KEY) as (files, writer):
        parameters = huggingface_folder.write(
            files, config.tokenizer, source, dtype=DTYPES[precision], shard_bytes=int(gigabytes * 1e9), writer=writer
        )
        stock_logits.compare(files, source.weights, source.model, DTYPES[precision])
        write_manifest(files, writer, settings, {"step": source.weights.step, "parameters": parameters})
    log.info("generate: wrote the export %s (step %d, %s parameters)", folder, source.weights.step, f"{parameters:,}")
    return folder
