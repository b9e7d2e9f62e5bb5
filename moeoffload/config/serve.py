"""The settings of the HTTP server: where it listens, whom it lets in, how much it takes on at a time."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from moeoffload.config.security import SecuritySettings, is_loopback
from moeoffload.config.sources import Panel, Setting
from moeoffload.config.values import check_file_to_read, check_secret_file, read_host
from moeoffload.errors import SettingError


class PingPongChoice(StrEnum):
    """Whether two halves of a batch take turns on the host and on the servers; AUTO is where it wins."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class HttpSettings(SecuritySettings):
    """What `moeoffload.config.settings.ServeSettings` has beside the settings of a host."""

    bind: Annotated[
        str,
        BeforeValidator(read_host),
        Field(description="The name or address of this machine at which to listen for clients."),
        Setting(allowed="a host name or an address", metavar="HOST", panel=Panel.SERVING),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Field(ge=0, le=65535, description="The TCP port at which to listen for clients; 0 picks a free one."),
        Setting(panel=Panel.SERVING),
    ] = 8000
    api_key_file: Annotated[
        Path | None,
        AfterValidator(check_secret_file),
        Field(description="The file that holds the key which clients show (Authorization: Bearer)."),
        Setting(
            allowed="a file that only its owner can read (chmod 600)",
            default_means="no key",
            metavar="FILE",
            panel=Panel.SERVING,
        ),
    ] = None
    http_tls_cert: Annotated[
        Path | None,
        AfterValidator(check_file_to_read),
        Field(description="The certificate that clients see, PEM; with it, the server speaks HTTPS."),
        Setting(allowed="a file that can be read", default_means="no TLS", metavar="FILE", panel=Panel.SERVING),
    ] = None
    http_tls_key: Annotated[
        Path | None,
        AfterValidator(check_secret_file),
        Field(description="The private key of that certificate, PEM."),
        Setting(allowed="a file that only its owner can read (chmod 600)", metavar="FILE", panel=Panel.SERVING),
    ] = None
    served_model_name: Annotated[
        str | None,
        Field(min_length=1, max_length=200, description="What clients call the model."),
        Setting(
            allowed="a text of 1 to 200 characters",
            default_means="the name of its folder, or its hub id",
            metavar="NAME",
            panel=Panel.SERVING,
        ),
    ] = None
    max_running: Annotated[
        int,
        Field(ge=1, le=1024, description="The most requests that are computed at a time."),
        Setting(unit="requests", panel=Panel.SERVING),
    ] = 32
    max_waiting: Annotated[
        int,
        Field(ge=0, le=65536, description="The most requests that wait for their turn; further ones are refused."),
        Setting(unit="requests", panel=Panel.SERVING),
    ] = 64
    kv_gib: Annotated[
        float,
        Field(gt=0, le=65536, description="The memory for keys and values of all requests."),
        Setting(unit="GiB", panel=Panel.SERVING),
    ] = 1.0
    prefill_chunk: Annotated[
        int,
        Field(ge=1, le=65536, description="The most tokens of prompts in one step, beside the running requests."),
        Setting(unit="tokens", panel=Panel.SERVING),
    ] = 512
    ping_pong: Annotated[
        PingPongChoice,
        Field(description="Two halves of a batch: attention of one while servers compute experts of the other."),
        Setting(default_means="where it wins", panel=Panel.SERVING),
    ] = PingPongChoice.AUTO
    prefix_reuse: Annotated[
        bool,
        Field(description="Keys and values of earlier requests are kept for prompts that begin the same."),
        Setting(panel=Panel.SERVING),
    ] = True
    drain_seconds: Annotated[
        float,
        Field(ge=0, le=86400, description="The longest wait for running requests when the server is told to stop."),
        Setting(unit="seconds", panel=Panel.SERVING),
    ] = 30.0

    def check_http(self) -> None:
        """Whether a server with these settings may listen for clients.

        Raises:
            SettingError: they do not go together, or the server would be open to others.
        """
        if (self.http_tls_cert is None) != (self.http_tls_key is None):
            flags = ("http-tls-cert", "http-tls-key")
            given, missing = flags if self.http_tls_key is None else flags[::-1]
            raise SettingError(f"--{given} needs --{missing}: a certificate and its private key go together")
        missing_flags = []
        if self.http_tls_cert is None:
            missing_flags.append("--http-tls-cert and --http-tls-key")
        if self.api_key_file is None:
            missing_flags.append("--api-key-file FILE")
        if not missing_flags or self.insecure or is_loopback(self.bind):
            return
        raise SettingError(
            f"--bind: {self.bind} can be reached from other machines, which needs {' and '.join(missing_flags)}; "
            "`moeoffload keys new DIR` makes certificates, `openssl rand -hex 32` a key; --insecure lets everybody in"
        )
