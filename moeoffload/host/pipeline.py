"""Prefill pipeline: the chunks of a long prompt follow each other through the layers.

While expert servers compute a layer for chunk n, the host computes attention for chunk n + 1. Two threads run
successive chunks through the same model and cache. A chunk may enter a decoder layer only after the chunk before it has
asked for that layer's experts, that is, after its keys and values of that layer are in the cache; so every chunk sees
exactly what it would see if the chunks ran one after the other.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any, Final

import torch
from torch import nn
from transformers import DynamicCache

from moeoffload.errors import DeadlineError
from moeoffload.host.recorder import Recorder

# Layers whose cache holds all that a later chunk needs of an earlier one, whatever the chunk's length.
_CHUNKABLE: Final = {"full_attention", "sliding_attention"}
_PLAIN_ARGUMENTS: Final = {
    "input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "return_dict",
}  # fmt: skip
POLL_S: Final = 0.5


class _Chunk(threading.local):
    """Which chunk of the running prefill this thread works on; None outside of one."""

    number: int | None = None


class PrefillPipeline:
    """Runs long prompts of ``model`` in overlapping chunks; other calls go through unchanged.

    ``chunk_rows_for(n_rows)`` gives the rows of a chunk for a prompt of that many tokens, or None to leave it alone.
    """

    def __init__(
        self,
        model: Any,
        expert_modules: list[str],
        recorder: Recorder,
        chunk_rows_for: Callable[[int], int | None],
        timeout_s: float,
    ) -> None:
        # Weak, as its layers, which lead to the dispatcher, which leads here: a model that nobody has any more goes at
        # once, with its servers and weights, and not at some collection of cycles.
        self._model = weakref.ref(model)
        self._recorder = recorder
        self.chunk_rows_for = chunk_rows_for
        self._timeout_s = timeout_s
        self._original = weakref.WeakMethod(model.forward)
        self._signature = inspect.signature(model.forward)
        self._chunk = _Chunk()
        self._passed: list[int] = []
        self._moved = threading.Condition()
        self._failed = False
        self._busy = threading.Lock()
        layers = _decoder_layers(model, expert_modules)
        self._layers = weakref.ref(layers)
        self._first_layers = _first_of_each_type(model, len(layers))
        # For each MoE layer the number of its decoder layer: the first number in its module's name.
        self._layer_of = [next(int(part) for part in name.split(".") if part.isdecimal()) for name in expert_modules]
        self._pool: ThreadPoolExecutor | None = None
        """None if this model's prompts cannot be cut into chunks at all."""
        if self._first_layers and "logits_to_keep" in self._signature.parameters:

            def forward(*args: Any, **kwargs: Any) -> Any:
                return self._call(*args, **kwargs)

            # generate() reads the signature of forward to know what it may pass.
            forward.__signature__ = self._signature  # type: ignore[attr-defined]
            model.forward = forward
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefill")

    def close(self) -> None:
        """Gives the model its own forward back. Idempotent."""
        if self._pool is not None:
            if (model := self._model()) is not None:
                del model.forward
            self._pool.shutdown()
            self._pool = None

    def experts_asked(self, layer: int) -> None:
        """To be called when the experts of MoE layer ``layer`` are asked for: the layer's attention is done."""
        if (number := self._chunk.number) is not None:
            self._pass(number, self._layer_of[layer] + 1)

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
        if chunks is None:
            return self._forward(*args, **kwargs)
        # Of several threads that share the model one at a time has its prompt cut.
        if not self._busy.acquire(blocking=False):
            return self._forward(*args, **kwargs)
        try:
            with contextlib.ExitStack() as hooks:  # on the decoder layers; a decode step pays for none
                for number, layer in enumerate(self._layers() or ()):
                    hooks.callback(layer.register_forward_pre_hook(functools.partial(self._enter, number)).remove)
                    hooks.callback(layer.register_forward_hook(functools.partial(self._leave, number)).remove)
                return self._run(arguments, chunks)
        finally:
            self._busy.release()

    def _cut(self, arguments: dict[str, Any]) -> list[tuple[int, int]] | None:
        """The chunks (first token, token after the last) of a call, or None if it is to run whole."""
        ids = arguments.get("input_ids")
        if ids is None or torch.is_grad_enabled() or self._chunk.number is not None:
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
        self._passed = [0] * len(chunks)
        self._failed = False
        parts = [_slice(arguments, cache, past, *chunk) for chunk in chunks]
        results: list[Any] = [None] * len(parts)
        inference = torch.is_inference_mode_enabled()

        def run(first: int) -> None:
            try:
                # Grad and inference mode belong to a thread.
                with torch.inference_mode(inference), torch.no_grad():
                    for number in range(first, len(parts), 2):
                        self._chunk.number = number
                        for layer in self._first_layers:
                            self._wait(number, layer)
                        results[number] = self._forward(**parts[number])
            except BaseException:
                self._fail()
                raise
            finally:
                self._chunk.number = None

        phase = self._recorder.own.phase

        def run_beside(first: int) -> None:
            with self._recorder.beside(phase):
                run(first)

        assert self._pool is not None
        self._recorder.counters.pipelined += 1
        beside = self._pool.submit(run_beside, 1)
        try:
            run(0)
            waited = perf_counter()
            beside.result()
        except BaseException:
            self._fail()
            # The first failure is the one to tell; the other thread's is its consequence.
            if (other := outlast(beside)) is not None and not isinstance(other, _OtherFailedError):
                raise other from None
            raise
        self._recorder.counters.turn(perf_counter() - waited)
        return results[-1]

    # -- order

    def _fail(self) -> None:
        """Ends the chunks of the other thread at the next layer that they enter."""
        with self._moved:
            self._failed = True
            self._moved.notify_all()

    def _enter(self, layer: int, module: nn.Module, args: Any) -> None:
        if (number := self._chunk.number) is not None:
            self._wait(number, layer)

    def _leave(self, layer: int, module: nn.Module, args: Any, output: Any) -> None:
        if (number := self._chunk.number) is not None:
            self._pass(number, layer + 1)

    def _pass(self, number: int, layers: int) -> None:
        with self._moved:
            if self._passed[number] < layers:
                self._passed[number] = layers
                self._moved.notify_all()

    def _wait(self, number: int, layer: int) -> None:
        """Waits until the chunk before ``number`` has passed the attention of ``layer``."""
        if self._failed:
            raise _OtherFailedError
        if number == 0 or self._passed[number - 1] > layer:
            return
        started = perf_counter()
        with self._moved:
            while self._passed[number - 1] <= layer:
                if self._failed:
                    raise _OtherFailedError
                waited = perf_counter() - started
                if waited > self._timeout_s:
                    raise DeadlineError(f"a chunk of the prompt waited {waited:.0f} s for the one before it")
                self._moved.wait(POLL_S)
        self._recorder.counters.turn(perf_counter() - started)


class _OtherFailedError(Exception):
    """This chunk ends because the other thread's failed."""


def outlast(beside: Future[Any]) -> BaseException | None:
    """Returns how the other thread ended. Waits for that whatever a signal raises, and raises it afterwards: until then
    the thread uses the model and adds to the cache. It ends within a layer, each of whose waits has a deadline."""
    try:
        return beside.exception()
    except (KeyboardInterrupt, SystemExit):
        outlast(beside)
        raise


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


def _decoder_layers(model: nn.Module, expert_modules: list[str]) -> nn.ModuleList:
    """The decoder layers: the list of modules that the experts modules are in; an empty one if there is none."""
    path = expert_modules[0].split(".")
    for end in range(1, len(path)):
        module = model.get_submodule(".".join(path[:end]))
        if isinstance(module, nn.ModuleList):
            return module
    return nn.ModuleList()


def _first_of_each_type(model: Any, n_layers: int) -> list[int]:
    """The first decoder layer of each attention type; none if a type does not allow chunks.

    A forward pass asks the cache once per type, at the first layer of it, how long the past is.
    """
    types: list[str] = list(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    if n_layers == 0 or not set(types) <= _CHUNKABLE:
        return []
    return sorted(types.index(each) for each in set(types))
