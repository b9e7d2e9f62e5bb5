"""Prefill pipeline: the chunks of a long prompt follow each other through the layers.

While expert servers compute a layer for chunk n, the host computes attention for chunk n + 1. Two threads run
successive chunks through the same model and cache, in turns (`turns`). A chunk enters a decoder layer only after the
chunk before it has asked for that layer's experts, that is, after its keys and values of that layer are in the cache;
so every chunk sees exactly what it would see if the chunks ran one after the other.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from transformers import DynamicCache

from moeoffload.config import HostSettings
from moeoffload.host.recorder import Recorder
from moeoffload.host.turns import Turns
from moeoffload.kernels.attention import takes_many
from moeoffload.native import Features, cpu_features

# Smaller chunks overlap better, but below these sizes reading the experts' weights serves too few rows. Measured on
# CPUs with prompts of 512 to 4,248 tokens.
CHUNK_ROWS: Final = 512
MASKED_CHUNK_ROWS: Final = 256
"""Used where attention also computes scores that the causal mask then hides: smaller chunks waste less."""
LEAST_CHUNK_ROWS: Final = 128
GPU_HOST_CHUNKS: Final = 4
"""Number of chunks on a GPU host, where attention takes little time and servers gain from large products."""
# Layers whose cache holds all that a later chunk needs of an earlier one, whatever the chunk's length.
_CHUNKABLE: Final = {"full_attention", "sliding_attention"}
_PLAIN_ARGUMENTS: Final = {
    "input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "return_dict",
}  # fmt: skip


def usual_chunk_rows(device: torch.device, dtype: torch.dtype, *, fast_dense: bool) -> int | None:
    """Returns the approximate chunk length for prompts on a host; None if they are cut into GPU_HOST_CHUNKS."""
    if device.type != "cpu":
        return None
    skips = fast_dense and takes_many(dtype)
    # Servers are presumably CPUs like this one: with a matrix unit, short chunks only wait for weights to be read.
    multiplies = dtype == torch.bfloat16 and Features.MATRIX_UNIT in cpu_features()
    return CHUNK_ROWS if skips or multiplies else MASKED_CHUNK_ROWS


def chunk_rows(n_rows: int, capacity: int, usual: int | None, settings: HostSettings) -> int | None:
    """Returns the chunk length for a prompt of ``n_rows`` tokens, given the least capacity of all servers and
    `usual_chunk_rows`; None: do not cut.

    Auto mode aims at two or more chunks of about even length, to overlap them; the other modes use the largest chunk
    that one dispatch may hold. The length never depends on measured speed: the shape of a product affects its rounding.
    """
    if settings.pipeline == "off":
        return None
    if settings.mode != "auto":
        return capacity
    n_chunks = GPU_HOST_CHUNKS if usual is None else max(2, round(n_rows / usual))
    even = -(-n_rows // n_chunks)
    return min(capacity, max(LEAST_CHUNK_ROWS, -(-even // 64) * 64))


class PrefillPipeline:
    """Runs long prompts of ``model`` in overlapping chunks; other calls go through unchanged.

    ``chunk_rows_for(n_rows)`` gives the rows of a chunk for a prompt of that many tokens, or None to leave it alone.
    """

    def __init__(
        self,
        model: Any,
        expert_modules: list[str],
        recorder: Recorder,
        turns: Turns,
        chunk_rows_for: Callable[[int], int | None],
    ) -> None:
        # Weak: a model that nobody has any more goes at once, with its weights, and not at some collection of cycles.
        self._model = weakref.ref(model)
        self._recorder = recorder
        self.chunk_rows_for = chunk_rows_for
        self._turns = turns
        self._original = weakref.WeakMethod(model.forward)
        self._signature = inspect.signature(model.forward)
        self._busy = threading.Lock()
        self._n_layers = len(expert_modules)
        self._head_start = _head_start(model, expert_modules)
        if self._head_start is not None:
            model.forward = functools.partial(self._call)
            # generate() reads the signature of forward to know what it may pass.
            model.forward.__signature__ = self._signature

    def close(self) -> None:
        """Gives the model its own forward back. Idempotent."""
        if self._head_start is not None and (model := self._model()) is not None:
            vars(model).pop("forward", None)

    # -- one forward pass

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._original()(*args, **kwargs)  # type: ignore[misc]

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        ids = args[0] if args else kwargs.get("input_ids")
        if ids is None or ids.shape[-1] == 1:  # a decode step: nothing more than this for it
            return self._forward(*args, **kwargs)
        bound = self._signature.bind_partial(*args, **kwargs).arguments
        arguments = {**bound.pop("kwargs", {}), **bound}
        chunks = self._cut(arguments)
        # Of several threads that share the model one at a time has its prompt cut.
        if chunks is None or not self._busy.acquire(blocking=False):
            return self._forward(*args, **kwargs)
        try:
            return self._run(arguments, chunks)
        finally:
            self._busy.release()

    def _cut(self, arguments: dict[str, Any]) -> list[tuple[int, int]] | None:
        """The chunks (first token, token after the last) of a call, or None if it is to run whole."""
        ids = arguments.get("input_ids")
        if ids is None or torch.is_grad_enabled():
            return None
        given = {name for name, value in arguments.items() if value is not None and value is not False}
        if not given <= _PLAIN_ARGUMENTS or arguments.get("use_cache") is False:
            return None
        mask, cache = arguments.get("attention_mask"), arguments.get("past_key_values")
        if (mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2)) or (
            cache is not None and type(cache) is not DynamicCache
        ):
            return None
        rows = self.chunk_rows_for(ids.numel())
        if rows is None:
            return None
        step = max(1, rows // ids.shape[0])
        chunks = [(start, min(start + step, ids.shape[1])) for start in range(0, ids.shape[1], step)]
        keep, last = arguments.get("logits_to_keep"), chunks[-1][1] - chunks[-1][0]
        return chunks if len(chunks) > 1 and isinstance(keep, int) and 1 <= keep <= last else None

    def _run(self, arguments: dict[str, Any], chunks: list[tuple[int, int]]) -> Any:
        cache = arguments.get("past_key_values")
        if cache is None:
            cache = DynamicCache(config=self._model().config)  # type: ignore[union-attr]
        past = cache.get_seq_length()
        parts = [_slice(arguments, cache, past, *chunk) for chunk in chunks]
        results: list[Any] = [None] * len(parts)
        assert self._head_start is not None
        # A chunk ends when the next one has passed all MoE layers but the head start; with few layers the one after
        # that must not begin yet.
        n_waits = 2 * self._head_start + 1 - self._n_layers

        def run(first: int) -> None:
            for number in range(first, len(parts), 2):
                for _ in range(n_waits if number > 1 else 0):
                    with self._turns:
                        pass
                results[number] = self._forward(**parts[number])

        counters = self._recorder.counters
        counters.pipelined += 1
        halves = functools.partial(run, 0), functools.partial(run, 1)
        self._turns.run(self._recorder.own.phase, halves, counters.turn, head_start=self._head_start)
        return results[-1]


def _slice(arguments: dict[str, Any], cache: Any, past: int, start: int, end: int) -> dict[str, Any]:
    """The arguments for tokens ``start`` to ``end`` of a call that begins after ``past`` cached tokens."""
    ids, positions = arguments["input_ids"], arguments.get("position_ids")
    part = arguments | {"input_ids": ids[:, start:end], "past_key_values": cache, "use_cache": True}
    if positions is None:
        positions = torch.arange(past, past + ids.shape[1], device=ids.device).unsqueeze(0)
    part["position_ids"] = positions[..., start:end]
    if arguments.get("attention_mask") is not None:
        part["attention_mask"] = arguments["attention_mask"][:, : past + end]
    return part


def _head_start(model: Any, expert_modules: list[str]) -> int | None:
    """How many MoE layers the first chunk passes before the second one may begin; None if prompts cannot be cut.

    A forward pass asks the cache once per attention type, at the first layer of it, how long the past is.
    """
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return None
    types: list[str] = list(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    # The decoder layers that have experts: the first number in a module's name.
    layers = [next(int(part) for part in name.split(".") if part.isdecimal()) for name in expert_modules]
    last_first = max(types.index(each) for each in types)
    if not set(types) <= _CHUNKABLE or last_first > layers[-1]:
        return None
    return sum(layer < last_first for layer in layers)
