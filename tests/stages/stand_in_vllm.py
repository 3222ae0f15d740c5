"""In place of vLLM, which needs a GPU: the names and arguments that generation/vllm_engine.py uses, computed by stock transformers.

It has no others, so that the use of one fails; test_generate_vllm.py compares them with those of an installed vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

__version__ = "0"


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


@dataclass
class SamplingParams:
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    detokenize: bool
    logprobs: int | None


@dataclass
class Logprob:
    logprob: float


@dataclass
class CompletionOutput:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str


@dataclass
class RequestOutput:
    outputs: list[CompletionOutput]


class LLM:
    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        tensor_parallel_size: int,
        max_model_len: int,
        max_num_seqs: int,
        generation_config: str,
        logprobs_mode: str,
        kv_cache_memory_bytes: int | None = None,
    ) -> None:
        assert (generation_config, logprobs_mode) == ("vllm", "raw_logprobs")
        if max_num_seqs == 7:
            raise ValueError("refused on request")
        print(f"vLLM: {tensor_parallel_size} GPUs, {max_num_seqs} sequences, {kv_cache_memory_bytes} bytes")
        self._length = max_model_len
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(model)

    def generate(self, prompts: list[TokensPrompt], sampling_params: list[SamplingParams], *, use_tqdm: bool) -> list[RequestOutput]:
        assert not use_tqdm
        return [
            RequestOutput([self._completed(prompt["prompt_token_ids"], params)])
            for prompt, params in zip(prompts, sampling_params, strict=True)
        ]

    def _completed(self, prompt: list[int], params: SamplingParams) -> CompletionOutput:
        assert params.ignore_eos, "else the model's own end tokens would count"
        assert params.detokenize or not params.stop, "vLLM finds texts in what it decodes"
        assert len(prompt) + params.max_tokens <= self._length
        if params.seed is not None:
            torch.manual_seed(params.seed)
        sampled = {"temperature": params.temperature, "top_k": max(params.top_k, 0), "top_p": params.top_p, "min_p": params.min_p}
        result = self._model.generate(
            torch.tensor([prompt]),
            max_new_tokens=params.max_tokens,
            do_sample=params.temperature > 0,
            **(sampled if params.temperature > 0 else {}),
            repetition_penalty=params.repetition_penalty,
            eos_token_id=params.stop_token_ids or None,
            pad_token_id=0,
            **({"stop_strings": params.stop, "tokenizer": self._tokenizer} if params.stop else {}),
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = result.sequences[0, len(prompt) :].tolist()
        found = tokens[-1] in params.stop_token_ids or any(text in self._tokenizer.decode(tokens) for text in params.stop)
        logprobs = None
        if params.logprobs is not None:
            values = [float(logits[0].float().log_softmax(dim=0)[token]) for logits, token in zip(result.logits, tokens, strict=True)]
            logprobs = [{token: Logprob(value)} for token, value in zip(tokens, values, strict=True)]
        return CompletionOutput(tokens, logprobs, "stop" if found else "length")
