"""Public reports of silent bugs in trainers: training that runs, converges roughly, and is wrong. A mutant names the one that it repeats.

A number after the name of a project is one of its issues or pull requests; "-n" is the n-th bug of an issue that lists several. TTrace is
https://arxiv.org/abs/2506.09280; its bugs are quoted from memory.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """A public bug.

    Attributes:
        heading: the part of training that it is in.
        source: where it was reported.
        what: what is wrong.
    """

    heading: str
    source: str
    what: str


LOSS, TENSOR, CONTEXT, NORM, EXPERTS = "loss", "tensor and sequence parallelism", "context parallelism", "norm and clipping", "experts"
PIPELINE, PRECISION, OPTIMIZER = "pipeline and tied weights", "ZeRO, accumulation, precision", "optimizer"
STATE, DATA = "state", "data"
HEADINGS = (LOSS, TENSOR, CONTEXT, NORM, EXPERTS, PIPELINE, PRECISION, OPTIMIZER, STATE, DATA)

#: Number -> bug.
BUGS = {
    1: Bug(LOSS, "Megatron-LM#7452-1, #737, #7464, #5522", "label smoothing over the local vocabulary"),
    2: Bug(LOSS, "Megatron-LM#7452-2", "the loss of gathered logits is off by log(tensor ranks)"),
    3: Bug(LOSS, "Megatron-LM#7452-3, #7498, #1532", "the loss of multi-token prediction is divided by the wrong count"),
    4: Bug(LOSS, "Megatron-LM#673", "loss scale of context parallelism"),
    5: Bug(LOSS, "torchtitan#3329, #3280", "the displayed loss is divided by the context ranks once too often"),
    6: Bug(LOSS, "Megatron-LM#1298", "a cached loss mask is changed in place"),
    7: Bug(LOSS, "DeepSpeed#7985", "the last micro-batch is not reduced"),
    8: Bug(LOSS, "TTrace", "wrong loss scale over data and context ranks"),
    9: Bug(TENSOR, "Megatron-LM#1446", "gradient of the last norm differs over tensor ranks"),
    10: Bug(TENSOR, "Megatron-LM#7452-11", "gradient of a norm over each rank's own heads is not summed"),
    11: Bug(TENSOR, "TTrace", "the bias of a row-parallel layer is added by every rank"),
    12: Bug(TENSOR, "TTrace", "wrong mask of the shard of the embedding"),
    13: Bug(TENSOR, "torchtitan#1373", "the shared rotary key of latent attention gets the gradient of local heads only"),
    14: Bug(TENSOR, "bigcode Megatron-LM#11, #12, #35", "replicated biases are not summed over tensor ranks"),
    15: Bug(TENSOR, "Megatron-LM#7452-4, #7403", "recomputation uses the wrong group"),
    16: Bug(TENSOR, "TTrace", "wrong input of recomputation"),
    17: Bug(CONTEXT, "Megatron-LM#1464, #1465, TransformerEngine#1557", "backward pass of ring attention"),
    18: Bug(CONTEXT, "ring attention", "log-sum-exp of a hop is merged in the wrong order or dtype"),
    19: Bug(NORM, "ROCm TransformerEngine#715", "replicated weights are marked as sharded"),
    20: Bug(NORM, "NeMo-RL#3788", "replicas are counted once for each tensor rank"),
    21: Bug(NORM, "Megatron-LM#5916, #6470", "experts are undercounted"),
    22: Bug(NORM, "Megatron-LM#7228", "the tied embedding is counted twice"),
    23: Bug(NORM, "torchtitan#2318", "the norm is off by the number of replicas"),
    24: Bug(NORM, "DeepSpeed#1801", "clipping on some tensor ranks only: replicated weights drift apart"),
    25: Bug(NORM, "Megatron-LM#7452-8, #7530", "sharded vectors are counted on rank 0 only"),
    26: Bug(EXPERTS, "Megatron-LM#599, #619, torchtitan#2387, #2416", "router gradients are not summed over tensor ranks"),
    27: Bug(EXPERTS, "pytorch#160285", "expert gradients are too large by the number of ranks"),
    28: Bug(EXPERTS, "transformers#48687, #48689", "padding leaks gradient into the router"),
    29: Bug(EXPERTS, "Megatron-LM#6111, #7452-10", "auxiliary loss is counted several times"),
    30: Bug(EXPERTS, "router bias", "the update of the router's bias is missing"),
    31: Bug(PIPELINE, "Megatron-LM#656, #7177", "tied head and embedding drift apart"),
    32: Bug(PIPELINE, "Megatron-LM#7172, #7173, #7174", "order of what is sent between two ranks"),
    33: Bug(PIPELINE, "TTrace", "wrong division into stages"),
    34: Bug(PIPELINE, "pipeline stages", "the learning rate differs by stage"),
    35: Bug(PRECISION, "DeepSpeed#8224", "a later contribution to a gradient is lost"),
    36: Bug(PRECISION, "DeepSpeed#7839", "gradients are never zeroed"),
    37: Bug(PRECISION, "DeepSpeed#5154", "reduction in bf16 before accumulation in fp32"),
    38: Bug(PRECISION, "DeepSpeed#8415", "steps are skipped silently"),
    39: Bug(PRECISION, "TTrace", "a reduction starts before the last gradient of its bucket"),
    40: Bug(PRECISION, "TransformerEngine#1047, #539", "fp8 scales are stale after the first micro-batch"),
    41: Bug(PRECISION, "pytorch#115607", "frozen weights are updated"),
    42: Bug(OPTIMIZER, "Megatron-LM#7117", "a rule for matrices depends on the layout"),
    43: Bug(OPTIMIZER, "DeepSpeed#8384", "what belongs to the heads is divided wrongly over tensor ranks"),
    44: Bug(OPTIMIZER, "Megatron-LM#3715", "the learning rate of one kind of weight is used for another"),
    45: Bug(OPTIMIZER, "Megatron-LM#4731", "split of a fused projection"),
    46: Bug(OPTIMIZER, "weight decay", "weight decay of norms and biases, or none of matrices"),
    47: Bug(STATE, "NeMo-RL#3312", "asynchronous checkpoints repeat the first one's weights"),
    48: Bug(STATE, "pytorch#144657", "staging of CPU tensors does not copy"),
    49: Bug(STATE, "Megatron-DeepSpeed#248, #405", "the loss jumps after loading in another layout"),
    50: Bug(STATE, "Megatron-LM#5281", "replicas are not loaded"),
    51: Bug(STATE, "resume", "optimizer step or schedule restarts at resume"),
    52: Bug(DATA, "accelerate#4071, #2823, Megatron-Bridge#4565, #4601", "a resumed or later epoch repeats samples"),
    53: Bug(DATA, "loader workers", "equal seeds"),
    54: Bug(DATA, "loader ranks", "two data ranks read the same shard"),
    55: Bug(DATA, "transformers#33844", "dropout is active in evaluation"),
    56: Bug(NORM, "Megatron-LM#7452, #7458", "attention sinks are counted on one tensor rank"),
}
