"""Every setting of the host and of an expert server: one annotated line each, from which everything else derives.

``python -m moeoffload.config.settings`` prints docs/settings.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf, ValidationInfo, field_validator

from moeoffload.config.generation import GenerationSettings
from moeoffload.config.recovery import RecoverySettings
from moeoffload.config.security import HostSecuritySettings, ServerSecuritySettings
from moeoffload.config.serve import HttpSettings
from moeoffload.config.sources import Panel, Setting, SettingsBase
from moeoffload.config.values import (
    SMALLEST_SHARED_BYTES,
    Address,
    check_file_to_read,
    check_file_to_write,
    check_folder,
    check_shared_bytes,
    read_addresses,
    read_device,
    read_listen,
    read_size,
)

__all__ = [
    "Address",
    "ExpertServerSettings",
    "HostSettings",
    "Kernel",
    "LogLevel",
    "Mode",
    "ModelDtypeChoice",
    "PayloadChoice",
    "Pipeline",
    "ServeSettings",
    "TransportChoice",
]

_ALIAS = "DFLASH_MOE_EXPERT_COMPUTE_"

_DTYPE_SPELLINGS = {
    "float32": "f32",
    "fp32": "f32",
    "float16": "f16",
    "fp16": "f16",
    "bfloat16": "bf16",
}
_DTYPES_ALLOWED = "auto, f32, f16 or bf16 (float32, fp32, float16, fp16 and bfloat16 too)"


class Mode(StrEnum):
    """How the rows of one layer are cut into dispatches."""

    AUTO = "auto"
    BATCHED = "batched"
    STREAM = "stream"


class TransportChoice(StrEnum):
    """How frames travel. LOOPBACK stays in the process; code may choose it, a command line or environment may not."""

    AUTO = "auto"
    SHARED = "shared"
    STREAM = "stream"
    LOOPBACK = "loopback"


class PayloadChoice(StrEnum):
    """The dtype of rows on the way; AUTO is the model's activation dtype."""

    AUTO = "auto"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"


class ModelDtypeChoice(StrEnum):
    """The dtype the host computes in; AUTO is the checkpoint's."""

    AUTO = "auto"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"


class Kernel(StrEnum):
    """What computes routed experts; GROUPED gives the bits of transformers' grouped_mm."""

    AUTO = "auto"
    TILED = "tiled"
    GROUPED = "grouped"


class Pipeline(StrEnum):
    """Whether the chunks of a long prompt follow each other through the layers; AUTO is on."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class LogLevel(StrEnum):
    """The least serious log message that is shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Rows = Annotated[int, Field(ge=1, le=4096)]
Slots = Annotated[int, Field(ge=1, le=64)]
Device = Annotated[str, BeforeValidator(read_device)]
SharedBytes = Annotated[int, BeforeValidator(read_size), AfterValidator(check_shared_bytes)]
GpuIndex = Annotated[int | None, Field(ge=0)]

_DEVICES_ALLOWED = "auto, cpu, cuda or cuda:N"
_DEVICE_METAVAR = "auto|cpu|cuda|cuda:N"
_SHARED_BYTES = Setting(
    alias=_ALIAS + "IPC_SHARED_BYTES",
    unit="bytes",
    allowed=f"0, or at least {SMALLEST_SHARED_BYTES} bytes, plain or with K, M, G, KiB, MiB or GiB (x 1024)",
    default_means="as much as needed",
    panel=Panel.CHANNEL,
)


