"""generate: prompts (JSON lines) -> completions, from a native checkpoint. The ranks share the prompts."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline.checkpoint import native
from pipeline.checkpoint.huggingface_import import read_generation_config
from pipeline.checkpoint.lora_merge import MergedWeights, open_merged
from pipeline.checkpoint.native import INDEX
from pipeline.checkpoint.peft_format import WEIGHTS
from pipeline.common.errors import UserError, collect_errors
from pipeline.common.files import digest
from pipeline.common.progress import Progress
from pipeline.common.ranks import Ranks
from pipeline.common.unfinished import work
from pipeline.config.layout import Layout
from pipeline.config.rules.check import layout_violations
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Generate
from pipeline.data.load.objectives.encoder_decoder import decoder_start
from pipeline.data.load.special_tokens import SpecialTokens
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.evaluation import translation
from pipeline.generation import draft, weights
from pipeline.generation.beam import BeamGenerator
from pipeline.generation.completions import REJECTED, Parts, missing, publish, wait_for_parts
from pipeline.generation.generator import Generator, Stopping
from pipeline.generation.prompts import PromptFile, PromptReader
from pipeline.generation.runner import Runner
from pipeline.generation.sampling import Sampling
from pipeline.generation.seq2seq import Seq2SeqRunner
from pipeline.generation.speculative import DraftModel, PromptLookup, SpeculativeGenerator
from pipeline.generation.template import PromptTemplate
from pipeline.layers.encoder_decoder import EncoderDecoder
from pipeline.models.config import ModelConfig
from pipeline.models.shared_sizes import EncoderDecoderSizes
from pipeline.parallel import mesh as meshes
from pipeline.parallel.parallelize import LocalModel
from pipeline.parallel.pipeline_relay import Relay
from pipeline.stages.convert import open_tokenizer
from pipeline.stages.convert_import import FOLDER

log = logging.getLogger("pipeline")


class _Ranks:
    """The ranks of torch.distributed with the interface that common/unfinished.py needs."""

    def __init__(self, ranks: Ranks) -> None:
        self.rank, self.size = ranks.rank, ranks.world_size

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return the root's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, root)
        return box[0]


def run(config: RunConfig, ranks: Ranks) -> None:
    """Write a completion for every prompt to `stage.output`. The model is that of the checkpoint; `model=` is not required.

    Raises:
        UserError: the checkpoint, the tokenizer or the prompts are missing or do not match, or the output folder has other content.
    """
    stage = config.stage
    assert isinstance(stage, Generate)
    folder = Path(stage.output or Path(config.run_dir) / "generated")
    prompts, _, template, tokenizer, path, draft_path = collect_errors(
        lambda: _open_prompts(stage),
        lambda: translation.check(stage),
        lambda: _open_template(stage),
        lambda: open_tokenizer(config),
        lambda: native.find(Path(config.run_dir), stage.checkpoint),
        lambda: draft.find(stage.draft) if stage.draft is not None else None,
    )
    minutes = config.training.timeout_minutes
    device = meshes.init_distributed(ranks.rank, ranks.world_size, ranks.local_rank, ranks.rendezvous(), minutes)
    try:
        # Rank 0 chooses the newest checkpoint for all: other ranks may see an older listing of the folder.
        path, draft_path = meshes.on_rank_0(lambda: (path, draft_path))
        checkpoint, drafts = open_merged(path, stage.adapter), None if draft_path is None else open_merged(draft_path, None)
        model = weights.model_of(checkpoint)
        reader = PromptReader(
            Path(config.tokenizer.path),
            max_positions=model.max_positions,
            vocab_size=model.vocab_size,
            end_of_document=tokenizer.end_of_document,
            encoder=isinstance(model, EncoderDecoderSizes),
            template=template,
        )
        stopping = Stopping(stage.max_tokens, _end_tokens(config, stage, tokenizer), tuple(stage.stop), reader.decode)
        _check(config, model, tokenizer)
        start = _decoder_start(config, model, tokenizer)
        violations = layout_violations(weights.for_generation(config, model))
        if drafts is not None:
            draft.check(stage, drafts, model, Path(config.tokenizer.path))
            violations += layout_violations(weights.for_generation(config, weights.model_of(drafts)))
        settings = _settings(config, stage, checkpoint, tokenizer) | _draft_settings(drafts)
        if violations:
            raise UserError(violations)
        config = weights.for_generation(config, model)
        comm = _Ranks(ranks)
        with work(comm, folder, ("stage.output", "generate"), settings, _summary, ["*.jsonl"]) as unfinished:  # type: ignore[arg-type]
            if unfinished is None:
                _score(config, ranks, stage, folder, checkpoint)
                return
            mesh = meshes.build_mesh(Layout.of(config, ranks.world_size), device, minutes)
            where = mesh.coordinates
            # Rank 0 decides for all: the ranks that share a model must process the same parts.
            mine = comm.bcast(missing(unfinished, prompts.parts))[mesh.layout.batch_shard(where) :: mesh.layout.batch_shards]
            leader = where.tensor == where.pipeline == 0
            parts = Parts(prompts, reader, stopping, unfinished, mine, logprobs=stage.logprobs, write=leader)
            runner = _runner(config, mesh, weights.load(checkpoint, config, mesh), start)
            small = None
            if drafts is not None:
                small_config = weights.for_generation(config, weights.model_of(drafts))
                small = _runner(small_config, mesh, weights.load(drafts, small_config, mesh), start)
            generator = _generator(stage, runner, small, stopping)
            began = time.monotonic()
            with Progress(None, "generate", "tokens", ranks.rank) as progress:
                for completion in generator.run(parts.read()):
                    parts.add(completion)
                    progress.advance(len(completion.tokens))
            if ranks.rank == 0:
                wait_for_parts(unfinished, prompts.parts)
                totals = publish(folder, settings, unfinished, prompts.parts)
                log.info("generate: wrote %s (%s) in %.1f s", folder, _summary(totals), time.monotonic() - began)
                if isinstance(generator, SpeculativeGenerator) and generator.proposed:
                    share = generator.accepted / generator.proposed
                    log.info("generate: %.0f %% of %s proposed tokens were accepted on rank 0", 100 * share, f"{generator.proposed:,}")
                if totals["rejected"]:
                    log.warning(
                        "generate: lines without a completion: %d; %s has the reason of each", totals["rejected"], folder / REJECTED
                    )
            _score(config, ranks, stage, folder, checkpoint)
    finally:
        meshes.destroy_process_group()


def _score(config: RunConfig, ranks: Ranks, stage: Generate, folder: Path, checkpoint: MergedWeights) -> None:
    """Record the scores of stage.metrics for the completions of a folder; also for one that an earlier job has written."""
    if stage.metrics and ranks.rank == 0:
        translation.write(Path(config.run_dir), checkpoint.step, Path(stage.prompts or ""), folder, stage.metrics)


def _open_prompts(stage: Generate) -> PromptFile:
    """Open the prompts.

    Raises:
        UserError: they are missing or empty.
    """
    assert stage.prompts is not None
    return PromptFile(Path(stage.prompts))


def _open_template(stage: Generate) -> PromptTemplate | None:
    """Open the template with its examples; errors as in PromptTemplate."""
    if stage.template is None:
        return None
    examples = None if stage.examples is None else Path(stage.examples)
    return PromptTemplate(Path(stage.template), examples, stage.few_shot or 0, stage.seed)


def _check(config: RunConfig, model: ModelConfig, tokenizer: TextEncoder) -> None:
    """Refuse a model that does not generate text, and a tokenizer of another model."""
    if model.objective in ("masked", "classification"):
        rule = f"is of family {model.family}, which does not predict the next token"
        raise UserError.of("stage.checkpoint", config.run_dir, rule, "choose a checkpoint of a decoder, such as llama or gpt")
    assert isinstance(config.stage, Generate)
    if config.parallel.pipeline > 1 and isinstance(model, EncoderDecoderSizes):
        rule = f"is not supported by stage=generate for family {model.family}"
        raise UserError.of("parallel.pipeline", config.parallel.pipeline, rule, "set it to 1, and use parallel.tensor")
    if config.stage.prompt_lookup and isinstance(model, EncoderDecoderSizes):
        rule = f"is not supported by family {model.family}; speculative decoding requires a decoder"
        raise UserError.of("stage.prompt_lookup", True, rule, "set it to false")
    if tokenizer.vocab_size > model.vocab_size:
        rule = f"has {tokenizer.vocab_size} entries, which exceeds model.vocab_size={model.vocab_size} of the checkpoint"
        raise UserError.of("tokenizer.path", config.tokenizer.path, rule, "set it to the tokenizer of the training run")


def _decoder_start(config: RunConfig, model: ModelConfig, tokenizer: TextEncoder) -> int:
    """Return the token that the decoder of an encoder-decoder reads first; 0, which is not read, for other models.

    Raises:
        UserError: the tokenizer does not have it.
    """
    if not isinstance(model, EncoderDecoderSizes):
        return 0
    return decoder_start(config, SpecialTokens(Path(config.tokenizer.path), tokenizer.fingerprint))


def _runner(config: RunConfig, mesh: meshes.Mesh, model: LocalModel, start: int) -> Runner:
    """Return what runs a model with a cache."""
    stage, module, longest = config.stage, next(model.stage_modules()), config.model.max_positions
    assert isinstance(stage, Generate)
    if isinstance(module, EncoderDecoder):
        return Seq2SeqRunner(module, longest, start=start)
    lookahead = stage.speculative_tokens + 1 if _is_speculative(stage) else 1
    relay = Relay(mesh) if mesh.layout.pipeline > 1 else None
    return Runner(module, longest, lookahead=lookahead, relay=relay, vocab_size=config.model.vocab_size, hidden=config.model.hidden)


def _is_speculative(stage: Generate) -> bool:
    """Whether tokens are proposed and verified."""
    return stage.draft is not None or stage.prompt_lookup


def _generator(stage: Generate, runner: Runner, small: Runner | None, stopping: Stopping) -> Generator | BeamGenerator:
    """Return the decoding algorithm; `small` is the draft model, if there is one."""
    if stage.beams > 1:
        return BeamGenerator(runner, stopping, beams=stage.beams, length_penalty=stage.length_penalty, batch_size=stage.batch_size)
    sampling = Sampling(stage.temperature, stage.top_k, stage.top_p, stage.min_p, stage.repetition_penalty, stage.seed)
    if not _is_speculative(stage):
        return Generator(runner, sampling, stopping, batch_size=stage.batch_size, logprobs=stage.logprobs)
    proposer = PromptLookup() if small is None else DraftModel(small, sampling)
    return SpeculativeGenerator(
        runner,
        sampling,
        stopping,
        batch_size=stage.batch_size,
        proposer=proposer,
        tokens=stage.speculative_tokens,
        logprobs=stage.logprobs,
    )


def _end_tokens(config: RunConfig, stage: Generate, tokenizer: TextEncoder) -> frozenset[int]:
    """Return the tokens that end a completion: end of document, and those of an imported model."""
    if stage.ignore_eos:
        return frozenset()
    imported = read_generation_config(Path(config.run_dir) / FOLDER) or {}
    ends = imported.get("eos_token_id") or []
    return frozenset([tokenizer.end_of_document, *(ends if isinstance(ends, list) else [ends])])


def _settings(config: RunConfig, stage: Generate, checkpoint: MergedWeights, tokenizer: TextEncoder) -> dict[str, Any]:
    """Return all settings that determine the completions."""
    keys = [
        name
        for name in vars(stage)
        if name not in ("name", "checkpoint", "prompts", "output", "batch_size", "draft", "draft_tokenizer", "metrics")
    ]
    adapter = None if stage.adapter is None else digest(Path(stage.adapter) / WEIGHTS)
    return {
        "stage.prompts": digest(Path(stage.prompts or "")),
        "stage.checkpoint": f"{checkpoint.path.name} {digest(checkpoint.path / INDEX)}",
        "tokenizer.path": tokenizer.fingerprint,
        "tokenizer.end_of_document": config.tokenizer.end_of_document,
        "data.decoder_start": config.data.decoder_start,
        "precision.dtype": config.precision.dtype,
        **{f"stage.{key}": list(value) if isinstance(value := getattr(stage, key), list) else value for key in keys},
        "stage.adapter": adapter,
        **{f"stage.{key}": digest(Path(path)) for key in ("template", "examples") if (path := getattr(stage, key)) is not None},
    }


def _draft_settings(drafts: MergedWeights | None) -> dict[str, Any]:
    """Return the setting of the draft model: its samples differ, although they have the same distribution."""
    return {"stage.draft": None if drafts is None else f"{drafts.path.name} {digest(drafts.path / INDEX)}"}


def _summary(totals: dict[str, Any]) -> str:
    """Format the totals for the log."""
    return f"{totals['completions']:,} completions, {totals['tokens']:,} tokens; {totals['rejected']:,} lines rejected"
