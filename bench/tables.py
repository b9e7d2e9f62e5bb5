"""Results of benchmarks as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Result = dict[str, Any]
Cell = Callable[[dict[str, Any]], str]

MIB = 1 << 20


def spread(value: dict[str, float] | None, digits: int = 2, scale: float = 1.0) -> str:
    """``median (low–high)``."""
    if value is None:
        return "–"
    middle, low, high = (value[key] * scale for key in ("median", "low", "high"))
    return f"{middle:,.{digits}f} ({low:,.{digits}f}–{high:,.{digits}f})"


def _share(part: str) -> Cell:
    return lambda row: f"{100 * row['parts'].get(part, 0.0) / sum(row['parts'].values()):.1f} %"


def _number(name: str, digits: int) -> Cell:
    return lambda row: "–" if row[name] is None else f"{row[name]:,.{digits}f}"


def _count(name: str) -> Cell:
    return lambda row: "–" if row[name] is None else f"{row[name]:,}"


# Benchmark -> its tables; a table is its columns, by heading.
COLUMNS: dict[str, list[dict[str, Cell]]] = {
    "overhead": [
        {
            "task": lambda row: row["task"],
            "tokens": lambda row: f"{row['tokens']:,}",
            "transport": lambda row: row["transport"] if row["ratio"] else "local",
            "pipeline": lambda row: row["pipeline"],
            "seconds": lambda row: spread(row["seconds"], 3),
            "tok/s": lambda row: f"{row['tokens'] / row['seconds']['median']:,.1f}",
            "limit tok/s": lambda row: f"{row['tokens'] / row['limit_s']:,.1f}",
            "remote / local": lambda row: spread(row["ratio"], 3),
        },
        {
            "task": lambda row: row["task"],
            "tokens": lambda row: f"{row['tokens']:,}",
            "transport": lambda row: row["transport"] if row["ratio"] else "local",
            "pipeline": lambda row: row["pipeline"],
        }
        | {
            part.replace("_", " "): _share(part)
            for part in (
                "dense",
                "pack",
                "local",
                "wait_wire",
                "wait_queue",
                "wait_compute",
                "combine",
                "turn",
                "other",
            )
        }
        | {"accounted": lambda row: f"{100 * row['accounted']:.1f} %" if row["accounted"] else "–"},
    ],
    "scaling": [
        {
            "transport": lambda row: row["transport"],
            "against": lambda row: row["sweep"],
            "value": lambda row: f"{row['value']:,}",
            "frames per call": lambda row: f"{row['frames']:.0f}",
            "overhead µs": lambda row: spread(row["overhead_us"], 0),
            "copy limit µs": lambda row: f"{row['copy_limit_us']:.1f}",
            "verdict": lambda row: row["verdict"],
        }
    ],
    "workspaces": [
        {
            "transport": lambda row: row["transport"],
            "prompt rows": lambda row: row["prompts"],
            "rounds": lambda row: f"{row['rounds']:,}",
            "made on the host": lambda row: f"{row['host_made']:,}",
            "made on the server": lambda row: f"{row['server_made']:,}",
            "one workspace for all shapes": lambda row: f"{row['one_workspace_would']:,}",
            "host MiB": lambda row: f"{row['host_mib']:+.1f}",
            "server MiB": lambda row: f"{row['server_mib']:+.1f}",
            "decode ms, first tenth": lambda row: spread(row["first_ms"]["decode"]),
            "last tenth": lambda row: spread(row["last_ms"]["decode"]),
        }
    ],
    "prefill_ipc": [
        {
            "mode": lambda row: row["mode"],
            "transport": lambda row: row["transport"],
            "dtype": lambda row: row["dtype"],
            "calls": lambda row: f"{row['calls']:,}",
            "MiB out": lambda row: f"{row['bytes_out'] / MIB:.1f}",
            "MiB back": lambda row: f"{row['bytes_back'] / MIB:.1f}",
            "prefill s": lambda row: spread(row["prefill_s"]),
            "copy limit s": lambda row: f"{row['copy_limit_s']:.3f}",
            "decode tok/s": lambda row: spread(row["decode_tokens_per_s"], 1),
        }
    ],
    "round_trips": [
        {
            "contender": lambda row: row["contender"],
            "KiB": lambda row: f"{row['n_bytes'] // 1024:,}",
            "median µs": lambda row: f"{row['median_us']:,.1f}",
            "95th percentile µs": lambda row: f"{row['p95_us']:,.1f}",
            "limit": lambda row: row["limit"] or "–",
            "limit µs": lambda row: f"{row['limit_us']:,.1f}" if row["limit_us"] else "–",
        }
    ],
    "serving": [
        {
            "way": lambda row: row["way"],
            "requests": lambda row: f"{row['requests']:,}",
            "tok/s": lambda row: spread(row["tokens_per_s"], 1) if row["tokens_per_s"]["median"] else "–",
            "limit tok/s": _number("limit", 0),
            "first token ms, p50": _number("first_p50", 0),
            "p95": _number("first_p95", 0),
            "between tokens ms, p50": _number("between_p50", 1),
            "p95 ": _number("between_p95", 1),
            "rows a dispatch": _number("rows_per_call", 2),
            "also": lambda row: ", ".join(f"{name} {value:.3g}" for name, value in row["details"].items()) or "–",
        }
    ],
    "draft": [
        {
            "transport": lambda row: row["transport"],
            "head": lambda row: row["head"],
            "guesses": lambda row: row["guesses"],
            "tok/s": lambda row: spread(row["tokens_per_s"], 0),
            "ratio": lambda row: spread(row["ratio"]),
            "limit": _number("limit", 2),
            "acceptance": lambda row: f"{100 * row['acceptance']:.0f} %",
            "tokens per pass": _number("tokens_per_pass", 2),
        }
    ],
    "loading": [
        {
            "format": lambda row: row["format"],
            "experts GB": _number("experts_gb", 2),
            "dense GB": _number("dense_gb", 2),
            "read again GB/s": _number("read_again", 2),
            "read (limit)": _number("read", 2),
            "server loads": _number("load", 2),
            "of limit": _number("load_of_read", 2),
            "host loads": _number("host", 2),
        }
    ],
    "cable": [
        {
            "Gbit/s": lambda row: f"{row['gbit']:g}",
            "rows as": lambda row: row["system"],
            "prefill tok/s": lambda row: spread(row["prefill"], 0),
            "of bf16": lambda row: spread(row["of_bf16"]),
            "decode tok/s": lambda row: spread(row["decode"], 1),
            "MB": lambda row: "–" if row["megabytes"] is None else f"{row['megabytes']:.1f}",
            "limit s": lambda row: "–" if row["limit_s"] is None else f"{row['limit_s']:.2f}",
            "prefill s": _number("prefill_s", 2),
        }
    ],
    "formats_parity": [
        {
            "format": lambda row: row["format"],
            "transport": lambda row: row["transport"],
            "equal answers": lambda row: f"{row['equal']} of {row['prompts']}",
            "tasks solved": lambda row: f"{row['right_percent']:.1f} %",
            "by the reference": lambda row: f"{row['reference_percent']:.1f} %",
            "answers that differ": lambda row: "; ".join(row["differing"]) or "–",
        }
    ],
    "coalescing": [
        {
            "clients": lambda row: f"{row['clients']}",
            "together": lambda row: "yes" if row["coalesce"] else "no",
            "rows/s": lambda row: spread(row["rows_per_s"], 0),
            "limit rows/s": _number("limit", 0),
            "ms, p50": _number("p50_ms", 2),
            "p95": _number("p95_ms", 2),
            "requests a call": _number("mean_members", 2),
            "calls of 1, 2, 3, 4, 5–8, 9+": lambda row: " ".join(f"{n:,}" for n in row["members"]),
        }
    ],
    "fuzz": [
        {"part": lambda row: row["part"]}
        | {name: _count(name) for name in ("inputs", "good", "refused", "dropped", "crashes", "hangs")}
        | {
            "over limit": _count("over_limit"),
            "seconds": lambda row: f"{row['seconds']:.0f}",
            "server MiB": lambda row: f"{row['server_mib']:,.0f}" if row["server_mib"] else "–",
            "descriptors": _count("descriptors"),
        }
    ],
    "memory": [
        {
            "process": lambda row: row["process"],
            "holds MiB": lambda row: f"{row['holds_mib']:,.0f}",
            "limit MiB": lambda row: f"{row['limit_mib']:,.0f}",
            "peak, model open": lambda row: f"{row['open_mib']:,.0f}",
            "peak, after the prompt": lambda row: f"{row['prompt_mib']:,.0f}",
        }
    ],
}


def markdown(result: Result) -> str:
    """What it was measured on, and the tables; a benchmark that is not known here gets its first row's plain fields."""
    machine, settings = result["machine"], result["settings"]
    where = f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, Python {machine['python']}"
    how = ", ".join(
        f"{name.replace('_', ' ')} {_value(value)}" for name, value in settings.items() if not isinstance(value, bool)
    )
    caption = f"*Measured on {where}; {how}.*"
    if settings.get("quick"):
        caption += " **A quick run: too few repetitions to be quoted.**"
    rows = result["rows"]
    tables = COLUMNS.get(result["benchmark"]) or [_plain_columns(rows[0])]
    return "\n\n".join([caption, *(_table(columns, rows) for columns in tables)])


def _table(columns: dict[str, Cell], rows: list[dict[str, Any]]) -> str:
    lines = [list(columns), ["---"] * len(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _plain_columns(row: dict[str, Any]) -> dict[str, Cell]:
    """A column for each field; the figure of each turn is for who reads the JSON."""
    keys = [key for key, value in row.items() if not (key == "turns" and isinstance(value, list))]
    return {key.replace("_", " "): lambda row, key=key: _value(row.get(key)) for key in keys}  # type: ignore[misc]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return spread(value) if value.keys() == {"median", "low", "high"} else str(value)
    if isinstance(value, list):
        return " and ".join(map(_value, value))
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e6 else f"{value / 1e9:,.4g} × 10⁹"
    return "–" if value is None else str(value)
