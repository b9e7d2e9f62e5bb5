"""Who is let in to the control plane: refusals are quick, say what to do, are counted, and logged without secrets."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import psutil
import pytest
from command_lines import CLEAN_TIMEOUT_S, ROOT, STEP_TIMEOUT_S, Commands, one_line_error, wait_until
from conftest import DEMO, RunningServer, expert_server
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from moeoffload.config import HostSettings
from moeoffload.control import same_user
from moeoffload.control.client import ControlClient
from moeoffload.control.credentials import TOKEN_KEY, HostCredentials
from moeoffload.control.same_user import split_peer, uid_of_peer
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.control.v1 import expert_service_pb2_grpc as pb_grpc
from moeoffload.errors import ServerError
from security.conftest import Site, secret_file

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def test_two_processes_with_certificates_and_a_token_give_the_right_answer(
    site: Site, commands: Commands, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    words = [f"--{name.replace('_', '-')}={value}" for name, value in site.good.items() if name != "experts"]
    result = commands.run(
        "moeoffload",
        "run",
        site.root / "demo",
        *("--experts", site.server.address, *words, "--threads", "1"),
        *("--transport", "stream", "--prompt", "add 17 25 =", "--report", str(report), "--log-level", "debug"),
    )
    assert (result.code, result.out.strip()) == (0, "42"), result.err
    assert "stream" in json.dumps(json.loads(report.read_text()))
    for text in (result.err, report.read_text(), site.server.log_text):
        site.check_no_secret(text)
    site.check_no_secret(Path(f"/proc/{site.server.process.pid}/cmdline").read_text())


def test_a_wrong_token_ends_the_command_with_one_line(site: Site, commands: Commands, tmp_path: Path) -> None:
    wrong = secret_file(tmp_path / "token", "x" * 32)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in (site.good | {"token_file": wrong}).items()]
    words = [word for word in words if not word.startswith("--experts")]
    with site.refused("another token"):
        result = commands.run("moeoffload", "run", DEMO, "--experts", site.server.address, *words, "--prompt", "x")
    assert "another token" in one_line_error(result, 5)


@pytest.mark.parametrize(
    ("changes", "told", "logged"),
    [
        (lambda site: {"token_file": None}, "it showed no token", "it showed no token"),
        (lambda site: {"tls_ca": site.strange_keys / "ca.pem"}, "not one that --tls-ca vouches for", "not accept this"),
        (lambda site: {"tls_cert": None, "tls_key": None}, "give --tls-cert and --tls-key", "it showed no certificate"),
        (
            lambda site: {"tls_cert": site.strange_keys / "host.pem", "tls_key": site.strange_keys / "host.key"},
            "does not accept this host's --tls-cert",
            "its certificate is not accepted",
        ),
        (
            lambda site: {"tls_ca": None, "tls_cert": None, "tls_key": None},
            "it speaks TLS; give --tls-ca",
            "it does not speak TLS",
        ),
    ],
    ids=["no token", "wrong CA", "no certificate", "certificate of a stranger", "no TLS"],
)
def test_who_lacks_something_is_refused(
    site: Site, changes: Callable[[Site], dict[str, Any]], told: str, logged: str
) -> None:
    started = monotonic()
    with site.refused(logged), contextlib.closing(site.client(**changes(site))) as client:
        with pytest.raises(ServerError, match=told) as caught:
            _reach(client)
        assert monotonic() - started < STEP_TIMEOUT_S / 2, "the reason is found long before the deadline"
        assert "\n" not in str(caught.value)
        site.check_no_secret(str(caught.value))


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
    with tls_channel(site) as channel:
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


def tls_channel(site: Site) -> grpc.Channel:
    files = (site.keys / name for name in ("ca.pem", "host.key", "host.pem"))
    return grpc.secure_channel(site.server.address, grpc.ssl_channel_credentials(*(f.read_bytes() for f in files)))


def test_nobody_gets_around_tls(site: Site) -> None:
    front = int(site.server.address.rpartition(":")[2])
    token = site.token_file.read_text().strip()
    listening = psutil.Process(site.server.process.pid).net_connections("tcp")
    ports = {c.laddr.port for c in listening if c.status == psutil.CONN_LISTEN} - {front}
    refused = 0
    for port in ports:  # gRPC's own, and the stream port, which does not speak gRPC at all
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = pb_grpc.ExpertServiceStub(channel)  # type: ignore[no-untyped-call]
            with pytest.raises(grpc.RpcError) as caught:
                stub.Describe(pb.DescribeRequest(), metadata=[(TOKEN_KEY, token)], timeout=2)
            refused += "around TLS" in str(caught.value)
    assert refused == 1


def test_half_open_and_senseless_connections_do_no_harm(site: Site) -> None:
    host, _, port = site.server.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection((host, int(port)), STEP_TIMEOUT_S))
        plain = stack.enter_context(socket.create_connection((host, int(port)), STEP_TIMEOUT_S))
        with site.refused("it does not speak TLS"), contextlib.suppress(ConnectionError):
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while plain.recv(1000):
                pass


def test_a_host_that_is_killed_behind_tls_frees_its_lease(site: Site) -> None:
    code = (
        "import sys, time\n"
        "from moeoffload.control.client import ControlClient\n"
        "from moeoffload.control.credentials import HostCredentials\n"
        "from moeoffload.config import HostSettings\n"
        "settings = HostSettings.load(dict(word.split('=', 1) for word in sys.argv[1:]))\n"
        "lease = ControlClient(settings.experts[0], HostCredentials.of(settings)).attach(60)\n"
        "print('attached', flush=True)\n"
        "time.sleep(600)\n"
    )
    words = [f"{name}={value[0] if name == 'experts' else value}" for name, value in site.good.items()]
    process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with process, contextlib.closing(site.client()) as client:
        assert process.stdout is not None
        assert process.stdout.readline() == "attached\n"
        assert client.stats(STEP_TIMEOUT_S).leases == 1
        process.kill()
        wait_until(lambda: client.stats(STEP_TIMEOUT_S).leases == 0, "the end of the lease", CLEAN_TIMEOUT_S)


def test_connections_through_tls_leave_nothing_behind(site: Site) -> None:
    server = psutil.Process(site.server.process.pid)

    def use(n_hosts: int) -> None:
        for _ in range(n_hosts):
            with contextlib.closing(site.client()) as client:
                # As much as a message may hold comes through in many pieces, and the front waits for the slow side.
                client.describe(STEP_TIMEOUT_S, model_digest="x" * (3 << 20))

    use(2)
    before = server.num_fds(), server.num_threads()
    use(8)
    wait_until(lambda: (server.num_fds(), server.num_threads()) <= before, "descriptors as before", CLEAN_TIMEOUT_S)


def test_a_host_with_tls_is_told_of_a_server_without(three_servers: list[str], site: Site) -> None:
    credentials = HostCredentials.of(HostSettings(**site.good))
    with (
        contextlib.closing(ControlClient(three_servers[0], credentials)) as client,
        pytest.raises(ServerError, match="it does not speak TLS"),
    ):
        client.connect(STEP_TIMEOUT_S)


@as_root
def test_loopback_without_credentials_is_for_the_same_user_only(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from moeoffload.control.client import ControlClient\n"
        "os.setuid(int(sys.argv[2]))\n"
        "print(ControlClient(sys.argv[1]).describe(20).server_version)\n"
    )

    def as_user(server: RunningServer, uid: int) -> str:
        command = [sys.executable, "-c", code, server.address, str(uid)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=STEP_TIMEOUT_S)
        return done.stdout + done.stderr

    with expert_server(tmp_path) as server:
        assert f"it runs as user id {NOBODY}" in as_user(server, NOBODY)
        assert f"it runs as user id {NOBODY}" in server.log_text
        assert "Error" not in as_user(server, 0)


@pytest.fixture(params=["asked", "looked through"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How users are found: the kernel is asked, or its tables are looked through."""
    assert same_user._kernel_answers()
    monkeypatch.setattr(same_user, "_kernel_answers", lambda: request.param == "asked")
    return str(request.param)


