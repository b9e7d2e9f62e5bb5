"""Where the time of a run went: the parts that the recorder counts beside times taken from outside."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Final

from torch import nn
from turns import Contender, Task

from moeoffload import OffloadedModel

PARTS: Final = ("dense", "pack", "wait_wire", "wait_queue", "wait_compute", "combine", "turn", "other")


class _Started(threading.local):
    at = 0.0


@contextmanager
def timed(modules: Sequence[nn.Module]) -> Iterator[list[float]]:
    """Yields a list that gets the seconds of each call of ``modules``, from whichever thread."""
    seconds: list[float] = []
    started = _Started()

    def enter(*_: Any) -> None:
        started.at = perf_counter()

    def leave(*_: Any) -> None:
        seconds.append(perf_counter() - started.at)

    handles = [module.register_forward_pre_hook(enter) for module in modules]
    handles += [module.register_forward_hook(leave) for module in modules]
    yield seconds
    for handle in handles:
        handle.remove()


def watch(
    contender: Contender, task: Task, phase: str, experts: Sequence[str], n_forwards: int
) -> tuple[dict[str, float], float | None]:
    """Runs ``task`` once more; its seconds by part and, if it is remote, the accounted share.

    ``experts`` are the names of the experts modules, ``n_forwards`` how many forward passes the phase has. Hooks cost
    microseconds, so the repetitions that count run without them.
    """
    offloaded = contender.offloaded
    if offloaded is not None:
        offloaded.recorder.reset()
    with timed([contender.model.get_submodule(name) for name in experts]) as seconds:
        wall_s = task(contender)
    # Decoding begins with a prompt, whose experts are not meant.
    experts_s = sum(seconds[-n_forwards * len(experts) :] if phase == "decode" else seconds)
    if offloaded is None:
        return {"dense": wall_s - experts_s, "experts": experts_s}, None
    return _breakdown(offloaded, phase, experts_s, wall_s)


def _breakdown(
    offloaded: OffloadedModel, phase: str, experts_s: float, wall_s: float
) -> tuple[dict[str, float], float]:
    """Seconds by part, and the share of the time of all threads that the parts account for.

    ``dense`` of the report is what is left over, so a sum with it proves nothing. Here it is what lies outside of the
    experts modules, as timed from outside; so time that the experts path spends unseen makes the share less than 1.
    """
    counters = offloaded.recorder.phases[phase]
    host = offloaded.report().phases[phase]["host"]
    parts = {name: float(host[f"{name}_s"]) for name in PARTS}
    parts["dense"] = counters.forward_s + counters.thread_s - counters.turn_s - experts_s
    return parts, sum(parts.values()) / (wall_s + counters.thread_s)
