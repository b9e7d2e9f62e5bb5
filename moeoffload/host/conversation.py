"""A conversation with an open model: keys and values stay from turn to turn, so that a turn computes what is new."""

from __future__ import annotations

from typing import Any, Final, TextIO

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from moeoffload.host.generate import Answer, Message, Watch, generate, prepare_chat
from moeoffload.host.session import OffloadedModel

_OTHER_CACHES: Final = ("mamba", "minimaxfor")
"""In the names of models whose cache is of another class; the later MiniMax-M2 has an ordinary one."""


class Conversation:
    """What was said, and the keys and values of it. ``system`` is what a model is told before the first turn."""

    def __init__(self, offloaded: OffloadedModel, system: str = "") -> None:
        self._offloaded = offloaded
        self.system = system
        self.turns: list[Message] = []
        self._cache: DynamicCache | None = None
        self._cached = torch.empty(0, dtype=torch.int64)  # (n,) the tokens whose keys and values the cache has

    def clear(self) -> None:
        """Forgets all turns; the system message stays."""
        self.turns, self._cache = [], None

    def ask(self, text: str, stream: TextIO, watch: Watch | None = None) -> Answer:
        """One turn: writes the answer to ``text`` to ``stream`` as it comes. Of a stopped answer what there is is kept.

        Raises, and forgets this turn, PromptError: no answer fits in the model's context, or the chat template does not
        take these messages; ServerError: a server failed; StoppedError: it was stopped before its first token.
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
        """Leaves in the cache what begins as ``ids`` (n,) do, for at least one token to compute; how many tokens.

        Models whose cache is their own class have none that is kept; others that forget (sliding windows, states of
        linear attention) keep all of it or nothing.
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
    """An empty cache where ``model.generate`` would make a `DynamicCache`."""
    wanted = model.generation_config
    if (
        any(name in type(model).__name__.lower() for name in _OTHER_CACHES)
        or wanted.use_cache is False
        or wanted.cache_implementation not in (None, "dynamic")
    ):
        return None
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def _rewind(cache: DynamicCache, n_tokens: int) -> bool:
    """Forgets all but the first ``n_tokens`` tokens, of which layers may hold more or fewer after a pass that failed.

    False for a cache with other layers than those of full attention: it cannot be rewound, and is as it was.
    """
    if not all(type(layer) is DynamicLayer for layer in cache.layers):
        return False
    for layer in cache.layers:
        layer.crop(min(0, n_tokens - layer.get_seq_length()))
    return True
