"""The picture that ``moeoffload top`` shows."""

from __future__ import annotations

from statistics import fmean
from typing import Any, Final

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from moeoffload.serve.figures import LAYER_PARTS, PARTS
from moeoffload.text import one_line

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_STATE_COLORS: Final = {"up": "green", "replaced": "yellow"}
_MOST_LAYERS: Final = 16  # shown at once; of more layers neighbours share a line

Json = dict[str, Any]


def picture(snapshot: Json, url: str, trouble: str = "") -> RenderableType:
    """What a host says in ``snapshot``; ``trouble`` is why a newer one could not be had."""
    shown = snapshot["now"]
    parts: list[RenderableType] = [_title(snapshot, url)]
    if trouble:
        parts.append(Text(f"{trouble}; the figures are the last ones", style="bold red"))
    parts += [Columns(_facts(snapshot), padding=(0, 1)), _servers(snapshot), _times(shown)]
    if not shown["layers"]:
        parts.append(Text("no layer was timed: no step has run since the first look", style="dim"))
    return Group(*parts)


def seconds(value: float | None) -> str:
    """A time with its unit, three digits."""
    if value is None or value >= 1:
        return "-" if value is None else f"{number(value)} s"
    return f"{number(1000 * value)} ms" if value >= 0.001 or value == 0 else f"{number(1e6 * value)} us"


def number(value: float | None) -> str:
    """Three digits, or all before the point."""
    if value is None:
        return "-"
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %" if 0 < value < 0.1 else f"{100 * value:.0f} %"


def _memory(bytes_of: Json) -> str:
    """What a process holds of its device, and what that has."""
    return f"{number(bytes_of['reserved_bytes'] / _GIB)} of {number(bytes_of['total_bytes'] / _GIB)}"


def _title(snapshot: Json, url: str) -> Text:
    model, requests = snapshot["model"], snapshot["requests"]
    state = "live" if requests["running"] or requests["waiting"] else "idle: nothing runs"
    names = " · ".join(one_line(model[name]) for name in ("name", "type", "dtype"))
    return Text.assemble(("moeoffload", "bold"), f"  {names} · {url} · up {snapshot['uptime_s']:,.0f} s · {state}")


def _facts(snapshot: Json) -> list[Panel]:
    shown, cache = snapshot["now"], snapshot["cache"]
    panels = {
        "requests": {"tokens/s": number(shown["tokens_per_s"])}
        | {name: f"{count:,}" for name, count in snapshot["requests"].items()},
        "latency, last minute": {
            "to the first token p50": seconds(shown["first_token_s"][0]),
            "to the first token p95": seconds(shown["first_token_s"][1]),
            "between tokens p50": seconds(shown["between_tokens_s"][0]),
            "between tokens p95": seconds(shown["between_tokens_s"][1]),
            "prompt tokens/s": number(shown["prompt_tokens_per_s"]),
            "steps/s": number(shown["steps_per_s"]),
            "rows of a step": number(shown["rows_per_step"]),
        },
        "cache, batches": {
            "cache in use or kept": _percent(shown["cache_use"]),
            "tokens in use": f"{cache['used_tokens']:,}",
            "tokens kept": f"{cache['kept_tokens']:,}",
            "tokens it holds": f"{cache['total_tokens']:,}",
            "prompt tokens reused": _percent(shown["reuse"]),
            "requests in a batch": number(shown["members_per_batch"]),
            "memory of the host, GiB": _memory(snapshot["memory"]),
            "servers lost so far": f"{snapshot['recovery']['lost']:,}",
        },
    }
    found = []
    for title, facts in panels.items():
        table = Table("", "", box=None, show_header=False, pad_edge=False)
        for name, value in facts.items():
            table.add_row(Text(name, style="dim"), Text(value, style="bold"))
        found.append(Panel(table, title=title, title_align="left", border_style="dim"))
    return found


def _table(title: str, first: str, *names: str) -> Table:
    table = Table(first, title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right")
    return table


def _servers(snapshot: Json) -> Table:
    table = _table(
        "expert servers",
        "server",
        "state",
        "busy",
        "calls/s",
        "rows/s",
        "MiB/s",
        "wait a call",
        "warm GiB",
        "memory GiB",
    )
    for server, load in zip(snapshot["servers"], snapshot["now"]["servers"], strict=True):
        state, told = server["state"], server.get("batches")
        by = f" by {server['computed_by']}" if state == "replaced" else ""
        table.add_row(
            Text(one_line(server["address"])),
            Text(one_line(state + by), style=_STATE_COLORS.get(state, "red")),
            _percent(load["busy"]),
            *(number(load[name]) for name in ("calls_per_s", "rows_per_s")),
            number(load["bytes_per_s"] / _MIB),
            seconds(load["wait_s"]),
            number(told["warm_bytes"] / _GIB if told else None),
            _memory(told) if told else "-",
        )
    return table


def _times(shown: Json) -> Table:
    """Where the seconds of a step go, and those of one call of each MoE layer."""
    table, layers = _table("where the time goes", "", *PARTS, "in all"), shown["layers"]
    lines = {"a step": shown["step_parts"]}
    size = max(1, -(-len(layers) // _MOST_LAYERS))
    for first in range(0, len(layers), size):
        group = layers[first : first + size]
        name = f"layer {first}" if len(group) == 1 else f"layers {first}-{first + len(group) - 1}"
        lines[name] = {part: fmean(layer[part] for layer in group) for part in LAYER_PARTS}
    for name, parts in lines.items():
        table.add_row(name, *(seconds(parts.get(part)) for part in PARTS), seconds(sum(parts.values())))
    return table
