"""All servers of a run restarted one after the other while it generates."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

from server_processes import ServerProcess, wait_until

from fault_kit.generation import LayerClock, generate

BACK_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True)
class Restart:
    """One server: at which layer call it got SIGTERM; times in seconds."""

    server: int
    layer_call: int
    exit_code: int
    drain_s: float
    """From SIGTERM to the end of the process."""
    start_s: float
    back_s: float
    """From the new process being ready until the host used it."""


@dataclass(frozen=True)
class Rolling:
    """What came of it. ``added_s`` is against the same generation without restarts."""

    tokens: int
    equal_tokens: int
    undisturbed_s: float
    disturbed_s: float
    added_s: float
    pause_s: float
    """The longest time that the generation stood still."""
    restarts: list[Restart]
    finished: bool
    """Whether every server was back before the generation was over."""


def rolling_restart(
    offloaded: Any, servers: Sequence[ServerProcess], prompt: str, n_tokens: int, token_s: float = 0.0
) -> Rolling:
    """Generates ``n_tokens`` twice, and restarts all servers by SIGTERM during the second time.

    ``token_s`` makes every token take so much longer, as a larger model would.
    """
    options = {"min_new_tokens": n_tokens, "max_new_tokens": n_tokens}
    generate(offloaded, prompt)
    restarts: list[Future[list[Restart]]] = []
    with ThreadPoolExecutor(1) as pool, contextlib.closing(LayerClock(offloaded.dispatcher)) as clock:
        clock.layer_s = token_s / len(offloaded.checkpoint.layers)

        def restart_all() -> list[Restart]:
            return [_restart(offloaded, number, server, clock) for number, server in enumerate(servers)]

        started = perf_counter()
        expected = generate(offloaded, prompt, **options)
        undisturbed_s, n_calls = perf_counter() - started, len(clock.ticks)
        clock.start(n_calls // 10, lambda: restarts.append(pool.submit(restart_all)))
        started = perf_counter()
        found = generate(offloaded, prompt, **options)
        disturbed_s, pause_s, finished = perf_counter() - started, clock.longest_pause(), restarts[0].done()
    equal = sum(a == b for a, b in zip(expected, found, strict=True))
    added_s = disturbed_s - undisturbed_s
    return Rolling(n_tokens, equal, undisturbed_s, disturbed_s, added_s, pause_s, restarts[0].result(), finished)


def _restart(offloaded: Any, number: int, server: ServerProcess, clock: LayerClock) -> Restart:
    layer_call = len(clock.ticks)
    times = [perf_counter()]
    code = server.drain()
    times.append(perf_counter())
    server.start()
    times.append(perf_counter())

    def back() -> bool:
        events = offloaded.report().to_json()["recovery"]["events"]
        last = {event["server"]: event["what"] for event in events}
        return last.get(server.address) == "returned"

    wait_until(back, f"the return of server {number}", BACK_TIMEOUT_S)
    times.append(perf_counter())
    return Restart(number, layer_call, code, *(later - earlier for earlier, later in itertools.pairwise(times)))
