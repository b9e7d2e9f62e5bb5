"""The one line that a page quotes from a benchmark's result: its figure, and the limit beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Result = dict[str, Any]
Rows = list[dict[str, Any]]


def _range(value: dict[str, float], digits: int = 2) -> str:
    return f"{value['median']:,.{digits}f} ({value['low']:,.{digits}f}–{value['high']:,.{digits}f})"


def _overhead(rows: Rows) -> str:
    parts = []
    for row in rows:
        if row["ratio"] is not None and (row["task"] == "decode" or row["pipeline"] == "on"):
            what = "decode" if row["task"] == "decode" else f"prefill of {row['tokens']:,}"
            parts.append(f"{what}, {row['transport']}: **{_range(row['ratio'])}**")
    return "; ".join(parts)


def _against(rows: Rows) -> str:
    return "; ".join(f"{row['task']}, {row['way']}: **{_range(row['speed'], 3)}**" for row in rows)


def _chunks(rows: Rows) -> str:
    chosen = [row for row in rows if row["chosen"]]
    return "; ".join(
        f"{row['tokens']:,} tokens in chunks of {row['chunk_rows']}: **{row['times_local_speed']['median']:.2f} ×** "
        f"(limit {row['limit']:.2f})"
        for row in chosen
    )


def _scaling(rows: Rows) -> str:
    sweeps = {(row["transport"], row["sweep"]): row for row in rows}
    return "; ".join(
        f"{sweep}, {transport}: **{row['overhead_us']['median']:.0f} µs**, {row['verdict']}"
        for (transport, sweep), row in sweeps.items()
    )


def _workspaces(rows: Rows) -> str:
    host, server = (max(row[side] for row in rows) for side in ("host_made", "server_made"))
    return f"**{host}** objects made on the host, **{server}** on the server in {rows[0]['rounds']:,} rounds (limit 0)"


def _prefill_ipc(rows: Rows) -> str:
    cells = {(row["mode"], row["transport"], row["dtype"]): row for row in rows}
    calls = {mode: cells[mode, "shared", "f32"]["calls"] for mode in ("stream", "batched", "auto")}
    mib = {dtype: cells["auto", "shared", dtype]["bytes_out"] / (1 << 20) for dtype in ("f32", "bf16")}
    return (
        f"calls: **{calls['stream']:,}** in slices, **{calls['batched']:,}** batched, **{calls['auto']:,}** auto; "
        f"sent: **{mib['f32']:.1f} MiB** as f32, **{mib['bf16']:.1f}** as bf16"
    )


def _balance(rows: Rows) -> str:
    mixed = rows[1]
    alone, both = (row["decode_tokens_per_s"]["median"] for row in rows[:2])
    return (
        f"busiest / mean **{mixed['busiest_to_mean']:.2f}** (limit 1); decode **{both:.1f} tok/s**, "
        f"{alone:.1f} without the slow server"
    )


def _hot_experts(rows: Rows) -> str:
    worst = max(row["call_ms"]["median"] / row["limit_ms"] for row in rows)
    return f"a call takes at most **{worst:.2f} ×** the longer of its two parts"


def _packed(rows: Rows) -> str:
    """Times of packed experts beside those in bfloat16."""
    ours = {(row["kernel"], row["rows"]): row for row in rows if row["layer"] == "packed experts"}
    plain = {n: row["ms"]["median"] for (name, n), row in ours.items() if name == "bfloat16"}
    parts = []
    for name in dict.fromkeys(name for name, _ in ours if name not in ("bfloat16", "limit")):
        few, many = ours[name, 1], ours[name, max(plain)]
        faster, prefill = plain[1] / few["ms"]["median"], plain[max(plain)] / many["ms"]["median"]
        read = f"{few['of_read']:.0%} of the read rate"
        parts.append(f"{name}: **{faster:.2f} ×** bf16 at one row ({read}), {prefill:.2f}")
    return "; ".join(parts) + f" at {max(plain):,} rows"


def _llama_cpp(rows: Rows) -> str:
    found = {(row["weights"], row["system"], row["where"]): row for row in rows}
    parts = []
    for weights in dict.fromkeys(row["weights"] for row in rows):
        ours, theirs = found[weights, "moeoffload", "remote"], found[weights, "llama.cpp", "remote"]
        local = ours["decode"]["median"] / found[weights, "moeoffload", "local"]["decode"]["median"]
        decode, prefill = (ours[task]["median"] / theirs[task]["median"] for task in ("decode", "prefill_512"))
        parts.append(
            f"{weights}: decode **{decode:.2f} ×** ({ours['decode']['median']:.1f} tok/s), prefill **{prefill:.2f} ×** "
            f"({ours['prefill_512']['median']:.0f}); remote / local {local:.2f}"
        )
    return "; ".join(parts)


def _kernels(rows: Rows) -> str:
    if any(row["layer"] == "packed experts" for row in rows):
        return _packed(rows)
    ours = [
        row for row in rows if row["layer"] == "experts" and row["kernel"] == "tiled" and "bfloat16" in row["dtype"]
    ]
    few = [row for row in ours if row["rows"] <= 4]
    reads = ", ".join(f"**{row['of_read']:.0%}** at {row['rows']}" for row in few)
    return f"bf16 experts read, of what one core reads: {reads} rows"


def _round_trips(rows: Rows) -> str:
    parts = []
    for row in rows:
        if row["contender"] in ("shared", "stream") and row["n_bytes"] in (4096, 2 << 20):
            size = "4 KiB" if row["n_bytes"] == 4096 else "2 MiB"
            limit = f"{row['limit_us']:,.0f}" if row["limit_us"] else "–"
            parts.append(f"{row['contender']} {size}: **{row['median_us']:,.0f} µs** ({row['limit']} {limit})")
    return "; ".join(parts)


def _memory(rows: Rows) -> str:
    return "; ".join(
        f"{row['process']}: **{row['prompt_mib']:,.0f} MiB** (limit {row['limit_mib']:,.0f})" for row in rows
    )


def _ablations(rows: Rows) -> str:
    kept = {row["path"] for row in rows if row["verdict"] == "kept"}
    cpus = " and ".join(sorted({row["cpu"] for row in rows}))
    paths = {row["path"] for row in rows if row["verdict"] != "noise"}
    return f"**{len(kept)}** of {len(paths)} paths kept; measured on {cpus}"


def _serving(rows: Rows) -> str:
    ones = [row for row in rows if row["way"] == "serve" and row["requests"] in (1, 8)]
    return "; ".join(
        f"{row['requests']} at a time: **{row['tokens_per_s']['median']:.0f} tok/s** (limit {row['limit']:.0f})"
        for row in ones
    )


def _coalescing(rows: Rows) -> str:
    most = max(row["clients"] for row in rows)
    off, on = (next(row for row in rows if row["clients"] == most and row["coalesce"] is way) for way in (False, True))
    gain = on["rows_per_s"]["median"] / off["rows_per_s"]["median"]
    return f"{most} hosts on one server: **{gain:.2f} ×** the rows per second (limit {on['limit']:.0f}/s)"


def _faults(rows: Rows) -> str:
    total = next(row for row in rows if row["fault"] == "all")
    return (
        f"**{total['same_tokens']} of {total['runs']}** runs with the same tokens, longest pause "
        f"**{total['pause_max_s']:.2f} s**, **{total['leaks']}** leaks"
    )


def _rolling_restart(rows: Rows) -> str:
    return (
        f"each of {len(rows)} servers back in use within **{max(row['back_s'] for row in rows):.1f} s**, no token lost"
    )


def _soak(rows: Rows) -> str:
    flat = sum(row["flat"] for row in rows)
    return f"**{flat} of {len(rows)}** figures flat (memory, descriptors, threads of both sides)"


def _fairness(rows: Rows) -> str:
    return (
        f"95th percentile beside a flood at most **{max(row['ratio_p95'] for row in rows):.2f} ×** that alone (bound 3)"
    )


def _fuzz(rows: Rows) -> str:
    inputs, crashes, hangs = (sum(row[name] or 0 for row in rows) for name in ("inputs", "crashes", "hangs"))
    return f"**{inputs:,}** inputs, **{crashes}** crashes, **{hangs}** hangs"


def _parity(rows: Rows) -> str:
    same = [row for row in rows if row["dtype"] == "f32"]
    worst = min(row["equal_tokens"] for row in same)
    return f"f32 payload: **{worst:.0f} %** of tokens equal to a local run in all of {len(same)} set-ups"


def _concurrent_answers(rows: Rows) -> str:
    return f"**{min(row['same_tokens_percent'] for row in rows):.1f} %** of answers have the tokens they have alone"


def _harness(rows: Rows) -> str:
    scores = [
        f"{row['task']} **{row['right']:.1f} %** (transformers {row['local']:.1f} %)" for row in rows if row["local"]
    ]
    schemas = [(row["asked"] * row["right"] / 100, row["asked"]) for row in rows if row["local"] is None]
    valid, asked = map(sum, zip(*schemas, strict=True))
    return f"lm-eval: {'; '.join(scores)}; random JSON schemas: **{valid:.0f} of {asked}** valid"


def _startup(rows: Rows) -> str:
    named = ("server ready", "first token, warm server", "serve ready")
    return "; ".join(
        f"{row['command']}: **{row['times_torch']['median']:.1f} ×** `import torch` ({row['seconds']['median']:.1f} s)"
        for row in rows
        if row["command"] in named
    )


def _loading(rows: Rows) -> str:
    return "; ".join(f"{row['format']}: **{row['load']:.1f} GB/s** ({100 * row['load_of_read']:.0f} %)" for row in rows)


def _cable(rows: Rows) -> str:
    return "; ".join(
        f"{row['gbit']:g} Gbit/s: prompt in f8 **{row['of_bf16']['median']:.2f} ×** bf16 "
        f"({row['prefill']['median']:.0f} tok/s, {row['megabytes']:.0f} MB; the cable needs {row['limit_s']:.2f} of "
        f"{row['prefill_s']:.1f} s)"
        for row in rows
        if row["system"] == "f8"
    )


def _formats_parity(rows: Rows) -> str:
    formats, transports = ({row[key] for row in rows} for key in ("format", "transport"))
    equal, all_of = (sum(row[key] for row in rows) for key in ("equal", "prompts"))
    return (
        f"{len(formats)} formats over {len(transports)} transports: **{equal:,} of {all_of:,}** answers with the same "
        f"tokens; tasks solved: **{min(row['right_percent'] for row in rows):.0f} %**"
    )


def _draft(rows: Rows) -> str:
    return "; ".join(
        f"{row['transport']}, {row['head']} head: **{row['ratio']['median']:.2f} ×** "
        f"(limit {row['limit']:.2f}, {100 * row['acceptance']:.0f} % of guesses right)"
        for row in rows
        if not row["guesses"].isdecimal()
    )


def _two_tiers(rows: Rows) -> str:
    return "; ".join(
        f"{row['trace']}: **{row['ours']:.0%}** at {row['ours_moves']:.2f} moves (static {row['static']:.0%}, "
        f"LRU {row['lru']:.0%} at {row['lru_moves']:.1f}, best static {row['best_static']:.0%})"
        for row in rows
    )


HEADLINES: dict[str, Callable[[Rows], str]] = {
    "ablations": _ablations,
    "against": _against,
    "balance": _balance,
    "chunks": _chunks,
    "coalescing": _coalescing,
    "concurrent_answers": _concurrent_answers,
    "cable": _cable,
    "draft": _draft,
    "fairness": _fairness,
    "faults": _faults,
    "formats_parity": _formats_parity,
    "fuzz": _fuzz,
    "harness": _harness,
    "hot_experts": _hot_experts,
    "kernels": _kernels,
    "llama_cpp": _llama_cpp,
    "loading": _loading,
    "memory": _memory,
    "overhead": _overhead,
    "parity": _parity,
    "prefill_ipc": _prefill_ipc,
    "rolling_restart": _rolling_restart,
    "round_trips": _round_trips,
    "scaling": _scaling,
    "serving": _serving,
    "soak": _soak,
    "startup": _startup,
    "two_tiers": _two_tiers,
    "workspaces": _workspaces,
}


def headline(result: Result) -> str:
    """The quoted line of a result, with what it was measured on."""
    line = HEADLINES[result["benchmark"]](result["rows"])
    quick = " (a quick run)" if result["settings"].get("quick") else ""
    return f"{line}. *{result['machine']['cpu']}, {result['machine']['cores']} cores{quick}.*"