class CommonSettings(SettingsBase):
    """What a host and an expert server both have."""

    transport: Annotated[
        TransportChoice,
        Field(description="How frames travel: shared memory on one machine, a TCP stream between machines."),
        Setting(
            alias=_ALIAS + "IPC_TRANSPORT",
            choices=("auto", "shared", "stream"),
            default_means="shared where both sides are on one machine, else stream",
            panel=Panel.CHANNEL,
        ),
    ] = TransportChoice.AUTO
    batch_capacity: Annotated[
        Rows,
        Field(description="The most rows in one dispatch; the smaller of the host's and the server's counts."),
        Setting(alias=_ALIAS + "IPC_BATCH_CAPACITY", unit="rows", panel=Panel.CHANNEL),
    ] = 1024
    threads: Annotated[
        int | None,
        Field(ge=1, le=1024, description="Compute threads on the CPU."),
        Setting(alias=_ALIAS + "THREADS", unit="threads", default_means="torch's default", panel=Panel.COMPUTE),
    ] = None


class HostSettings(HostSecuritySettings, RecoverySettings, GenerationSettings, CommonSettings):
    """The settings of the side that owns the model."""

    experts: Annotated[
        tuple[InstanceOf[Address], ...],
        BeforeValidator(read_addresses),
        Field(description="The expert servers to use."),
        Setting(
            allowed="HOST:PORT, or several with commas between, each once, ports 1 to 65535, IPv6 in brackets",
            default_means="start servers on this machine",
            metavar="HOST:PORT,...",
            panel=Panel.SERVERS,
        ),
    ] = ()
    gpu: Annotated[
        GpuIndex,
        Field(description="The CUDA device of a server started on this machine."),
        Setting(alias=_ALIAS + "IPC_GPU", default_means="the server's own choice", panel=Panel.SERVERS),
    ] = None
    server_memory_gib: Annotated[
        float | None,
        Field(gt=0, description="The memory given to each server started on this machine."),
        Setting(unit="GiB", default_means="what is free on its device", panel=Panel.SERVERS),
    ] = None
    work_dir: Annotated[
        Path | None,
        AfterValidator(check_folder),
        Field(description="The folder for logs and temporary files of servers started on this machine."),
        Setting(
            alias=_ALIAS + "IPC_WORK_DIR",
            allowed="a folder that exists and can be written to, or that can be made",
            default_means="a temporary folder",
            metavar="FOLDER",
            panel=Panel.SERVERS,
        ),
    ] = None
    mode: Annotated[
        Mode,
        Field(description="One dispatch of many rows for each layer and server (batched), or small slices (stream)."),
        Setting(alias=_ALIAS + "IPC_MODE", default_means="what measures fastest", panel=Panel.CHANNEL),
    ] = Mode.AUTO
    dtype: Annotated[
        PayloadChoice,
        Field(description="The dtype of rows on the way to expert servers and back."),
        Setting(
            alias=_ALIAS + "IPC_DTYPE",
            allowed=_DTYPES_ALLOWED,
            spellings=_DTYPE_SPELLINGS,
            default_means="the model's activation dtype",
            panel=Panel.CHANNEL,
        ),
    ] = PayloadChoice.AUTO
    shared_bytes: Annotated[
        SharedBytes,
        Field(description="The size of the shared memory segment of each server."),
        _SHARED_BYTES,
    ] = 0
    hot_slice: Annotated[
        Rows,
        Field(description="The rows of one slice in stream mode."),
        Setting(alias="DFLASH_MOE_PREFILL_HOT_SUB_BATCH", unit="rows", panel=Panel.CHANNEL),
    ] = 4
    slots: Annotated[
        Slots,
        Field(description="Requests in flight for each server."),
        Setting(unit="requests", panel=Panel.CHANNEL),
    ] = 4
    pipeline: Annotated[
        Pipeline,
        Field(description="Attention of one chunk of a long prompt while servers compute experts of the one before."),
        Setting(default_means="on, for models and calls whose prompts can be cut", panel=Panel.CHANNEL),
    ] = Pipeline.AUTO
    local_experts_gib: Annotated[
        float,
        Field(ge=0, le=65536, description="Routed experts kept on the host, beside the dense layers."),
        Setting(unit="GiB", default_means="none", panel=Panel.COMPUTE),
    ] = 0.0
    routing_stats: Annotated[
        Path | None,
        AfterValidator(check_file_to_read),
        Field(
            description="Which experts are used most, as `moeoffload profile` writes it: those stay on the host, and "
            "the others are placed so that all servers finish together."
        ),
        Setting(
            allowed="a file that can be read",
            default_means="all experts count the same",
            metavar="FILE",
            panel=Panel.COMPUTE,
        ),
    ] = None
    fast_dense: Annotated[
        bool,
        Field(description="On a CPU, dense layers, norms and attention by kernels of its own (other order of sums)."),
        Setting(panel=Panel.COMPUTE),
    ] = True
    device: Annotated[
        Device,
        Field(description="Where the dense layers run."),
        Setting(
            allowed=_DEVICES_ALLOWED,
            default_means="the first CUDA device, else the CPU",
            metavar=_DEVICE_METAVAR,
            panel=Panel.COMPUTE,
        ),
    ] = "auto"
    model_dtype: Annotated[
        ModelDtypeChoice,
        Field(description="The dtype the model computes in."),
        Setting(
            allowed=_DTYPES_ALLOWED,
            spellings=_DTYPE_SPELLINGS,
            default_means="the checkpoint's",
            panel=Panel.COMPUTE,
        ),
    ] = ModelDtypeChoice.AUTO
    profile: Annotated[
        bool,
        Field(description="Also record each layer's times in the report."),
        Setting(alias=_ALIAS + "IPC_PROFILE", panel=Panel.REPORTING),
    ] = False
    report: Annotated[
        Path | None,
        AfterValidator(check_file_to_write),
        Field(description="The file to write the run's report to, as JSON."),
        Setting(
            allowed="a file that can be written, in a folder that exists",
            default_means="no report file",
            metavar="FILE",
            panel=Panel.REPORTING,
        ),
    ] = None
    log_level: Annotated[
        LogLevel,
        Field(description="The least serious log message that is shown."),
        Setting(panel=Panel.REPORTING),
    ] = LogLevel.WARNING


