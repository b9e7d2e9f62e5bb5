"""Turns a token stream into text, piece by piece: whole characters only, and no part of a stop string."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, Final

from transformers.convert_slow_tokenizer import bytes_to_unicode

_UNKNOWN: Final = "\ufffd"
"""The character that decoders put in place of invalid UTF-8, including a character that is still incomplete."""
_LONGEST_HELD: Final = 8
"""Most tokens held back: a UTF-8 character has at most 4 bytes, so by then one is complete or never will be."""
_HEX_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """Decodes one stream of tokens. The joined pieces equal the tokenizer's decoding of all tokens at once, except for
    characters that begin after more than `_LONGEST_HELD` tokens of invalid bytes."""

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # Some tokenizers drop a space at the start of a text, so each piece is decoded together with its predecessor.
        self._before: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """Returns the text that ``token`` makes certain; usually the token's own, may be empty."""
        self._held.append(token)
        text = self.decode(self._before + self._held)
        piece = text[len(self.decode(self._before)) :]
        if not piece or text.endswith(_UNKNOWN):
            return self.finish() if len(self._held) >= _LONGEST_HELD else ""
        self._before, self._held = self._held, []
        return piece

    def finish(self) -> str:
        """Returns the rest after the last token: a character that stayed incomplete becomes U+FFFD."""
        held, self._before, self._held = self._held, [], []
        return self.decode(held)

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of ``tokens``, whatever was pushed."""
        if not tokens:
            return ""
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


class StopStrings:
    """Cuts a text before the stop string that is complete first, and holds back what may be the start of one.

    The output does not depend on where the pieces begin and end.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = ""  # the stop string that was found; nothing is returned after it

    def push(self, piece: str) -> str:
        """Returns the text that certainly precedes any stop string."""
        if self.found or not self._stops:
            return "" if self.found else piece
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, at = min(ends)
            self.found, self._held = text[at:end], ""
            return text[:at]
        n = max(self._n_begun(text, stop) for stop in self._stops)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]

    def finish(self) -> str:
        """Returns the text that was held back, after the last piece."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _n_begun(text: str, stop: str) -> int:
        """Returns how many characters at the end of ``text`` are a proper prefix of ``stop``."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class TokenTexts:
    """Formats single tokens as they are shown beside their log probabilities."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._decode = Detokenizer(tokenizer, skip_special_tokens=False).decode
        # Byte-level tokenizers write a letter for each byte.
        self._bytes_of_letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
        # Some tokenizers drop a space at the start of a text, so each token is decoded behind another one.
        self._before: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        self._n_before = len(self._decode(self._before))
        self.special = frozenset(tokenizer.all_special_ids)
        self.of = functools.lru_cache(maxsize=65536)(self._of)
        """Returns (text, UTF-8 bytes) of a token. The text of a partial character is like ``bytes:\\xe2\\x82``, as in
        OpenAI's API; the bytes are None if the tokenizer does not reveal them."""

    def _of(self, token: int) -> tuple[str, tuple[int, ...] | None]:
        text = self._decode([*self._before, token])[self._n_before :]
        if _UNKNOWN not in text:
            return text, tuple(text.encode())
        letters = str(self._tokenizer.convert_ids_to_tokens(token))
        if match := _HEX_BYTE.fullmatch(letters):
            parts: list[int | None] = [int(match[1], 16)]
        else:
            parts = [self._bytes_of_letters.get(letter) for letter in letters]
        known = tuple(part for part in parts if part is not None)
        if len(known) != len(parts):
            return text, None
        return "bytes:" + "".join(f"\\x{part:02x}" for part in known), known
