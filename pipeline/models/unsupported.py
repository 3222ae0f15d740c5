"""Hugging Face classes that cannot be imported, the nearest one that can, and what differs. Does not import torch."""

from __future__ import annotations

from collections.abc import Container

_IMAGES = "also reads images; its language model alone"
#: class -> the nearest supported class, and what the class has that this one lacks.
NEAREST: dict[str, tuple[str, str]] = {
    "AlbertForMaskedLM": ("BertForMaskedLM", "shares the weights of its layers and has a narrow embedding"),
    "BartForConditionalGeneration": ("MarianMTModel", "has learned positions, and norms of its embeddings"),
    "Cohere2ForCausalLM": ("LlamaForCausalLM", "has LayerNorm, attention beside the feed-forward, and layers without positions"),
    "CohereForCausalLM": ("LlamaForCausalLM", "has LayerNorm, and attention beside the feed-forward"),
    "DebertaV2ForMaskedLM": ("BertForMaskedLM", "has attention to relative positions"),
    "DeepseekV2ForCausalLM": ("DeepseekV3ForCausalLM", "has softmax routers without correction biases"),
    "DeepseekV32ForCausalLM": ("DeepseekV3ForCausalLM", "has sparse attention to the tokens that an indexer selects"),
    "DistilBertForMaskedLM": ("BertForMaskedLM", "has no segment embeddings"),
    "FalconForCausalLM": ("BloomForCausalLM", "has attention beside the feed-forward, and a key and value head for several query heads"),
    "FlexOlmoForCausalLM": ("OlmoeForCausalLM", "has the norms of OLMo 2, of the outputs of the layers"),
    "GPTJForCausalLM": ("GPTNeoXForCausalLM", "has one norm for attention and feed-forward, and rotates pairs of neighboring dims"),
    "GPTNeoForCausalLM": ("GPT2LMHeadModel", "has a sliding window in every second layer, and does not scale the attention scores"),
    "Gemma3nForCausalLM": ("Gemma3ForCausalLM", "has embeddings in every layer, and several residual streams"),
    "Gemma3nForConditionalGeneration": ("Gemma3ForCausalLM", "has embeddings in every layer, and several residual streams"),
    "GemmaForCausalLM": ("Gemma2ForCausalLM", "has no norms of the outputs of the layers, no soft caps, and no sliding window"),
    "Glm4ForCausalLM": ("LlamaForCausalLM", "rotates a part of the dims of a head, and has norms of the outputs of the layers"),
    "GlmForCausalLM": ("LlamaForCausalLM", "rotates a part of the dims of a head"),
    "GraniteMoeForCausalLM": ("GraniteForCausalLM", "has experts"),
    "GraniteMoeSharedForCausalLM": ("GraniteForCausalLM", "has experts"),
    "KimiK25ForConditionalGeneration": ("DeepseekV3ForCausalLM", f"{_IMAGES} is Kimi K2, of DeepseekV3ForCausalLM"),
    "Llama4ForCausalLM": ("LlamaForCausalLM", "has experts, and attention in chunks"),
    "Llama4ForConditionalGeneration": ("LlamaForCausalLM", "has experts, and attention in chunks, and also reads images"),
    "MT5ForConditionalGeneration": ("T5ForConditionalGeneration", "is T5 1.1 under another name, which is not verified here"),
    "Mistral3ForConditionalGeneration": ("MistralForCausalLM", f"{_IMAGES} is of MistralForCausalLM"),
    "MllamaForConditionalGeneration": ("LlamaForCausalLM", "has layers with attention to images"),
    "OlmoForCausalLM": ("Olmo2ForCausalLM", "has LayerNorm without weights, of the inputs of the layers"),
    "Phi4MultimodalForCausalLM": ("Phi3ForCausalLM", "has adapters for images and speech"),
    "PhiForCausalLM": ("GPTNeoXForCausalLM", "has one norm for attention and feed-forward, and a bias of the head"),
    "PhimoeForCausalLM": ("MixtralForCausalLM", "has LayerNorm, biases, and another router"),
    "Qwen2MoeForCausalLM": ("Qwen3MoeForCausalLM", "has a shared expert with a gate, and biases for norms of queries and keys"),
    "Qwen2VLForConditionalGeneration": ("Qwen2ForCausalLM", f"{_IMAGES} is of Qwen2ForCausalLM"),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2ForCausalLM", f"{_IMAGES} is of Qwen2ForCausalLM"),
    "Qwen3VLForConditionalGeneration": ("Qwen3ForCausalLM", f"{_IMAGES} is of Qwen3ForCausalLM"),
    "StableLmForCausalLM": ("LlamaForCausalLM", "has LayerNorm, and rotates a part of the dims of a head"),
    "Starcoder2ForCausalLM": ("MistralForCausalLM", "has LayerNorm, biases, and no gate"),
}
#: End of the name of a class with another head -> the end of the class of the same model that may be supported.
_HEADS = {"ForSequenceClassification": "ForCausalLM", "ForTokenClassification": "ForCausalLM", "ForQuestionAnswering": "ForCausalLM"}


def nearest(architecture: str | None, supported: Container[str]) -> str:
    """Return the end of a message about a class that cannot be imported, empty if no supported class is near.

    Args:
        architecture: name of the class.
        supported: names of the classes that can be imported.
    """
    name = architecture or ""
    for end, other in _HEADS.items():
        model = name.removesuffix(end) + other
        if name.endswith(end) and model in supported:
            return f"; the nearest is {model}: {name} is the same model with another head"
    if name not in NEAREST:
        return ""
    near, difference = NEAREST[name]
    return f"; the nearest is {near}: {name} {difference}"
