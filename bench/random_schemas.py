"""JSON schemas at random, each of which has valid answers; and what answers by the demo model need."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

Schema = dict[str, Any]
CLOSING: dict[str, Any] = {"logit_bias": {str(ord(letter)): 14 for letter in '"]}'}, "frequency_penalty": 0.3}
"""The demo model was not trained to write JSON; left to itself it repeats a letter and ends no text."""
ASK: list[Any] = [{"role": "user", "content": "reverse abc ="}]
_NAMES = st.sampled_from(["name", "age", "tags", "x y", "gr\u00fc\u00df", 'a"b', "point", "\u20ac", "id", "next"])
_SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-1000, 1000), st.text(max_size=8))
_BOUNDS = st.tuples(st.integers(-50, 50), st.integers(0, 100)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@st.composite
def _numbers(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": draw(st.sampled_from(["integer", "number"]))}
    least, most = draw(_BOUNDS)
    if draw(st.booleans()):
        schema["minimum"] = least
    if draw(st.booleans()):
        schema["maximum"] = most
    if schema["type"] == "integer" and len(schema) == 1 and draw(st.booleans()):
        schema["multipleOf"] = draw(st.integers(2, 12))
    return schema


@st.composite
def _strings(draw: st.DrawFn) -> Schema:
    kind = draw(st.sampled_from(["plain", "length", "pattern", "format"]))
    if kind == "length":
        least = draw(st.integers(0, 5))
        return {"type": "string", "minLength": least, "maxLength": least + draw(st.integers(0, 5))}
    if kind == "pattern":
        return {"type": "string", "pattern": draw(st.sampled_from(["^[a-z]{2,4}$", "^(a|b)+c?$", r"^\d{3}-\d{2}$"]))}
    if kind == "format":
        return {"type": "string", "format": draw(st.sampled_from(["date", "date-time", "uuid", "ipv4", "email"]))}
    return {"type": "string"}


@st.composite
def _arrays(draw: st.DrawFn, parts: st.SearchStrategy[Schema]) -> Schema:
    least = draw(st.integers(0, 2))
    schema: Schema = {"type": "array", "items": draw(parts), "minItems": least}
    if draw(st.booleans()):
        schema["maxItems"] = least + draw(st.integers(0, 3))
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(parts, min_size=1, max_size=2))
    return schema


@st.composite
def _objects(draw: st.DrawFn, parts: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(_NAMES, parts, max_size=4))
    schema: Schema = {"type": "object", "properties": properties}
    if properties:
        schema["required"] = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    if draw(st.booleans()):
        schema["additionalProperties"] = draw(st.one_of(st.just(False), parts))
    return schema


_LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}]),
    _numbers(),
    _strings(),
    st.builds(lambda values: {"enum": values}, st.lists(_SCALARS, min_size=1, max_size=4)),
    st.builds(lambda value: {"const": value}, _SCALARS),
)
_PARTS = st.recursive(
    _LEAVES,
    lambda parts: st.one_of(
        _arrays(parts),
        _objects(parts),
        st.builds(lambda each: {"anyOf": each}, st.lists(parts, min_size=1, max_size=3)),
    ),
    max_leaves=8,
)
_TREE: Schema = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "id": {"type": "integer"}}}},
    "$ref": "#/$defs/node",
}
SCHEMAS = st.one_of(_PARTS, _objects(_PARTS), _arrays(_PARTS), st.just(_TREE))


def validator(schema: Schema) -> Any:
    """Checks formats, too."""
    return jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())


def different_schemas(n: int) -> list[Schema]:
    """``n`` different schemas, the same each time."""
    found: dict[str, Schema] = {}

    @settings(
        max_examples=4 * n,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(SCHEMAS)
    def collect(schema: Schema) -> None:
        found.setdefault(json.dumps(schema, sort_keys=True), schema)

    collect()
    return list(found.values())[:n]
