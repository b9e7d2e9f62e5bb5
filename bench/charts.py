"""Charts of benchmark results; one function for each benchmark that has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tables import Result

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#999999",
)  # fmt: skip
TRANSPORT_COLOURS: Final = {"shared": BLUE, "stream": ORANGE}
PART_COLOURS: Final = {
    "dense": GREY, "pack": ORANGE, "local": SKY, "wait_wire": RED, "wait_queue": PURPLE, "wait_compute": BLUE,
    "combine": YELLOW, "turn": GREEN, "other": "#333333",
}  # fmt: skip


def overhead(result: Result) -> Figure:
    """Remote over local for every task, with a line at 1, beside what the time went into."""
    rows = [row for row in result["rows"] if row["ratio"]]
    labels = [_label(row) for row in rows]
    figure, (left, right) = _figure(1, 2, height=1.5 + 0.32 * len(rows), sharey=True)
    middle = [row["ratio"]["median"] for row in rows]
    errors = [
        [m - row["ratio"]["low"] for m, row in zip(middle, rows, strict=True)],
        [row["ratio"]["high"] - m for m, row in zip(middle, rows, strict=True)],
    ]
    colours = [TRANSPORT_COLOURS[row["transport"]] for row in rows]
    left.barh(labels, middle, xerr=errors, color=colours, error_kw={"elinewidth": 1, "capsize": 2})
    left.axvline(1, color="black", linewidth=1)
    left.set_xlim(0, 1.1 * max(row["ratio"]["high"] for row in rows))
    left.set_xlabel("time, remote / local (line: as fast as local)")
    left.invert_yaxis()
    start = [0.0] * len(rows)
    for part, colour in PART_COLOURS.items():
        shares = [100 * row["parts"][part] / sum(row["parts"].values()) for row in rows]
        right.barh(labels, shares, left=start, color=colour, label=part.replace("_", " "))
        start = [before + share for before, share in zip(start, shares, strict=True)]
    right.set_xlim(0, 100)
    right.set_xlabel("share of the host's time, %")
    right.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8)
    return figure


def scaling(result: Result) -> Figure:
    """One panel for each sweep; the band is 20 % above the least overhead of a transport."""
    sweeps = list(dict.fromkeys(row["sweep"] for row in result["rows"]))
    figure, panels = _figure(1, len(sweeps), height=3.2, sharey=True)
    for axes, sweep in zip(panels, sweeps, strict=True):
        for transport, colour in TRANSPORT_COLOURS.items():
            rows = [row for row in result["rows"] if (row["sweep"], row["transport"]) == (sweep, transport)]
            values, middle = [row["value"] for row in rows], [row["overhead_us"]["median"] for row in rows]
            axes.plot(values, middle, "o-", color=colour, label=transport)
            axes.axhspan(min(middle), 1.2 * min(middle), color=colour, alpha=0.15, linewidth=0)
        axes.plot(values, [row["copy_limit_us"] for row in rows], ":", color="black", label="one copy of the bytes")
        axes.axhline(result["settings"]["semaphore_us"], color=GREY, linestyle="--", label="bare semaphore")
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [f"{value:,}" for value in values], fontsize=7)
        axes.minorticks_off()
        axes.set_xlabel({"rows": "prompt rows"}.get(sweep, sweep))
    # The panels share the axis, so it can be set only when all are drawn.
    panels[0].set_ylim(0, 1.1 * max(row["overhead_us"]["median"] for row in result["rows"]))
    panels[0].set_ylabel("overhead per layer and frame, µs")
    figure.legend(
        *panels[-1].get_legend_handles_labels(), ncols=4, loc="outside upper center", frameon=False, fontsize=8
    )
    return figure


def round_trips(result: Result) -> Figure:
    """Time against size, both logarithmic."""
    figure, (axes,) = _figure(1, 1, height=4)
    names = list(dict.fromkeys(row["contender"] for row in result["rows"]))
    colours = TRANSPORT_COLOURS | {
        "memcpy": GREY, "semaphore": "black", "ZeroMQ tcp": GREEN, "gRPC unary": RED,
    }  # fmt: skip
    for name in names:
        rows = [row for row in result["rows"] if row["contender"] == name]
        sizes, times = [row["n_bytes"] / 1024 for row in rows], [row["median_us"] for row in rows]
        axes.plot(sizes, times, "o-" if name in TRANSPORT_COLOURS else ".--", color=colours.get(name), label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:,.0f} KiB" if size < 1024 else f"{size / 1024:,.0f} MiB" for size in sizes])
    axes.set_xlabel("bytes each way")
    axes.set_ylabel("round trip, µs (median)")
    axes.legend(frameon=False, fontsize=8)
    return figure


def prefill_ipc(result: Result) -> Figure:
    """Prefill time of every mode, transport and dtype, and the local baseline as a line."""
    local, *rows = result["rows"]
    figure, (axes,) = _figure(1, 1, height=1.2 + 0.24 * len(rows))
    labels = [f"{row['mode']}, {row['transport']}, {row['dtype']}" for row in rows]
    colours = [TRANSPORT_COLOURS[row["transport"]] for row in rows]
    axes.barh(labels, [row["prefill_s"]["median"] for row in rows], color=colours)
    axes.axvline(local["prefill_s"]["median"], color="black", linewidth=1, label="all in one process")
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds of a prompt of {result['settings']['prompt_tokens']:,} tokens")
    axes.legend(frameon=False, fontsize=8)
    return figure


def memory(result: Result) -> Figure:
    """Peaks beside what a process must hold and its limit."""
    rows = result["rows"]
    figure, (axes,) = _figure(1, 1, height=1.2 + 0.6 * len(rows))
    places = range(len(rows))
    for offset, key, colour, label in (
        (-0.27, "holds_mib", GREY, "what it must hold"),
        (0.0, "open_mib", BLUE, "peak, model open"),
        (0.27, "prompt_mib", SKY, "peak, after the prompt"),
    ):
        axes.barh([place + offset for place in places], [row[key] for row in rows], 0.25, color=colour, label=label)
    for place, row in zip(places, rows, strict=True):
        name = "limit" if place == 0 else None
        axes.plot([row["limit_mib"]] * 2, [place - 0.42, place + 0.42], color=RED, label=name)
    axes.set_yticks(list(places), [row["process"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("resident memory, MiB")
    axes.legend(frameon=False, fontsize=8)
    return figure


def serving(result: Result) -> Figure:
    """Tokens per second and the time between two tokens against the number of requests."""
    colours = {"serve": BLUE, "local, generate_batch": GREY}
    figure, (speed, between) = _figure(1, 2, height=3.2)
    counts: list[int] = []
    for way, colour in colours.items():
        rows = [row for row in result["rows"] if row["way"] == way]
        speeds = [row["tokens_per_s"] for row in rows]
        middle = [each["median"] for each in speeds]
        errors = [
            [each["median"] - each["low"] for each in speeds],
            [each["high"] - each["median"] for each in speeds],
        ]
        here = [row["requests"] for row in rows]
        counts = max(counts, here, key=len)
        speed.errorbar(here, middle, yerr=errors, fmt="o-", color=colour, capsize=2, label=way)
        if way != "local, generate_batch":
            between.plot(here, [row["between_p50"] for row in rows], "o-", color=colour, label=f"{way}, p50")
            between.plot(here, [row["between_p95"] for row in rows], ":", color=colour, label=f"{way}, p95")
        if way == "one group":
            speed.plot(here, [row["limit"] for row in rows], "--", color="black", label="limit: one core reads")
    for axes, what in ((speed, "tokens per second"), (between, "milliseconds between tokens")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [f"{count:,}" for count in counts])
        axes.minorticks_off()
        axes.set_ylim(0)
        axes.set_xlabel("requests at once")
        axes.set_ylabel(what)
        axes.legend(frameon=False, fontsize=8)
    return figure


def llama_cpp(result: Result) -> Figure:
    """Tokens per second of prompts and of decode with remote experts, ours beside llama.cpp's, by format."""
    figure, panels = _figure(1, 2, height=3.0)
    formats = list(dict.fromkeys(row["weights"] for row in result["rows"]))
    for axes, task, what in zip(panels, ("prefill_512", "decode"), ("prompt of 512", "decode"), strict=True):
        for number, (system, colour) in enumerate({"moeoffload": BLUE, "llama.cpp": ORANGE}.items()):
            rows = [row for row in result["rows"] if (row["system"], row["where"]) == (system, "remote")]
            speeds = [row[task] for row in sorted(rows, key=lambda row: formats.index(row["weights"]))]
            middle = [speed["median"] for speed in speeds]
            errors = [
                [speed["median"] - speed["low"] for speed in speeds],
                [speed["high"] - speed["median"] for speed in speeds],
            ]
            places = [place + 0.4 * number - 0.2 for place in range(len(formats))]
            bar = {"elinewidth": 1, "capsize": 2}
            axes.bar(places, middle, 0.38, yerr=errors, color=colour, error_kw=bar, label=f"{system}, remote")
        axes.set_xticks(range(len(formats)), formats)
        axes.set_ylabel(f"tokens per second, {what}")
        axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8)
    return figure


CHARTS: dict[str, Callable[[Result], Figure]] = {
    "overhead": overhead,
    "scaling": scaling,
    "round_trips": round_trips,
    "prefill_ipc": prefill_ipc,
    "memory": memory,
    "serving": serving,
    "llama_cpp": llama_cpp,
}


def _figure(rows: int, columns: int, *, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(10, height), dpi=150, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    return figure, panels


def _label(row: dict[str, Any]) -> str:
    pipeline = ", pipeline" if row["pipeline"] == "on" else ""
    return f"{row['task']} {row['tokens']:,}, {row['transport']}{pipeline}"
