"""Too few descriptors, no room on disk: one clear line, and a server that goes on serving."""

from __future__ import annotations

import resource
import subprocess
import sys

import psutil
import pytest
from command_lines import STEP_TIMEOUT_S, Commands, one_line_error
from conftest import DEMO, ROOT, StartServer

from moeoffload import open_model
from moeoffload.control.client import ControlClient
from moeoffload.errors import ServerError, SystemLimitError
from moeoffload.transport import ChannelSizes, SharedServerEnd

RUN_TIMEOUT_S = 120


def test_a_server_with_too_few_descriptors_refuses_the_host_and_goes_on(start_server: StartServer) -> None:
    server = start_server()
    pid = server.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with open_model(DEMO, experts=[server.address], device="cpu"):
        pass  # what is opened once for all hosts is open now
    client = ControlClient(server.address)
    client.connect(STEP_TIMEOUT_S)
    try:
        tight = psutil.Process(pid).num_fds() + 2
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (tight, limits[1]))
        with pytest.raises(ServerError) as caught:
            open_model(DEMO, experts=[server.address], device="cpu", connect_timeout_s=5).close()
        assert "\n" not in str(caught.value)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        with open_model(DEMO, experts=[server.address], device="cpu"):
            assert client.stats(STEP_TIMEOUT_S).leases == 1
        assert server.process.poll() is None
    finally:
        client.close()


@pytest.mark.parametrize("room", [0, 4 << 20, 16 << 20], ids=lambda room: f"{room >> 20} MiB")
def test_a_server_without_memory_or_threads_refuses_hosts_in_one_line_and_heeds_sigterm(
    start_server: StartServer, commands: Commands, room: int
) -> None:
    server = start_server()
    process = psutil.Process(server.process.pid)
    # A thread needs 8 MiB of addresses for its stack, weights need more than that.
    process.rlimit(resource.RLIMIT_AS, (process.memory_info().vms + room, resource.RLIM_INFINITY))
    result = commands.run("moeoffload", "run", DEMO, "--prompt", "x", "--experts", server.address, "--device", "cpu")
    line = one_line_error(result, ServerError.exit_code)
    # The third comes from a library; in the last case gRPC's own threads have got no memory to accept a connection.
    reasons = ("no further thread can be started", "out of memory", "failed to map", "no connection within 10 s")
    assert any(reason in line for reason in reasons), line
    server.process.terminate()
    assert server.process.wait(STEP_TIMEOUT_S) == 0
    assert "Traceback" not in server.log_text


def test_too_few_descriptors_are_not_taken_for_a_full_dev_shm() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="files open") as caught:
            SharedServerEnd(ChannelSizes(1, 4096, 4096), lambda channel, slot: None).close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "ulimit -n" in str(SystemLimitError.of(caught.value))


def test_a_host_with_too_few_descriptors_says_what_to_raise(commands: Commands) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))"
    done = commands.run("moeoffload", "run", DEMO, "--prompt", "add 1 2 =", "--device", "cpu", patch=limit)
    assert done.code in (ServerError.exit_code, SystemLimitError.exit_code), done.err  # its servers' or its own
    assert "Traceback" not in done.err
    assert "too few file descriptors: this process may have 12" in done.err


STREAM_ENDS = """
import os, resource, sys
from moeoffload.errors import DeadlineError, SystemLimitError
from moeoffload.transport import ChannelOffer, ChannelSizes, StreamKeys, StreamListener, open_stream

def listen(keys):
    StreamListener(encrypted=keys is not None).close()

def connect(keys):
    parameters = {"port": "9", "routing_id": "6d" * 32, **({"server_key": keys.public} if keys else {})}
    offer = ChannelOffer("stream", ChannelSizes(1, 4096, 4096), parameters)
    open_stream(offer, "127.0.0.1", timeout_s=0.02, keys=keys)

n_open = len(os.listdir("/proc/self/fd"))
for end in (listen, connect):
    for keys in (None, StreamKeys.new()):
        for room in range(30):
            pid = os.fork()
            if not pid:
                resource.setrlimit(resource.RLIMIT_NOFILE, (n_open + room, n_open + room))
                try:
                    end(keys)
                except OSError as error:
                    assert "ulimit -n" in str(SystemLimitError.of(error))
                except DeadlineError:
                    pass  # nobody listens at this port
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0, f"{end.__name__} died with {room} descriptors left"
"""


def test_a_stream_end_with_too_few_descriptors_is_refused_whatever_their_number() -> None:
    """ZeroMQ ends the process if it gets none, or waits forever."""
    command = [sys.executable, "-c", STREAM_ENDS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr


def test_a_report_on_a_full_disk_is_one_line_after_the_answer(three_servers: list[str], commands: Commands) -> None:
    options = ["--experts", three_servers[0], "--device", "cpu", "--max-new-tokens", "8", "--report", "/dev/full"]
    done = commands.run("moeoffload", "run", DEMO, "--prompt", "add 17 25 =", *options)
    assert done.code == SystemLimitError.exit_code, done.err
    assert "No space left on device" in done.err
    assert "Traceback" not in done.err
    assert "42" in done.out
