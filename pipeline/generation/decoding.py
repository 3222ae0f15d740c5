"""What stage=generate decodes with: the checks of the model, when a completion ends, the runner of the model, and the algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pipeline.checkpoint.lora_merge import MergedWeights
from pipeline.common import host_memory
from pipeline.common.errors import UserError
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Generate
from pipeline.conversion import imported
from pipeline.data.load.objectives.objective import decoder_start
from pipeline.data.load.special_tokens import SpecialTokens
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.generation import weights
from pipeline.generation.beam import BeamGenerator
from pipeline.generation.generator import Generator, Stopping
from pipeline.generation.pages import PAGE, SLACK
from pipeline.generation.proposers import DraftModel, PromptLookup
from pipeline.generation.runner import Runner, decoder_runner
from pipeline.generation.sampling import Sampling
from pipeline.generation.seq2seq import Seq2SeqRunner
from pipeline.generation.speculative import SpeculativeGenerator
from pipeline.layers.encoder_decoder import EncoderDecoder
from pipeline.models.config import ModelConfig
from pipeline.models.shared_sizes import EncoderDecoderSizes
from pipeline.parallel import collectives
from pipeline.parallel.mesh import Mesh


def check_model(model: ModelConfig, stage: Generate, run_dir: str, pipeline: int) -> None:
    """Refuse a model that does not generate text, or not with these settings.

    Raises:
        UserError: with the first rule that the model breaks.
    """
    if model.objective in ("masked", "classification"):
        rule = f"is of family {model.family}, which does not predict the next token"
        raise UserError.of("stage.checkpoint", run_dir, rule, "choose a checkpoint of a decoder, such as llama or gpt")
    if not isinstance(model, EncoderDecoderSizes):
        return
    if stage.engine == "vllm":
        rule = f"runs decoders only, and the checkpoint is of family {model.family}"
        raise UserError.of("stage.engine", "vllm", rule, "set it to native")
    if pipeline > 1:
        rule = f"is not supported by stage=generate for family {model.family}"
        raise UserError.of("parallel.pipeline", pipeline, rule, "set it to 1, and use parallel.tensor")
    if stage.prompt_lookup:
        rule = f"is not supported by family {model.family}; speculative decoding requires a decoder"
        raise UserError.of("stage.prompt_lookup", True, rule, "set it to false")


def stopping(stage: Generate, checkpoint: Path, tokenizer: Path, ends: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Stopping:
    """Return when a completion ends: after stage.max_tokens, at stage.stop, at the end of a text, and at the ends of an imported model."""
    tokens: list[int] = []
    if not stage.ignore_eos:
        original = imported.original_of(imported.folder_of(checkpoint), tokenizer)
        tokens = [*ends, *(original.ends if original else ())]
    return Stopping(stage.max_tokens, frozenset(tokens), tuple(stage.stop), decode)


def first_decoder_token(named: str | None, model: ModelConfig, tokenizer: TextEncoder) -> int:
    """Return the token that the decoder of an encoder-decoder reads first; 0, which is not read, for other models.

    Raises:
        UserError: the tokenizer does not have it.
    """
    if not isinstance(model, EncoderDecoderSizes):
        return 0
    return decoder_start(named, SpecialTokens(tokenizer.path.parent, tokenizer.fingerprint))


def load_runner(config: RunConfig, stage: Generate, checkpoint: MergedWeights, mesh: Mesh, decoder_token: int) -> Runner:
    """Return what runs the model of a checkpoint with a cache.

    Args:
        config: as weights.for_generation returns it.

    Raises:
        UserError: the checkpoint is damaged.
    """
    local = weights.load(checkpoint, config, mesh)
    module = next(local.stage_modules())
    if isinstance(module, EncoderDecoder):
        return Seq2SeqRunner(module, config.model.max_positions, start=decoder_token)
    return decoder_runner(local, config.model, mesh, lookahead=stage.speculative_tokens + 1 if _is_speculative(stage) else 1)


def open_generator(
    stage: Generate,
    models: Sequence[tuple[RunConfig, MergedWeights]],
    mesh: Mesh,
    stops: Stopping,
    decoder_token: int,
    local_ranks: int,
    longest: Sequence[int],
    lines: int,
) -> Generator | BeamGenerator:
    """Load the models, and return the decoding algorithm that the settings choose.

    Args:
        models: the model, and the draft model if there is one: configuration for generation, and weights.
        local_ranks: ranks that share the memory of this machine.

    Raises:
        UserError: a checkpoint is damaged, or a batch does not fit in memory.
    """
    runners = [load_runner(config, stage, checkpoint, mesh, decoder_token) for config, checkpoint in models]
    positions = models[0][0].model.max_positions
    if stage.cache_gigabytes is not None:
        available = stage.cache_gigabytes * 1e9
    elif mesh.device.type == "cuda":
        available = FREE_SHARE * torch.cuda.mem_get_info(mesh.device)[0]
    else:
        available = FREE_SHARE * host_memory.available_bytes() / local_ranks

    def maximum(values: Tensor) -> Tensor:
        for group in mesh.all_ranks:
            values = collectives.all_reduce(values, group, "max")
        return values

    room = CacheRoom(runners, positions, available, maximum)
    room.check(stage, min(stage.batch_size, lines), runners[0].length(longest), positions)
    return generator_of(stage, runners[0], runners[1] if len(runners) > 1 else None, stops, room.share)


def _is_speculative(stage: Generate) -> bool:
    """Whether tokens are proposed and verified."""
    return stage.draft is not None or stage.prompt_lookup


def generator_of(
    stage: Generate, runner: Runner, draft: Runner | None, stops: Stopping, share: Callable[[int], float]
) -> Generator | BeamGenerator:
    """Return the decoding algorithm that the settings choose."""
    if stage.beams > 1:
        return BeamGenerator(runner, stops, beams=stage.beams, length_penalty=stage.length_penalty, batch_size=stage.batch_size)
    sampling = Sampling(stage.temperature, stage.top_k, stage.top_p, stage.min_p, stage.repetition_penalty, stage.seed)
    if not _is_speculative(stage):
        return Generator(runner, sampling, stops, batch_size=stage.batch_size, logprobs=stage.logprobs, share=share)
    return SpeculativeGenerator(
        runner,
        sampling,
        stops,
        batch_size=stage.batch_size,
        proposer=PromptLookup() if draft is None else DraftModel(draft, sampling),
        tokens=stage.speculative_tokens,
        logprobs=stage.logprobs,
        share=share,
    )


#: Share of the free memory that the cache may take; the rest is for activations.
FREE_SHARE = 0.8


class CacheRoom:
    """What sequences take of the caches of a rank.

    With several ranks, a share is the largest one on all ranks: they have different layers and memories, and must decide alike.

    Args:
        runners: of the model, and of the draft model.
        max_positions: longest sequence, tokens.
        available: bytes for the caches of this rank.
        maximum: returns the elementwise maximum over all ranks.
    """

    def __init__(self, runners: Sequence[Runner], max_positions: int, available: float, maximum: Callable[[Tensor], Tensor]) -> None:
        lengths = range(0, max_positions + PAGE, PAGE)
        sizes = [sum(runner.bytes_of(min(length, max_positions)) for runner in runners) * (1 + 1 / SLACK) for length in lengths]
        shares = [size / max(available, 1.0) for size in sizes]
        largest = maximum(torch.tensor([*sizes, *shares], dtype=torch.float64, device=runners[0].device))
        self._bytes, self._shares = (part.tolist() for part in largest.chunk(2))

    def share(self, length: int) -> float:
        """Return the share of the memory that a sequence of `length` tokens takes."""
        return float(self._shares[-(-length // PAGE)])

    def check(self, stage: Generate, rows: int, prompt: int, max_positions: int) -> None:
        """Refuse a batch that does not fit.

        Args:
            prompt: tokens of the longest prompt.
            max_positions: longest sequence, tokens.

        Raises:
            UserError: with the memory that is needed and the nearest setting that fits.
        """
        length = min(prompt + stage.max_tokens, max_positions)
        share = self.share(length)
        if rows * share <= 1:
            return
        needed = self._bytes[-(-length // PAGE)]
        rule = (
            f"{rows} sequences of up to {length:,} tokens (the longest prompt has {prompt:,}) need {rows * needed / 1e9:.3g} GB of KV "
            f"cache; {needed / share / 1e9:.3g} GB are available"
        )
        if share <= 1:
            raise UserError.of("stage.batch_size", stage.batch_size, rule, f"set stage.batch_size={math.floor(1 / share)}")
        fitting = PAGE * sum(share <= 1 for share in self._shares[1:]) - prompt
        if fitting >= 1:
            fix = f"set stage.batch_size=1 and stage.max_tokens={fitting}, or shard the model with parallel.tensor"
            raise UserError.of("stage.max_tokens", stage.max_tokens, rule, fix)
        raise UserError.of("stage.prompts", stage.prompts, rule, "shorten the longest prompt, or shard the model with parallel.tensor")
