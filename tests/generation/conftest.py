"""Small models of the families, each beside its Hugging Face class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from pipeline.conversion import huggingface_export
from tests.conversion.test_huggingface_export import InMemory, load, random_model
from tests.models.small_decoders import CONFIGS

POSITIONS = 112


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> Callable[[str], tuple[Any, Any, Any]]:
    """`pair(name)`: a configuration, our model, and the stock class with its export."""

    @cache
    def made(name: str) -> tuple[Any, Any, Any]:
        config = replace(CONFIGS[name], max_positions=POSITIONS)
        ours = random_model(config).eval()
        folder = tmp_path_factory.mktemp(name)
        huggingface_export.write_weights(folder, InMemory(ours), config, dtype=torch.float32, shard_bytes=10**9)
        huggingface_export.write_configs(folder, config, dtype=torch.float32, end_of_document_id=0)
        return config, ours, load(folder)

    return made


def prompts(vocabulary: int, *lengths: int, seed: int = 3) -> list[list[int]]:
    """Random prompts."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocabulary, (length,), generator=generator).tolist() for length in lengths]
