"""Checks within seconds, without torch, that a hub id exists; `checkpoint.locate` downloads the model."""

from __future__ import annotations

import os
from typing import Final

from moeoffload.errors import ModelError
from moeoffload.last_resort import answer_within
from moeoffload.text import one_line

HUB_S: Final = 2.5
"""How long the hub may take to answer, unless HF_HUB_ETAG_TIMEOUT, huggingface_hub's own setting, says otherwise."""
_SLACK_S: Final = 0.25


def check_hub_id(model: str, revision: str | None) -> None:
    """Asks the hub once whether it has ``model`` at ``revision``, unless its config is in the local cache.
    Raises ModelError: the hub does not have it, or does not answer in time."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import (
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        if isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str):
            return
    except (OSError, ValueError):
        pass  # the hub reports what is wrong
    wait_s = constants.HF_HUB_ETAG_TIMEOUT if os.environ.get("HF_HUB_ETAG_TIMEOUT") else HUB_S
    at = f" at revision {revision}" if revision else ""
    missing = f"{model}{at}: no such folder, not in the local hub cache, and"
    try:
        answer_within(wait_s + _SLACK_S, "hub", lambda: HfApi().model_info(model, revision=revision, timeout=wait_s))
    except Exception as error:  # connection, HTTP and validation errors share no base class
        match error:
            case OfflineModeIsEnabled():
                reason = "the hub is not asked: HF_HUB_OFFLINE is set"
            case RevisionNotFoundError():
                reason = "the hub has no such revision of it"
            case RepositoryNotFoundError():  # unknown, private or gated: the hub does not say which
                reason = f"the hub has none of that name, or wants a token for it: {_first_line(error)}"
            case HfHubHTTPError():
                reason = f"the hub refuses: {_first_line(error)}"
            case _ if "timeout" in type(error).__name__.lower():
                reason = f"the hub cannot be reached within {wait_s:g} s (HF_HUB_ETAG_TIMEOUT=SECONDS waits longer)"
            case _:
                reason = f"the hub cannot be reached: {_first_line(error)}"
        raise ModelError(f"{missing} {reason}") from error


def _first_line(error: Exception) -> str:
    return one_line((str(error).strip().splitlines() or [type(error).__name__])[0])
