"""Sanitises text from the peer for log lines, error messages and tables."""

from __future__ import annotations

from typing import Final

MAX_TEXT: Final = 500  # default number of characters kept of a peer's text
_CONTROLS: Final = {n: "\N{REPLACEMENT CHARACTER}" for n in (*range(32), *range(127, 160)) if chr(n) not in "\t\n\r"}


def one_line(text: str, limit: int = MAX_TEXT) -> str:
    """``text`` as one printable line of at most ``limit`` characters.

    White space becomes a space. Other non-printable characters (controls, terminal escapes, marks that change the
    writing direction, lone surrogates) become a question mark, so that no text can forge a log line.
    """
    short = text[: limit + 1]
    line = "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in short)
    return line if len(line) <= limit else line[: max(0, limit - 3)] + "..."


def for_terminal(text: str) -> str:
    """``text`` without control characters, by which a model could drive a terminal; white space stays."""
    return text.translate(_CONTROLS)


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its class name if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_unicode(text: str) -> bool:
    """Whether ``text`` is free of lone surrogates, which Python uses for bytes that it could not decode."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