class ServeSettings(HttpSettings, HostSettings):
    """The settings of a host that answers many clients over HTTP."""


class ExpertServerSettings(ServerSecuritySettings, CommonSettings):
    """The settings of the side that owns routed experts."""

    listen: Annotated[
        InstanceOf[Address],
        BeforeValidator(read_listen),
        Field(description="Where to listen for hosts."),
        Setting(
            allowed="HOST:PORT, port 0 to 65535 (0 picks a free one), IPv6 in brackets",
            metavar="HOST:PORT",
            panel=Panel.SERVERS,
        ),
    ] = Address("127.0.0.1:50051")
    model: Annotated[
        str | None,
        Field(min_length=1, description="The server's own copy of the model."),
        Setting(
            allowed="a folder or a model id of the Hugging Face hub",
            default_means="the one the host names",
            metavar="MODEL",
            panel=Panel.SERVERS,
        ),
    ] = None
    # gpu stands before device: fields are checked in this order, and device takes gpu into account.
    gpu: Annotated[
        GpuIndex,
        Field(description="Short for device cuda:N; not together with a different device."),
        Setting(alias=_ALIAS + "IPC_GPU", rival="device", panel=Panel.COMPUTE),
    ] = None
    device: Annotated[
        Device,
        Field(description="Where the routed experts live and run."),
        Setting(
            allowed=_DEVICES_ALLOWED,
            default_means="the last CUDA device, else the CPU",
            metavar=_DEVICE_METAVAR,
            rival="gpu",
            panel=Panel.COMPUTE,
        ),
    ] = "auto"
    memory_gib: Annotated[
        float | None,
        Field(gt=0, description="The most memory that experts and buffers take on the device."),
        Setting(unit="GiB", default_means="what is free", panel=Panel.COMPUTE),
    ] = None
    kernel: Annotated[
        Kernel,
        Field(description="What computes the experts; grouped gives the bits of transformers' grouped_mm."),
        Setting(default_means="the fastest that covers the model", panel=Panel.COMPUTE),
    ] = Kernel.AUTO
    shared_bytes: Annotated[
        SharedBytes,
        Field(description="The most that the shared memory segment of one host may take."),
        _SHARED_BYTES,
    ] = 0
    slots: Annotated[
        Slots,
        Field(description="The most requests in flight for each host."),
        Setting(unit="requests", panel=Panel.CHANNEL),
    ] = 16
    stream_port: Annotated[
        int,
        Field(ge=0, le=65535, description="The TCP port of the stream transport, beside that of --listen."),
        Setting(default_means="a free one, which hosts are told", panel=Panel.CHANNEL),
    ] = 0
    coalesce: Annotated[
        bool,
        Field(description="Requests that wait for the same experts, of all hosts, are computed as one batch."),
        Setting(panel=Panel.COMPUTE),
    ] = True
    collect_window_ms: Annotated[
        float,
        Field(
            ge=0,
            le=10,
            description="How long a brief request waits for others that could be computed with it.",
        ),
        Setting(
            unit="milliseconds",
            default_means="never; so it is, too, with a batch capacity of 1 or no-coalesce",
            panel=Panel.COMPUTE,
        ),
    ] = 0.0
    drain_timeout_s: Annotated[
        float,
        Field(gt=0, le=86400, description="The longest wait for hosts to move on when the server is told to stop."),
        Setting(unit="seconds", panel=Panel.TIME_LIMITS),
    ] = 30.0
    log_level: Annotated[
        LogLevel,
        Field(description="The least serious log message that is shown."),
        Setting(panel=Panel.REPORTING),
    ] = LogLevel.INFO

    @field_validator("collect_window_ms", mode="after")
    @classmethod
    def _no_window_for_one(cls, window: float, context: ValidationInfo) -> float:
        can_merge = context.data.get("coalesce", True) and context.data.get("batch_capacity", 2) > 1
        return window if can_merge else 0.0

    @field_validator("device", mode="after")
    @classmethod
    def _device_of_gpu(cls, device: str, context: ValidationInfo) -> str:
        gpu = context.data.get("gpu")
        if gpu is None:
            return device
        if device not in ("auto", f"cuda:{gpu}"):
            raise ValueError(f"gpu {gpu} was given too, which is cuda:{gpu}")
        return f"cuda:{gpu}"


