"""The settings of the host, the side that owns the model, and of one that answers many clients over HTTP."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from moeoffload.config import values
from moeoffload.config.base import channel, compute, generation, limits, recovery, reporting, security, servers, serving
from moeoffload.config.shared import KEYS_HINT, CommonSettings, LogLevel
from moeoffload.config.values import Address, is_loopback
from moeoffload.errors import SettingError

REFUSED_S: Final = 3.0
"""How long a host waits for a server that refuses connections: enough for one that is started at the same time."""

Mode = Literal["auto", "batched", "stream"]
"""How the rows of one layer are split into dispatches."""
PayloadChoice = Literal["auto", "f32", "f16", "bf16", "f8"]
"""A payload dtype; auto is that of the model or, for replies, that of the requests."""
DenseFormat = Literal["keep", "int8", "int4"]
"""The format to quantise a CPU host's linear layers to; keep leaves them as stored."""
Pipeline = Literal["auto", "on", "off"]
"""Whether the chunks of a long prompt overlap; auto is on."""


class HostSettings(CommonSettings):
    """The settings of the side that owns the model."""

    experts: values.Addresses = servers(
        (), "The expert servers to use.", means="start servers on this machine", common=True
    )
    gpu: values.Gpu = servers(
        None, "The CUDA device of a server started here.", means="the server's choice", common=True
    )
    server_memory_gib: values.GibOrAll = servers(
        None, "Memory of each server started here.", means="what is free", common=True
    )
    work_dir: values.FolderToFill = servers(
        None, "The folder for the logs of servers started on this machine.", means="temporary files"
    )
    tls_ca: values.FileToRead = security(
        None,
        "Certificates of those who vouch for servers, PEM; with it, servers are reached by TLS.",
        means="no TLS",
        common=True,
    )
    mode: Mode = channel(
        "auto",
        "One dispatch of many rows a layer and server (batched), or small slices (stream).",
        means="batched; a long prompt is cut in at least two chunks, which overlap",
    )
    dtype: PayloadChoice = channel(
        "auto",
        "The dtype of rows that travel to servers; what the model computes in is --model-dtype.",
        means="the model's activation dtype",
        common=True,
    )
    dtype_back: PayloadChoice = channel("auto", "The dtype of sums that travel back.", means="that of --dtype")
    shared_bytes: values.Size = channel(
        0, "Least shared memory with a server started here.", means="as much as a batch needs"
    )
    hot_slice: values.Rows = channel(4, "The rows of one slice in stream mode.")
    slots: values.Slots = channel(4, "Requests in flight for each server.")
    pipeline: Pipeline = channel(
        "auto",
        "Attention of one chunk of a long prompt, or of one half of a step, while servers compute the other one.",
        means="on, for models and calls whose prompts can be cut",
    )
    local_experts_gib: values.GibOrZero = compute(0.0, "Routed experts kept on the host.", means="none", common=True)
    routing_stats: values.FileToRead = compute(
        None,
        "Which experts are used most, as `moeoffload profile` writes it: those stay on the host, and the others are "
        "placed so that all servers finish together.",
        means="all experts count the same",
    )
    fast_dense: bool = compute(True, "On CPUs, dense layers, norms, attention by own kernels (other order of sums).")
    device: values.Device = compute(
        "auto", "Where the dense layers run.", means="the first CUDA device, else the CPU", common=True
    )
    model_dtype: Literal["auto", "f32", "f16", "bf16"] = compute(
        "auto", "What the model computes in: the dtype of transformers' from_pretrained.", means="the checkpoint's"
    )
    expert_format: Literal["keep", "int8", "int4", "fp8", "mxfp4"] = compute(
        "keep", "What servers pack experts of 16 or 32 bits in.", means="as they are stored", common=True
    )
    dense: values.DenseFolder = compute(
        None,
        "For a model in a GGUF file: config, tokenizer and dense layers come from this folder, experts from the file.",
        means="all comes from the GGUF file, which is possible for some families",
    )
    dense_format: DenseFormat = compute(
        "keep",
        "On a CPU, linear layers of the host are packed in this format while they are loaded; the head in 8 bits.",
        means="as they are stored",
    )
    max_new_tokens: values.Tokens = generation(256, "The most tokens to generate.", common=True)
    temperature: values.Spread = generation(
        0.0, "Spread of the sampling.", means="greedy, always the likeliest token", common=True
    )
    seed: values.Seed = generation(None, "Start of the random numbers of sampling.", means="a new one each run")
    prompt_lookup: values.GuessesOrNone = generation(
        0, "Tokens guessed from what the text has repeated, and verified in one pass.", means="no guesses"
    )
    draft: values.Draft = generation(
        None,
        "What guesses tokens, which are verified in one pass: the checkpoint's own multi-token-prediction layer, whose "
        "experts the host keeps, or a small model of the same vocabulary.",
        means="no guesses",
    )
    draft_tokens: values.Guesses = generation(4, "The most tokens that --draft guesses each time.")
    adapt_guesses: bool = generation(True, "Guess fewer tokens, or none, while that is measured to be faster.")
    required: bool | None = recovery(
        None,
        "Expert servers are needed: one that is lost and has no replica ends the run. If not required, a server on "
        "this machine takes the place of one that cannot be reached at the start.",
        means="needed at the start; the host computes the experts of one that is lost later",
    )
    replicas: values.Copies = recovery(1, "Expert servers that hold each expert; one of them computes it.")
    fallback_gib: values.GibOrZero = recovery(4.0, "Memory for experts of lost servers that the host computes.")
    verify_percent: values.Percent = recovery(
        0.0, "Share of dispatches that a replica or the host computes again; a difference ends the run.", means="none"
    )
    connect_timeout_s: values.Seconds = limits(
        10.0,
        "The longest wait for an expert server to answer at the start; unless this is given, "
        f"{REFUSED_S:g} seconds for one that refuses connections.",
    )
    load_timeout_s: values.DaySeconds = limits(1800.0, "The longest wait for an expert server to load its experts.")
    dispatch_timeout_s: values.Seconds = limits(60.0, "The longest wait for the reply to a dispatch of any size.")
    dispatch_floor_s: values.Seconds = limits(2.0, "The deadline of a dispatch is learned, but not below this.")
    profile: bool = reporting(False, "Also record each layer's times in the report.")
    report: values.FileToWrite = reporting(
        None, "The file for the run's report, as JSON.", means="no report file", common=True
    )
    log_level: LogLevel = reporting("warning", "The least serious log message that is shown.")

    @property
    def refused_timeout_s(self) -> float:
        """How long to wait for a server that refuses connections."""
        return self.connect_timeout_s if "connect_timeout_s" in self.model_fields_set else REFUSED_S

    def check_security(self, servers: Iterable[Address]) -> None:
        """Check that these settings may be used to reach ``servers``.
        Raises SettingError: they are inconsistent, or rows or the token would be sent in the clear."""
        self.check_certificate_pair()
        if self.tls_cert is not None and self.tls_ca is None:
            raise SettingError(
                f"--tls-cert needs --tls-ca, the certificate of the authority that vouches for the servers; {KEYS_HINT}"
            )
        if self.tls_ca is not None or self.insecure:
            return
        for address in servers:
            if not is_loopback(address.host):
                raise SettingError(
                    f"--experts: {address} is on another machine and this host would talk to it without TLS; give "
                    f"--tls-ca FILE ({KEYS_HINT}), or say --insecure if no other machine is on that network"
                )


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
