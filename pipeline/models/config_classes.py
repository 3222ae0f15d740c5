"""Names and configuration dataclasses of the model families. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.models.apertus.config import ApertusConfig
from pipeline.models.bert.config import BertConfig
from pipeline.models.bloom.config import BloomConfig
from pipeline.models.config import ModelConfig
from pipeline.models.deepseek_v3.config import DeepseekV3Config
from pipeline.models.gemma2.config import Gemma2Config
from pipeline.models.gemma3.config import Gemma3Config
from pipeline.models.glm4_moe.config import Glm4MoeConfig
from pipeline.models.gpt.config import GPTConfig
from pipeline.models.gpt1.config import GPT1Config
from pipeline.models.gpt_neox.config import GPTNeoXConfig
from pipeline.models.gpt_oss.config import GptOssConfig
from pipeline.models.granite.config import GraniteConfig
from pipeline.models.llama.config import LlamaConfig
from pipeline.models.mistral.config import MistralConfig
from pipeline.models.mixtral.config import MixtralConfig
from pipeline.models.nemotron.config import NemotronConfig
from pipeline.models.olmo2.config import Olmo2Config
from pipeline.models.olmo3.config import Olmo3Config
from pipeline.models.olmoe.config import OlmoeConfig
from pipeline.models.opt.config import OPTConfig
from pipeline.models.phi3.config import Phi3Config
from pipeline.models.qwen3_moe.config import Qwen3MoeConfig
from pipeline.models.qwen3_next.config import Qwen3NextConfig
from pipeline.models.roberta.config import RobertaConfig
from pipeline.models.smollm3.config import SmolLM3Config
from pipeline.models.t5.config import T5Config
from pipeline.models.transformer.config import TransformerConfig

#: family -> its configuration dataclass
CONFIG_CLASSES: dict[str, type[Any]] = {
    "apertus": ApertusConfig,
    "bert": BertConfig,
    "bloom": BloomConfig,
    "deepseek_v3": DeepseekV3Config,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3Config,
    "glm4_moe": Glm4MoeConfig,
    "gpt": GPTConfig,
    "gpt1": GPT1Config,
    "gpt_neox": GPTNeoXConfig,
    "gpt_oss": GptOssConfig,
    "granite": GraniteConfig,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "mixtral": MixtralConfig,
    "nemotron": NemotronConfig,
    "olmo2": Olmo2Config,
    "olmo3": Olmo3Config,
    "olmoe": OlmoeConfig,
    "opt": OPTConfig,
    "phi3": Phi3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "qwen3_next": Qwen3NextConfig,
    "roberta": RobertaConfig,
    "smollm3": SmolLM3Config,
    "t5": T5Config,
    "transformer": TransformerConfig,
}


def from_dict(values: Mapping[str, Any]) -> ModelConfig:
    """Return the model configuration that a checkpoint or a run directory stores as a dictionary."""
    config: ModelConfig = CONFIG_CLASSES[values["family"]](**values)
    return config
