"""The kinds of faults: what happens, to whom it can happen, and how it is put right again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from server_processes import STEP_TIMEOUT_S

from fault_kit.station import Station

if TYPE_CHECKING:
    from fault_kit.world import World

Act = Callable[["World", Station], None]


def _nothing(world: World, station: Station) -> None:
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


def _restart(world: World, station: Station) -> None:
    station.kill()
    station.start()


def _died(world: World, station: Station) -> None:
    assert station.server.process.wait(STEP_TIMEOUT_S) == -signal.SIGKILL
    _restart(world, station)


def _drain(world: World, station: Station) -> None:
    code = station.server.drain()
    station.proxy.tell("forward", [])
    assert code == 0, f"a drained server ended with {code}:\n{station.server.log_text[-2000:]}"


def _other_model(world: World, station: Station) -> None:
    station.kill()
    station.start("--model", str(world.other_model))


def _signal(number: signal.Signals) -> Act:
    return lambda world, station: station.server.process.send_signal(number)


def _link(order: str, *arguments: float) -> Act:
    return lambda world, station: station.proxy.tell(order, *arguments)


def _reply(how: str, n: int = 1) -> Act:
    return lambda world, station: station.server.spoil(how, n)


_mend = _link("mend")
KINDS: Final = (
    Kind("killed", lambda world, station: station.kill(), _restart, (0.1, 1.0)),
    Kind("stopped", _signal(signal.SIGSTOP), _signal(signal.SIGCONT), (0.1, 4.0), loses=False),
    Kind("drained", _drain, _restart, (0.1, 1.0)),
    Kind("other model", _other_model, _restart, (0.5, 2.0)),
    Kind("host killed", lambda world, station: world.kill_second_host(), loses=False, second_host=True),
    Kind("link cut", _link("cut"), _mend, (0.1, 2.0)),
    Kind("link stalled", _link("stall"), _mend, (0.1, 4.0), loses=False),
    Kind("link slow", _link("slow", 0.004), _mend, (0.1, 1.0), loses=False),
    Kind("frame corrupted on the link", _link("corrupt", 1), transports=("stream",)),
    Kind("died writing a reply", _reply("die"), _died, (0.1, 0.5)),
    Kind("reply half written", _reply("half")),
    Kind("reply not written", _reply("unwritten")),
    Kind("reply damaged", _reply("damaged")),
    Kind("reply to an older request", _reply("older")),
    Kind("reply of another epoch", _reply("other epoch")),
    Kind("reply twice", _reply("twice"), loses=False),
    Kind("reply late", _reply("late")),
    Kind("reply lost", _reply("never")),
    Kind("server error", _reply("failed")),
    Kind("server slow", _reply("slowly", 25), loses=False),
)
