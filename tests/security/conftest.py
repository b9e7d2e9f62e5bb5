"""A server that wants TLS with a host certificate and a token, and what hosts need to get in."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command_lines import CLEAN_TIMEOUT_S, STEP_TIMEOUT_S, wait_until
from conftest import DEMO, RunningServer
from models import secret_file

from moeoffload.cli.key_files import make_keys
from moeoffload.config import HostSettings
from moeoffload.control.client import ControlClient
from moeoffload.control.credentials import HostCredentials


@dataclass(frozen=True)
class Site:
    """Two sets of certificates, the second of strangers; the token; the server that trusts the first."""

    server: RunningServer
    keys: Path
    strange_keys: Path
    token_file: Path
    root: Path

    @property
    def good(self) -> dict[str, Any]:
        """Settings of a host that is let in."""
        return {
            "experts": [self.server.address],
            "tls_ca": self.keys / "ca.pem",
            "tls_cert": self.keys / "host.pem",
            "tls_key": self.keys / "host.key",
            "token_file": self.token_file,
        }

    def options(self, **changes: Any) -> list[str]:
        """The good settings with these changes as options of a command."""
        values = {**self.good, "experts": self.server.address, **changes}
        return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]

    def client(self, **changes: Any) -> ControlClient:
        """A host with the good settings and these changes."""
        settings = HostSettings(**self.good | changes)
        return ControlClient(self.server.address, HostCredentials.of(settings))

    def n_refused(self) -> int:
        with contextlib.closing(self.client()) as client:
            return int(client.stats(STEP_TIMEOUT_S).refused)

    @contextlib.contextmanager
    def refused(self, words: str) -> Iterator[None]:
        """What happens inside is counted as refused, and logged with these words and none of the secrets."""
        before, log_before = self.n_refused(), len(self.server.log_text)
        yield
        wait_until(lambda: self.n_refused() > before, "the count of refusals", CLEAN_TIMEOUT_S)
        wait_until(lambda: words in self.server.log_text[log_before:], f"{words!r} in the log", CLEAN_TIMEOUT_S)
        self.check_no_secret(self.server.log_text)

    def check_no_secret(self, text: str) -> None:
        assert self.token_file.read_text().strip() not in text
        for key in (*self.keys.glob("*.key"), *self.strange_keys.glob("*.key")):
            assert key.read_text().splitlines()[1] not in text
        assert "Traceback" not in text


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    keys, strange, root = folder / "keys", folder / "strange", folder / "models"
    for each in (keys, strange):
        make_keys(each, [])
    shutil.copytree(DEMO, root / "demo")
    token = secret_file(folder / "token", secrets.token_hex(32) + "\n")
    options = ["--tls-cert", keys / "server.pem", "--tls-key", keys / "server.key", "--client-ca", keys / "ca.pem"]
    options += ["--token-file", token, "--model-root", root]
    # Of many refusals only some are logged; these tests want to see each.
    patch = "import moeoffload.logs as logs; logs.FloodFilter.filter = lambda self, record: True"
    # Started afresh: its command line is looked at, too.
    with RunningServer(folder, *map(str, options), patch=patch, warm=False) as server:
        yield Site(server, keys, strange, token, root)
