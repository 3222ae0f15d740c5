"""Rules of the group stage: the keys of evaluate, generate, convert, plan, certify and rehearse."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.common import knobs
from pipeline.common.errors import Violation
from pipeline.config.planned import planned_job
from pipeline.config.rules import convert, parallel
from pipeline.config.rules.unread import unlike
from pipeline.config.schema import RunConfig
from pipeline.config.stages import STAGES, Certify, Convert, Evaluate, Generate, Plan, Rehearse

#: Logits divided by less would exceed the range of fp32.
LEAST_TEMPERATURE = 1e-6
#: vLLM increases smaller temperatures to this one.
LEAST_VLLM_TEMPERATURE = 0.01
#: What is planned instead of the configured job.
PLANS = ("search", "scaling", "run")


def violations(config: RunConfig, world_size: int) -> Iterator[Violation]:
    """Yield the rules that the settings of the stage violate."""
    stage = config.stage
    if stage.name not in STAGES or STAGES[stage.name][0] is not type(stage):
        yield Violation("stage.name", stage.name, "is not the stage whose keys were composed", "choose the stage by stage=NAME")
    if isinstance(stage, Generate):
        yield from _generate(config, stage)
        yield from _replicas(config, world_size)
    if isinstance(stage, Evaluate):
        yield from _tasks(stage)
        if stage.tasks:
            yield from _replicas(config, world_size)
    if isinstance(stage, Plan):
        yield from _plan(config, stage)
    if isinstance(stage, Certify):
        yield from _certify(config)
    if isinstance(stage, Rehearse):
        yield from _rehearse(config, stage, world_size)
    if isinstance(stage, Convert):
        yield from convert.violations(stage)


def evaluated_model_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield the rules of an evaluation that depend on the model of the checkpoint."""
    assert isinstance(config.stage, Evaluate)
    yield from _pseudo_perplexity(config, config.stage)
    yield from _stride(config, config.stage)
    yield from _distill(config, config.stage)


def _generate(config: RunConfig, stage: Generate) -> Iterator[Violation]:
    """Prompts are given, and each way of decoding has its own settings."""
    if stage.prompts is None:
        yield Violation("stage.prompts", None, "is required", 'set it to a file with lines such as {"prompt": "Once upon a time"}')
    if 0 < stage.temperature < LEAST_TEMPERATURE:
        rule = f"divides the logits, and must be 0 or at least {LEAST_TEMPERATURE:g}"
        yield Violation("stage.temperature", stage.temperature, rule, "set it to 0, which chooses the most probable token")
    if "" in stage.stop:
        yield Violation("stage.stop", stage.stop, "contains an empty text, which would end every completion", "remove it")
    if stage.beams > 1:
        plain = {"temperature": 0, "repetition_penalty": 1, "stop": [], "logprobs": False, "draft": None, "prompt_lookup": False}
        rule = f"is not supported by beam search (stage.beams={stage.beams})"
        yield from unlike(config, {f"stage.{key}": value for key, value in plain.items()}, rule, "set {key}={value} or stage.beams=1")
        if stage.beams > stage.batch_size:
            yield Violation("stage.beams", stage.beams, f"must not exceed stage.batch_size={stage.batch_size}", "increase stage.batch_size")
    yield from _template(stage)
    if stage.draft is not None and stage.prompt_lookup:
        yield Violation("stage.prompt_lookup", True, "proposes tokens, and so does stage.draft", "set one of them")
    if stage.engine == "vllm":
        yield from _vllm(config, stage)
    elif stage.export is not None:
        yield Violation("stage.export", stage.export, "is read with stage.engine=vllm only", "set that, or remove it")


