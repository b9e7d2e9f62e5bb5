"""Answers that must be in a form, from the real process: JSON by a schema, and what a regular expression matches."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_schemas import ASK, CLOSING, SCHEMAS, Schema, validator

from many_requests.http_kit import Process, form
from moeoffload.serve.grammar import Grammar, GrammarCompiler, allowed_by
from moeoffload.serve.response_formats import AnswerFormat

N_EXAMPLES = int(os.environ.get("N_SCHEMAS", "10"))


async def answers(server: Process, asked: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The text and the end of each choice, of all requests at once."""
    async with server.clients() as many:

        async def one(options: dict[str, Any]) -> list[tuple[str, str]]:
            texts, ends = [""] * options.get("n", 1), [""] * options.get("n", 1)
            stream = await many.chat.completions.create(model="demo", messages=ASK, stream=True, **options)
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                    ends[choice.index] = choice.finish_reason or ends[choice.index]
            return list(zip(texts, ends, strict=True))

        told = await asyncio.gather(*(one(options) for options in asked))
    return [each for answer in told for each in answer]


@settings(
    max_examples=N_EXAMPLES,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_answers_are_valid_by_their_schema_greedy_and_sampled_together(
    serve_process: Process, schema: Schema, seed: int
) -> None:
    common = {"response_format": form(schema), "max_tokens": 1000, **CLOSING}
    sampled = {"temperature": 1.0, "seed": seed, "n": 2}
    told = asyncio.run(answers(serve_process, [common | {"temperature": 0}, common | sampled]))
    for text, end in told:
        assert end == "stop", (schema, text)
        validator(schema).validate(json.loads(text))


def test_expressions_choices_and_plain_requests_at_the_same_time(serve_process: Process) -> None:
    forms: dict[str, dict[str, Any]] = {
        r"[0-9]{3}-[a-f]{4}": {"structured_outputs": {"regex": "[0-9]{3}-[a-f]{4}"}},
        r"(ja|nein)\.": {"guided_regex": r"(ja|nein)\."},
        r"a b\?|c\*/\n": {"structured_outputs": {"choice": ["a b?", "c*/\n"]}},
        r"\u20ac{2}": {"guided_regex": "\u20ac{2}"},
    }
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 3, "n": 2}]
    asked = [{"extra_body": body, **kind} for body in forms.values() for kind in kinds]
    told = asyncio.run(answers(serve_process, [*asked, {"temperature": 0}]))
    assert told[-1] == (" cba", "stop")
    for number, pattern in enumerate(forms):
        for text, end in told[3 * number : 3 * number + 3]:
            assert end == "stop"
            assert re.fullmatch(pattern, text), text


def test_completions_and_json_objects_and_whole_answers(serve_process: Process) -> None:
    whole = serve_process.chat(ASK, response_format={"type": "json_object"}, logprobs=True, **CLOSING).choices[0]
    assert isinstance(json.loads(whole.message.content), dict)
    assert "".join(entry.token for entry in whole.logprobs.content) == whole.message.content
    body = {"structured_outputs": {"json": {"type": "integer", "minimum": 10, "maximum": 99}}}
    assert 10 <= int(serve_process.complete(extra_body=body, temperature=0).choices[0].text) <= 99


def test_an_answer_whose_form_becomes_too_complex_ends_alone(serve_process: Process) -> None:
    def ask(form_: dict[str, Any]) -> Any:
        body = {"model": "demo", "messages": ASK, "temperature": 1, "seed": 1, "max_tokens": 100}
        return serve_process.ask("POST", "/v1/chat/completions", body | form_)

    reply = ask({"response_format": form({"type": "object", "properties": {f"p{i}": {} for i in range(2500)}})})
    assert (reply.status, "max is 2000" in reply.error["message"]) == (400, True), reply.text
    assert ask({"guided_regex": "[ab]{2}"}).status == 200


@pytest.mark.parametrize("special", [True, False])
def test_a_form_begins_behind_reasoning(tokenizer: Any, special: bool) -> None:
    """Whether its marks are special tokens or letters, for a model that may think, thinks already, or has done so."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "<think></think>"
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    compiler, kind = GrammarCompiler(tokenizer, 258, [256]), AnswerFormat(tokenizer)

    def takes(prompt: str, text: str) -> bool:
        grammar = replace(Grammar("regex", "[0-9]", "x"), opening=kind.opening(prompt))
        matcher = compiler.compile(grammar).deep_copy()
        for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], 256]:
            if allowed_by(matcher, torch.zeros(len(tokenizer)))[token] < 0:
                return False
            matcher.consume_token(token)
        return True

    texts = ["5", "<think>so\nwhat</think>\n\n5", "so what</think>5", "<think>5"]
    expected = {"hi": [True, True, False, False], "<think>\n": [False, not special, True, False]}
    expected["<think>\n\n</think>\n\n"] = [True, False, False, False]
    for prompt, wanted in expected.items():
        assert [takes(prompt, text) for text in texts] == wanted, prompt
