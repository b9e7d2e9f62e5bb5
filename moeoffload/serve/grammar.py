"""Grammars that constrain answers: JSON schemas and regular expressions, compiled and matched by llguidance.

A client's input is bounded before it is compiled, and the cost of compiling and matching is bounded again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite, prod
from typing import Any, Final, Literal

import numpy as np
import torch

from moeoffload.serve.api_errors import ApiError, bad_request, unsupported
from moeoffload.text import one_line

MAX_GRAMMAR_BYTES: Final = 64 << 10
MAX_MULTIPLES: Final = 20_000
"""The compiler makes one state per remainder of a ``multipleOf``, and per pair of remainders where two combine."""
_LIMITS: Final = {"max_lexer_states": 20_000, "max_grammar_size": 100_000, "verbose_errors": False}
"""Limits per answer; a state takes 1 to 2 kB. Other limits are the library's defaults: about 20 ms per token."""
_WHITESPACE: Final = r" |\n {0,24}"  # with more, a weak model may fill its answer with white space
_JSON_OPTIONS: Final = {"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE, "lenient": False}


@dataclass(frozen=True)
class Grammar:
    """The form of an answer: ``text`` is a JSON schema, a regular expression, or a list of llguidance grammars;
    ``param`` is the request's parameter. ``opening`` is a Lark grammar of what may precede ``@body``."""

    kind: Literal["json", "regex", "parts"]
    text: str
    param: str
    opening: str = ""

    @classmethod
    def of(cls, kind: Literal["json", "parts"], value: Any, param: str) -> Grammar:
        """A grammar of answers that are valid by the JSON schema ``value``, or by the first of the ``parts``, which may
        refer to the others."""
        return cls(kind, json.dumps(value, separators=(",", ":")), param)


class GrammarCompiler:
    """Compiles grammars for one tokenizer and caches the latest. For one thread."""

    def __init__(self, tokenizer: Any, n_vocabulary: int, eos: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._n_vocabulary = max(n_vocabulary, len(tokenizer))
        self._eos = list(eos)
        self._library: Any = None  # llguidance's view of the tokenizer, made for the first grammar
        self.compile = functools.lru_cache(maxsize=32)(self._compile)
        """Returns an llguidance matcher at the start of a `Grammar`, None for none; callers must copy it.
        Raises ApiError: the grammar is invalid, too large, or not supported by the library."""

    def _compile(self, grammar: Grammar | None) -> Any:
        if grammar is None:
            return None
        from llguidance import LLMatcher, LLParserLimits  # a request without a grammar does not need it

        if len(grammar.text) > MAX_GRAMMAR_BYTES:
            raise bad_request(f"Invalid '{grammar.param}': larger than {MAX_GRAMMAR_BYTES} bytes.", grammar.param)
        try:
            if grammar.kind == "regex":
                parts = json.loads(LLMatcher.grammar_from_regex(grammar.text))["grammars"]
            else:
                value = json.loads(grammar.text)
                _check_multiples(value, grammar.param)
                parts = value if grammar.kind == "parts" else [{"json_schema": value}]
            for part in parts:
                if part.get("json_schema") is not None:
                    part["json_schema"]["x-guidance"] = _JSON_OPTIONS
            if grammar.opening:
                parts = [{"lark_grammar": grammar.opening}, parts[0] | {"name": "body"}, *parts[1:]]
            source = json.dumps({"grammars": parts}, allow_nan=False)
        except ValueError as error:  # no JSON (NaN), no Unicode
            raise _refused(grammar.param, str(error)) from None
        matcher = LLMatcher(self._of_tokenizer(grammar.param), source, log_level=0, limits=LLParserLimits(**_LIMITS))
        trial = matcher.deep_copy()
        if not matcher.is_error():
            trial.compute_bitmask()  # some prove too complex, or to have no answer, only at the first token
        if trial.is_error():
            raise _refused(grammar.param, trial.get_error())
        return matcher

    def _of_tokenizer(self, param: str) -> Any:
        if self._library is None:
            from llguidance.hf import from_tokenizer

            try:
                self._library = from_tokenizer(self._tokenizer, self._n_vocabulary, self._eos)
            except (ValueError, AttributeError) as error:
                raise unsupported(param, f"not with this model's tokenizer: {one_line(str(error), 200)}") from None
        return self._library


def allowed_by(matcher: Any, scores: torch.Tensor) -> torch.Tensor:
    """``scores`` (vocabulary,) float32 with minus infinity for all tokens that ``matcher`` does not allow next."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    allowed = np.unpackbits(bits, count=scores.numel(), bitorder="little")
    return scores.masked_fill(torch.from_numpy(allowed == 0).to(scores.device), -torch.inf)


def reason(error: str) -> str:
    """The library's ``error`` for clients; empty for none."""
    return one_line(" ".join(error.split("<non-verbose/>", maxsplit=1)[0].split()), 300)


def _refused(param: str, error: str) -> ApiError:
    return bad_request(f"Invalid '{param}': {reason(error)}.", param)


def _check_multiples(schema: Any, param: str) -> None:
    multiples: list[int] = []
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            multiple = part.get("multipleOf")
            # A bool is an int, and an int may be beyond every float; the compiler refuses both.
            if type(multiple) is int or (isinstance(multiple, float) and isfinite(multiple)):
                digits = Decimal(str(multiple)).normalize().as_tuple().digits
                multiples.append(int("".join(map(str, digits))))
            left += part.values()
        elif isinstance(part, list):
            left += part
    if sum(multiples) > MAX_MULTIPLES or prod(set(multiples)) > MAX_MULTIPLES:
        raise bad_request(f"Invalid '{param}': its multipleOf are too large together.", param)
