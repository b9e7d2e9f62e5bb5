"""Two servers behind proxies and a host that keeps its model open while faults strike, one generation each."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from logging.handlers import BufferingHandler
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from command_lines import shm_left, shm_names
from server_processes import DEMO, wait_until
from synthetic import write_tiny

from fault_kit.generation import LayerClock, fixed_prompts, generate
from fault_kit.leaks import Holding, descendants, settled
from fault_kit.outcome import Outcome
from fault_kit.schedule import Fault, Setup
from fault_kit.second_host import SecondHost
from fault_kit.station import FaultyServer, Station
from moeoffload.control.client import ControlClient
from moeoffload.host.session import open_model

DEADLINE_S: Final = 2.0
FLOOR_S: Final = 0.5
SPARE: Final = 1.2
"""What is noticed within the deadline plus a fifth counts as in time."""
WHOLE_TIMEOUT_S: Final = 10.0
"""A server that works again has to be in use within this."""
HANG_S: Final = 60.0
SETTLE_S: Final = 12.0
"""Longer than gRPC needs to give up a connection that nobody closed."""
RPC_TIMEOUT_S: Final = 10.0


class World(contextlib.AbstractContextManager["World"]):
    """Use it in a ``with`` block: `open` the model in some setup, `run` faults, `shut` it, and again.

    Attributes:
        other_model: a checkpoint that is not the demo.
        servers: two.
        stations: they and the proxies in front of them.
        host: the open model, None while there is none.
        expected: the tokens of an undisturbed generation, per prompt.
        n_layer_calls: of such a generation.
    """

    def __init__(self, folder: Path, *server_options: str) -> None:
        self.other_model = write_tiny("mixtral", folder / "other", dtype=torch.float32)
        self.host: Any = None
        self.expected: list[list[int]] = []
        self.n_layer_calls = 0
        self._folder = folder
        self._setup: Setup | None = None
        self._second: SecondHost | None = None
        self._shm_before = shm_names()
        self._warnings = BufferingHandler(1 << 30)
        self._warnings.setLevel(logging.WARNING)
        with contextlib.ExitStack() as stack:
            stack.callback(self.kill_second_host)
            self.servers = [stack.enter_context(FaultyServer(folder, *server_options)) for _ in range(2)]
            self.stations = [
                stack.enter_context(contextlib.closing(Station(server, "127.0.0.2"))) for server in self.servers
            ]
            self._pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="generation"))
            logging.getLogger("moeoffload.host").addHandler(self._warnings)
            stack.callback(logging.getLogger("moeoffload.host").removeHandler, self._warnings)
            stack.callback(self._close_host)
            self._stack = stack.pop_all()

    def open(self, setup: Setup, **options: Any) -> None:
        """Opens the model and generates undisturbed; ``options`` are settings beside those of ``setup``."""
        assert self.host is None
        keywords: dict[str, Any] = {"threads": 1, "device": "cpu", "transport": setup.transport, "fallback_gib": 1.0}
        keywords |= {"dispatch_timeout_s": DEADLINE_S, "dispatch_floor_s": FLOOR_S, "connect_timeout_s": 5.0}
        keywords |= {"replicas": 2 if setup.rescue == "replica" else 1} | options
        addresses = [station.address for station in self.stations]
        # What libraries make once and keep is there after a first opening.
        open_model(DEMO, experts=addresses, **keywords).close()
        self._alone = list(self.holdings().values())
        self._setup = setup
        self.host = open_model(DEMO, experts=addresses, **keywords)
        self.clock = LayerClock(self.host.dispatcher)
        self.expected = self.generate()
        self.clock.start()
        if self.generate() != self.expected:
            raise RuntimeError("two undisturbed generations differ")
        self.n_layer_calls = len(self.clock.ticks)
        self._processes = descendants()
        self._n_leases = [_leases(server) for server in self.servers]
        self._whole = list(self.holdings().values())

    def shut(self) -> list[str]:
        """Closes the model; returns what is left on both sides that was not there before it was opened."""
        self._close_host()
        return settled(lambda: self._left(self._alone), SETTLE_S)

    def generate(self) -> list[list[int]]:
        """The tokens of one generation, per prompt.

        Raises:
            TimeoutError: it hangs.
        """
        prompts = fixed_prompts()
        return self._pool.submit(lambda: [generate(self.host, prompt) for prompt in prompts]).result(HANG_S)

    def run(self, fault: Fault) -> Outcome:
        """One generation under ``fault``, the way back, and a look at what is left."""
        assert fault.setup == self._setup
        station = self.stations[fault.victim]
        at = max(1, int(fault.at * self.n_layer_calls))
        outcome = Outcome(
            fault.number, fault.kind.name, str(fault.setup), fault.victim, at, fault.lasts_s, limit_s=DEADLINE_S * SPARE
        )
        before, n_warnings = self.recovery(), len(self._warnings.buffer)
        if fault.kind.second_host:
            self._second = SecondHost(
                self._folder, [station.address for station in self.stations], transport=fault.setup.transport
            )
        acts = ThreadPoolExecutor(1, thread_name_prefix="fault")
        struck: list[Future[None]] = []

        def strike() -> None:
            struck.append(acts.submit(fault.kind.strike, self, station))
            if fault.before_frames:
                struck[0].result(HANG_S)
            struck.append(acts.submit(self._repair, fault, station))

        try:
            self.clock.start(at, strike)
            outcome.same_tokens = self.generate() == self.expected
            outcome.pause_s = self.clock.longest_pause()
            for act in struck:
                act.result(HANG_S)
            outcome.whole_s = self._wait_whole()
            self.clock.start()
            outcome.same_tokens &= self.generate() == self.expected
        except TimeoutError as error:
            outcome.error = f"hang: {error}"
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"
        acts.shutdown()
        self.clock.start()
        if outcome.whole_s is not None:
            outcome.leaks = settled(self._leaks, SETTLE_S)
        after = self.recovery()
        for name in ("lost", "returned", "replica_calls", "fallback_calls", "stale"):
            setattr(outcome, name, after[name] - before[name])
        outcome.lost += after["drained"] - before["drained"]
        outcome.warnings = len(self._warnings.buffer) - n_warnings
        return outcome

    def recovery(self) -> dict[str, Any]:
        """The section of the host's report."""
        section: dict[str, Any] = self.host.report().to_json()["recovery"]
        return section

    def kill_second_host(self) -> None:
        """kill -9 of another host that uses the same servers, if there is one."""
        if self._second is not None:
            self._second.close()

    def holdings(self) -> dict[str, Holding]:
        """What the host and the servers hold now."""
        return dict(zip(("host", "server 0", "server 1"), map(Holding.of, self._pids()), strict=True))

    def _in_use(self) -> bool:
        """Whether the host is attached to every server as it was at first, by what both sides say."""
        recovery = self.recovery()
        if recovery["lost"] + recovery["drained"] != recovery["returned"]:
            return False
        return [_leases(server) for server in self.servers] == self._n_leases

    def _close_host(self) -> None:
        if self.host is not None:
            self.host.close()
            del self.clock
            self.host = None

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _repair(self, fault: Fault, station: Station) -> None:
        time.sleep(fault.lasts_s)
        fault.kind.repair(self, station)

    def _wait_whole(self) -> float | None:
        started = perf_counter()
        with contextlib.suppress(TimeoutError):
            wait_until(self._in_use, "all servers in use", WHOLE_TIMEOUT_S)
            return perf_counter() - started
        return None

    def _pids(self) -> list[int]:
        return [os.getpid(), *(server.pid for server in self.servers)]

    def _leaks(self) -> list[str]:
        # A server that was started again is another process.
        more = descendants() - self._processes - {server.pid for server in self.servers}
        return [*self._left(self._whole), *(f"process {pid}" for pid in sorted(more))]

    def _left(self, before: list[Holding]) -> list[str]:
        pairs = zip(self.holdings().items(), before, strict=True)
        left = [f"{name}: {what}" for (name, now), then in pairs for what in now.beyond(then)]
        return [*left, *(f"/dev/shm: {name}" for name in shm_left(self._shm_before, *self._pids()))]


def _leases(server: FaultyServer) -> int:
    """How many hosts the server knows, asked past the proxy; -1 if it does not answer."""
    with contextlib.closing(ControlClient(server.address)) as client:
        try:
            return int(client.stats(RPC_TIMEOUT_S).leases)
        except Exception:
            return -1