_OF_RUN_ONLY = "Requests say themselves what `--max-new-tokens`, `--temperature` and `--seed` say for a run."


def markdown() -> str:
    """The text of docs/settings.md."""
    return "\n".join(_markdown_lines()) + "\n"


def _markdown_lines() -> Iterator[str]:
    yield "# Settings"
    yield ""
    yield "Made by `python -m moeoffload.config.settings`; change moeoffload/config instead of this page."
    yield ""
    yield "A value on the command line (or a Python keyword) wins over the first environment name, which wins over the"
    yield "second, which wins over the default. An empty environment variable counts as not set. Where none is allowed,"
    yield "the word `none` says so."
    host = {info.name for info in HostSettings.infos()}
    for title, model, elsewhere, note in (
        ("moeoffload run", HostSettings, set(), ""),
        ("moeoffload serve", ServeSettings, host, "Those of `moeoffload run`, and these. " + _OF_RUN_ONLY),
        ("moeoffload-expert", ExpertServerSettings, set(), ""),
    ):
        yield ""
        yield f"## {title}"
        yield ""
        if note:
            yield note
            yield ""
        yield "| Setting | Flag | Environment | Default | Allowed | Meaning |"
        yield "|---|---|---|---|---|---|"
        for info in model.infos():
            if info.name in elsewhere:
                continue
            flag = f"{info.flag} / --no-{info.flag[2:]}" if info.is_boolean else info.flag
            names = ", ".join(f"`{name}`" for name in info.env_names)
            yield f"| {info.name} | `{flag}` | {names} | {info.default} | {info.allowed} | {info.description} |"


if __name__ == "__main__":
    print(markdown(), end="")
