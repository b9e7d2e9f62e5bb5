"""Settings: where they come from, what they refuse and how they say it; the options and the page made of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from moeoffload.cli.options import exit_on_error, with_settings
from moeoffload.config import (
    Address,
    DtypeChoice,
    ExpertServerSettings,
    HostSettings,
    LogLevel,
    Mode,
    ServeSettings,
    SettingsBase,
    TransportChoice,
)
from moeoffload.config.base import ALIASES, unknown_names
from moeoffload.config.page import markdown
from moeoffload.errors import PlacementError, SettingError

ROOT = Path(__file__).parent.parent
P = "DFLASH_MOE_EXPERT_COMPUTE_"
MODELS: tuple[type[SettingsBase], ...] = (HostSettings, ServeSettings, ExpertServerSettings)
OF_HOST = set(HostSettings.model_fields)

ALIAS_CASES = [
    (HostSettings, "mode", P + "IPC_MODE", "stream", Mode.STREAM),
    (HostSettings, "transport", P + "IPC_TRANSPORT", "shared", TransportChoice.SHARED),
    (HostSettings, "dtype", P + "IPC_DTYPE", "float16", DtypeChoice.F16),
    (HostSettings, "batch_capacity", P + "IPC_BATCH_CAPACITY", "4096", 4096),
    (HostSettings, "hot_slice", "DFLASH_MOE_PREFILL_HOT_SUB_BATCH", "8", 8),
    (HostSettings, "shared_bytes", P + "IPC_SHARED_BYTES", "64KiB", 65536),
    (HostSettings, "work_dir", P + "IPC_WORK_DIR", ".", Path()),
    (HostSettings, "required", P + "IPC_REQUIRED", "0", False),
    (HostSettings, "profile", P + "IPC_PROFILE", "1", True),
    (HostSettings, "gpu", P + "IPC_GPU", "1", 1),
    (HostSettings, "threads", P + "THREADS", "12", 12),
    (ExpertServerSettings, "gpu", P + "IPC_GPU", "1", 1),
    (ExpertServerSettings, "threads", P + "THREADS", "12", 12),
    (ExpertServerSettings, "transport", P + "IPC_TRANSPORT", "stream", TransportChoice.STREAM),
    (ExpertServerSettings, "batch_capacity", P + "IPC_BATCH_CAPACITY", "1", 1),
    (ExpertServerSettings, "shared_bytes", P + "IPC_SHARED_BYTES", "1G", 1 << 30),
]

# Setting -> values that are not allowed. No folder without permission is among them: root may write anywhere.
BAD = {
    "experts": ["here", "a:0", "a:65536", "a:x", "a:1,a:1", "A:1,a:1", "a:1,", "::1:5", "[::g]:5", "1.2.3:4", "a b:1"],
    "mode": ["batch", "2"],
    "transport": ["tcp", "loopback"],
    "dtype": ["f64", "int8"],
    "batch_capacity": ["0", "4097", "many", "1.5", "-1"],
    "hot_slice": ["0", "4097", "4 rows"],
    "slots": ["0", "65"],
    "shared_bytes": ["-1", "1T", "1025G", "64KB", "1.5G", "5iB"],
    "work_dir": [__file__, __file__ + "/below", "a" * 300],
    "required": ["maybe", "2"],
    "replicas": ["0", "9", "two"],
    "fallback_gib": ["-1", "65537", "nan"],
    "hedge_ms": ["-1", "60001", "soon"],
    "verify_percent": ["-1", "101", "all"],
    "dispatch_floor_s": ["0", "3601", "nan"],
    "coalesce": ["maybe", "2"],
    "collect_window_ms": ["-1", "10.1", "nan", "long"],
    "stream_port": ["-1", "65536", "any"],
    "drain_timeout_s": ["0", "86401", "never"],
    "profile": ["maybe", "2"],
    "gpu": ["-1", "cuda:0"],
    "threads": ["0", "1025"],
    "device": ["tpu", "cuda:", "cuda:-1", "cuda:01", "gpu"],
    "model_dtype": ["f8"],
    "connect_timeout_s": ["0", "3601", "nan", "inf", "soon"],
    "load_timeout_s": ["0", "86401", "nan"],
    "dispatch_timeout_s": ["0", "3601", "-1"],
    "max_new_tokens": ["0", "-5"],
    "prompt_lookup": ["-1", "16", "some"],
    "draft_model": [__file__, "no/such/folder"],
    "draft_tokens": ["0", "16"],
    "temperature": ["-0.1", "5.1", "nan", "hot"],
    "seed": ["x", "9223372036854775808"],
    "report": [".", "no/such/folder/report.json"],
    "log_level": ["loud"],
    "server_memory_gib": ["0", "-1", "inf"],
    "listen": ["50051", "a:65536", "a:-1", "a:1,b:2"],
    "memory_gib": ["0", "nan"],
    "kernel": ["fast"],
    "pipeline": ["maybe", "1"],
    "local_experts_gib": ["-1", "65537", "nan", "all"],
    "routing_stats": [".", "no/such/file.json"],
    "fast_dense": ["maybe", "2"],
    "tls_cert": [".", "no/such/file.pem"],
    "tls_key": [".", "no/such/file.key"],
    "tls_ca": [".", "no/such/file.pem"],
    "client_ca": [".", "no/such/file.pem"],
    "token_file": [".", "no/such/token"],
    "insecure": ["maybe", "2"],
    "model_root": ["no/such/folder", __file__, "/,no/such/folder"],
    "model": [],  # any text may be a model id; empty text is refused with the rest
    "bind": ["a b", "::g", "1.2.3", "a:1"],
    "port": ["-1", "65536", "http"],
    "api_key_file": [".", "no/such/key"],
    "http_tls_cert": [".", "no/such/file.pem"],
    "http_tls_key": [".", "no/such/file.key"],
    "served_model_name": ["n" * 201],
    "max_running": ["0", "1025", "many"],
    "max_waiting": ["-1", "65537"],
    "kv_gib": ["0", "-1", "nan"],
    "prefill_chunk": ["0", "65537"],
    "prefix_reuse": ["maybe", "2"],
    "drain_seconds": ["-1", "86401", "nan"],
}
BAD_CASES = [
    pytest.param(model, info, bad, id=f"{model.__name__}-{info.name}-{bad[:12]}")
    for model in MODELS
    for info in model.infos()
    for bad in BAD[info.name]
    if model is not ServeSettings or info.name not in OF_HOST
]


@pytest.fixture(autouse=True)
def _no_settings_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("MOEOFFLOAD_", "DFLASH_")):
            monkeypatch.delenv(name)


def refusal(build: Callable[[], object]) -> str:
    with pytest.raises(SettingError) as caught:
        build()
    assert caught.value.exit_code == 2
    return str(caught.value)


# ---------------------------------------------------------------- defaults and values


@pytest.mark.parametrize("model", MODELS)
def test_settings_cannot_be_changed(model: type[SettingsBase]) -> None:
    with pytest.raises(ValueError, match="frozen"):
        model().slots = 5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({"bind": "0.0.0.0"}, "--http-tls-cert and --http-tls-key and --api-key-file FILE"),
        ({"bind": "[::]", "api_key_file": True}, "needs --http-tls-cert and --http-tls-key;"),
        ({"bind": "node7", "http_tls_cert": True, "http_tls_key": True}, "needs --api-key-file FILE;"),
        ({"http_tls_cert": True}, "--http-tls-cert needs --http-tls-key"),
        ({"http_tls_key": True, "insecure": True}, "--http-tls-key needs --http-tls-cert"),
        ({"bind": "10.0.0.7", "api_key_file": True, "http_tls_cert": True, "http_tls_key": True}, None),
        ({"bind": "10.0.0.7", "insecure": True}, None),
        ({"bind": "::1"}, None),
        ({"bind": "localhost"}, None),
    ],
)
def test_what_an_http_server_needs(values: dict[str, Any], missing: str | None, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(0o600)
    paths = {name: str(file) for name, value in values.items() if value is True and name != "insecure"}
    settings = ServeSettings.load(values | paths)
    if missing is None:
        settings.check_http()
    else:
        assert missing in refusal(settings.check_http)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("experts", "node1:50051, [::1]:5", ("node1:50051", "[::1]:5")),
        ("experts", "", ()),
        ("mode", "Batched", Mode.BATCHED),
        ("dtype", "fp32", DtypeChoice.F32),
        ("dtype", "Float32", DtypeChoice.F32),
        ("dtype", "fp16", DtypeChoice.F16),
        ("dtype", "bfloat16", DtypeChoice.BF16),
        ("model_dtype", "bfloat16", DtypeChoice.BF16),
        ("shared_bytes", "100", 100),
        ("shared_bytes", "64K", 65536),
        ("shared_bytes", "3M", 3 << 20),
        ("shared_bytes", "3MiB", 3 << 20),
        ("shared_bytes", "2g", 2 << 30),
        ("shared_bytes", "2 GiB", 2 << 30),
        ("device", "CUDA:3", "cuda:3"),
        ("device", "cuda", "cuda"),
        ("gpu", "none", None),
        ("seed", "-7", -7),
        ("temperature", "0.7", 0.7),
        ("log_level", "DEBUG", LogLevel.DEBUG),
        *(("required", word, True) for word in ("1", "true", "yes", "on", "ON")),
        *(("required", word, False) for word in ("0", "false", "no", "off", "No")),
    ],
)
def test_reads_text(name: str, text: str, value: Any) -> None:
    read = getattr(HostSettings.load({name: text}), name)
    assert read == value
    assert type(read) is type(value)


def test_address_has_host_and_port() -> None:
    named, ipv6 = HostSettings.load({"experts": ["Node1:50051", "[0:0::1]:5"]}).experts
    assert (named, named.host, named.port) == ("node1:50051", "node1", 50051)
    assert (ipv6, ipv6.host, ipv6.port) == ("[::1]:5", "::1", 5)
    assert isinstance(named, Address)


def test_folder_that_can_be_made_is_allowed_and_not_made(tmp_path: Path) -> None:
    settings = HostSettings(work_dir=tmp_path / "a" / "b")
    assert settings.work_dir == tmp_path / "a" / "b"
    assert list(tmp_path.iterdir()) == []


def test_loopback_is_for_code_only() -> None:
    assert HostSettings(transport=TransportChoice.LOOPBACK).transport is TransportChoice.LOOPBACK
    assert "auto, shared or stream" in refusal(lambda: HostSettings.load({"transport": "loopback"}))


# ---------------------------------------------------------------- where values come from


@pytest.mark.parametrize(("model", "name", "alias", "text", "value"), ALIAS_CASES)
def test_alias_is_read(
    model: type[SettingsBase], name: str, alias: str, text: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(alias, text)
    assert getattr(model.load(), name) == value


def test_no_alias_is_untested() -> None:
    models = (HostSettings, ExpertServerSettings)
    declared = {(model, name, ALIASES[name]) for model in models for name in model.model_fields if name in ALIASES}
    assert declared == {(model, name, alias) for model, name, alias, _, _ in ALIAS_CASES}


@pytest.mark.parametrize("model", MODELS)
def test_precedence(model: type[SettingsBase], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(P + "IPC_BATCH_CAPACITY", "none such")
    assert model.load({"batch_capacity": "3"}).batch_capacity == 3, "a bad value of a weaker source does no harm"  # type: ignore[attr-defined]
    monkeypatch.setenv(P + "IPC_BATCH_CAPACITY", "1")
    assert model.load().batch_capacity == 1  # type: ignore[attr-defined]
    monkeypatch.setenv("MOEOFFLOAD_BATCH_CAPACITY", "2")
    assert model.load().batch_capacity == 2  # type: ignore[attr-defined]
    assert model.load({"batch_capacity": None}).batch_capacity == 2  # type: ignore[attr-defined]
    assert model.load({"batch_capacity": "3"}).batch_capacity == 3  # type: ignore[attr-defined]
    assert model(batch_capacity=4).batch_capacity == 4  # type: ignore[attr-defined]


def test_empty_environment_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for model in MODELS:
        for info in model.infos():
            for env in info.env_names:
                monkeypatch.setenv(env, "")
    for model in MODELS:
        for name, field in model.model_fields.items():
            assert getattr(model.load(), name) == field.default
    monkeypatch.setenv(P + "IPC_BATCH_CAPACITY", "7")
    assert HostSettings.load().batch_capacity == 7


def test_an_environment_variable_without_our_prefix_is_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("slots", "SLOTS", "experts"):
        monkeypatch.setenv(name, "7")
    assert HostSettings.load() == HostSettings()


# ---------------------------------------------------------------- refusals


def test_every_setting_has_a_bad_value() -> None:
    assert {info.name for model in MODELS for info in model.infos()} == set(BAD)


@pytest.mark.parametrize(("model", "info", "bad"), BAD_CASES)
def test_bad_value_is_refused_by_each_source(model: Any, info: Any, bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_named(message: str, source: str) -> None:
        shown = bad if len(bad) < 100 else bad[:100]
        assert message.startswith(f"{source}: '{shown}")
        assert f"allowed is {info.allowed}" in message
        assert "\n" not in message

    is_named(refusal(lambda: model.load({info.name: bad})), info.flag)
    is_named(refusal(lambda: model(**{info.name: bad})), info.name)
    for env in info.env_names:
        with monkeypatch.context() as patch:
            patch.setenv(env, bad)
            is_named(refusal(model.load), env)
            is_named(refusal(model), env)


def test_the_message_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(P + "IPC_BATCH_CAPACITY", "9000")
    assert refusal(HostSettings.load) == (
        "DFLASH_MOE_EXPERT_COMPUTE_IPC_BATCH_CAPACITY: '9000' is not allowed; "
        "allowed is an integer from 1 to 4096 (rows)"
    )


def test_all_bad_settings_are_told_at_once() -> None:
    lines = refusal(lambda: HostSettings.load({"slots": "0", "mode": "x", "gpu": "y"})).splitlines()
    assert sorted(line.split(":")[0] for line in lines) == ["--gpu", "--mode", "--slots"]


def test_line_breaks_and_long_values_stay_one_short_line() -> None:
    message = refusal(lambda: HostSettings.load({"mode": "a\nb" * 1000}))
    assert "\n" not in message
    assert len(message) < 400


def test_unknown_keyword_is_refused_with_the_nearest() -> None:
    assert "did you mean batch_capacity?" in refusal(lambda: HostSettings.load({"batch_capacty": 5}))


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("MOEOFFLOAD_BATCH_CAPACTY", "; did you mean MOEOFFLOAD_BATCH_CAPACITY?"),
        (P + "IPC_SHARED_BYTE", f"; did you mean {P}IPC_SHARED_BYTES?"),
        ("DFLASH_MOE_PREFIL_HOT_SUB_BATCH", "; did you mean DFLASH_MOE_PREFILL_HOT_SUB_BATCH?"),
        ("DFLASH_MOE_QQQ", ""),
    ],
)
def test_misspelt_environment_name_warns_with_the_nearest(
    name: str, nearest: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, "5")
    HostSettings.load()
    assert [record.getMessage() for record in caplog.records] == [
        f"{name} is set, but there is no such setting{nearest}"
    ]


def test_names_of_the_other_model_and_of_others_are_not_unknown() -> None:
    names = ("MOEOFFLOAD_LISTEN", "MOEOFFLOAD_MODE", "OTHER", "DFLASH_OTHER", *ALIASES.values())
    assert unknown_names(dict.fromkeys(names, "1")) == []


def test_no_window_where_nothing_can_be_collected() -> None:
    assert ExpertServerSettings.load({"collect_window_ms": "2.5"}).collect_window_ms == 2.5
    for other in ({"batch_capacity": "1"}, {"coalesce": "off"}):
        assert ExpertServerSettings.load({"collect_window_ms": "2.5", **other}).collect_window_ms == 0


# ---------------------------------------------------------------- gpu and device of a server


@pytest.mark.parametrize(
    ("typed", "environment", "device"),
    [
        ({"gpu": "2"}, {}, "cuda:2"),
        ({"gpu": "2", "device": "cuda:2"}, {}, "cuda:2"),
        ({}, {P + "IPC_GPU": "1"}, "cuda:1"),
        ({"gpu": "1"}, {"MOEOFFLOAD_DEVICE": "cpu"}, "cuda:1"),
        ({"device": "cpu"}, {"MOEOFFLOAD_GPU": "1"}, "cpu"),
        ({"gpu": "1", "device": "cpu"}, {}, "--device: 'cpu'"),
        ({}, {"MOEOFFLOAD_GPU": "1", "MOEOFFLOAD_DEVICE": "cuda:0"}, "MOEOFFLOAD_DEVICE: 'cuda:0'"),
    ],
)
def test_gpu_is_short_for_a_device_and_what_is_typed_silences_the_environment(
    typed: dict[str, str], environment: dict[str, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if ": " in device:
        message = refusal(lambda: ExpertServerSettings.load(typed))
        assert message.startswith(device)
        assert "cuda:1" in message
    else:
        assert ExpertServerSettings.load(typed).device == device


# ---------------------------------------------------------------- the page


def test_page_is_fresh() -> None:
    page = ROOT / "docs" / "settings.md"
    assert page.read_text(encoding="utf-8") == markdown(), "run: make docs"


# ---------------------------------------------------------------- the command line


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()

    @app.command()
    @with_settings(HostSettings)
    def run(
        settings: HostSettings,
        model: Annotated[str, typer.Argument(help="The model.")],
        prompt: Annotated[str, typer.Option("--prompt", help="What to say.")] = "hello",
    ) -> None:
        """Run a model."""
        print(model, prompt, settings.slots, settings.required, settings.experts, settings.seed)

    @app.command()
    @with_settings(ExpertServerSettings)
    def serve(settings: ExpertServerSettings) -> None:
        print(settings.listen, settings.device)

    @app.command()
    @with_settings(ServeSettings)
    def listen(settings: ServeSettings) -> None:
        print(settings.bind, settings.port)

    @app.command()
    @exit_on_error()
    def fail(how: str) -> None:
        ends: dict[str, BaseException] = {
            "table": PlacementError("too big\na table"),
            "break": KeyboardInterrupt(),
            "pipe": BrokenPipeError(),
        }
        raise ends[how]

    return app


def call(app: typer.Typer, *words: str) -> Any:
    return CliRunner().invoke(app, words, terminal_width=250, env={"COLUMNS": "250"})


def plain(text: str) -> str:
    """Without colours, which typer turns on where it believes to be in a build service."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_options_reach_the_settings(app: typer.Typer) -> None:
    words = "run m --slots 7 --no-required --experts a:1,b:2 --seed -1 --prompt hi"
    done = call(app, *words.split())
    assert done.exit_code == 0, done.output
    assert done.stdout == "m hi 7 False ('a:1', 'b:2') -1\n"