def _vllm(config: RunConfig, stage: Generate) -> Iterator[Violation]:
    """Settings that vLLM has no equivalent for, or that its batch interface does not take."""
    plain = {"stage.beams": 1, "stage.draft": None, "stage.prompt_lookup": False, "parallel.pipeline": 1, "parallel.expert": 1}
    rule, fix = "is not supported by stage.engine=vllm", "set {key}={value}, or stage.engine=native"
    yield from unlike(config, plain | {"precision.fp8": "none"}, rule, fix)
    if 0 < stage.temperature < LEAST_VLLM_TEMPERATURE:
        rule = f"must be 0 or at least {LEAST_VLLM_TEMPERATURE} with stage.engine=vllm, which increases smaller values to it"
        yield Violation("stage.temperature", stage.temperature, rule, "set it to 0, which chooses the most probable token")
    if stage.min_p > 0 and stage.top_p < 1:
        rule = f"is applied before stage.top_p={stage.top_p} by stage.engine=vllm, and after it by transformers and stage.engine=native"
        yield Violation("stage.min_p", stage.min_p, rule, "set one of them, or stage.engine=native")


def _template(stage: Generate) -> Iterator[Violation]:
    """Examples are shown by a template, and their number is set."""
    if stage.examples is not None and stage.template is None:
        fix = "set it to a Jinja file that shows them: {% for example in examples %} ... {% endfor %}"
        yield Violation("stage.template", None, "is required by stage.examples", fix)
    if stage.examples is not None and stage.few_shot is None:
        yield Violation("stage.few_shot", None, "is required by stage.examples", "set the number of examples of a prompt")
    if stage.examples is None and stage.few_shot:
        yield Violation(
            "stage.few_shot", stage.few_shot, "requires stage.examples", "set it to a file of JSON lines, or remove stage.few_shot"
        )


def _tasks(stage: Evaluate) -> Iterator[Violation]:
    """Tasks are local files, and no validation split."""
    if stage.tasks and stage.task_folder is None:
        yield Violation("stage.task_folder", None, "is required by stage.tasks", "set it to the folder with their .yaml files")
    if stage.tasks and stage.stride is not None:
        yield Violation("stage.stride", stage.stride, "is read without stage.tasks only", "remove it")
    if stage.tasks and stage.pseudo_perplexity:
        rule = "is computed on the validation split, without stage.tasks"
        yield Violation("stage.pseudo_perplexity", True, rule, "set it to false")
    if stage.fewshot_as_multiturn is not None and not stage.apply_chat_template:
        rule = "is read with stage.apply_chat_template=true only"
        yield Violation("stage.fewshot_as_multiturn", stage.fewshot_as_multiturn, rule, "set that, or remove it")
    if stage.tasks:
        return
    for key in ("task_folder", "few_shot", "limit", "apply_chat_template", "fewshot_as_multiturn", "system_instruction"):
        if (value := getattr(stage, key)) not in (None, False):
            yield Violation(f"stage.{key}", value, "is read with stage.tasks only", "set stage.tasks, or remove it")


def _pseudo_perplexity(config: RunConfig, stage: Evaluate) -> Iterator[Violation]:
    """Only masked language models have one."""
    if stage.pseudo_perplexity and config.objective != "masked":
        rule = f"is not defined for family {config.model.family} with the objective {config.objective}"
        yield Violation(
            "stage.pseudo_perplexity", True, rule, "set it to false, or choose a masked language model: BERT, RoBERTa or ModernBERT"
        )


def _replicas(config: RunConfig, world_size: int) -> Iterator[Violation]:
    """Prompts and questions are shared over replicas of the model, which tensor and pipeline ranks may shard, of prompts also experts."""
    generates = isinstance(config.stage, Generate)
    unsupported = ("context",) if generates else ("context", "expert")
    for axis in unsupported:
        if (size := getattr(config.parallel, axis)) > 1:
            rule = "is not supported by stage=generate" if generates else "is not supported by stage.tasks"
            sharded = "tensor, pipeline and expert" if generates else "tensor and pipeline"
            yield Violation(f"parallel.{axis}", size, rule, f"set parallel.{axis}=1; {sharded} ranks shard the model")
    supported = knobs.changed(config, {f"parallel.{axis}": 1 for axis in unsupported})
    yield from parallel.ranks(supported.parallel, world_size)


