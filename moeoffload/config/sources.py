"""Where settings come from: command line or keyword, then ``MOEOFFLOAD_*``, then an alias name, then the default.

Everything said about a setting (flag, environment names, help, documentation, error text) derives from its annotation,
so none of them can disagree with what the model accepts.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

import annotated_types
from pydantic import ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from moeoffload.errors import SettingError

ENV_PREFIX = "MOEOFFLOAD_"
_BOOLEAN_WORDS = "1, true, yes, on, 0, false, no or off"
_LONGEST_VALUE_SHOWN = 200

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


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What an annotation says of a setting beyond its type, bounds, default and description."""

    alias: str | None = None
    """A second environment name, read when the ``MOEOFFLOAD_`` one is not set."""
    unit: str | None = None
    allowed: str | None = None
    """What is allowed, in words; left out where type and bounds say it."""
    choices: tuple[str, ...] | None = None
    """The words of an enum that a user may write; left out where it is all of them."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of choices."""
    default_means: str | None = None
    metavar: str | None = None
    rival: str | None = None
    """The setting that says the same in other words: given on the command line, it silences this one's environment."""
    panel: Panel


@dataclass(frozen=True, kw_only=True)
class SettingInfo:
    """A setting as a user meets it."""

    name: str
    flag: str
    env: str
    alias: str | None
    description: str
    unit: str | None
    default: str
    allowed: str
    metavar: str
    panel: Panel
    is_boolean: bool
    is_optional: bool
    choices: tuple[str, ...] | None
    spellings: Mapping[str, str]
    rival: str | None

    @property
    def env_names(self) -> tuple[str, ...]:
        """The environment names, strongest first."""
        return (self.env,) if self.alias is None else (self.env, self.alias)

    def from_environment(self) -> tuple[str, str] | None:
        """The environment name that is set and its value, or None; an empty variable counts as not set."""
        for env in self.env_names:
            value = os.environ.get(env, "").strip()
            if value:
                return env, value
        return None


