"""An expert server that is told to misbehave."""

from __future__ import annotations

import contextlib
import functools

from server_processes import STEP_TIMEOUT_S, WARM, ServerProcess

from fault_kit.bad_replies import spoil_replies


class FaultyServer(ServerProcess):
    """A server whose replies can be spoiled."""

    def start(self, *more: str) -> None:
        theirs, self._orders = WARM.Pipe()
        self._patch = functools.partial(spoil_replies, theirs)
        super().start(*more)
        theirs.close()

    def spoil(self, how: str, n: int = 1) -> None:
        """Spoils the next ``n`` replies; see `bad_replies.SPOILERS`."""
        self._orders.send((how, n))
        assert self._orders.poll(STEP_TIMEOUT_S)
        with contextlib.suppress(EOFError):  # it may die of the order before it says that it has it
            self._orders.recv()
