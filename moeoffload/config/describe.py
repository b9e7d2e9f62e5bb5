"""Descriptions of settings for help, documentation and errors, derived from their declarations in the model."""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic.fields import FieldInfo

_BOOLEAN_WORDS: Final = "1, true, yes, on, 0, false, no or off"


@dataclass(frozen=True)
class Words:
    """For a type in an annotation: the allowed values in words, the placeholder in help, and the unit of a number.

    A field that is None is derived from the type and its bounds.
    """

    allowed: str | None = None
    metavar: str | None = None
    unit: str | None = None


@dataclass(frozen=True, kw_only=True)
class SettingInfo:
    """A setting as shown to users; ``env_names`` are by precedence, ``choices`` is None if any text is allowed."""

    name: str
    env_names: tuple[str, ...]
    description: str
    default: str
    allowed: str
    metavar: str
    panel: str
    is_boolean: bool
    is_optional: bool
    may_be_empty: bool
    choices: tuple[str, ...] | None
    is_common: bool

    @property
    def flag(self) -> str:
        """The command line option; a boolean has ``--no-...``, too."""
        return "--" + self.name.replace("_", "-")


def describe(name: str, field: FieldInfo, env_names: tuple[str, ...]) -> SettingInfo:
    """Describes the setting that ``field`` (made by `Panel.setting`) declares."""
    declared = typing.cast("dict[str, Any]", field.json_schema_extra)
    is_optional = types.NoneType in typing.get_args(field.annotation)
    kind: Any = typing.get_args(field.annotation)[0] if is_optional else field.annotation
    words = next((item for item in field.metadata if isinstance(item, Words)), Words())
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else None
    allowed = declared["allowed"] or words.allowed
    if allowed is None:
        allowed = _allowed(kind, choices, field.metadata) + (f" ({words.unit})" if words.unit else "")
    return SettingInfo(
        name=name,
        env_names=env_names,
        description=field.description or "",
        default=_default(field.default, words.unit, declared["means"]),
        allowed=allowed + (", or none" if is_optional else ""),
        metavar=words.metavar or _metavar(kind, choices, words.unit),
        panel=declared["panel"],
        is_boolean=kind is bool,
        is_optional=is_optional,
        may_be_empty=field.default == (),
        choices=choices,
        is_common=declared["common"],
    )


def _allowed(kind: Any, choices: tuple[str, ...] | None, metadata: list[Any]) -> str:
    if choices is not None:
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    if kind is bool:
        return _BOOLEAN_WORDS
    low, above, high = (next((getattr(i, at) for i in metadata if hasattr(i, at)), None) for at in ("ge", "gt", "le"))
    noun = "an integer" if kind is int else "a number"
    if low is not None:
        return f"{noun} from {low} to {high}" if high is not None else f"{noun} of at least {low}"
    return f"{noun} above {above}" + (f" and at most {high}" if high is not None else "")


def _default(value: Any, unit: str | None, means: str | None) -> str:
    named = {None: "none", True: "yes", False: "no", (): "empty"}
    if isinstance(value, bool | tuple | None):
        text = named[value]
    else:
        text = (f"{value:g}" if isinstance(value, float) else str(value)) + (f" {unit}" if unit and value else "")
    return f"{text} = {means}" if means else text


def _metavar(kind: Any, choices: tuple[str, ...] | None, unit: str | None) -> str:
    if choices is not None:
        return "|".join(choices)
    return unit.split()[0].upper() if unit else "INTEGER" if kind is int else "NUMBER"