class SettingsBase(BaseSettings):
    """A frozen settings model. Values are checked here once; a bad one raises SettingError naming its source."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, *, _from_cli: bool = False, **values: Any) -> None:
        """Take keywords over the environment over the defaults; ``_from_cli`` makes errors name flags, not keywords."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SettingError("\n".join(_complaints(type(self), error, values, _from_cli))) from None

    @classmethod
    def load(cls, cli: Mapping[str, Any] | None = None) -> Self:
        """Build the settings from what the command line gave (None = not given), the environment and the defaults."""
        for complaint in unknown_names(os.environ):
            _log.warning("%s", complaint)
        return cls(_from_cli=True, **{name: value for name, value in (cli or {}).items() if value is not None})

    @classmethod
    def infos(cls) -> tuple[SettingInfo, ...]:
        """Every setting of this model, panel by panel."""
        panels = list(Panel)
        return tuple(sorted(_infos(cls).values(), key=lambda info: panels.index(info.panel)))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keywords first, then the environment by our own names; no dotenv file, no secrets folder."""
        return init_settings, _Environment(settings_cls)

    @field_validator("*", mode="before")
    @classmethod
    def _read_text(cls, value: Any, context: ValidationInfo) -> Any:
        # An enum member is a str too, but it is no text: code may use members that users may not write.
        if type(value) is not str or context.field_name is None:
            return value
        info, text = _infos(cls)[context.field_name], value.strip()
        word = text.lower()
        if info.is_optional and word == "none":
            return None
        if info.choices is None:
            if not text and cls.model_fields[context.field_name].default != ():
                raise PydanticCustomError("empty", "empty")
            return text
        word = info.spellings.get(word, word)
        if word not in info.choices:
            raise PydanticCustomError("choice", "not a choice")
        return word


class _Environment(PydanticBaseSettingsSource):
    """The environment under each setting's own names, so that an error can say which of them held the bad value."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        found = _info_of(self.settings_cls, field_name).from_environment()
        return (found[1] if found else None), field_name, False

    def __call__(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, field_info in self.settings_cls.model_fields.items():
            value, _, _ = self.get_field_value(field_info, name)
            if value is not None and _info_of(self.settings_cls, name).rival not in self.current_state:
                values[name] = value
        return values


def unknown_names(environ: Mapping[str, str]) -> list[str]:
    """One sentence for each ``MOEOFFLOAD_*`` name that no settings model knows, with the nearest name that one does."""
    known = {info.env for model in _models(SettingsBase) for info in model.infos()}
    sentences = []
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known and environ[name].strip():
            sentences.append(f"{name} is set, but there is no such setting{_nearest(name, known)}")
    return sentences


def _models(base: type[SettingsBase]) -> Iterator[type[SettingsBase]]:
    for model in base.__subclasses__():
        yield model
        yield from _models(model)


def _nearest(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else ""


def _complaints(model: type[SettingsBase], error: ValidationError, values: Mapping[str, Any], cli: bool) -> list[str]:
    """One line for each bad setting."""
    infos = _infos(model)
    lines: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        name = str(detail["loc"][0])
        if name in infos:
            lines.setdefault(name, _complaint(infos[name], detail, values, cli))
        else:
            lines[name] = f"{name}: there is no such setting{_nearest(name, set(infos))}"
    return list(lines.values())


def _complaint(info: SettingInfo, detail: ErrorDetails, values: Mapping[str, Any], cli: bool) -> str:
    source, value = info.name, detail["input"]
    if info.name in values:
        source, value = (info.flag if cli else info.name), values[info.name]
    elif found := info.from_environment():
        source, value = found
    shown = repr(value)  # escapes line breaks: the complaint stays one line
    if len(shown) > _LONGEST_VALUE_SHOWN:
        shown = shown[:_LONGEST_VALUE_SHOWN] + "..."
    reason = f" ({detail['ctx']['error']})" if detail["type"] == "value_error" else ""
    return f"{source}: {shown} is not allowed{reason}; allowed is {info.allowed}"


def _info_of(model: type[BaseSettings], name: str) -> SettingInfo:
    assert issubclass(model, SettingsBase)
    return _infos(model)[name]


@functools.cache
def _infos(model: type[SettingsBase]) -> dict[str, SettingInfo]:
    return {name: _describe(name, field_info) for name, field_info in model.model_fields.items()}


def _describe(name: str, field_info: FieldInfo) -> SettingInfo:
    setting = next((item for item in field_info.metadata if isinstance(item, Setting)), None)
    assert setting is not None, f"{name} has no Setting(...) in its annotation"
    kind, is_optional = _plain_type(field_info.annotation)
    choices = setting.choices
    if choices is None and isinstance(kind, type) and issubclass(kind, StrEnum):
        choices = tuple(kind)
    allowed = setting.allowed or _allowed(kind, choices, field_info) + (f" ({setting.unit})" if setting.unit else "")
    return SettingInfo(
        name=name,
        flag="--" + name.replace("_", "-"),
        env=ENV_PREFIX + name.upper(),
        alias=setting.alias,
        description=field_info.description or "",
        unit=setting.unit,
        default=_default(field_info.default, setting),
        allowed=allowed + (", or none" if is_optional else ""),
        metavar=setting.metavar or _metavar(kind, choices, setting),
        panel=setting.panel,
        is_boolean=kind is bool,
        is_optional=is_optional,
        choices=choices,
        spellings=setting.spellings,
        rival=setting.rival,
    )


def _plain_type(annotation: Any) -> tuple[Any, bool]:
    """The type without its ``| None``, and whether it had one."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return annotation, False
    members = [member for member in typing.get_args(annotation) if member is not types.NoneType]
    return members[0], True


def _allowed(kind: Any, choices: tuple[str, ...] | None, field_info: FieldInfo) -> str:
    if choices is not None:
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    if kind is bool:
        return _BOOLEAN_WORDS
    bounds = field_info.metadata
    low = next((item.ge for item in bounds if isinstance(item, annotated_types.Ge)), None)
    above = next((item.gt for item in bounds if isinstance(item, annotated_types.Gt)), None)
    high = next((item.le for item in bounds if isinstance(item, annotated_types.Le)), None)
    noun = "an integer" if kind is int else "a number"
    if low is not None:
        return f"{noun} from {low} to {high}" if high is not None else f"{noun} of at least {low}"
    if above is not None:
        return f"{noun} above {above}" + (f" and at most {high}" if high is not None else "")
    return noun


def _default(value: Any, setting: Setting) -> str:
    if value is None:
        text = "none"
    elif isinstance(value, bool):
        text = "yes" if value else "no"
    elif value == ():
        text = "empty"
    else:
        text = f"{value:g}" if isinstance(value, float) else str(value)
        if setting.unit and value:
            text += f" {setting.unit}"
    return f"{text} = {setting.default_means}" if setting.default_means else text


def _metavar(kind: Any, choices: tuple[str, ...] | None, setting: Setting) -> str:
    if choices is not None:
        return "|".join(choices)
    if setting.unit:
        return setting.unit.split()[0].upper()
    return "INTEGER" if kind is int else "NUMBER"
