"""The base of all settings models: how settings are declared, where values come from, how invalid ones are refused.

pydantic-settings reads the values: keyword or command line, then ``MOEOFFLOAD_*``, then the name in `ALIASES`, then the
default. Flag, help, documentation and error text are derived from the declaration, so none can disagree with it.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal, Self

from pydantic import AliasChoices, AliasGenerator, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from moeoffload.errors import SettingError

ENV_PREFIX: Final = "MOEOFFLOAD_"
ALIAS_PREFIX: Final = "DFLASH_MOE_"
_COMPUTE: Final = ALIAS_PREFIX + "EXPERT_COMPUTE_"
ALIASES: Final = {
    "batch_capacity": _COMPUTE + "IPC_BATCH_CAPACITY",
    "dtype": _COMPUTE + "IPC_DTYPE",
    "gpu": _COMPUTE + "IPC_GPU",
    "hot_slice": ALIAS_PREFIX + "PREFILL_HOT_SUB_BATCH",
    "mode": _COMPUTE + "IPC_MODE",
    "profile": _COMPUTE + "IPC_PROFILE",
    "required": _COMPUTE + "IPC_REQUIRED",
    "shared_bytes": _COMPUTE + "IPC_SHARED_BYTES",
    "threads": _COMPUTE + "THREADS",
    "transport": _COMPUTE + "IPC_TRANSPORT",
    "work_dir": _COMPUTE + "IPC_WORK_DIR",
}
"""Setting -> a second environment name, read when the first is not set."""
_SPELLINGS: Final = {"float32": "f32", "fp32": "f32", "float16": "f16", "fp16": "f16", "bfloat16": "bf16"}
_LONGEST_VALUE_SHOWN: Final = 200
_BOOLEAN_WORDS: Final = "1, true, yes, on, 0, false, no or off"

_log = logging.getLogger(__name__)


class Panel(StrEnum):
    """The groups of settings, in the order in which help and documentation show them."""

    SERVERS = "Expert servers"
    SERVING = "HTTP server"
    SECURITY = "Security"
    CHANNEL = "Channel"
    COMPUTE = "Compute"
    GENERATION = "Generation"
    RECOVERY = "Faults"
    TIME_LIMITS = "Time limits"
    REPORTING = "Reporting"

    def setting(
        self,
        default: Any,
        description: str,
        *,
        means: str | None = None,
        common: bool = False,
    ) -> Any:
        """Declare a setting of this group; ``description`` is one sentence, bounds and unit are in its type.

        ``means`` says what the default does, if the value does not say so. --help shows only ``common`` settings.
        """
        words: Any = {"panel": self, "means": means, "common": common}
        return Field(default, description=description, json_schema_extra=words)


@dataclass(frozen=True)
class Words:
    """For a type in an annotation: the allowed values in words, the placeholder in help, the unit of a number, and what
    help adds because the placeholder does not say it.

    A field that is None is derived from the type and its bounds.
    """

    allowed: str | None = None
    metavar: str | None = None
    unit: str | None = None
    hint: str | None = None


@dataclass(frozen=True, kw_only=True)
class SettingInfo:
    """A setting as shown to users; ``env_names`` are by precedence, ``choices`` is None if any text is allowed.
    ``hint`` is what ``metavar`` does not say of the allowed values."""

    name: str
    env_names: tuple[str, ...]
    description: str
    default: str
    allowed: str
    metavar: str
    hint: str
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


servers = Panel.SERVERS.setting
serving = Panel.SERVING.setting
security = Panel.SECURITY.setting
channel = Panel.CHANNEL.setting
compute = Panel.COMPUTE.setting
generation = Panel.GENERATION.setting
recovery = Panel.RECOVERY.setting
limits = Panel.TIME_LIMITS.setting
reporting = Panel.REPORTING.setting


def env_names(name: str) -> tuple[str, ...]:
    """The environment names of the setting ``name``, in order of precedence."""
    return (ENV_PREFIX + name.upper(), *([ALIASES[name]] if name in ALIASES else []))


class SettingsBase(BaseSettings):
    """A frozen settings model. Values are checked here once; an invalid one raises SettingError with its source."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="ignore",  # pydantic treats a setting's lower-priority names as extra; unknown keywords are refused below
        allow_inf_nan=False,
        validate_by_name=True,
        alias_generator=AliasGenerator(validation_alias=lambda name: AliasChoices(*env_names(name))),
        case_sensitive=True,
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        enable_decoding=False,  # lists are comma-separated text, not JSON
    )

    def __init__(self, *, _from_cli: bool = False, **values: Any) -> None:
        """Use keywords before the environment before defaults; with ``_from_cli`` errors name flags, not keywords."""
        known = _infos(type(self))
        complaints = [f"{name}: there is no such setting{_nearest(name, known)}" for name in values.keys() - known]
        if complaints:
            raise SettingError("\n".join(complaints))
        try:
            super().__init__(**values)
        except ValidationError as error:
            details = error.errors(include_url=False)
            by_key = {_name_of(known, str(detail["loc"][0])): detail for detail in reversed(details)}
            lines = [_complaint(known[name], detail, values, _from_cli) for name, detail in by_key.items()]
            raise SettingError("\n".join(reversed(lines))) from None

    @classmethod
    def load(cls, cli: Mapping[str, Any] | None = None) -> Self:
        """Build the settings from command line values (None = not given), the environment and the defaults."""
        warn_of_misspelt_names()
        return cls(_from_cli=True, **{name: value for name, value in (cli or {}).items() if value is not None})

    @classmethod
    def infos(cls) -> tuple[SettingInfo, ...]:
        """Every setting of this model, ordered by panel."""
        panels = list(Panel)
        return tuple(sorted(_infos(cls).values(), key=lambda info: panels.index(Panel(info.panel))))

    @field_validator("*", mode="before")
    @classmethod
    def _read_text(cls, value: Any, context: ValidationInfo) -> Any:
        if type(value).__module__ == "torch":  # torch.bfloat16, torch.device("cpu"); torch itself is not imported here
            value = str(value).removeprefix("torch.")
        if type(value) is not str or context.field_name is None:
            return value
        info, text = _infos(cls)[context.field_name], value.strip()
        word = text.lower()
        if info.is_optional and word == "none":
            return None
        if info.choices is None:
            if not text and not info.may_be_empty:
                raise PydanticCustomError("empty", "empty")
            return text
        word = _SPELLINGS.get(word, word)
        if word not in info.choices:
            raise PydanticCustomError("choice", "not a choice")
        return word


