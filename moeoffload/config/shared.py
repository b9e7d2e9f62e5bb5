"""Settings that hosts and expert servers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from moeoffload.config.base import SettingsBase, channel, compute, security
from moeoffload.config.values import MOST_ROWS, FileToRead, RowsOrMeasured, SecretFile, Threads, is_loopback
from moeoffload.errors import SettingError

USUAL_ROWS: Final = 1024
KEYS_HINT = "`moeoffload keys new DIR` makes them"

LogLevel = Literal["debug", "info", "warning", "error"]
"""The lowest level of log messages that are shown."""


class CommonSettings(SettingsBase):
    """The settings of both programs."""

    tls_cert: FileToRead = security(None, "This side's certificate, PEM.", common=True)
    tls_key: SecretFile = security(None, "The private key of that certificate, PEM.", common=True)
    token_file: SecretFile = security(None, "The file that holds the token which hosts show to servers.")
    insecure: bool = security(
        False, "Allow connections between machines without TLS, and servers open to all.", common=True
    )
    transport: Literal["auto", "shared", "stream"] = channel(
        "auto",
        "How frames travel: shared memory on one machine, a TCP stream between machines.",
        means="shared where both sides are on one machine, else stream",
    )
    batch_capacity: RowsOrMeasured = channel(
        None,
        "The most rows in one dispatch; the smaller of both sides' counts.",
        means=f"{USUAL_ROWS}; on a GPU up to {MOST_ROWS}, as far as larger calls are measured to pay",
    )
    threads: Threads = compute(None, "Compute threads on the CPU.", means="torch's default", common=True)

    @property
    def usual_rows(self) -> int:
        """The batch capacity unless a larger one was measured to pay."""
        return self.batch_capacity or USUAL_ROWS

    @property
    def most_rows(self) -> int:
        """The largest batch capacity."""
        return self.batch_capacity or MOST_ROWS

    def check_open(self, flag: str, address: str, host: str, needs: Mapping[str, bool], advice: str) -> None:
        """Check that a server which other machines can reach has everything in ``needs`` (name to whether it has it).
        Raises SettingError."""
        missing = " and ".join(name for name, is_there in needs.items() if not is_there)
        if missing and not self.insecure and not is_loopback(host):
            raise SettingError(
                f"{flag}: {address} can be reached from other machines, which needs {missing}; {advice}; "
                "--insecure lets anyone in"
            )

    def check_certificate_pair(self, prefix: str = "") -> None:
        """Check that certificate and private key were given together. Raises SettingError."""
        names = [f"{prefix}tls_cert", f"{prefix}tls_key"]
        missing, given = sorted(names, key=lambda name: getattr(self, name) is not None)
        if getattr(self, missing) is None and getattr(self, given) is not None:
            missing, given = (name.replace("_", "-") for name in (missing, given))
            why = "a certificate and its private key go together"
            raise SettingError(f"--{given} needs --{missing}: {why}; {KEYS_HINT}")
