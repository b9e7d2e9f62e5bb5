"""Where the time of a run went: the parts that the recorder counts beside the time taken from outside."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, Final

from devices import settle
from turns import Contender, Task

PARTS: Final = ("dense", "pack", "local", "wait_wire", "wait_queue", "wait_compute", "combine", "turn", "other")


def watch(contender: Contender, task: Task, phase: str) -> tuple[dict[str, float], float]:
    """Runs ``task`` of a remote model once more; its seconds by part, and the share of all time they account for."""
    offloaded = contender.offloaded
    assert offloaded is not None
    offloaded.recorder.reset()
    wall_s = task(contender)
    host = offloaded.report().phases[phase]["host"]
    parts = {name: float(host[f"{name}_s"]) for name in PARTS}
    # A pipelined prefill has a second thread, whose time comes on top.
    return parts, sum(parts.values()) / (wall_s + offloaded.recorder.phases[phase].thread_s)


def watch_local(contender: Contender, task: Task, experts: Sequence[str], n_forwards: int) -> dict[str, float]:
    """As `watch` for the model that is all in this process; ``experts`` are the names of its experts modules.

    Hooks cost microseconds, so the turns that count run without them. Only the last ``n_forwards`` forward passes are
    looked at: decoding begins with a prompt, which is not meant.
    """
    modules = [contender.model.get_submodule(name) for name in experts]
    started: list[float] = []
    ended: list[float] = []

    def enter(*_: Any) -> None:
        settle(contender.model.device)
        started.append(perf_counter())

    def leave(*_: Any) -> None:
        settle(contender.model.device)
        ended.append(perf_counter())

    handles = [module.register_forward_pre_hook(enter) for module in modules]
    handles += [module.register_forward_hook(leave) for module in modules]
    wall_s = task(contender)
    for handle in handles:
        handle.remove()
    n_calls = n_forwards * len(modules)
    experts_s = sum(ended[-n_calls:]) - sum(started[-n_calls:])
    return {"dense": wall_s - experts_s, "local": experts_s}
