"""The kinds of faults: what happens, to whom it can happen, and how it is put right again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from fault_kit.station import Station

SLOW_LINK_S: Final = 0.004
N_SLOW_REPLIES: Final = 25


class Scene(Protocol):
    """What a fault finds where it strikes."""

    other_model: Path
    """A checkpoint that is not the one in use."""

    def kill_second_host(self) -> None:
        """kill -9 of another host that uses the same servers."""


Act = Callable[[Scene, Station], None]


def _nothing(scene: Scene, station: Station) -> None:
    """The fault is over by itself."""


@dataclass(frozen=True)
class Kind:
    """One kind of fault. ``lasts_s`` is the range in seconds between ``strike`` and ``repair``."""

    name: str
    strike: Act
    repair: Act = _nothing
    lasts_s: tuple[float, float] = (0.0, 0.0)
    transports: tuple[str, ...] = ("shared", "stream")
    loses: bool = True
    """Whether the host has to notice: some faults it may sit out."""
    second_host: bool = False


def _restart(scene: Scene, station: Station) -> None:
    station.start()


def _drain(scene: Scene, station: Station) -> None:
    code = station.server.drain()
    station.proxy.forward([])
    assert code == 0, f"a drained server ended with {code}:\n{station.server.log_text[-2000:]}"


def _other_model(scene: Scene, station: Station) -> None:
    station.kill()
    station.start("--model", str(scene.other_model))


def _right_model(scene: Scene, station: Station) -> None:
    station.kill()
    station.start()


def _die_writing(scene: Scene, station: Station) -> None:
    station.server.spoil("die")


def _died(scene: Scene, station: Station) -> None:
    station.gone()
    station.start()


def _spoil(how: str, n: int = 1) -> Act:
    return lambda scene, station: station.server.spoil(how, n)


KINDS: Final = (
    Kind("killed", lambda scene, station: station.kill(), _restart, (0.1, 1.0)),
    Kind(
        "stopped",
        lambda scene, station: station.server.pause(),
        lambda scene, station: station.server.resume(),
        (0.1, 4.0),
        loses=False,
    ),
    Kind("drained", _drain, _restart, (0.1, 1.0)),
    Kind("other model", _other_model, _right_model, (0.5, 2.0)),
    Kind("host killed", lambda scene, station: scene.kill_second_host(), loses=False, second_host=True),
    Kind(
        "link cut", lambda scene, station: station.proxy.cut(), lambda scene, station: station.proxy.mend(), (0.1, 2.0)
    ),
    Kind(
        "link stalled",
        lambda scene, station: station.proxy.stall(),
        lambda scene, station: station.proxy.mend(),
        (0.1, 4.0),
        loses=False,
    ),
    Kind(
        "link slow",
        lambda scene, station: station.proxy.slow(SLOW_LINK_S),
        lambda scene, station: station.proxy.mend(),
        (0.1, 1.0),
        loses=False,
    ),
    Kind(
        "frame corrupted on the link",
        lambda scene, station: station.proxy.corrupt(1),
        transports=("stream",),
    ),
    Kind("died writing a reply", _die_writing, _died, (0.1, 0.5)),
    Kind("reply half written", _spoil("half")),
    Kind("reply not written", _spoil("unwritten")),
    Kind("reply damaged", _spoil("damaged")),
    Kind("reply to an older request", _spoil("older")),
    Kind("reply of another epoch", _spoil("other epoch")),
    Kind("reply twice", _spoil("twice"), loses=False),
    Kind("reply late", _spoil("late")),
    Kind("reply lost", _spoil("never")),
    Kind("server error", _spoil("failed")),
    Kind("server slow", _spoil("slowly", N_SLOW_REPLIES), loses=False),
)
