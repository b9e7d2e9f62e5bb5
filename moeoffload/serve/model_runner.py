"""Runs a model over the packed rows of several requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moeoffload.errors import ModelError
from moeoffload.serve.paged_attention import IMPLEMENTATION, KeyValueStore, PackedRows, Segment
from moeoffload.serve.sequence import Share

_NO_PAGES = torch.empty(0, dtype=torch.int64)


class ModelRunner:
    """A transformers model and the memory of its keys and values: ``n_pages``, ``total_bytes``. For one thread."""

    def __init__(self, model: Any, page_tokens: int, kv_bytes: int) -> None:
        """Takes the model over until `close`, and runs it once to learn what its layers keep.
        Raises ModelError: requests of this model cannot be batched; ServerError: an expert server failed."""
        self._model = model
        self._device = model.device
        self._page_tokens = page_tokens
        self._own_attention = "sdpa"
        try:
            try:
                model.set_attn_implementation("sdpa")
            except ValueError:  # of a family with a kind of attention that torch does not have
                self._own_attention = "eager"
            model.set_attn_implementation(IMPLEMENTATION)
            self._store = KeyValueStore(page_tokens)
            self._learn()
        except (ValueError, KeyError, AttributeError, TypeError, NotImplementedError) as error:
            self.close()
            kind = getattr(model.config, "model_type", "this")
            raise ModelError(f"requests of a {kind} model cannot be batched: {error}") from error
        except BaseException:
            self.close()
            raise
        self.n_pages = max(2, kv_bytes // self._store.page_bytes)
        self.total_bytes = self.n_pages * self._store.page_bytes
        self._store.allocate(self.n_pages)

    def close(self) -> None:
        """Gives the model its own attention back. Idempotent."""
        self._model.set_attn_implementation(self._own_attention)

    @torch.inference_mode()
    def _learn(self) -> None:
        self._model(**self._inputs([0], [0], [Segment(0, 1, 1, -1, _NO_PAGES)], [0], [0]))
        n_layers = self._model.config.get_text_config().num_hidden_layers
        if len(self._store.shapes) != n_layers:
            raise NotImplementedError(f"{n_layers - len(self._store.shapes)} of its layers have no attention")

    def forward(self, shares: Sequence[Share]) -> torch.Tensor:
        """Logits (rows, vocabulary) of one step of these shares, of each its ``n_logits`` last rows."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        keep: list[int] = []
        segments = []
        size = self._page_tokens
        for share in shares:
            n_rows, pages = len(share.tokens), share.sequence.pages
            end = share.past + n_rows
            segments.append(self._segment(len(tokens), n_rows, end, pages[: -(-end // size)]))
            tokens += share.tokens
            positions += range(share.past, end)
            slots += [pages[at // size] * size + at % size for at in range(share.past, end)]
            keep += range(len(tokens) - share.n_logits, len(tokens))
        logits: torch.Tensor = self._model(**self._inputs(tokens, positions, segments, slots, keep)).logits
        return logits[0, -max(1, len(keep)) :]

    def _segment(self, start: int, n_rows: int, n_keys: int, pages: list[int]) -> Segment:
        if pages[-1] - pages[0] == len(pages) - 1 and pages == list(range(pages[0], pages[-1] + 1)):
            return Segment(start, n_rows, n_keys, pages[0], _NO_PAGES)
        return Segment(start, n_rows, n_keys, -1, torch.tensor(pages, device=self._device))

    def _inputs(
        self, tokens: list[int], positions: list[int], segments: list[Segment], slots: list[int], keep: list[int]
    ) -> dict[str, Any]:
        """The arguments of the model."""
        device = self._device
        return {
            "input_ids": torch.tensor([tokens], device=device),
            "position_ids": torch.tensor([positions], device=device),
            # Some models cannot compute no logits at all.
            "logits_to_keep": torch.tensor(keep or [0], device=device),
            "use_cache": False,
            "packed_rows": PackedRows(
                self._store, segments, torch.tensor(slots, device=device), self._own_attention == "eager"
            ),
        }