def test_settings_not_typed_come_from_elsewhere(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEOFFLOAD_REQUIRED", "no")
    monkeypatch.setenv("MOEOFFLOAD_SLOTS", "9")
    assert call(app, "run", "m").stdout == "m hello 9 False () None\n"
    assert call(app, "run", "m", "--required").stdout == "m hello 9 True () None\n"
    assert call(app, "serve", "--listen", "h:1", "--gpu", "0").stdout == "h:1 cuda:0\n"


@pytest.mark.parametrize(
    ("command", "model"), [("run m", HostSettings), ("listen", ServeSettings), ("serve", ExpertServerSettings)]
)
def test_a_bad_value_on_the_command_line_is_one_line(app: typer.Typer, command: str, model: type[SettingsBase]) -> None:
    for info in model.infos():
        if BAD[info.name] and not info.is_boolean and (model is not ServeSettings or info.name not in OF_HOST):
            done = call(app, *command.split(), info.flag, BAD[info.name][0])
            assert (done.exit_code, done.stdout) == (2, "")
            assert done.stderr.startswith(f"error: {info.flag}: '")
            assert done.stderr.endswith(f"allowed is {info.allowed}\n")
            assert done.stderr.count("\n") == 1


def test_a_bad_value_of_the_environment_is_one_line(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEOFFLOAD_COALESCE", "maybe")
    done = call(app, "serve")
    assert (done.exit_code, done.stdout) == (2, "")
    allowed = "1, true, yes, on, 0, false, no or off"
    assert done.stderr == f"error: MOEOFFLOAD_COALESCE: 'maybe' is not allowed; allowed is {allowed}\n"


@pytest.mark.parametrize(
    ("command", "model"), [("run", HostSettings), ("listen", ServeSettings), ("serve", ExpertServerSettings)]
)
def test_help_tells_all(app: typer.Typer, command: str, model: type[SettingsBase]) -> None:
    done = call(app, command, "--help")
    assert done.exit_code == 0
    text = " ".join(plain(done.stdout).replace("│", " ").split())
    for info in model.infos():
        for words in (info.flag, info.default, info.panel, *info.env_names):
            assert words in text
    assert "--no-required" in text or model is ExpertServerSettings
    assert "What to say." in text or model is not HostSettings


def test_error_interrupt_and_closed_pipe_end_quietly(app: typer.Typer) -> None:
    done = call(app, "fail", "table")
    assert (done.exit_code, done.stderr) == (PlacementError.exit_code, "error: too big\na table\n")
    assert (call(app, "fail", "break").exit_code, call(app, "fail", "break").output) == (130, "")
    assert (call(app, "fail", "pipe").exit_code, call(app, "fail", "pipe").output) == (141, "")


def test_reader_that_leaves_early_gets_no_traceback() -> None:
    code = (
        "import typer\n"
        "from moeoffload.cli.options import with_settings\n"
        "from moeoffload.config import HostSettings\n"
        "def run(settings: HostSettings) -> None:\n"
        "    for _ in range(200_000): print('a line')\n"
        "typer.run(with_settings(HostSettings)(run))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_help_and_refusals_need_no_heavy_imports() -> None:
    code = (
        "import sys\n"
        "from moeoffload.cli import expert_app, host_app\n"
        "def call(main, *words):\n"
        "    sys.argv = ['command', *words]\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        "for words in (['--help'], ['--version'], ['run', '--help'], ['run', 'm', '--slots', '0'], ['run', 'm'],\n"
        "              ['serve', 'm', '--port', 'x'], ['profile', '--help'], ['keys', '--help'], ['top', '--help']):\n"
        "    call(host_app.main, *words)\n"
        "for words in (['--help'], ['--version'], ['--slots', '0']):\n"
        "    call(expert_app.main, *words)\n"
        "heavy = 'torch transformers numpy numba grpc zmq fastapi uvicorn cryptography huggingface_hub'\n"
        "print('imported:', *sorted(set(heavy.split()) & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1].split() == ["imported:"]
