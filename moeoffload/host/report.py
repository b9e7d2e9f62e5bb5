"""The report of a run, as data (docs/report.md describes the JSON) and as tables for a terminal or notebook."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from rich.console import Console, Group, RenderableType
from rich.table import Table

from moeoffload import __version__
from moeoffload.checkpoint import Checkpoint
from moeoffload.config import HostSettings
from moeoffload.devices import device_name
from moeoffload.host.link import ExpertLink
from moeoffload.host.recorder import (
    DECODE,
    PREFILL,
    CallCounters,
    GuessCounts,
    PhaseCounters,
    Recorder,
    add_counters,
)
from moeoffload.payload import Payloads

REPORT_VERSION: Final = 1
ACCOUNTED: Final = 0.95  # a phase is marked incomplete if its parts add up to a smaller share of its time
_MIB: Final = 1 << 20
_WIDTH: Final = 120  # of tables outside terminals
_HOST_FIELDS: Final = ("dense", "pack", "local", "wait", "wait_queue", "wait_compute", "turn", "combine", "other")
_PHASE_FIGURES: Final = ("tokens", "seconds", "tokens_per_s", "calls", "rows", "bytes_out", "bytes_back")
_SERVER_FACTS: Final = ("transport", "transport_reason", "device", "kernel", "n_experts", "resident_bytes",
                        "batch_capacity")  # fmt: skip


def model_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """Collects the report's facts about the model; ``dense_bytes`` counts everything but routed experts."""
    layers = checkpoint.layers
    return {
        "path": str(checkpoint.path),
        "model_type": checkpoint.model_type,
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "moe_layers": len(layers),
        "routed_experts": sum(layer.n_experts for layer in layers),
        "top_k": checkpoint.top_k,
        "hidden_size": checkpoint.hidden_size,
        "dense_bytes": checkpoint.dense_bytes,
        "expert_bytes": (n_bytes := sum(layer.n_experts * layer.expert_bytes for layer in layers)),
        "expert_format": "+".join(sorted({name for layer in layers for name in layer.format.split("+")})),
        "bits_per_weight": 8 * n_bytes / sum(layer.n_experts * layer.n_weights for layer in layers),
    }


def run_facts(settings: HostSettings, payloads: Payloads, device: torch.device) -> dict[str, Any]:
    """Collects the report's facts about the settings, with the payload dtypes and the device that were chosen."""
    return {
        "mode": settings.mode,
        "payload_dtype": payloads.label,
        "batch_capacity": settings.batch_capacity,
        "hot_slice": settings.hot_slice,
        "slots": settings.slots,
        "host_device": str(device),
        "host_device_name": device_name(device),
    }


