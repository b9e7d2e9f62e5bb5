"""Logs: one line for one event whatever it quotes, and no disk filled by a peer that repeats itself."""

from __future__ import annotations

import io
import logging

import pytest

from moeoffload.logs import BURST, WINDOW_S, FloodFilter, OneLineFormatter
from moeoffload.text import for_terminal


@pytest.fixture
def log() -> tuple[logging.Logger, io.StringIO, FloodFilter]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(OneLineFormatter("%(levelname)s %(name)s: %(message)s"))
    flood = FloodFilter()
    handler.addFilter(flood)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    return logger, stream, flood


def test_a_models_text_cannot_drive_a_terminal() -> None:
    assert for_terminal("a\x1b[2J\tb\r\n\x9bc\x7fä") == "a\ufffd[2J\tb\r\n\ufffdc\ufffdä"


Log = tuple[logging.Logger, io.StringIO, FloodFilter]


def test_what_a_message_quotes_adds_no_line(log: Log) -> None:
    logger, stream, _ = log
    logger.warning("%s: lease opened", "me\nERROR test: forged\r\x1b[1A\u2028")
    assert stream.getvalue() == "WARNING test: me ERROR test: forged ?[1A : lease opened\n"
    logger.warning("x" * 100_000)
    assert len(stream.getvalue().splitlines()[1]) == 4096


def test_lines_of_a_traceback_are_known_for_what_they_are(log: Log) -> None:
    logger, stream, _ = log
    try:
        raise ValueError("\nERROR test: forged")
    except ValueError:
        logger.exception("failed")
    first, *rest = stream.getvalue().splitlines()
    assert first == "ERROR test: failed"
    assert rest
    assert all(line.startswith("  | ") for line in rest)


def test_a_flood_of_one_kind_is_cut_and_counted_and_hides_nothing_else(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, stream, _ = log
    now = 1000.0
    monkeypatch.setattr("moeoffload.logs.monotonic", lambda: now)
    for number in range(1000):
        logger.warning("request %d refused", number)
    logger.warning("something else")
    assert stream.getvalue().count("refused") == BURST
    assert "something else" in stream.getvalue()
    now += WINDOW_S + 1
    logger.warning("request %d refused", 7)
    last = f"WARNING test: request 7 refused ({1000 - BURST} more like it were left out)"
    assert stream.getvalue().splitlines()[-1] == last
    logger.warning("request %d refused", 8)
    assert stream.getvalue().splitlines()[-1] == "WARNING test: request 8 refused"


def test_texts_of_many_kinds_are_not_kept_for_ever(log: Log) -> None:
    logger, _, flood = log
    for number in range(2000):
        logger.warning(f"unique {number}")
    assert len(flood._kinds) <= 256
