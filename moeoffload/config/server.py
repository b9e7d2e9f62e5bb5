"""The settings of an expert server, the side that owns routed experts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ValidationInfo, field_validator

from moeoffload.config import values
from moeoffload.config.base import channel, compute, limits, reporting, security, servers
from moeoffload.config.shared import KEYS_HINT, CommonSettings, LogLevel
from moeoffload.config.values import Address, is_loopback
from moeoffload.errors import SettingError

Kernel = Literal["auto", "tiled", "grouped"]
"""The kernel for routed experts; grouped gives the bits of transformers' grouped_mm."""


class ExpertServerSettings(CommonSettings):
    """The settings of the side that owns routed experts."""

    listen: values.Listen = servers(Address("127.0.0.1:50051"), "Where to listen for hosts.", common=True)
    model: values.ModelName = servers(
        None, "The server's own copy of the model.", means="the one the host names", common=True
    )
    client_ca: values.FileToRead = security(
        None, "Certificates that vouch for hosts, PEM; hosts then need one.", common=True
    )
    model_root: values.Folders = security(
        (),
        "Folders below which hosts may name models for this server to read.",
        means="models in the hub cache only; any for hosts of the same user on this machine",
        common=True,
    )
    shared_bytes: values.Size = channel(0, "Least shared memory with one host.", means="as much as a batch needs")
    slots: values.Slots = channel(16, "The most requests in flight for each host.")
    stream_port: values.Port = channel(0, "The TCP port of the stream transport.", means="a free one")
    # gpu comes before device: fields are validated in this order, and device depends on gpu.
    gpu: values.Gpus = compute(
        None,
        "Short for device cuda:N; of several each holds a part of every layer; not together with a different device.",
        common=True,
    )
    device: values.Device = compute(
        "auto", "Where routed experts run.", means="the last CUDA device, else the CPU", common=True
    )
    memory_gib: values.GibOrAll = compute(
        None,
        "The most memory that experts and buffers take, of each GPU if there are several.",
        means="what is free",
        common=True,
    )
    ram_gib: values.GibOrAll = compute(
        None,
        "RAM for experts beyond memory-gib, computed by the CPU; those used most move to the device.",
        means="all experts are on the device",
        common=True,
    )
    keep_warm: Literal["on", "off"] = compute(
        "on", "Experts of a host that has left stay in memory for the next one, until others need the memory."
    )
    kernel: Kernel = compute(
        "auto", "What computes the experts; grouped has transformers' bits.", means="the fastest for the model"
    )
    coalesce: bool = compute(True, "Requests that wait for the same experts, of all hosts, are computed as one batch.")
    drain_timeout_s: values.DaySeconds = limits(30.0, "The longest wait for hosts to move on at a stop.")
    log_level: LogLevel = reporting("info", "The least serious log message that is shown.")

    def __init__(self, **values: Any) -> None:
        """See `SettingsBase`; gpu or device, given as a keyword, overrides the other one's environment variable."""
        if "device" in values:
            values.setdefault("gpu", None)
        elif "gpu" in values:
            values.setdefault("device", "auto")
        super().__init__(**values)

    @field_validator("device", mode="after")
    @classmethod
    def _device_of_gpu(cls, device: str, context: ValidationInfo) -> str:
        gpu = context.data.get("gpu")
        if gpu is None:
            return device
        devices, numbers = ",".join(f"cuda:{number}" for number in gpu), ",".join(map(str, gpu))
        if device not in ("auto", devices):
            raise ValueError(f"gpu {numbers} was given too, which is {devices}")
        return devices

    def check_security(self, listen: Address) -> None:
        """Check that a server with these settings may listen at ``listen``.
        Raises SettingError: they are inconsistent, or the server would be open to others."""
        self.check_certificate_pair()
        if self.client_ca is not None and self.tls_cert is None:
            raise SettingError(f"--client-ca needs --tls-cert and --tls-key: it is a part of TLS; {KEYS_HINT}")
        needs = {
            "--tls-cert and --tls-key": self.tls_cert is not None,
            "--client-ca (or --token-file FILE)": self.has_credential,
        }
        advice = "`moeoffload keys new DIR` makes the files and prints the commands"
        self.check_open("--listen", listen, listen.host, needs, advice)

    @property
    def has_credential(self) -> bool:
        """Whether hosts need a credential: a certificate or the token."""
        return self.client_ca is not None or self.token_file is not None

    def is_for_same_user(self, listen: Address) -> bool:
        """Whether only processes of the server's own user on this machine are admitted."""
        return is_loopback(listen.host) and not self.has_credential and not self.insecure
