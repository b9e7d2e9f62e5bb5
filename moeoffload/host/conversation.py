"""A conversation with an open model: keys and values stay from turn to turn, so that a turn computes what is new."""

from __future__ import annotations

from typing import TextIO

import torch
from transformers import DynamicCache

from moeoffload.host.generate import Answer, Message, Watch, generate, prepare_chat
from moeoffload.host.kv_cache import generation_cache, rewind
from moeoffload.host.session import OffloadedModel


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
            if self._cache is not None and not rewind(self._cache, n_kept):
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
            if n_kept == self._cached.numel() or rewind(self._cache, n_kept):
                self._cached = ids[:n_kept]
                return n_kept
        self._cache = generation_cache(self._offloaded.model).get("past_key_values")
        self._cached = ids[:0]
        return 0