def warn_of_misspelt_names() -> None:
    """Warns of environment variables that have our prefixes but name no setting."""
    known = [env for model in _models(SettingsBase) for info in model.infos() for env in info.env_names]
    for name in sorted(os.environ):
        if name.startswith((ENV_PREFIX, ALIAS_PREFIX)) and name not in known and os.environ[name].strip():
            _log.warning("%s is set, but there is no such setting%s", name, _nearest(name, known))


def _models(base: type[SettingsBase]) -> Iterator[type[SettingsBase]]:
    for model in base.__subclasses__():
        yield model
        yield from _models(model)


@functools.cache
def _infos(model: type[SettingsBase]) -> dict[str, SettingInfo]:
    return {name: _describe(name, field) for name, field in model.model_fields.items()}


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else ""


def _name_of(infos: Mapping[str, SettingInfo], key: str) -> str:
    """The name of the setting that pydantic reports by name or by environment name."""
    return next(name for name, info in infos.items() if key == name or key in info.env_names)


def _complaint(info: SettingInfo, detail: ErrorDetails, values: Mapping[str, Any], from_cli: bool) -> str:
    """One line: where the value came from, the value, what is wrong, what is allowed."""
    if info.name in values:
        source = info.flag if from_cli else info.name
    else:
        source = next((name for name in info.env_names if os.environ.get(name)), info.name)
    shown = repr(values.get(info.name, os.environ.get(source, detail["input"])))  # repr escapes line breaks
    if len(shown) > _LONGEST_VALUE_SHOWN:
        shown = shown[:_LONGEST_VALUE_SHOWN] + "..."
    reason = f" ({detail['ctx']['error']})" if detail["type"] == "value_error" else ""
    return f"{source}: {shown} is not allowed{reason}; allowed is {info.allowed}"


def _describe(name: str, field: FieldInfo) -> SettingInfo:
    """Describes the setting that ``field`` (made by `Panel.setting`) declares."""
    declared = typing.cast("dict[str, Any]", field.json_schema_extra)
    is_optional = types.NoneType in typing.get_args(field.annotation)
    kind: Any = typing.get_args(field.annotation)[0] if is_optional else field.annotation
    words = next((item for item in field.metadata if isinstance(item, Words)), Words())
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else None
    allowed = words.allowed or _allowed(kind, choices, field.metadata) + (f" ({words.unit})" if words.unit else "")
    return SettingInfo(
        name=name,
        env_names=env_names(name),
        description=field.description or "",
        default=_default(field.default, words.unit, declared["means"]),
        allowed=allowed + (", or none" if is_optional else ""),
        metavar=words.metavar or _metavar(kind, choices, words.unit),
        hint=words.hint or ("" if words.allowed or choices or kind is bool else _bounds(field.metadata)),
        panel=declared["panel"],
        is_boolean=kind is bool,
        is_optional=is_optional,
        may_be_empty=field.default == (),
        choices=choices,
        is_common=declared["common"],
    )


def _allowed(kind: Any, choices: tuple[str, ...] | None, metadata: list[Any]) -> str:
    if choices is not None:
        too = [spelling for spelling, choice in _SPELLINGS.items() if choice in choices]
        spellings = f" ({', '.join(too[:-1])} and {too[-1]} too)" if too else ""
        return f"{', '.join(choices[:-1])} or {choices[-1]}{spellings}"
    if kind is bool:
        return _BOOLEAN_WORDS
    bounds = _bounds(metadata)
    return ("an integer " if kind is int else "a number ") + ("of " if bounds.startswith("at") else "") + bounds


def _bounds(metadata: list[Any]) -> str:
    low, above, high = (next((getattr(i, at) for i in metadata if hasattr(i, at)), None) for at in ("ge", "gt", "le"))
    if low is not None:
        return f"from {low} to {high}" if high is not None else f"at least {low}"
    return f"above {above}" + (f" and at most {high}" if high is not None else "")


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
