"""Waiting for a server that has no room at the moment."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, TypeVar

from moeoffload.errors import BusyError

logger = logging.getLogger(__name__)

LEAST_WAIT_S: Final = 0.05
_Result = TypeVar("_Result")


def retry_while_busy(attempt: Callable[[], _Result], timeout_s: float) -> _Result:
    """The result of ``attempt()``; repeats it as long as it is told to come back, up to ``timeout_s`` seconds.

    Raises:
        BusyError: there was no room in time; and whatever else ``attempt`` raises.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return attempt()
        except BusyError as error:
            wait_s = max(error.retry_after_s, LEAST_WAIT_S)
            if time.monotonic() + wait_s >= deadline:
                raise
            logger.warning("%s; trying again in %.3g s", error, wait_s)
            time.sleep(wait_s)
