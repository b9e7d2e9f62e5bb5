"""The pages of the KV cache and the tokens in them. Unused pages are kept for prompts with the same prefix."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Tokens
from typing import Any, Final

from moeoffload.serve.sequence import Sequence

_LEAST_PAGES: Final = 4  # of new tokens for which states are kept: these take the memory of thousands of tokens


class BlockManager:
    """Allocates and frees pages by number; does not touch their memory. For one thread."""

    def __init__(self, n_pages: int, page_tokens: int, *, reuse: bool, n_states: int | None = None) -> None:
        """With ``reuse``, pages of ended sequences are kept until they are needed. For a model with layers of linear
        attention they are of use only with the states after them, which are kept of the last ``n_states`` beginnings.
        """
        self.n_pages = n_pages
        self.page_tokens = page_tokens
        self._reuse = reuse and n_states != 0
        self._n_states = n_states
        self.reset()

    def reset(self) -> None:
        """Forgets all pages and their contents."""
        self._empty = list(range(self.n_pages - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Pages that no sequence holds but whose tokens are known, the oldest first."""
        self._n_users = [0] * self.n_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._states: OrderedDict[bytes, dict[int, Any]] = OrderedDict()
        """By the key of the page before it and by layer: states, the ones least recently used first."""

    @property
    def n_free(self) -> int:
        """Pages that can be allocated."""
        return len(self._empty) + len(self._kept)

    def cache_tokens(self) -> tuple[int, int]:
        """Tokens in pages that sequences hold, and in pages kept for reuse."""
        return (self.n_pages - self.n_free) * self.page_tokens, len(self._kept) * self.page_tokens

    def take_prefix(self, sequence: Sequence) -> None:
        """Gives a sequence without pages the cached pages of its prefix; at least one token is left to compute."""
        if not self._reuse or sequence.sampler.prompt_scores is not None:  # reused tokens have no logits
            return
        for start in range(0, len(sequence.tokens) - self.page_tokens, self.page_tokens):
            key = self.page_key(sequence, start)
            if key not in self._page_of:
                break
            sequence.keys.append(key)
        if self._n_states is not None:
            self._take_states(sequence)
        for key in sequence.keys:
            page = self._page_of[key]
            self._kept.pop(page, None)
            self._n_users[page] += 1
            sequence.pages.append(page)
        sequence.n_computed = len(sequence.pages) * self.page_tokens

    def _take_states(self, sequence: Sequence) -> None:
        """Shortens a prefix to where states were kept, and says where to keep those of this sequence: where it leaves
        an earlier one, as others may, and at the end of its prompt, from where a conversation goes on."""
        n_known = len(sequence.keys)
        n_taken = next((n for n in range(n_known, 0, -1) if sequence.keys[n - 1] in self._states), 0)
        if n_taken:
            key = sequence.keys[n_taken - 1]
            sequence.first_states = self._states[key]
            self._states.move_to_end(key)
        del sequence.keys[n_taken:]
        ends = (n_known, (len(sequence.tokens) - 1) // self.page_tokens)
        sequence.kept_states = {n * self.page_tokens: {} for n in ends if n >= n_taken + _LEAST_PAGES}

    def grow(self, sequence: Sequence, n_tokens: int) -> bool:
        """Gives a sequence pages for ``n_tokens`` tokens in all; False, with none allocated, if too few are free."""
        n_more = -(-n_tokens // self.page_tokens) - len(sequence.pages)
        if n_more > self.n_free:
            return False
        for _ in range(n_more):
            page = self._empty.pop() if self._empty else self._evict()
            self._n_users[page] = 1
            sequence.pages.append(page)
        return True

    def note_computed(self, sequence: Sequence) -> None:
        """Registers the full pages of a sequence, so that others can reuse them."""
        if not self._reuse:
            return
        for n in range(len(sequence.keys), sequence.n_computed // self.page_tokens):
            key = self.page_key(sequence, n * self.page_tokens)
            sequence.keys.append(key)
            if key not in self._page_of:
                self._page_of[key] = sequence.pages[n]
                self._key_of[sequence.pages[n]] = key
        for n_tokens in [n for n in sequence.kept_states if n <= sequence.n_computed]:
            self._states[sequence.keys[n_tokens // self.page_tokens - 1]] = sequence.kept_states.pop(n_tokens)
            if len(self._states) > (self._n_states or 0):
                self._states.popitem(last=False)

    def free(self, sequence: Sequence) -> None:
        """Frees the pages of a sequence and resets it, as if nothing of it had been computed."""
        for page in reversed(sequence.pages):  # the beginning is evicted last
            self._n_users[page] -= 1
            if self._n_users[page]:
                continue
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._empty.append(page)
        sequence.pages.clear()
        sequence.keys.clear()
        sequence.n_computed, sequence.states, sequence.first_states = 0, None, {}
        sequence.kept_states.clear()

    def page_key(self, sequence: Sequence, start: int) -> bytes:
        """A unique key for the tokens of the page at ``start`` and all tokens before it."""
        tokens: Tokens[int] = sequence.tokens[start : start + self.page_tokens]
        before = sequence.keys[start // self.page_tokens - 1] if start else b""
        return hashlib.sha256(before + array("q", tokens).tobytes()).digest()

    def _evict(self) -> int:
        page, _ = self._kept.popitem(last=False)
        key = self._key_of.pop(page)
        del self._page_of[key]
        self._states.pop(key, None)
        return page
