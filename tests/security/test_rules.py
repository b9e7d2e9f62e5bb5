"""Which settings may go together, the files they name, and the certificates that `moeoffload keys new` makes."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
from command_lines import Commands, one_line_error
from conftest import DEMO
from models import secret_file

from moeoffload.cli.key_files import NAMES, make_keys
from moeoffload.config import ExpertServerSettings, HostSettings
from moeoffload.control.credentials import HostCredentials, ServerCredentials
from moeoffload.errors import SettingError


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "keys"
    make_keys(folder, ["node7", "10.0.0.7"])
    secret_file(folder / "token", "0123456789abcdef0123456789abcdef")
    return folder


def files(keys: Path, *names: str) -> dict[str, Any]:
    known = {
        "tls_cert": "server.pem",
        "tls_key": "server.key",
        "client_ca": "ca.pem",
        "tls_ca": "ca.pem",
        "token_file": "token",
    }
    return {name: keys / known[name] for name in names}


def test_a_server_that_others_reach_and_a_host_that_talks_in_the_clear_are_told_what_to_do(commands: Commands) -> None:
    listen = ("moeoffload-expert", "--listen", "0.0.0.0:0")
    run = ("moeoffload", "run", DEMO, "--experts", "192.0.2.7:50051", "--prompt", "x")
    for command, option in ((listen, "--client-ca --token-file"), (run, "--tls-ca 192.0.2.7:50051")):
        line = one_line_error(commands.run(*map(str, command)), 2)
        assert all(word in line for word in (*option.split(), "moeoffload keys new DIR", "--insecure"))


@pytest.mark.parametrize(
    ("listen", "names", "insecure", "missing"),
    [
        ("0.0.0.0:1", [], False, "--tls-cert and --tls-key and --client-ca"),
        ("[::]:1", [], False, "--tls-cert"),
        ("10.0.0.7:1", ["token_file"], False, "needs --tls-cert and --tls-key;"),
        ("node7:1", ["tls_cert", "tls_key"], False, "needs --client-ca (or --token-file FILE);"),
        ("127.0.0.1:1", ["tls_cert"], False, "needs --tls-key"),
        ("127.0.0.1:1", ["tls_key"], True, "needs --tls-cert"),
        ("127.0.0.1:1", ["client_ca"], True, "--client-ca needs --tls-cert"),
        ("10.0.0.7:1", [], True, None),
        ("10.0.0.7:1", ["tls_cert", "tls_key", "client_ca"], False, None),
        ("10.0.0.7:1", ["tls_cert", "tls_key", "token_file"], False, None),
        ("127.0.0.1:1", [], False, None),
        ("localhost:1", ["token_file"], False, None),
        ("[::1]:1", [], False, None),
    ],
)
def test_what_a_server_needs(keys: Path, listen: str, names: list[str], insecure: bool, missing: str | None) -> None:
    settings = ExpertServerSettings.load({"listen": listen, "insecure": insecure, **files(keys, *names)})
    if missing is None:
        credentials = ServerCredentials.of(settings)
        # Rows are in the clear only where nobody but the same user is let in.
        assert credentials.encrypt_rows == (not credentials.same_user or "tls_cert" in names)
        assert credentials.same_user == (not names and not insecure)
        assert credentials.any_model == credentials.same_user
        return
    with pytest.raises(SettingError) as caught:
        ServerCredentials.of(settings)
    assert missing in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("experts", "names", "insecure", "wrong"),
    [
        ("10.0.0.7:1", [], False, "without TLS"),
        ("127.0.0.1:1,node7:1", ["token_file"], False, "node7:1"),
        ("10.0.0.7:1", ["tls_cert", "tls_key"], False, "--tls-cert needs --tls-ca"),
        ("10.0.0.7:1", ["tls_ca", "tls_cert"], False, "needs --tls-key"),
        ("10.0.0.7:1", ["tls_ca"], False, None),
        ("10.0.0.7:1", [], True, None),
        ("127.0.0.1:1,localhost:2,[::1]:3", ["token_file"], False, None),
    ],
)
def test_what_a_host_needs(keys: Path, experts: str, names: list[str], insecure: bool, wrong: str | None) -> None:
    settings = HostSettings.load({"experts": experts, "insecure": insecure, **files(keys, *names)})
    if wrong is None:
        assert (HostCredentials.of(settings).ca is not None) == ("tls_ca" in names)
        return
    with pytest.raises(SettingError, match=wrong):
        HostCredentials.of(settings)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_secrets_that_others_can_read_are_refused(keys: Path, tmp_path: Path, mode: int) -> None:
    loose = tmp_path / "loose"
    loose.write_bytes((keys / "server.key").read_bytes())
    loose.chmod(mode)
    for name in ("tls_key", "token_file"):
        with pytest.raises(SettingError, match=f"its mode is {mode:o}; chmod 600 it"):
            HostSettings.load({name: loose})


@pytest.mark.parametrize("content", [b"", b"short", b"two words of more than sixteen", b"\xff" * 40, b"x" * 5000])
def test_a_file_that_holds_no_token_is_refused_without_showing_it(tmp_path: Path, content: bytes) -> None:
    file = secret_file(tmp_path / "token", content)
    with pytest.raises(SettingError, match="holds no token") as caught:
        ServerCredentials.of(ExpertServerSettings(token_file=file))
    assert not content or content.decode("latin-1") not in str(caught.value)


def test_files_that_hold_something_else_are_refused(keys: Path, tmp_path: Path) -> None:
    junk = secret_file(tmp_path / "junk", "no PEM")
    pair = files(keys, "tls_cert", "tls_key")
    for wrong in (pair | {"tls_cert": junk}, pair | {"tls_key": junk}, pair | {"client_ca": junk}):
        with pytest.raises(SettingError, match=f"{junk}"):
            ServerCredentials.of(ExpertServerSettings(**wrong))
    with pytest.raises(SettingError, match="no certificate and its key"):
        ServerCredentials.of(ExpertServerSettings(**pair | {"tls_key": keys / "host.key"}))
    with pytest.raises(SettingError, match="--tls-ca"):
        HostCredentials.of(HostSettings(tls_ca=junk))


def test_no_secret_is_in_a_repr(keys: Path) -> None:
    names = ("tls_cert", "tls_key", "token_file")
    host = HostSettings(**files(keys, *names, "tls_ca"))
    server = ExpertServerSettings(**files(keys, *names, "client_ca"))
    for shown in (host, server, HostCredentials.of(host), ServerCredentials.of(server)):
        assert "0123456789abcdef" not in repr(shown)
        assert "PRIVATE" not in repr(shown)


def test_made_keys_are_secret_and_for_the_names_that_were_given(keys: Path) -> None:
    assert {path.name for path in keys.iterdir()} == {*NAMES, "token"}
    assert keys.stat().st_mode & 0o777 == 0o700
    for path in keys.glob("*.key"):
        assert path.stat().st_mode & 0o777 == 0o600
    shown = ssl._ssl._test_decode_cert(str(keys / "server.pem"))  # type: ignore[attr-defined]
    names = {value for _, value in shown["subjectAltName"]}
    assert {"localhost", "127.0.0.1", "0:0:0:0:0:0:0:1", "node7", "10.0.0.7"} <= names


def test_keys_new_prints_commands_and_replaces_nothing(commands: Commands, tmp_path: Path) -> None:
    made = commands.run("moeoffload", "keys", "new", tmp_path / "k", "--name", "10.0.0.7")
    assert made.code == 0
    server, host = (line for line in made.out.splitlines() if not line.startswith("#"))
    assert server.startswith("moeoffload-expert --listen 10.0.0.7:50051 --tls-cert ")
    assert host.startswith("moeoffload run MODEL --experts 10.0.0.7:50051 --tls-ca ")
    before = {path.name: path.read_bytes() for path in (tmp_path / "k").iterdir()}
    again = commands.run("moeoffload", "keys", "new", tmp_path / "k")
    assert "is there already" in one_line_error(again, 2)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "k").iterdir()}
    wrong = commands.run("moeoffload", "keys", "new", tmp_path / "other", "--name", "no such name")
    assert "--name: 'no such name'" in one_line_error(wrong, 2)


def test_a_folder_that_cannot_be_looked_into_is_no_traceback(tmp_path: Path) -> None:
    folder = tmp_path
    while (left := 4090 - len(str(folder))) > 1:
        folder /= "d" * min(200, left - 1)  # in the end too long a path for the files, not for the folder itself
    with pytest.raises(SettingError, match=r"^keys new: .* \(File name too long\)$"):
        make_keys(folder, [])