def _plan(config: RunConfig, stage: Plan) -> Iterator[Violation]:
    """One kind of plan at a time, pictures of those that have one, and a run that is not too long."""
    training = planned_job(config).training
    if training != config.training and knobs.range_violations(training):
        batch = f"{training.global_batch_size:,} x {training.sequence_length:,}"
        rule = f"takes training.steps={training.steps} of {batch} tokens, which is not a legal number"
        yield Violation("stage.tokens", stage.tokens, rule, "reduce it, or increase training.global_batch_size")
    kinds = [kind for kind in PLANS if getattr(stage, kind)]
    for other in kinds[1:]:
        rule = f"plans something else than stage.{kinds[0]}={getattr(stage, kinds[0])}"
        yield Violation(f"stage.{other}", getattr(stage, other), rule, "set one of them")
    if stage.plot and kinds and kinds[0] == "run":
        yield Violation("stage.plot", stage.plot, f"has no picture of stage.{kinds[0]}", "remove it")


def _stride(config: RunConfig, stage: Evaluate) -> Iterator[Violation]:
    """Overlapping windows are those of the validation split of a causal model."""
    if stage.stride is None:
        return
    if config.objective != "causal":
        rule = f"requires a causal language model; model.family={config.model.family} has the objective {config.objective}"
        yield Violation("stage.stride", stage.stride, rule, "remove it")
    elif stage.stride > config.training.sequence_length:
        rule = f"must not exceed training.sequence_length={config.training.sequence_length}"
        yield Violation("stage.stride", stage.stride, rule, "reduce it, for example to half of training.sequence_length")


def _distill(config: RunConfig, stage: Evaluate) -> Iterator[Violation]:
    """One decoder predicts next tokens of its vocabulary."""
    if stage.distill is None:
        return
    if config.objective != "causal":
        rule = f"requires a causal language model; model.family={config.model.family} has the objective {config.objective}"
        yield Violation("stage.distill", stage.distill, rule, "remove it")
    if stage.distill_top_k > config.model.vocab_size:
        rule = f"must not exceed the vocabulary size {config.model.vocab_size}"
        yield Violation("stage.distill_top_k", stage.distill_top_k, rule, "reduce it")
    if stage.checkpoint == "all":
        yield Violation("stage.checkpoint", "all", "is no teacher; stage.distill has one", "name a checkpoint, or latest")
    rule = "has no effect with stage.distill"
    yield from unlike(config, {"stage.tasks": [], "stage.stride": None, "stage.batches": None}, rule, "remove it")


def _certify(config: RunConfig) -> Iterator[Violation]:
    """The layout computes the same function as a plain loop."""
    capacity, parallel = getattr(config.model, "capacity_factor", None), config.parallel
    if capacity is None:
        return
    for key, value, sharded in (("context", parallel.context, parallel.context > 1), ("expert_tensor", 1, parallel.folded)):
        if sharded:
            rule = f"drops other tokens with parallel.{key}={value} than in one process, so that the results differ"
            fix = f"set it to null, or {'parallel.context=1' if key == 'context' else 'remove parallel.expert_tensor'}"
            yield Violation("model.capacity_factor", capacity, rule, fix)


def _rehearse(config: RunConfig, stage: Rehearse, world_size: int) -> Iterator[Violation]:
    """The GPU is known, and the job has the rank."""
    if config.cluster.hardware is None:
        fix = "set it to one of conf/hardware/, for example cluster.hardware=h100; dry_run=true works without it"
        yield Violation("cluster.hardware", None, "is required: the rehearsal plays the GPU of the nodes", fix)
    if stage.rank is not None and stage.rank >= world_size:
        rule = f"must be less than the world size {world_size}"
        yield Violation("stage.rank", stage.rank, rule, f"choose a rank from 0 to {world_size - 1}, or set stage.world_size")
