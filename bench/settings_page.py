"""Prints docs/settings.md: ``python bench/settings_page.py``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moeoffload.config import ExpertServerSettings, HostSettings, ServeSettings, SettingInfo

_HEAD = """# Settings

Made by `python bench/settings_page.py`; change moeoffload/config instead of this page.

A value on the command line (or a Python keyword) wins over the first environment name, which wins over the
second, which wins over the default. An empty environment variable counts as not set. Where none is allowed,
the word `none` says so.
"""
_OF_SERVE = (
    "Those of `moeoffload run`, and these. Requests say themselves what `--max-new-tokens`, `--temperature` and "
    "`--seed` say for a run."
)


def markdown() -> str:
    """The text of docs/settings.md."""
    host = HostSettings.infos()
    own = [info for info in ServeSettings.infos() if info.name not in HostSettings.model_fields]
    lines = [_HEAD, *_table("moeoffload run", host), *_table("moeoffload serve", own, _OF_SERVE)]
    return "\n".join([*lines, *_table("moeoffload-expert", ExpertServerSettings.infos())])


def _table(title: str, infos: Sequence[SettingInfo], note: str = "") -> Iterator[str]:
    yield f"## {title}\n"
    if note:
        yield note + "\n"
    yield "| Setting | Flag | Environment | Default | Allowed | Meaning |"
    yield "|---|---|---|---|---|---|"
    for info in infos:
        flag = f"{info.flag} / --no-{info.flag[2:]}" if info.is_boolean else info.flag
        names = ", ".join(f"`{name}`" for name in info.env_names)
        yield f"| {info.name} | `{flag}` | {names} | {info.default} | {info.allowed} | {info.description} |"
    yield ""


if __name__ == "__main__":
    print(markdown(), end="")
