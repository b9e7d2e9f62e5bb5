"""Without a replica and without a fallback a lost server ends the command: in time, in one line, with code 5."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_lines import Commands, wait_until
from conftest import DEMO
from fault_kit.generation import fixed_prompts
from fault_kit.server import ServerProcess

DEADLINE_S = 1.0
GRACE_S = 10.0
"""What a busy machine may take to end a process, beside the deadline."""
N_PROMPTS = 400


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    made = ServerProcess(tmp_path)
    yield made
    made.close()


def test_a_required_server_that_stops_in_the_middle(server: ServerProcess, commands: Commands) -> None:
    options = ["--device", "cpu", "--threads", "1", "--experts", server.address, "--required"]
    options += ["--dispatch-timeout-s", str(DEADLINE_S), "--dispatch-floor-s", str(DEADLINE_S)]
    prompts = [word for text in fixed_prompts()[:4] for word in ("--prompt", text)]
    whole = commands.run("moeoffload", "run", DEMO, *options, *prompts)
    assert whole.code == 0, whole.err
    command = commands.start("moeoffload", "run", DEMO, *options, *prompts * (N_PROMPTS // 4))
    wait_until(lambda: command.out.exists() and len(command.out.read_text().splitlines()) > 3, "the first answers")
    server.pause()
    struck = time.monotonic()
    result = command.wait()
    assert time.monotonic() - struck < DEADLINE_S * 1.2 + GRACE_S
    assert result.code == 5, result.err
    assert "Traceback" not in result.err
    last = result.err.strip().splitlines()[-1]
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert errors == [last]
    assert server.address in last
    answers, expected = result.out.splitlines(), whole.out.splitlines()
    assert len(answers) > 3
    for number, answer in enumerate(answers[:-1]):
        assert answer == expected[number % len(expected)]
    assert expected[(len(answers) - 1) % len(expected)].startswith(answers[-1])
    server.resume()
    commands.check_clean()
