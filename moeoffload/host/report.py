"""What a run did, as data (docs/report.md describes the JSON) and as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table

from moeoffload import __version__
from moeoffload.host.counters import CallCounters, PhaseCounters
from moeoffload.host.link import ExpertLink
from moeoffload.host.recorder import Recorder, TokenTotals

REPORT_VERSION: Final = 1
ACCOUNTED: Final = 0.95
"""A phase whose parts add up to less of its time is marked incomplete."""
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class ModelFacts:
    """The model of a run. ``expert_bytes`` counts all routed experts, ``dense_bytes`` everything else."""

    path: str
    model_type: str
    dtype: str
    moe_layers: int
    routed_experts: int
    top_k: int
    hidden_size: int
    dense_bytes: int
    expert_bytes: int


@dataclass(frozen=True)
class RunFacts:
    """How a run was set up."""

    mode: str
    payload_dtype: str
    batch_capacity: int
    hot_slice: int
    slots: int
    host_device: str
    host_device_name: str


@dataclass(frozen=True)
class Report:
    """One run. Times are seconds, sizes bytes; phases are prefill and decode."""

    model: ModelFacts
    run: RunFacts
    phases: dict[str, dict[str, Any]]
    servers: list[dict[str, Any]]
    recovery: dict[str, Any]
    tokens: TokenTotals | None
    guesses: dict[str, Any] | None
    layers: dict[str, list[dict[str, Any]]] | None

    @classmethod
    def collect(
        cls, model: ModelFacts, run: RunFacts, recorder: Recorder, links: Sequence[ExpertLink], recovery: dict[str, Any]
    ) -> Report:
        """Takes the figures of ``recorder`` and ``links`` as they stand; ``recovery`` is what befell the servers."""
        totals = recorder.phases
        servers = [
            asdict(link.info)
            | {"batch_capacity": link.layout.capacity}
            | {"phases": {name: asdict(phase.servers[i]) for name, phase in totals.items()}}
            | ({"auto": link.learner.describe()} if run.mode == "auto" else {})
            for i, link in enumerate(links)
        ]
        phases = {name: _phase(phase) for name, phase in totals.items()}
        layers = {name: [asdict(times) for times in phase.layers] for name, phase in totals.items()}
        guesses = _guesses(recorder, phases)
        return cls(
            model, run, phases, servers, recovery, recorder.tokens, guesses, layers if recorder.profile else None
        )

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts that were computed."""
        return self.tokens.prompt if self.tokens is not None else int(self.phases["prefill"]["tokens"])

    @property
    def completion_tokens(self) -> int:
        """Tokens that forward passes produced: one for each sequence of a prefill, one for each decoded token, unless
        somebody packed requests or guesses into them and told how many."""
        if self.tokens is not None:
            return self.tokens.completion
        return int(self.phases["prefill"]["sequences"] + self.phases["decode"]["tokens"])

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, in the form docs/report.md describes."""
        data: dict[str, Any] = {
            "report_version": REPORT_VERSION,
            "moeoffload_version": __version__,
            "model": asdict(self.model),
            "run": asdict(self.run),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "phases": self.phases,
            "servers": self.servers,
            "recovery": self.recovery,
        }
        if self.guesses is not None:
            data["guesses"] = self.guesses
        if self.layers is not None:
            data["layers"] = self.layers
        return data

    def table(self) -> RenderableType:
        """Tables for a terminal: the phases, then the servers."""
        tables = [self._phase_table(), self._server_table()]
        if self.guesses is not None:
            tables.append(self._guess_table(self.guesses))
        if any(count for name, count in self.recovery.items() if name != "events"):
            tables.append(self._recovery_table())
        return Group(*tables)

    def _phase_table(self) -> Table:
        table = Table(title=f"{self.model.model_type} · mode {self.run.mode} · payload {self.run.payload_dtype}")
        table.add_column("")
        rows: dict[str, list[str]] = {}
        for name, phase in self.phases.items():
            table.add_column(name, justify="right")
            host, server = phase["host"], phase["server"]
            cells = {
                "tokens": f"{phase['tokens']:,}",
                "seconds": f"{phase['seconds']:.3f}",
                "tok/s": f"{phase['tokens_per_s']:.1f}",
                "calls": f"{phase['calls']:,}",
                "rows": f"{phase['rows']:,}",
                "MiB out": f"{phase['bytes_out'] / _MIB:.2f}",
                "MiB back": f"{phase['bytes_back'] / _MIB:.2f}",
                "host: dense s": f"{host['dense_s']:.3f}",
                "host: pack s": f"{host['pack_s']:.3f}",
                "host: local experts s": f"{host['local_s']:.3f}",
                "host: wait s": f"{host['wait_s']:.3f}",
                "host: combine s": f"{host['combine_s']:.3f}",
                "host: turn s": f"{host['turn_s']:.3f}",
                "host: other s": f"{host['other_s']:.3f}",
                "accounted": f"{phase['accounted']:.0%}"
                if phase["complete"]
                else f"incomplete: {phase['accounted']:.0%}",
                "server: queue s": f"{server['queue_s']:.3f}",
                "server: compute s": f"{server['compute_s']:.3f}",
            }
            for label, cell in cells.items():
                rows.setdefault(label, []).append(cell)
        for label, row in rows.items():
            table.add_row(label, *row)
        return table

    def _server_table(self) -> Table:
        table = Table()
        table.add_column("")
        rows: dict[str, list[str]] = {}
        for server in self.servers:
            table.add_column(server["address"], justify="right")
            phases = server["phases"].values()
            cells = {
                "transport": server["transport"],
                "because": server["transport_reason"],
                "device": server["device"],
                "kernel": server["kernel"],
                "experts": f"{server['n_experts']:,}",
                "resident MiB": f"{server['resident_bytes'] / _MIB:,.1f}",
                "batch capacity": f"{server['batch_capacity']:,}",
                "calls": f"{sum(phase['calls'] for phase in phases):,}",
                "rows": f"{sum(phase['rows'] for phase in phases):,}",
                "queue s": f"{sum(phase['queue_s'] for phase in phases):.3f}",
                "compute s": f"{sum(phase['compute_s'] for phase in phases):.3f}",
            }
            for label, cell in cells.items():
                rows.setdefault(label, []).append(cell)
        for label, row in rows.items():
            table.add_row(label, *row)
        return table

    @staticmethod
    def _guess_table(guesses: dict[str, Any]) -> Table:
        table = Table(title="guesses")
        cells = {
            "guessed": f"{guesses['guessed']:,}",
            "right": f"{guesses['right']:,}",
            "accepted": f"{guesses['acceptance']:.0%}",
            "tokens per pass": f"{guesses['tokens_per_pass']:.2f}",
            "calls per token": f"{guesses['calls_per_token']:.2f}",
        }
        for name in cells:
            table.add_column(name, justify="right")
        table.add_row(*cells.values())
        return table

    def _recovery_table(self) -> Table:
        table = Table(title="faults")
        counts = {name: count for name, count in self.recovery.items() if name != "events" and count}
        for name in counts:
            table.add_column(name.replace("_", " "), justify="right")
        table.add_row(*(f"{count:,}" for count in counts.values()))
        return table


def _guesses(recorder: Recorder, phases: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    counts = recorder.guesses
    if counts is None:
        return None
    calls = sum(phase["calls"] for phase in phases.values())
    return asdict(counts) | {
        "acceptance": counts.right / counts.guessed if counts.guessed else 0.0,
        "tokens_per_pass": counts.tokens / counts.passes,
        "calls_per_token": calls / counts.tokens if counts.tokens else 0.0,
    }


def _phase(phase: PhaseCounters) -> dict[str, Any]:
    total = CallCounters()
    for server in phase.servers:
        total.calls += server.calls
        total.rows += server.rows
        total.bytes_out += server.bytes_out
        total.bytes_back += server.bytes_back
        total.queue_s += server.queue_s
        total.compute_s += server.compute_s
    return {
        "tokens": phase.tokens,
        "sequences": phase.sequences,
        "forwards": phase.forwards,
        "seconds": phase.seconds,
        "tokens_per_s": phase.tokens / phase.seconds if phase.seconds else 0.0,
        "calls": total.calls,
        "rows": total.rows,
        "accounted": phase.accounted,
        "complete": phase.accounted >= ACCOUNTED,
        "local_rows": phase.local_rows,
        "pipelined": phase.pipelined,
        "bytes_out": total.bytes_out,
        "bytes_back": total.bytes_back,
        "host": {
            "dense_s": phase.dense_s,
            "pack_s": phase.pack_s,
            "local_s": phase.local_s,
            "wait_s": phase.wait_s,
            "wait_queue_s": phase.wait_queue_s,
            "wait_compute_s": phase.wait_compute_s,
            "wait_wire_s": max(0.0, phase.wait_s - phase.wait_queue_s - phase.wait_compute_s),
            "turn_s": phase.turn_s,
            "combine_s": phase.combine_s,
            "other_s": phase.other_s,
        },
        "server": {"queue_s": total.queue_s, "compute_s": total.compute_s},
    }