class Shown(ABC):
    """Is printed, and shown by a notebook, as its `table`."""

    @abstractmethod
    def table(self) -> RenderableType:
        """Returns what a terminal shows."""

    def __repr__(self) -> str:
        return self._printed().export_text().rstrip()

    def _repr_html_(self) -> str:
        return self._printed().export_html(inline_styles=True, code_format="<pre>{code}</pre>")

    def _printed(self) -> Console:
        console = Console(file=io.StringIO(), record=True, width=_WIDTH)
        console.print(self.table(), markup=False, highlight=False)
        return console


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """One run. Times are in seconds, sizes in bytes; phases are prefill and decode.

    ``prompt_tokens`` were computed; ``completion_tokens`` were produced by forward passes: one for each sequence of a
    prefill and one for each decoded token, unless passes held packed requests or guesses, which report their own.
    ``recovery`` has the server events; ``layers``, times by layer, is None without ``profile``; ``guesses`` is None if
    there were none.
    """

    model: dict[str, Any]
    run: dict[str, Any]
    prompt_tokens: int
    completion_tokens: int
    phases: dict[str, dict[str, Any]]
    servers: list[dict[str, Any]]
    recovery: dict[str, Any]
    guesses: dict[str, Any] | None
    layers: dict[str, list[dict[str, Any]]] | None

    @classmethod
    def collect(
        cls,
        model: dict[str, Any],
        run: dict[str, Any],
        recorder: Recorder,
        links: Sequence[ExpertLink],
        recovery: dict[str, Any],
    ) -> Report:
        """Builds a report from the present figures of ``recorder`` and ``links``."""
        totals = recorder.phases
        servers = [
            asdict(link.info)
            | {"batch_capacity": link.layout.capacity}
            | {"phases": {name: asdict(phase.servers[i]) for name, phase in totals.items()}}
            for i, link in enumerate(links)
        ]
        phases = {name: _phase(phase) for name, phase in totals.items()}
        layers = {name: [asdict(times) for times in phase.layers] for name, phase in totals.items()}
        prefill, decode = totals[PREFILL], totals[DECODE]
        tokens = recorder.prompt_tokens, recorder.completion_tokens
        if not recorder.prompt_tokens:
            tokens = prefill.tokens, prefill.sequences + decode.tokens
        guesses = _guesses(recorder.guesses, sum(phase["calls"] for phase in phases.values()))
        return cls(model, run, *tokens, phases, servers, recovery, guesses, layers if recorder.profile else None)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as plain data, in the form docs/report.md describes."""
        data = {name: value for name, value in vars(self).items() if value is not None}
        return {"report_version": REPORT_VERSION, "moeoffload_version": __version__} | data

    def table(self) -> RenderableType:
        """Returns tables for a terminal: the phases, then the servers."""
        phases = _table(self.title, {name: _phase_cells(phase) for name, phase in self.phases.items()})
        guesses = [_table(None, {"guesses": self.guesses})] if self.guesses else []
        return Group(phases, *self.server_tables(), *guesses)

    def server_tables(self) -> list[Table]:
        """Returns tables of the servers, and of server events if there were any."""
        servers = {server["address"]: _server_cells(server) for server in self.servers}
        events = {"faults": {name: n for name, n in self.recovery.items() if name != "events" and n}}
        return [table for table in (_table(None, servers), _table(None, events)) if table.row_count]

    @property
    def title(self) -> str:
        """The model and the main settings, in one line."""
        model, run = self.model, self.run
        weights = f"experts in {model['expert_format']}, {model['bits_per_weight']:.3g} bits a weight"
        return f"{model['model_type']} · {weights} · mode {run['mode']} · payload {run['payload_dtype']}"


def _phase_cells(phase: dict[str, Any]) -> dict[str, Any]:
    share = f"{phase['accounted']:.0%}"
    return (
        {name: phase[name] for name in _PHASE_FIGURES}
        | {f"host: {name} s": phase["host"][f"{name}_s"] for name in _HOST_FIELDS if "wait_" not in name}
        | {"accounted": share if phase["complete"] else f"incomplete: {share}"}
        | {f"server: {name}": seconds for name, seconds in phase["server"].items()}
    )


def _server_cells(server: dict[str, Any]) -> dict[str, Any]:
    phases = server["phases"].values()
    sums = {name: sum(phase[name] for phase in phases) for name in ("calls", "rows", "queue_s", "compute_s")}
    return {name: server[name] for name in _SERVER_FACTS} | sums


def _table(title: str | None, columns: dict[str, dict[str, Any]]) -> Table:
    """Returns a table for a terminal; ``columns`` maps each column to its cells by row, the same rows in all."""
    table = Table("", title=title)
    for name in columns:
        table.add_column(name, justify="right")
    for row in next(iter(columns.values()), {}):
        table.add_row(row.replace("_", " "), *(_cell(row, cells[row]) for cells in columns.values()))
    return table


def _cell(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if "bytes" in name:
        return f"{value / _MIB:,.2f} MiB"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def _guesses(counts: GuessCounts, calls: int) -> dict[str, Any] | None:
    if not counts.passes:
        return None
    return asdict(counts) | {
        "acceptance": counts.right / counts.guessed if counts.guessed else 0.0,
        "tokens_per_pass": counts.tokens / counts.passes,
        "calls_per_token": calls / counts.tokens if counts.tokens else 0.0,
    }


def _phase(phase: PhaseCounters) -> dict[str, Any]:
    total = CallCounters()
    for server in phase.servers:
        add_counters(total, server)
    times = phase.times
    figures = asdict(times) | {"turn_s": phase.turn_s, "other_s": phase.other_s}
    host = {f"{name}_s": figures[f"{name}_s"] for name in _HOST_FIELDS}
    host["wait_wire_s"] = max(0.0, times.wait_s - times.wait_queue_s - times.wait_compute_s)
    return {
        **{name: getattr(phase, name) for name in ("tokens", "sequences", "forwards", "seconds")},
        "tokens_per_s": phase.tokens / phase.seconds if phase.seconds else 0.0,
        **{name: getattr(total, name) for name in ("calls", "rows", "bytes_out", "bytes_back")},
        "accounted": phase.accounted,
        "complete": phase.accounted >= ACCOUNTED,
        "local_rows": phase.local_rows,
        "pipelined": phase.pipelined,
        "host": host,
        "server": {"queue_s": total.queue_s, "compute_s": total.compute_s},
    }
