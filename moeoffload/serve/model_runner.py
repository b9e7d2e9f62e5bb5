"""Runs a model over the packed rows of several requests."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DummyLayer

from moeoffload.errors import ModelError
from moeoffload.host.rollback import linear_layers
from moeoffload.placement import GIB
from moeoffload.serve.linear_states import LinearStates
from moeoffload.serve.paged_attention import IMPLEMENTATION, KeyValueStore, PackedRows, Segment, SingleRows, StatesPart
from moeoffload.serve.sequence import Share

logger = logging.getLogger(__name__)


class ModelRunner:
    """A transformers model and the memory of its keys and values: ``n_pages``, ``total_bytes``. For one thread.

    Of a model with layers of linear attention, ``max_running`` requests have states in that memory, too, and
    ``n_kept_states`` beginnings (None for other models).
    """

    def __init__(self, model: Any, page_tokens: int, kv_bytes: int, max_running: int, *, reuse: bool) -> None:
        """Takes the model over until `close`, and runs it once to learn what its layers keep; with ``reuse``, states of
        beginnings will be kept.
        Raises ModelError: requests of this model cannot be batched; ServerError: an expert server failed."""
        self._model = model
        self._device = model.device
        self._page_tokens = page_tokens
        self._own_attention = "sdpa"
        self.linear = LinearStates(model)
        try:
            try:
                model.set_attn_implementation("sdpa")
            except ValueError:  # of a family with a kind of attention that torch does not have
                self._own_attention = "eager"
            model.set_attn_implementation(IMPLEMENTATION)
            self._store = KeyValueStore(page_tokens)
            state_bytes = self._learn()
        except (ValueError, KeyError, AttributeError, TypeError, NotImplementedError) as error:
            self.close()
            kind = getattr(model.config, "model_type", "this")
            raise ModelError(f"requests of a {kind} model cannot be batched: {error}") from error
        except BaseException:
            self.close()
            raise
        self.max_running = max_running
        self.n_kept_states: int | None = None
        if state_bytes:
            n_states = min(2 * max_running, kv_bytes // 2 // state_bytes)  # the other half is for keys and values
            self.n_kept_states = n_states // 4 if reuse else 0
            self.max_running = min(max_running, max(1, n_states - self.n_kept_states))
        if self.max_running < max_running:
            logger.warning(
                "%d requests run at a time instead of %d: states of one take %.3g GiB, and half of kv-gib is for them",
                *(self.max_running, max_running, state_bytes / GIB),
            )
        state_bytes *= self.max_running + (self.n_kept_states or 0)
        self.n_pages = max(2, (kv_bytes - state_bytes) // self._store.page_bytes)
        self.total_bytes = self.n_pages * self._store.page_bytes + state_bytes
        self._store.allocate(self.n_pages)
        self._shares_calls = self._device.type == "cuda" and self._own_attention == "sdpa"

    def close(self) -> None:
        """Gives the model its own attention back. Idempotent."""
        self._model.set_attn_implementation(self._own_attention)
        self.linear.close()

    @torch.inference_mode()
    def _learn(self) -> int:
        """Returns the bytes of a request's states."""
        zero, states = torch.zeros(1, dtype=torch.int64, device=self._device), self.linear.new()
        self._model(**self._inputs(zero, zero, [Segment(0, 1, 1, zero)], zero, zero, [(1, states, None)]))
        n_layers = self._model.config.get_text_config().num_hidden_layers - self.linear.n_layers
        n_layers -= sum(isinstance(layer, DummyLayer) for layer in states.layers)  # with experts alone
        if mixed := len(linear_layers(states)) - self.linear.n_layers:
            raise NotImplementedError(f"{mixed} of its layers have states that belong to no single request")
        if self._store.n_layers != n_layers:
            raise NotImplementedError(f"{n_layers - self._store.n_layers} of its layers have no attention")
        return self.linear.n_bytes(states)

    def ordered(self, shares: list[Share]) -> list[Share]:
        """The shares in an order in which those that attention computes in one call follow each other."""
        return sorted(shares, key=self._length_class)

    def forward(self, shares: Sequence[Share], *, beside: bool = False) -> torch.Tensor:
        """Logits (rows, vocabulary) of one step of `ordered` shares, of each its ``n_logits`` last rows. ``beside``: in
        a second thread, whose pass is part of another one."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        keep: list[int] = []
        tables: list[list[int]] = []
        calls = self._calls(shares)
        size = self._page_tokens
        for call in calls:
            tables += self._tables(call)
            for share in call:
                pages = share.sequence.pages
                tokens += share.tokens
                positions += range(share.past, share.end)
                slots += [pages[at // size] * size + at % size for at in range(share.past, share.end)]
                keep += range(len(tokens) - share.n_logits, len(tokens))
        numbers = [tokens, positions, slots, keep or [0], *tables]  # some models cannot compute no logits at all
        flat = torch.tensor([*itertools.chain(*numbers)], device=self._device)  # in one transfer
        ids, places, written, kept, *found = flat.split([len(each) for each in numbers])
        segments: list[Segment | SingleRows] = []
        start = 0
        for call, ends, table in zip(calls, found[::2], found[1::2], strict=True):
            longest = max(share.end for share in call)
            if len(call) > 1:
                segments.append(SingleRows(start, ends[:, None], longest, table.view(len(call), -1)))
            else:
                segments.append(Segment(start, len(call[0].tokens), longest, table))
            start += sum(len(share.tokens) for share in call)
        run = self._model.forward if beside else self._model  # without hooks, which count passes
        states = [part for call in calls for share in call for part in self.linear.parts(share)]
        logits: torch.Tensor = run(**self._inputs(ids, places, segments, written, kept, states)).logits
        return logits[0, -len(kept) :] if keep else logits[0, :0]

    def _calls(self, shares: Sequence[Share]) -> list[list[Share]]:
        """What attention computes together: on a GPU all single rows of requests of about the same length."""
        calls: list[list[Share]] = []
        for length, group in itertools.groupby(shares, self._length_class):
            members = list(group)
            calls += [members] if length < math.inf else [[share] for share in members]
        return calls

    def _length_class(self, share: Share) -> float:
        """The same for single rows whose calls are shared, of which the longest has at most twice the shortest's pages;
        infinite for rows whose calls are not."""
        if not self._shares_calls or len(share.tokens) > 1:
            return math.inf
        return (-(-share.end // self._page_tokens)).bit_length()

    def _tables(self, call: list[Share]) -> tuple[list[int], list[int]]:
        """The tokens of each request of a call and its pages, padded to the most that one has."""
        tables = [share.sequence.pages[: -(-share.end // self._page_tokens)] for share in call]
        first, most = tables[0][0], max(map(len, tables))
        return [share.end for share in call], [page for each in tables for page in each + [first] * (most - len(each))]

    def _inputs(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        segments: Sequence[Segment | SingleRows],
        slots: torch.Tensor,
        keep: torch.Tensor,
        states: Sequence[StatesPart],
    ) -> dict[str, Any]:
        """The arguments of the model."""
        return {
            "input_ids": tokens[None],
            "position_ids": positions[None],
            "logits_to_keep": keep,
            "use_cache": False,
            "packed_rows": PackedRows(self._store, segments, slots, self._own_attention == "eager", states),
        }
