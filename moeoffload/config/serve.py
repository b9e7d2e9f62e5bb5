"""The settings of a host that answers many clients over HTTP."""

from __future__ import annotations

from moeoffload.config import values
from moeoffload.config.base import serving
from moeoffload.config.host import HostSettings


class ServeSettings(HostSettings):
    """The settings of a host that answers many clients over HTTP."""

    bind: values.HostName = serving(
        "127.0.0.1", "The name or address of this machine at which to listen for clients.", common=True
    )
    port: values.Port = serving(8000, "The TCP port at which to listen for clients; 0 picks a free one.", common=True)
    api_key_file: values.SecretFile = serving(
        None, "The file of the key that clients show (Bearer).", means="no key", common=True
    )
    http_tls_cert: values.FileToRead = serving(None, "The certificate for clients, PEM: HTTPS.", means="no TLS")
    http_tls_key: values.SecretFile = serving(None, "The private key of that certificate, PEM.")
    served_model_name: values.Name = serving(None, "Model name for clients.", means="its folder's name, or hub id")
    max_running: values.Requests = serving(32, "The most requests that are computed at a time.")
    max_waiting: values.RequestsOrNone = serving(64, "The most requests that wait for their turn; others are refused.")
    kv_gib: values.Gib = serving(1.0, "The memory for keys and values of all requests.", common=True)
    prefill_chunk: values.PromptTokens = serving(512, "The most prompt tokens in a step, beside the running requests.")
    prefix_reuse: bool = serving(True, "Keys and values of earlier requests are kept for prompts that begin the same.")
    drain_seconds: values.DaySecondsOrNone = serving(30.0, "The longest wait for running requests at a stop.")

    def check_http(self) -> None:
        """Check that a server with these settings may listen for clients.
        Raises SettingError: they are inconsistent, or the server would be open to others."""
        self.check_certificate_pair("http_")
        needs = {
            "--http-tls-cert and --http-tls-key": self.http_tls_cert is not None,
            "--api-key-file FILE": self.api_key_file is not None,
        }
        advice = "`moeoffload keys new DIR` makes certificates, `openssl rand -hex 32` a key"
        self.check_open("--bind", self.bind, self.bind, needs, advice)
