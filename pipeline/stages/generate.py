"""generate: prompts (JSON lines) -> completions, from a native checkpoint. The ranks share the prompts."""

from __future__ import annotations

import logging
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint import native
from pipeline.checkpoint.load_any_layout import open_on_all_ranks
from pipeline.checkpoint.lora_merge import MergedWeights, open_merged
from pipeline.checkpoint.native import INDEX
from pipeline.checkpoint.peft_format import WEIGHTS
from pipeline.checkpoint.reader import settings_of_weights, with_weights
from pipeline.common.atomic_files import digest
from pipeline.common.errors import UserError, collect_errors
from pipeline.common.progress import Progress
from pipeline.common.ranks import Ranks
from pipeline.common.unfinished import Unfinished, work
from pipeline.config.data import TokenizerConfig
from pipeline.config.layout import Layout
from pipeline.config.rules.check import layout_violations
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Generate
from pipeline.conversion.huggingface_folder import ExportSource, original_of
from pipeline.conversion.tokenizer import check_tokenizer, open_tokenizer
from pipeline.data.tokenize import chat_template
from pipeline.data.tokenize.chat_template import ChatTemplate
from pipeline.data.tokenize.tokenizer import TextEncoder, warn_of_spelled
from pipeline.evaluation import translation
from pipeline.generation import decoding, vllm_engine, weights
from pipeline.generation.beam import BeamGenerator
from pipeline.generation.completions import REJECTED, BroadcastRanks, PromptParts, missing, publish, wait_for_parts
from pipeline.generation.generator import Generator
from pipeline.generation.prompts import PromptFile, PromptReader, open_template
from pipeline.generation.speculative import SpeculativeGenerator
from pipeline.generation.vllm_engine import VllmEngine
from pipeline.models.shared_sizes import EncoderDecoderSizes
from pipeline.parallel import mesh as meshes

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Write a completion for every prompt to `stage.output`. The model is that of the checkpoint; `model=` is not required.

    Raises:
        UserError: the checkpoint, the tokenizer or the prompts are missing or do not match, or the output folder has other content.
    """
    stage, run_dir, minutes = config.stage, Path(config.run_dir), config.training.timeout_minutes
    assert isinstance(stage, Generate)
    folder = Path(stage.output or run_dir / "generated")
    prompts, _, _, template, tokenizer, chats, path, draft_path = collect_errors(
        lambda: PromptFile(Path(stage.prompts or "")),
        lambda: translation.check(stage),
        lambda: vllm_engine.check_installed() if stage.engine == "vllm" else None,
        lambda: open_template(stage),
        lambda: open_tokenizer(config.tokenizer, run_dir),
        lambda: _chat_template(config.tokenizer),
        lambda: native.find(run_dir, stage.checkpoint),
        lambda: weights.find_draft(stage.draft) if stage.draft is not None else None,
    )
    own_device = torch.device("cpu") if stage.engine == "vllm" else None  # whose processes use the GPUs
    with meshes.process_group(ranks, minutes, own_device) as device:
        # Rank 0 chooses the newest checkpoint for all: other ranks may see an older listing of the folder.
        path, draft_path = meshes.on_rank_0(lambda: (path, draft_path))
        checkpoint = open_merged(with_weights(open_on_all_ranks(path), stage.weights), stage.adapter)
        drafts = None if draft_path is None else open_merged(open_on_all_ranks(draft_path), None)
        model = weights.model_of(checkpoint)
        reader = PromptReader(
            Path(config.tokenizer.path),
            max_positions=model.max_positions,
            vocab_size=model.vocab_size,
            end_of_document=tokenizer.end_of_document,
            encoder=isinstance(model, EncoderDecoderSizes),
            template=template,
            chats=chats,
            texts=tokenizer.prompts,
        )
        stops = decoding.stopping(stage, path, tokenizer.path.parent, reader.ends, reader.decode)
        decoding.check_model(model, stage, config.run_dir, config.parallel.pipeline)
        check_tokenizer(tokenizer, checkpoint, model.vocab_size)
        decoder_token = decoding.first_decoder_token(config.data.decoder_start, model, tokenizer)
        models = [(weights.for_generation(config, model), checkpoint)]
        if drafts is not None:
            weights.check_draft(stage, drafts, model, Path(config.tokenizer.path), config.parallel.expert)
            models.append((weights.draft_config(config, drafts), drafts))
        settings = _settings(config, stage, checkpoint, drafts, tokenizer)
        UserError.raise_for(violation for model_config, _ in models for violation in layout_violations(model_config))
        comm = BroadcastRanks(ranks.rank, ranks.world_size)
        with work(comm, folder, ("stage.output", "generate"), settings, _summary, ["*.jsonl"]) as unfinished:  # type: ignore[arg-type]
            if unfinished is not None:
                mesh = meshes.build_mesh(Layout.of(models[0][0], ranks.world_size), device, minutes, ranks.local_size)
                where = mesh.coordinates
                # Rank 0 decides for all what is missing: other ranks may see an older listing of the folder.
                left = comm.bcast(missing(unfinished, prompts.parts))
                leader = where.tensor == where.pipeline == 0
                taken = meshes.handed_out("generate", mesh.layout.batch_shard(where), leader=leader)
                mine = (left[number] for number in takewhile(lambda number: number < len(left), taken))
                parts = PromptParts(prompts, reader, stops, unfinished, mine, logprobs=stage.logprobs, write=leader)
                generator: Generator | BeamGenerator | VllmEngine
                if stage.engine == "vllm":
                    source = ExportSource(checkpoint, model, tokenizer, original_of(checkpoint, model, tokenizer))
                    generator = vllm_engine.open_engine(models[0][0], stage, source, mesh, stops, ranks.local_rank, prompts.lines)
                else:
                    longest, lines = reader.longest(prompts), prompts.lines
                    generator = decoding.open_generator(stage, models, mesh, stops, decoder_token, ranks.local_size, longest, lines)
                began = time.monotonic()
                with Progress(None, "generate", "tokens", ranks.rank) as progress:
                    for completion in generator.run(parts.read()):
                        parts.add(completion)
                        progress.advance(len(completion.tokens))
                if ranks.rank == 0:
                    warn_of_spelled(f"stage.prompts={stage.prompts}", reader.text_encoder.spelled)
                    wait_for_parts(unfinished, prompts.parts)
                    _publish(folder, settings, unfinished, prompts.parts, began)
                    if isinstance(generator, SpeculativeGenerator) and generator.proposed:
                        share, proposed = generator.accepted / generator.proposed, f"{generator.proposed:,}"
                        log.info("generate: %.0f %% of %s proposed tokens were accepted on rank 0", 100 * share, proposed)
            if stage.metrics and ranks.rank == 0:  # also for completions that an earlier job has written
                translation.write(run_dir, checkpoint.step, Path(stage.prompts or ""), folder, stage.metrics)


def _chat_template(tokenizer: TokenizerConfig) -> ChatTemplate | None:
    """Return the template of chats; None without one, or without a tokenizer, which is reported by itself."""
    return chat_template.of(tokenizer) if (Path(tokenizer.path) / "tokenizer.json").is_file() else None


def _publish(folder: Path, settings: dict[str, Any], unfinished: Unfinished, parts: range, began: float) -> None:
    """Write the files and the manifest, and log them."""
    totals = publish(folder, settings, unfinished, parts)
    log.info("generate: wrote %s (%s) in %.1f s", folder, _summary(totals), time.monotonic() - began)
    if totals["rejected"]:
        log.warning("generate: lines without a completion: %d; %s has the reason of each", totals["rejected"], folder / REJECTED)


def _settings(
    config: RunConfig, stage: Generate, checkpoint: MergedWeights, drafts: MergedWeights | None, tokenizer: TextEncoder
) -> dict[str, Any]:
    """Return all settings that determine the completions; with a draft model, samples differ although their distribution does not."""
    others = [
        *("name", "checkpoint", "weights", "prompts", "output", "engine", "export", "batch_size", "cache_gigabytes"),
        *("draft", "draft_tokenizer", "metrics"),
    ]
    keys = [name for name in vars(stage) if name not in others]
    return {
        "stage.prompts": digest(Path(stage.prompts or "")),
        "stage.checkpoint": f"{checkpoint.path.name} {digest(checkpoint.path / INDEX)}",
        **tokenizer.settings,
        "tokenizer.end_of_document": config.tokenizer.end_of_document,
        **({} if (named := config.tokenizer.chat_template) is None else {"tokenizer.chat_template": named}),
        "data.decoder_start": config.data.decoder_start,
        "precision.dtype": config.precision.dtype,
        **{f"stage.{key}": list(value) if isinstance(value := getattr(stage, key), list) else value for key in keys},
        **settings_of_weights(stage.weights),
        "stage.adapter": None if stage.adapter is None else digest(Path(stage.adapter) / WEIGHTS),
        **{f"stage.{key}": digest(Path(path)) for key in ("template", "examples") if (path := getattr(stage, key)) is not None},
        "stage.draft": None if drafts is None else f"{drafts.path.name} {digest(drafts.path / INDEX)}",
        **({} if stage.engine == "native" else {"stage.engine": stage.engine}),  # nothing for ours, as before there was a choice
    }


def _summary(totals: dict[str, Any]) -> str:
    """Format the totals for the log."""
    return f"{totals['completions']:,} completions, {totals['tokens']:,} tokens; {totals['rejected']:,} lines rejected"
