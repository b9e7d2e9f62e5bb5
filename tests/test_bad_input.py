"""What a user or a machine can get wrong: each is one clear line and its exit code, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from command_lines import STEP_TIMEOUT_S, Commands, one_line_error, run_python, wait_until
from conftest import DEMO, RunningServer, StartServer, connected
from grpc_health.v1 import health, health_pb2_grpc
from server_processes import read
from synthetic import write_tiny

from moeoffload import open_model
from moeoffload.control.protocol import PROTOCOL_VERSION
from moeoffload.errors import ServerError, SystemLimitError
from moeoffload.transport import ChannelSizes, SharedServerEnd

SETTING, MODEL, PROMPT, PLACEMENT, SERVER = 2, 3, 3, 4, 5
TINY_CONTEXT = 512


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3_moe", tmp_path_factory.mktemp("tiny"))


def run_error(commands: Commands, code: int, model: str | Path, *options: str | Path, **how: Any) -> str:
    """The one error line of a run that is to fail."""
    words = ("run", model, "--device", "cpu", "--threads", "1", *options)
    return one_line_error(commands.run("moeoffload", *words, **how), code)


@pytest.mark.parametrize(
    ("options", "stdin", "code", "words"),
    [
        ([], b"", SETTING, "--prompt"),
        (["--prompt", ""], b"", PROMPT, "empty"),
        (["--prompt", "-"], b"caf\xe9", SETTING, "utf-8"),
        (["--prompt", "-"], None, SETTING, "stdin"),
        (["--prompt-file", "/no/such/prompt.txt"], b"", SETTING, "/no/such/prompt.txt"),
        (["--prompt-file", str(DEMO / "model.safetensors")], b"", SETTING, "model.safetensors"),
        (["--prompt", "caf\udce9"], b"", PROMPT, "UTF-8"),
        (["--prompt", "hi", "--gpu", "77"], b"", SETTING, "cuda:77"),
    ],
    ids=str,
)
def test_prompts_and_devices_that_cannot_be(
    commands: Commands, options: list[str], stdin: bytes | None, code: int, words: str
) -> None:
    assert words in run_error(commands, code, DEMO, *options, stdin=stdin)


def test_a_prompt_longer_than_the_context(commands: Commands, server: RunningServer, tiny: Path) -> None:
    prompt = "x y " * TINY_CONTEXT
    line = run_error(commands, PROMPT, tiny, "--prompt", prompt, "--experts", server.address)
    assert str(TINY_CONTEXT) in line


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, "copy: no such folder"),
        (lambda folder: os.truncate(folder / "model.safetensors", 100_000), "model.safetensors: truncated"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
    ],
    ids=["no folder", "truncated", "no tokenizer"],
)
def test_a_model_that_cannot_be_used(  # in more ways: tests/checkpoint/test_hostile_files.py
    commands: Commands, tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "copy"))
    damage(folder)
    nobody = "127.0.0.1:1"  # is asked: nothing is loaded for such a model
    assert words in run_error(commands, MODEL, folder, "--prompt", "hi", "--experts", nobody)


def test_addresses_of_other_things(commands: Commands) -> None:
    other = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), other)
    service = other.add_insecure_port("127.0.0.1:0")
    other.start()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port, timeout_s, words in (
            (silent.getsockname()[1], "1", "moeoffload-expert"),
            (service, "10", "not a moeoffload expert server"),
        ):
            line = server_error(commands, f"127.0.0.1:{port}", "--connect-timeout-s", timeout_s)
            assert f"127.0.0.1:{port}" in line
            assert words in line
    other.stop(0).wait(10)
    line = server_error(commands, "no-such-host.invalid:50051", "--insecure")
    assert "no machine of the name no-such-host.invalid is known" in line


def test_a_server_that_refuses_connections_is_not_waited_for_as_long(commands: Commands, unused_address: str) -> None:
    address = unused_address
    result = commands.run("moeoffload", "run", DEMO, "--device", "cpu", "--prompt", "hi", "--experts", address)
    waiting, error = result.err.splitlines()
    assert f"{address} refuses connections; waiting 3 s for it" in waiting
    assert error.startswith(f"error: expert server {address}: ")
    assert "moeoffload-expert" in error
    assert "--connect-timeout-s" in error
    assert (result.code, result.out) == (SERVER, "")


def test_a_server_that_is_started_after_its_host_is_waited_for(
    commands: Commands, start_server: StartServer, unused_address: str
) -> None:
    options = ("--device", "cpu", "--prompt", "add 17 25 =", "--experts", unused_address, "--connect-timeout-s", "60")
    host = commands.start("moeoffload", "run", DEMO, *options)
    wait_until(lambda: "refuses connections; waiting 60 s" in read(host.err), "word of waiting", STEP_TIMEOUT_S)
    start_server("--listen", unused_address)
    result = host.wait()
    assert (result.code, result.out.strip()) == (0, "42"), result.err


def test_a_server_that_cannot_be_started_leaves_no_connection_to_the_others(
    server: RunningServer, unused_address: str, tmp_path: Path
) -> None:
    """Even while the error, and with it all that it has seen, is kept, as an interactive shell does."""
    (tmp_path / "expert-server-0.log").mkdir()
    experts = [server.address, unused_address]
    with pytest.raises(OSError, match=r"expert-server-0\.log") as kept:
        open_model(DEMO, experts=experts, required=False, connect_timeout_s=1, work_dir=tmp_path, device="cpu")
    port = int(server.address.rpartition(":")[2])

    def is_left() -> bool:
        return not any(each.raddr and each.raddr.port == port for each in psutil.Process().net_connections("tcp"))

    wait_until(is_left, "gRPC closes its sockets after its channels")
    del kept


def server_error(commands: Commands, address: str, *options: str) -> str:
    return run_error(commands, SERVER, DEMO, "--prompt", "hi", "--experts", address, *options)


def test_a_server_of_another_protocol_version_or_with_another_model(
    commands: Commands, start_server: StartServer, tiny: Path
) -> None:
    other = PROTOCOL_VERSION + 41
    patch = f"import moeoffload.control.protocol\nmoeoffload.control.protocol.PROTOCOL_VERSION = {other}"
    for server, words in (
        (start_server(patch=patch, warm=False), (f"protocol version is {other}", f"speaks {PROTOCOL_VERSION} ")),
        (start_server("--model", str(tiny)), (str(tiny), "model digest")),
    ):
        line = server_error(commands, server.address)
        assert all(word in line for word in (server.address, *words)), line
        assert "Traceback" not in server.log_text


def test_a_server_with_too_little_memory(commands: Commands, start_server: StartServer) -> None:
    address = start_server("--memory-gib", "0.001").address
    result = commands.run("moeoffload", "run", DEMO, "--device", "cpu", "--prompt", "hi", "--experts", address)
    assert (result.code, result.out) == (PLACEMENT, "")
    assert "Traceback" not in result.err
    title, *rows = result.err.splitlines()
    assert title.startswith("error: ")
    sizes = dict(re.fullmatch(r"  (\S+) +(-?[0-9.]+) GiB", row).groups() for row in rows)  # type: ignore[union-attr, misc]
    assert set(sizes) == {"needed", "offered", "missing", address}
    needed, offered, missing = (float(sizes[name]) for name in ("needed", "offered", "missing"))
    assert needed - offered == pytest.approx(missing, abs=2e-6)


def test_a_server_with_too_few_descriptors_refuses_the_host_and_goes_on(start_server: StartServer) -> None:
    server = start_server()
    pid = server.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with open_model(DEMO, experts=[server.address], device="cpu"):
        pass  # what is opened once for all hosts is open now
    with connected(server.address) as client:
        tight = psutil.Process(pid).num_fds() + 2
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (tight, limits[1]))
        with pytest.raises(ServerError) as caught:
            open_model(DEMO, experts=[server.address], device="cpu", connect_timeout_s=5).close()
        assert "\n" not in str(caught.value)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        with open_model(DEMO, experts=[server.address], device="cpu"):
            assert client.stats(STEP_TIMEOUT_S).leases == 1
        assert server.process.poll() is None


@pytest.mark.parametrize("room", [0, 4096, 8208, 16384], ids=lambda room: f"{room} KiB")
def test_a_server_without_memory_or_threads_refuses_hosts_in_one_line_and_heeds_sigterm(
    start_server: StartServer, commands: Commands, room: int
) -> None:
    server = start_server()
    process = psutil.Process(server.process.pid)
    # A thread needs 8 MiB of addresses for its stack, and a little more to begin; weights need more than that.
    process.rlimit(resource.RLIMIT_AS, (process.memory_info().vms + 1024 * room, resource.RLIM_INFINITY))
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
    assert "ulimit -n" in str(SystemLimitError.from_exception(caught.value))


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
                    assert "ulimit -n" in str(SystemLimitError.from_exception(error))
                except DeadlineError:
                    pass  # nobody listens at this port
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0, f"{end.__name__} died with {room} descriptors left"
"""


def test_a_stream_end_with_too_few_descriptors_is_refused_whatever_their_number() -> None:
    """ZeroMQ ends the process if it gets none, or waits forever."""
    done = run_python(STREAM_ENDS)
    assert done.code == 0, done.err


def test_a_report_on_a_full_disk_is_one_line_after_the_answer(three_servers: list[str], commands: Commands) -> None:
    options = ["--experts", three_servers[0], "--device", "cpu", "--max-new-tokens", "8", "--report", "/dev/full"]
    done = commands.run("moeoffload", "run", DEMO, "--prompt", "add 17 25 =", *options)
    assert done.code == SystemLimitError.exit_code, done.err
    assert "No space left on device" in done.err
    assert "Traceback" not in done.err
    assert "42" in done.out
