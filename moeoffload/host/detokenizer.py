"""Text of a token stream, piece by piece: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, Final

from transformers.convert_slow_tokenizer import bytes_to_unicode

_UNKNOWN: Final = "\ufffd"
"""What decoders put in the place of bytes that are no UTF-8, also of a character that is not complete yet."""
_LONGEST_HELD: Final = 8
"""Tokens after which some of them are complete, or never will be: a character of UTF-8 has at most 4 bytes."""
_HEX_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """Text of one stream of tokens. The pieces together are what the tokenizer makes of all tokens at once, but for
    characters that begin behind more than `_LONGEST_HELD` tokens of bytes that are no text."""

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # Some tokenizers drop a space at the start of a text: each piece is decoded behind the tokens before it.
        self._before: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that is certain now that ``token`` has come; often that of the token, may be empty."""
        self._held.append(token)
        text = self._decode(self._before + self._held)
        piece = text[len(self._decode(self._before)) :]
        if not piece or text.endswith(_UNKNOWN):
            return self.finish() if len(self._held) >= _LONGEST_HELD else ""
        self._before, self._held = self._held, []
        return piece

    def finish(self) -> str:
        """The rest, when no more tokens come: a character that stayed incomplete becomes U+FFFD."""
        held, self._before, self._held = self._held, [], []
        return self._decode(held)

    def _decode(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


class StopStrings:
    """Cuts a text where the first of some strings is complete, and holds back what may be the start of one.

    What comes out does not depend on where the pieces begin and end.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False  # whether a stop string has come; nothing comes out any more

    def push(self, piece: str) -> str:
        """The text that is certain to stand before any stop string."""
        if self.found or not self._stops:
            return "" if self.found else piece
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.found = True
            self._held = ""
            return text[: min(ends)[1]]
        n = max(self._n_begun(text, stop) for stop in self._stops)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _n_begun(text: str, stop: str) -> int:
        """Characters at the end of ``text`` that are the start of ``stop``, not all of it."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class TokenTexts:
    """How single tokens are shown beside their log probabilities."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Byte-level tokenizers write a letter for each byte.
        self._bytes_of_letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
        self.of = functools.lru_cache(maxsize=65536)(self._of)
        """(text, UTF-8 bytes) of a token. One that is part of a character has a text like ``bytes:\\xe2\\x82``, as in
        OpenAI's API; its bytes are None where the tokenizer does not tell."""

    def _of(self, token: int) -> tuple[str, tuple[int, ...] | None]:
        text: str = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
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
