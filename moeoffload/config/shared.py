"""What the settings of a host and of an expert server have in common."""

from __future__ import annotations

from enum import StrEnum

from moeoffload.config.base import Panel, SettingsBase, setting
from moeoffload.config.values import FileToRead, Rows, SecretFile, Threads
from moeoffload.errors import SettingError

KEYS_HINT = "`moeoffload keys new DIR` makes them"


class TransportChoice(StrEnum):
    """How frames travel. LOOPBACK stays in the process; code may choose it, a command line or environment may not."""

    AUTO = "auto"
    SHARED = "shared"
    STREAM = "stream"
    LOOPBACK = "loopback"


class LogLevel(StrEnum):
    """The least serious log message that is shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class CommonSettings(SettingsBase):
    """The settings of both programs."""

    tls_cert: FileToRead = setting(None, Panel.SECURITY, "This side's certificate, PEM.")
    tls_key: SecretFile = setting(None, Panel.SECURITY, "The private key of that certificate, PEM.")
    token_file: SecretFile = setting(None, Panel.SECURITY, "The file that holds the token which hosts show to servers.")
    insecure: bool = setting(
        False, Panel.SECURITY, "Allow connections between machines without TLS, and servers that anybody can use."
    )
    transport: TransportChoice = setting(
        TransportChoice.AUTO,
        Panel.CHANNEL,
        "How frames travel: shared memory on one machine, a TCP stream between machines.",
        choices=("auto", "shared", "stream"),
        means="shared where both sides are on one machine, else stream",
    )
    batch_capacity: Rows = setting(
        1024, Panel.CHANNEL, "The most rows in one dispatch; the smaller of the host's and the server's counts."
    )
    threads: Threads = setting(None, Panel.COMPUTE, "Compute threads on the CPU.", means="torch's default")

    def check_certificate_pair(self, prefix: str = "") -> None:
        """Check that certificate and private key were given together. Raises SettingError."""
        names = [f"{prefix}tls_cert", f"{prefix}tls_key"]
        missing, given = sorted(names, key=lambda name: getattr(self, name) is not None)
        if getattr(self, missing) is None and getattr(self, given) is not None:
            missing, given = (name.replace("_", "-") for name in (missing, given))
            why = "a certificate and its private key go together"
            raise SettingError(f"--{given} needs --{missing}: {why}; {KEYS_HINT}")
