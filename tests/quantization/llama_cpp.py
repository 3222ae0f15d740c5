"""llama.cpp, in the library of its Python package, by its C interface."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
import xllamacpp
from torch import Tensor


class _Options(ctypes.Structure):  # llama_model_params and llama_context_params, which are smaller
    _fields_ = (("words", ctypes.c_int32 * 128),)


class _Batch(ctypes.Structure):  # llama_batch
    _fields_ = (("count", ctypes.c_int32), ("pointers", ctypes.c_void_p * 6))


#: Index of words of llama_context_params, their defaults, and ours: two threads, plain attention, keys and values in fp32
_CONTEXT = {7: (4, 1), 8: (4, 1), 13: (-1, 0), 26: (1, 0), 27: (1, 0)}


class LlamaCpp:
    """A model that llama.cpp has read from a file."""

    def __init__(self, path: Path) -> None:
        (library,) = Path(xllamacpp.__file__).parent.glob("*.so")
        self._llama: Any = ctypes.CDLL(str(library))
        self._log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(self._note)
        self._said: list[str] = []
        self._llama.llama_log_set(self._log, None)
        pointer, integers = ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32)
        for name, returned, arguments in (
            ("llama_model_default_params", _Options, []),
            ("llama_model_load_from_file", pointer, [ctypes.c_char_p, _Options]),
            ("llama_model_get_vocab", pointer, [pointer]),
            ("llama_tokenize", ctypes.c_int32, [pointer, ctypes.c_char_p, ctypes.c_int32, integers, ctypes.c_int32, *[ctypes.c_bool] * 2]),
            ("llama_context_default_params", _Options, []),
            ("llama_init_from_model", pointer, [pointer, _Options]),
            ("llama_batch_get_one", _Batch, [integers, ctypes.c_int32]),
            ("llama_decode", ctypes.c_int32, [pointer, _Batch]),
            ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), [pointer, ctypes.c_int32]),
            ("llama_free", None, [pointer]),
        ):
            function = getattr(self._llama, name)
            function.restype, function.argtypes = returned, arguments
        self._model = self._llama.llama_model_load_from_file(str(path).encode(), self._llama.llama_model_default_params())
        assert self._model, "llama.cpp does not read the file: " + "".join(self._said)
        self._vocabulary = self._llama.llama_model_get_vocab(self._model)

    def _note(self, level: int, text: bytes, _: Any) -> None:
        if level >= 3:  # warnings and errors
            self._said.append(text.decode(errors="replace"))

    def tokens(self, text: str) -> list[int]:
        """The ids of a text with special tokens, those that it spells and those that are added."""
        content = text.encode()
        ids = (ctypes.c_int32 * (len(content) + 8))()
        return ids[: self._llama.llama_tokenize(self._vocabulary, content, len(content), ids, len(ids), True, True)]

    def logits(self, tokens: list[int], vocab_size: int, *, at_once: int) -> Tensor:
        """The logits of a sequence whose first tokens are read at once and the others one by one, from the last one of the first on."""
        options = self._llama.llama_context_default_params()
        for word, (default, wanted) in _CONTEXT.items():
            assert options.words[word] == default, "other options of llama.cpp"
            options.words[word] = wanted
        context = self._llama.llama_init_from_model(self._model, options)
        found = []
        for part in (tokens[:at_once], *([token] for token in tokens[at_once:])):
            ids = (ctypes.c_int32 * len(part))(*part)
            assert self._llama.llama_decode(context, self._llama.llama_batch_get_one(ids, len(part))) == 0, "".join(self._said)
            found.append(torch.tensor(self._llama.llama_get_logits_ith(context, -1)[:vocab_size]))
        self._llama.llama_free(context)
        return torch.stack(found)
