"""Who is let in to the control plane: refusals are quick, say what to do, are counted, and logged without secrets."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import pytest
from command_lines import CLEAN_TIMEOUT_S, STEP_TIMEOUT_S, Commands, one_line_error, run_python, wait_until
from conftest import DEMO, StartServer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from models import secret_file

from moeoffload import open_model
from moeoffload.config import Address, HostSettings
from moeoffload.control.client import ControlClient
from moeoffload.control.credentials import TOKEN_KEY, HostCredentials
from moeoffload.control.protocol import MAX_CONNECTIONS
from moeoffload.control.user_token import UserToken, new_token, user_tokens
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.control.v1 import expert_service_pb2_grpc as pb_grpc
from moeoffload.errors import ServerError, SystemLimitError
from security.conftest import Site

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def test_two_processes_with_certificates_and_a_token_give_the_right_answer(
    site: Site, commands: Commands, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    words = [*site.options(), "--threads", "1", "--transport", "stream", "--log-level", "debug"]
    result = commands.run(
        "moeoffload", "run", site.root / "demo", *words, "--prompt", "add 17 25 =", "--report", report
    )
    assert (result.code, result.out.strip()) == (0, "42"), result.err
    assert "stream" in json.dumps(json.loads(report.read_text()))
    for text in (result.err, report.read_text(), site.server.log_text):
        site.check_no_secret(text)
    site.check_no_secret(Path(f"/proc/{site.server.process.pid}/cmdline").read_text())


def test_a_wrong_token_ends_the_command_with_one_line(site: Site, commands: Commands, tmp_path: Path) -> None:
    words = site.options(token_file=secret_file(tmp_path / "token", "x" * 32))
    with site.refused("another token"):
        result = commands.run("moeoffload", "run", DEMO, *words, "--prompt", "x")
    assert "another token" in one_line_error(result, 5)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (lambda site: {"token_file": None}, "it showed no token"),
        (lambda site: {"tls_ca": site.strange_keys / "ca.pem"}, "not one that --tls-ca vouches for"),
        (lambda site: {"tls_cert": None, "tls_key": None}, "give --tls-cert and --tls-key"),
        (
            lambda site: {"tls_cert": site.strange_keys / "host.pem", "tls_key": site.strange_keys / "host.key"},
            "does not accept this host's --tls-cert",
        ),
        (lambda site: {"tls_ca": None, "tls_cert": None, "tls_key": None}, "it speaks TLS; give --tls-ca"),
    ],
    ids=["no token", "wrong CA", "no certificate", "certificate of a stranger", "no TLS"],
)
def test_a_host_that_lacks_something_is_refused(
    site: Site, changes: Callable[[Site], dict[str, Any]], told: str
) -> None:
    started = monotonic()
    with contextlib.closing(site.client(**changes(site))) as client:
        with pytest.raises(ServerError, match=told) as caught:
            _reach(client)
        assert monotonic() - started < STEP_TIMEOUT_S / 2, "the reason is found long before the deadline"
        assert "\n" not in str(caught.value)
        site.check_no_secret(str(caught.value))
    site.check_no_secret(site.server.log_text)


def _reach(client: ControlClient) -> None:
    client.connect(STEP_TIMEOUT_S)
    client.describe(STEP_TIMEOUT_S)


def test_every_call_of_the_expert_service_needs_the_token(site: Site) -> None:
    calls: dict[str, Callable[[Any], Any]] = {
        "Describe": lambda stub: stub.Describe(pb.DescribeRequest(), timeout=STEP_TIMEOUT_S),
        "Stats": lambda stub: stub.Stats(pb.StatsRequest(), timeout=STEP_TIMEOUT_S),
        "Drain": lambda stub: stub.Drain(pb.DrainRequest(), timeout=STEP_TIMEOUT_S),
        "Calibrate": lambda stub: stub.Calibrate(pb.CalibrateRequest(), timeout=STEP_TIMEOUT_S),
        "LoadExperts": lambda stub: list(stub.LoadExperts(pb.LoadExpertsRequest(), timeout=STEP_TIMEOUT_S)),
        "Attach": lambda stub: list(stub.Attach(iter([pb.AttachRequest(hello=pb.Hello())]), timeout=STEP_TIMEOUT_S)),
    }
    assert set(calls) == set(pb.DESCRIPTOR.services_by_name["ExpertService"].methods_by_name)
    files = [(site.keys / name).read_bytes() for name in ("ca.pem", "host.key", "host.pem")]
    with grpc.secure_channel(site.server.address, grpc.ssl_channel_credentials(*files)) as channel:
        stub = pb_grpc.ExpertServiceStub(channel)  # type: ignore[no-untyped-call]
        for call in calls.values():
            with pytest.raises(grpc.RpcError) as caught:
                call(stub)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests, timeout=10)
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            list(reflected)
        status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=STEP_TIMEOUT_S)
        assert status.status == health_pb2.HealthCheckResponse.SERVING, "health checks are open"
    assert site.n_refused() >= len(calls)


def test_more_connections_than_allowed_are_closed_and_later_ones_are_served(site: Site) -> None:
    host, _, port = site.server.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(MAX_CONNECTIONS + 20)]

        def n_closed() -> int:
            return sum(select.select([each], [], [], 0)[0] != [] and each.recv(1) == b"" for each in idle)

        wait_until(lambda: n_closed() >= 20, "the end of those too many", CLEAN_TIMEOUT_S)

    def is_served() -> bool:  # not before the server has noticed that the others are gone
        try:
            return site.n_refused() >= 0
        except ServerError:
            return False

    wait_until(is_served, "the answer to a later one", CLEAN_TIMEOUT_S)


FOREIGN = ("grpc_global_tim", "event_engine", "lifeguard", "ZMQbg")
"""How gRPC's core and ZeroMQ name the threads that they keep by themselves; Python's have no names of their own."""
MOST_THREADS = 8


def test_a_server_with_a_host_keeps_few_threads(site: Site) -> None:
    settings = site.good | {"transport": "stream", "device": "cpu", "threads": 1}

    def n_own() -> int:
        names = [path.read_text().strip() for path in Path(f"/proc/{site.server.process.pid}/task").glob("*/comm")]
        return sum(not name.startswith(FOREIGN) for name in names)

    with open_model(site.root / "demo", **settings):
        wait_until(lambda: n_own() <= MOST_THREADS, "the end of the threads of calls that are over", CLEAN_TIMEOUT_S)


def test_a_host_with_tls_is_told_of_a_server_without(three_servers: list[str], site: Site) -> None:
    credentials = HostCredentials.of(HostSettings(**site.good))
    with (
        contextlib.closing(ControlClient(three_servers[0], credentials)) as client,
        pytest.raises(ServerError, match="it does not speak TLS"),
    ):
        client.connect(STEP_TIMEOUT_S)


@as_root
def test_loopback_without_credentials_is_for_the_same_user_only(three_servers: list[str]) -> None:
    code = (
        "import os, sys\n"
        "from moeoffload.control.client import ControlClient\n"
        "os.setuid(int(sys.argv[2]))\n"
        "print(ControlClient(sys.argv[1]).describe(20).server_version)\n"
    )

    def as_user(uid: int) -> str:
        done = run_python(code, three_servers[0], str(uid))
        return done.out + done.err

    refusal = as_user(NOBODY)
    assert "this host was refused: it showed no token; this server wants the one in /" in refusal
    assert "--token-file or --client-ca" in refusal
    assert "Error" not in as_user(0)


def test_a_server_for_its_own_user_wants_the_token_of_this_start(start_server: StartServer) -> None:
    server = start_server()
    place = Address.parse(server.address)
    (token,) = user_tokens(place.host, place.port)

    def shows(*tokens: str) -> str:
        with grpc.insecure_channel(server.address) as channel, contextlib.suppress(grpc.RpcError):
            stub = pb_grpc.ExpertServiceStub(channel)  # type: ignore[no-untyped-call]
            stub.Describe(pb.DescribeRequest(), metadata=[(TOKEN_KEY, each) for each in tokens], timeout=STEP_TIMEOUT_S)
            return "served"
        return "refused"

    assert [shows(), shows("x" * 64), shows(token), shows("x" * 64, token)] == [*["refused"] * 2, *["served"] * 2]
    assert token not in server.log_text
    wait_until(lambda: "it showed no token" in server.log_text, "the refusal in the log", CLEAN_TIMEOUT_S)
    server.process.terminate()
    server.process.wait(STEP_TIMEOUT_S)
    assert user_tokens(place.host, place.port) == [], "the file goes with its server"


def test_tokens_are_secret_and_replace_those_of_servers_that_were_killed(folder: Path) -> None:
    killed = UserToken.write("127.0.0.1", 5, new_token())
    mine = UserToken.write("localhost", 5, token := new_token())
    assert mine.path == killed.path
    assert (mine.path.stat().st_mode & 0o777, mine.path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert user_tokens("127.0.0.1", 5) == user_tokens("localhost", 5) == [token]
    assert user_tokens("127.0.0.2", 5) == user_tokens("127.0.0.1", 6) == user_tokens("::1", 5) == []
    killed.remove()
    assert user_tokens("127.0.0.1", 5) == [token], "only a server's own token is removed"
    mine.remove()
    assert list(mine.path.parent.iterdir()) == []


def test_a_folder_in_which_the_token_cannot_be_written_is_passed_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "runtime"))
    (folder / "runtime").mkdir()
    first = UserToken.write("127.0.0.1", 5, new_token()).path
    first.unlink()
    first.mkdir()
    second = UserToken.write("127.0.0.1", 5, token := new_token()).path
    assert second.parent == folder / f"moeoffload-{os.geteuid()}"
    assert user_tokens("127.0.0.1", 5) == [token]
    assert list(first.parent.iterdir()) == [first], "nothing else is left in it"
    second.unlink()
    second.mkdir()
    with pytest.raises(SystemLimitError, match=r"runtime/moeoffload cannot be written \(Is a dir.*--token-file"):
        UserToken.write("127.0.0.1", 5, token)


def test_tokens_that_others_could_have_left_are_not_used(folder: Path) -> None:
    path = UserToken.write("127.0.0.1", 5, new_token()).path
    path.chmod(0o640)
    assert user_tokens("127.0.0.1", 5) == []
    path.unlink()
    path.symlink_to(secret_file(folder / "elsewhere", "0" * 64))
    assert user_tokens("127.0.0.1", 5) == []
    path.unlink()
    os.mkfifo(path, 0o600)
    assert user_tokens("127.0.0.1", 5) == []
    path.unlink()
    path.parent.chmod(0o755)
    with pytest.raises(SystemLimitError, match="XDG_RUNTIME_DIR"):
        UserToken.write("127.0.0.1", 5, new_token())


@as_root
def test_a_folder_of_another_user_is_not_used(folder: Path) -> None:
    token = UserToken.write("127.0.0.1", 5, new_token())
    os.chown(token.path.parent, NOBODY, -1)
    assert user_tokens("127.0.0.1", 5) == []
    with pytest.raises(SystemLimitError, match="belongs to somebody else"):
        UserToken.write("127.0.0.1", 5, new_token())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, where there is no runtime folder."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path
