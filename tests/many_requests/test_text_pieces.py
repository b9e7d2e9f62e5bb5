"""Text of token streams: nothing lost, no half characters, nothing of a stop string."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from moeoffload.host.detokenizer import Detokenizer, StopStrings, TokenTexts

TEXTS = st.text(st.sampled_from("ab é€😀\u0301\ufffd\n") | st.characters(codec="utf-8"), max_size=40)


def pieces(tokenizer: Any, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_pieces_are_whole_characters_and_together_the_text(tokenizer: Any, text: str) -> None:
    got = pieces(tokenizer, list(text.encode()))
    assert "".join(got) == text
    assert all(piece in text for piece in got)
    if "\ufffd" not in text:
        assert got[-1] == ""


NO_TEXT = st.lists(st.integers(0xC0, 0xFF) | st.integers(0x80, 0xBF) | st.sampled_from([256, 257]), max_size=6)


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.tuples(NO_TEXT, st.integers(0, 127)), max_size=12))
def test_pieces_of_any_bytes_are_what_the_tokenizer_makes_of_all(
    tokenizer: Any, parts: list[tuple[list[int], int]]
) -> None:
    tokens = [token for part, letter in parts for token in (*part, letter)]
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_bytes_that_are_no_text_do_not_wait_for_the_end(tokenizer: Any) -> None:
    got = pieces(tokenizer, [0xFF] * 40)
    assert "".join(got[:10])
    assert "".join(got) == "\ufffd" * 40


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
def test_nothing_of_a_stop_string_gets_out_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    ends = {at + len(stop): at for stop in sorted(stops, key=len) if (at := text.find(stop)) >= 0}
    wanted = text[: ends[min(ends)]] if ends else text
    watcher, out, places = StopStrings(stops), "", sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    for start, end in itertools.pairwise(places):
        out += watcher.push(text[start:end])
        assert wanted.startswith(out)
    assert bool(watcher.found) == bool(ends)
    assert out + watcher.finish() == wanted


def test_tokens_with_and_without_a_space_before_them_are_told_apart() -> None:
    """By the decoders of Llama and Mistral, which drop the first space of a text."""
    inner = Tokenizer(
        models.BPE({"a": 0, "\u2581": 1, "\u2581a": 2, "<0xE2>": 3}, [("\u2581", "a")], byte_fallback=True)
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=inner))
    assert [texts.of(token)[0] for token in range(4)] == ["a", " ", " a", "bytes:\\xe2"]


def test_tokens_that_are_parts_of_characters_are_shown_as_bytes(tokenizer: Any) -> None:
    texts = TokenTexts(tokenizer)
    assert texts.of(ord("a")) == ("a", (97,))
    assert texts.of(0xE2) == ("bytes:\\xe2", (0xE2,))
    assert texts.of(0x20) == (" ", (32,))
    assert [texts.of(byte)[1] for byte in range(256)] == [(byte,) for byte in range(256)]
