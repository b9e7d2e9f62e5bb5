"""Text from the other side, made fit for a log line, an error message or a table."""

from __future__ import annotations

from typing import Final

MAX_TEXT: Final = 500  # characters that are kept of a text of the other side where nothing else is said


def one_line(text: str, limit: int = MAX_TEXT) -> str:
    """``text`` as one printable line of at most ``limit`` characters.

    White space becomes a space. Other characters that do not print (controls, escapes of terminals, marks that turn the
    writing direction, halves of surrogate pairs) become a question mark, so that no text forges a line of a log.
    """
    short = text[: limit + 1]
    line = "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in short)
    return line if len(line) <= limit else line[: max(0, limit - 3)] + "..."


def is_unicode(text: str) -> bool:
    """Whether ``text`` holds no bytes that Python could not decode and has passed on as halves of surrogate pairs."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
