"""What a certificate compares models on: random batches, and the gradients of stock transformers."""

import math
from itertools import groupby

import pytest
import torch

from pipeline.certification import exported
from pipeline.certification.batches import random_batches
from pipeline.checkpoint.weights import InMemory
from pipeline.conversion import huggingface_export
from pipeline.models import registry
from tests.models.small_decoders import CONFIGS
from tests.world import configured, tiny


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_the_tokens_of_a_document_follow_one_another(packing):
    """As those of a run: context parallelism sends no keys between parts of a document that another one divides."""
    config = configured(*tiny("model=llama-tiny", "training.document_mask=true", "training.sequence_length=16", f"data.packing={packing}"))
    documents = torch.cat([batch["documents"] for _, batch in random_batches(config, 4)])
    for row in documents.tolist():
        numbers = [number for number, _ in groupby(row)]
        assert len(numbers) == len(set(numbers))
    assert any(len(set(row)) > 2 for row in documents.tolist())


def test_gradients_of_stock_linear_attention_are_precise_enough_to_compare(tmp_path):
    """With strong decays, in fp32."""
    config = CONFIGS["qwen3-next"]
    model, generator = registry.build(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.05, generator=generator)
            if name.endswith("decay_rate_log"):
                parameter.fill_(math.log(12))
    weights = InMemory({name: parameter.detach() for name, parameter in model.named_parameters()})
    huggingface_export.write_weights(tmp_path, weights, config, dtype=torch.float32, shard_bytes=1 << 30)
    huggingface_export.write_configs(tmp_path, config, dtype=torch.float32, end_of_document_id=0)
    assert exported.differences(tmp_path, weights, config) == []
