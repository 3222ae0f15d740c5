"""Phi-3 (Abdin et al. 2024, https://arxiv.org/abs/2404.14219) and Phi-4 (https://arxiv.org/abs/2412.08905): the function of Mistral."""

from __future__ import annotations

from pipeline.layers.init import scaled_residual
from pipeline.models.family import Family
from pipeline.models.mistral.model import build
from pipeline.models.phi3.config import Phi3Config
from pipeline.models.phi3.huggingface import MAPPING

PHI3 = Family(
    config=Phi3Config,
    build=build,
    # GPT-2's recipe; Microsoft published none.
    initial_std=scaled_residual,
    huggingface=(MAPPING,),
)
