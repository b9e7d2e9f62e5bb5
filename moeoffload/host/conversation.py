"""A conversation with an open model: its KV cache is kept from turn to turn, so a turn computes only new tokens."""

from __future__ import annotations

from typing import Any, Final, TextIO

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from moeoffload.host.generate import Answer, Message, Watch, generate, prepare_chat
from moeoffload.host.session import OffloadedModel

_OTHER_CACHES: Final = ("mamba", "minimaxfor")
"""Parts of the class names of models with a cache class of their own; the later MiniMax-M2 uses the usual one."""


class Conversation:
    """The turns so far and their KV cache. ``system`` is the system message that precedes the first turn."""

    def __init__(self, offloaded: OffloadedModel, system: str = "") -> None:
        self._offloaded = offloaded
        self.system = system
        self.turns: list[Message] = []
        self._cache: DynamicCache | None = None
        self._cached = torch.empty(0, dtype=torch.int64)  # (n,) the tokens in the cache

    def clear(self) -> None:
        """Forgets all turns; the system message stays."""
        self.turns, self._cache = [], None

    def ask(self, text: str, stream: TextIO, watch: Watch | None = None) -> Answer:
        """Runs one turn: writes the answer to ``text`` to ``stream`` as it is generated. A stopped answer is kept.

        Any error forgets this turn. Raises PromptError: no answer fits in the model's context, or the chat template
        rejects these messages; ServerError: a server failed; StoppedError: it was stopped before its first token.
        """
        asked = [*self.turns, {"role": "user", "content": text}]
        first = [{"role": "system", "content": self.system}] if self.system else []
        prompt = prepare_chat(self._offloaded, [*first, *asked])
        ids = prompt.inputs["input_ids"][0]
        n_kept = self._keep(ids)
        try:
            answer = generate(self._offloaded, prompt, stream, cache=self._cache, watch=watch)
        except BaseException:
            if self._cache is not None and not _rewind(self._cache, n_kept):
                self._cache = None
            raise
        self.turns = [*asked, {"role": "assistant", "content": answer.text}]
        if self._cache is not None:
            self._cached = torch.cat([ids, answer.tokens])[: self._cache.get_seq_length()]
        return answer

    def _keep(self, ids: torch.Tensor) -> int:
        """Keeps the longest cached prefix of ``ids`` (n,) that leaves a token to compute; returns its length.

        A cache of the model's own class is not kept; one that discards tokens (sliding windows, states of linear
        attention) is kept whole or not at all.
        """
        if self._cache is not None:
            shared = min(self._cached.numel(), ids.numel() - 1)
            differs = (self._cached[:shared] != ids[:shared]).nonzero()
            n_kept = int(differs[0]) if differs.numel() else shared
            if n_kept == self._cached.numel() or _rewind(self._cache, n_kept):
                self._cached = ids[:n_kept]
                return n_kept
        self._cache = _new_cache(self._offloaded.model)
        self._cached = ids[:0]
        return 0


def _new_cache(model: Any) -> DynamicCache | None:
    """Returns an empty cache if ``model.generate`` would make a `DynamicCache`, else None."""
    wanted = model.generation_config
    if (
        any(name in type(model).__name__.lower() for name in _OTHER_CACHES)
        or wanted.use_cache is False
        or wanted.cache_implementation not in (None, "dynamic")
    ):
        return None
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def _rewind(cache: DynamicCache, n_tokens: int) -> bool:
    """Crops the cache to its first ``n_tokens`` tokens; after a failed pass layers may differ in length.

    Returns False, and leaves the cache as it is, if any layer is not full attention: such a cache cannot be rewound.
    """
    if not all(type(layer) is DynamicLayer for layer in cache.layers):
        return False
    for layer in cache.layers:
        layer.crop(min(0, n_tokens - layer.get_seq_length()))
    return True
