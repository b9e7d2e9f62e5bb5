"""A connection that Ctrl-C interrupts while it is being closed, or whose closing never ends."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

import pytest
from command_lines import STEP_TIMEOUT_S
from conftest import StartServer

from moeoffload.control.client import HostCredentials
from moeoffload.control.probe import why_not

INTERRUPTED = """
import os, random, signal, sys, threading, time
from moeoffload.control.client import ControlClient

def interrupt(begun, delay_s):
    begun.wait()
    end = time.perf_counter() + delay_s
    while time.perf_counter() < end:
        pass
    os.kill(os.getpid(), signal.SIGINT)

for _ in range(200):
    client = ControlClient(sys.argv[1])
    client.connect(60)
    client.describe(60)
    begun = threading.Event()
    interrupter = threading.Thread(target=interrupt, args=(begun, random.uniform(0, 0.0015)))
    interrupter.start()
    try:
        begun.set()
        client.close()
        time.sleep(60)
    except KeyboardInterrupt:
        client.close()
    interrupter.join()
print("ended", flush=True)
"""


def test_a_close_that_ctrl_c_has_interrupted_is_not_waited_for(start_server: StartServer) -> None:
    """At moments drawn anew each time: about one in two hundred falls where gRPC's own close cannot be interrupted."""
    command = [sys.executable, "-c", INTERRUPTED, start_server().address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


STUCK = """
import threading
from moeoffload.control import client

class Stuck(client.HostCredentials):
    def channel(self, address, options):
        channel = super().channel(address, options)
        channel.close = threading.Event().wait
        return channel

client.CLOSE_S = 0.1
client.ControlClient("127.0.0.1:1", Stuck()).close()
print("ended", flush=True)
"""


def test_a_close_that_never_ends_does_not_keep_the_interpreter() -> None:
    command = [sys.executable, "-c", STUCK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def test_a_name_that_is_not_resolved_in_time_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = threading.Event()

    def resolve(*_: object, **__: object) -> list[object]:
        answered.append(resolved.wait(STEP_TIMEOUT_S))
        return []

    answered: list[bool] = []
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert why_not("a-name:50051", HostCredentials(), 0.1) is None
    assert answered == [], "it was not waited for"
    resolved.set()
