"""Which page of the cache holds which tokens. A page that no sequence needs is kept for prompts that begin the same."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Tokens

from moeoffload.serve.sequence import Sequence


class BlockManager:
    """Hands out pages and takes them back; knows nothing of memory. For one thread."""

    def __init__(self, n_pages: int, page_tokens: int, *, reuse: bool) -> None:
        """With ``reuse``, the pages of sequences that have ended are kept until their room is needed."""
        self.n_pages = n_pages
        self.page_tokens = page_tokens
        self._reuse = reuse
        self.reset()

    def reset(self) -> None:
        """Forgets all pages and what is in them."""
        self._empty = list(range(self.n_pages - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Pages that no sequence holds and whose tokens are known, the oldest first."""
        self._n_users = [0] * self.n_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def n_free(self) -> int:
        """Pages that can be handed out."""
        return len(self._empty) + len(self._kept)

    def cache_tokens(self) -> tuple[int, int]:
        """Room in tokens that sequences hold, and that of pages kept for later ones."""
        return (self.n_pages - self.n_free) * self.page_tokens, len(self._kept) * self.page_tokens

    def take_prefix(self, sequence: Sequence) -> None:
        """Gives a sequence without pages those of its beginning that are known; at least one token is left over."""
        if not self._reuse or sequence.sampler.prompt_scores is not None:  # what is not computed has no logits
            return
        for start in range(0, len(sequence.tokens) - self.page_tokens, self.page_tokens):
            key = self.page_key(sequence, start)
            page = self._page_of.get(key)
            if page is None:
                break
            self._kept.pop(page, None)
            self._n_users[page] += 1
            sequence.pages.append(page)
            sequence.keys.append(key)
        sequence.n_computed = len(sequence.pages) * self.page_tokens

    def grow(self, sequence: Sequence, n_tokens: int) -> bool:
        """Gives a sequence pages for ``n_tokens`` tokens in all; False, and none of them, if there are not enough."""
        n_more = -(-n_tokens // self.page_tokens) - len(sequence.pages)
        if n_more > self.n_free:
            return False
        for _ in range(n_more):
            page = self._empty.pop() if self._empty else self._evict()
            self._n_users[page] = 1
            sequence.pages.append(page)
        return True

    def note_computed(self, sequence: Sequence) -> None:
        """Makes the full pages of a sequence known, so that others can use them."""
        if not self._reuse:
            return
        for n in range(len(sequence.keys), sequence.n_computed // self.page_tokens):
            key = self.page_key(sequence, n * self.page_tokens)
            sequence.keys.append(key)
            if key not in self._page_of:
                self._page_of[key] = sequence.pages[n]
                self._key_of[sequence.pages[n]] = key

    def free(self, sequence: Sequence) -> None:
        """Takes the pages of a sequence back; it is as if nothing of it had been computed."""
        for page in reversed(sequence.pages):  # a beginning is worth more than what follows it
            self._n_users[page] -= 1
            if self._n_users[page]:
                continue
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._empty.append(page)
        sequence.pages.clear()
        sequence.keys.clear()
        sequence.n_computed = 0

    def page_key(self, sequence: Sequence, start: int) -> bytes:
        """A name for the tokens of the page from ``start`` on and of all before it, of which no two have the same."""
        tokens: Tokens[int] = sequence.tokens[start : start + self.page_tokens]
        before = sequence.keys[start // self.page_tokens - 1] if start else b""
        return hashlib.sha256(before + array("q", tokens).tobytes()).digest()

    def _evict(self) -> int:
        page, _ = self._kept.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page
