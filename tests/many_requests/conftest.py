"""What tests of the HTTP server share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from command_lines import Commands
from conftest import DEMO

from many_requests.http_kit import RUNNING, WAITING, Process, start_serve
from moeoffload import OffloadedModel, open_model


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The demo checkpoint's: one token for each byte, 256 ends an answer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="session")
def serve_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """`moeoffload serve` with the demo checkpoint, for all modules that leave it as it was."""
    folder = tmp_path_factory.mktemp("serve")
    with contextlib.closing(Commands(folder)) as commands:
        yield start_serve(commands, folder, "--max-running", str(RUNNING), "--max-waiting", str(WAITING))


@pytest.fixture(scope="module")
def offloaded(three_servers: list[str]) -> Iterator[OffloadedModel]:
    """The demo model, for engines of a module's tests."""
    with open_model(DEMO, experts=three_servers[:2], device="cpu", threads=1) as opened:
        yield opened