@as_root
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("listens", "calls"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("127.0.0.1", "::ffff:127.0.0.1"), ("127.0.0.7", "127.0.0.7")],
)
def test_the_user_at_the_other_end_is_known(listens: str, calls: str) -> None:
    kind = socket.AF_INET6 if ":" in listens else socket.AF_INET
    with socket.create_server((listens, 0), family=kind) as server:
        own = server.getsockname()[1]
        code = f"exec 3<>/dev/tcp/{calls}/{own}; read -u 3"
        process = subprocess.Popen(["bash", "-c", code], user=NOBODY, stdin=subprocess.DEVNULL)
        connection, peer = server.accept()
        assert uid_of_peer(peer[0], peer[1], listens, own) == NOBODY
        if listens in ("127.0.0.1", "::1"):
            assert uid_of_peer(peer[0], peer[1], "localhost", own) == NOBODY
        assert uid_of_peer(peer[0], peer[1], listens, own + 1) is None
        assert uid_of_peer(peer[0], peer[1] + 1, listens, own) is None
        connection.close()
        process.wait(STEP_TIMEOUT_S)


@pytest.mark.usefixtures("kernel")
def test_a_connection_that_its_process_has_left_is_nobodys() -> None:
    # The kernel says that such a socket belongs to root.
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = server.getsockname()[1]
        caller = socket.create_connection(("127.0.0.1", own))
        connection, peer = server.accept()
        assert uid_of_peer(peer[0], peer[1], "127.0.0.1", own) == os.geteuid()
        caller.close()
        assert uid_of_peer(peer[0], peer[1], "127.0.0.1", own) is None
        connection.close()


@pytest.mark.usefixtures("kernel")
def test_a_connection_to_somebody_else_is_not_taken_for_one_to_us() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours:
        own = ours.getsockname()[1]
        with socket.create_server(("127.0.0.2", own)) as theirs, socket.socket() as first, socket.socket() as second:
            for caller, server in ((first, ours), (second, theirs)):
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                caller.bind(("127.0.0.1", 0 if caller is first else first.getsockname()[1]))
                caller.connect(server.getsockname())
            port = first.getsockname()[1]
            assert uid_of_peer("127.0.0.1", port, "127.0.0.1", own) == os.geteuid()
            first.close()
            assert uid_of_peer("127.0.0.1", port, "127.0.0.1", own) is None
            assert uid_of_peer("127.0.0.1", port, "127.0.0.2", own) == os.geteuid()


@pytest.mark.usefixtures("kernel")
def test_a_connection_that_nobody_has_accepted_is_nobodys() -> None:
    # Older kernels say that it belongs to root.
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as caller:
            own = caller.getsockname()[1]
            assert uid_of_peer("127.0.0.1", port, "127.0.0.1", own) is None
            accepted, _ = server.accept()
            assert uid_of_peer("127.0.0.1", port, "127.0.0.1", own) == os.geteuid()
            accepted.close()


def test_peers_are_read_as_grpc_writes_them() -> None:
    assert split_peer("ipv4:127.0.0.1:40000") == ("127.0.0.1", 40000)
    assert split_peer("ipv6:%5B::1%5D:40000") == ("::1", 40000)
    assert split_peer("unix:/tmp/socket") is None
