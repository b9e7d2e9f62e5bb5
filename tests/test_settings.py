"""Settings: where they come from, what they refuse and how they say it; the options and the page made of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from command_lines import ROOT, run_python
from settings_page import markdown
from typer.testing import CliRunner

from moeoffload.cli import expert_app, host_app
from moeoffload.cli.options import with_settings
from moeoffload.config import (
    Address,
    ExpertServerSettings,
    HostSettings,
    ServeSettings,
    SettingInfo,
    SettingsBase,
)
from moeoffload.config.base import ALIASES
from moeoffload.errors import SettingError

P = "DFLASH_MOE_EXPERT_COMPUTE_"
MODELS: tuple[type[SettingsBase], ...] = (HostSettings, ServeSettings, ExpertServerSettings)
OF_HOST = set(HostSettings.model_fields)

ALIAS_CASES = [
    ("mode", P + "IPC_MODE", "stream", "stream"),
    ("transport", P + "IPC_TRANSPORT", "shared", "shared"),
    ("dtype", P + "IPC_DTYPE", "float16", "f16"),
    ("batch_capacity", P + "IPC_BATCH_CAPACITY", "4096", 4096),
    ("hot_slice", "DFLASH_MOE_PREFILL_HOT_SUB_BATCH", "8", 8),
    ("shared_bytes", P + "IPC_SHARED_BYTES", "64KiB", 65536),
    ("work_dir", P + "IPC_WORK_DIR", ".", Path()),
    ("required", P + "IPC_REQUIRED", "0", False),
    ("profile", P + "IPC_PROFILE", "1", True),
    ("gpu", P + "IPC_GPU", "1", 1),
    ("threads", P + "THREADS", "12", 12),
]

# Setting -> values that are not allowed, where type and bounds do not say. No folder without permission is among them:
# root may write anywhere.
BAD = {
    "experts": ["here", "a:0", "a:65536", "a:x", "a:1,a:1", "A:1,a:1", "a:1,", "::1:5", "[::g]:5", "1.2.3:4", "a b:1"],
    "transport": ["tcp", "loopback"],
    "shared_bytes": ["-1", "1T", "1025G", "64KB", "1.5G", "5iB"],
    "work_dir": [__file__, __file__ + "/below", "a" * 300],
    "device": ["tpu", "cuda:", "cuda:-1", "cuda:01", "gpu"],
    "draft": ["owns", __file__],
    "gpu": ["-1", "1.5", "x", "0,0", "0,", "a,b", "0,-1"],
    "dense": [__file__, "no/such/folder"],
    "seed": ["x", "9223372036854775808"],
    "report": [".", "no/such/folder/report.json"],
    "listen": ["50051", "a:65536", "a:-1", "a:1,b:2"],
    "model_root": ["no/such/folder", __file__, "/,no/such/folder"],
    "model": [],  # any text may be a model id; empty text is refused with the rest
    "bind": ["a b", "::g", "1.2.3", "a:1"],
    "served_model_name": ["n" * 201],
}


def bad_values(info: SettingInfo) -> list[str]:
    if info.name in BAD:
        return BAD[info.name]
    if info.is_boolean or info.choices:
        return ["other", "2"]
    if info.metavar in ("FILE", "FOLDER"):
        return ["no/such", "." if info.metavar == "FILE" else __file__]
    bounds = re.search(r"(integer|number) (?:from|of at least|above) (\S+)(?: (?:to|and at most) (\S+))?", info.allowed)
    assert bounds is not None, f"{info.name} has no bad value"
    low = float(bounds[2].rstrip(",")) - (0 if "above" in info.allowed else 1)
    beyond = [f"{low:g}", *([f"{float(bounds[3].rstrip(',')) + 1:.10g}"] if bounds[3] else [])]
    return [*beyond, "many", *(["1.5"] if bounds[1] == "integer" else ["nan", "inf"])]


BAD_CASES = [
    pytest.param(model, info, bad, id=f"{model.__name__}-{info.name}-{bad[:12]}")
    for model in MODELS
    for info in model.infos()
    for bad in bad_values(info)
    if model is not ServeSettings or info.name not in OF_HOST
]


def refusal(build: Callable[[], object]) -> str:
    with pytest.raises(SettingError) as caught:
        build()
    assert caught.value.exit_code == 2
    return str(caught.value)


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
        ("mode", "Batched", "batched"),
        *(("dtype", text, "f32") for text in ("fp32", "Float32")),
        *(("model_dtype", text, "bf16") for text in ("bf16", "bfloat16")),
        *(("shared_bytes", text, 3 << 20) for text in ("3145728", "3072K", "3M", "3MiB", "3 mib")),
        ("device", "CUDA:3", "cuda:3"),
        ("device", "cuda", "cuda"),
        ("gpu", "none", None),
        ("seed", "-7", -7),
        ("temperature", "0.7", 0.7),
        ("log_level", "DEBUG", "debug"),
        *(("required", word, True) for word in ("1", "true", "yes", "on", "ON")),
        *(("required", word, False) for word in ("0", "false", "no", "off", "No")),
    ],
)
def test_reads_text(name: str, text: str, value: Any) -> None:
    read = getattr(HostSettings.load({name: text}), name)
    assert read == value
    assert type(read) is type(value)


def test_an_empty_name_of_a_folder_does_not_mean_all_that_the_default_allows() -> None:
    assert "is no folder" in refusal(lambda: ExpertServerSettings.load({"model_root": ""}))


def test_address_has_host_and_port() -> None:
    named, ipv6 = HostSettings.load({"experts": ["Node1:50051", "[0:0::1]:5"]}).experts
    assert (named, named.host, named.port) == (Address("node1:50051"), "node1", 50051)
    assert (ipv6, ipv6.host, ipv6.port) == (Address("[::1]:5"), "::1", 5)


def test_folder_that_can_be_made_is_allowed_and_not_made(tmp_path: Path) -> None:
    assert HostSettings(work_dir=tmp_path / "a" / "b").work_dir == tmp_path / "a" / "b"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "alias", "text", "value"), ALIAS_CASES)
def test_alias_is_read(name: str, alias: str, text: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(alias, text)
    for model in MODELS:
        if name in model.model_fields:
            several = name == "gpu" and model is ExpertServerSettings
            assert getattr(model.load(), name) == ((value,) if several else value)


def test_no_alias_is_untested() -> None:
    assert {name: alias for name, alias, _, _ in ALIAS_CASES} == ALIASES


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


def test_empty_and_others_environment_variables_are_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = [model() for model in MODELS]
    for model in MODELS:
        for info in model.infos():
            for env in info.env_names:
                monkeypatch.setenv(env, "")
    for name in ("slots", "SLOTS", "experts"):
        monkeypatch.setenv(name, "7")
    assert [model.load() for model in MODELS] == defaults
    monkeypatch.setenv(P + "IPC_BATCH_CAPACITY", "7")
    assert HostSettings.load().batch_capacity == 7


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


def test_all_bad_settings_are_told_at_once_each_in_one_short_line() -> None:
    lines = refusal(lambda: HostSettings.load({"slots": "0", "mode": "a\nb" * 1000, "gpu": "y"})).splitlines()
    assert sorted(line.split(":")[0] for line in lines) == ["--gpu", "--mode", "--slots"]
    assert max(map(len, lines)) < 400
    assert "did you mean batch_capacity?" in refusal(lambda: HostSettings.load({"batch_capacty": 5}))


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        *((known, None) for known in ("MOEOFFLOAD_LISTEN", "OTHER", "DFLASH_OTHER", *ALIASES.values())),
        ("MOEOFFLOAD_BATCH_CAPACTY", "; did you mean MOEOFFLOAD_BATCH_CAPACITY?"),
        (P + "IPC_SHARED_BYTE", f"; did you mean {P}IPC_SHARED_BYTES?"),
        ("DFLASH_MOE_PREFIL_HOT_SUB_BATCH", "; did you mean DFLASH_MOE_PREFILL_HOT_SUB_BATCH?"),
        ("DFLASH_MOE_QQQ", ""),
    ],
)
def test_misspelt_environment_name_warns_with_the_nearest(
    name: str, nearest: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, "1")
    with contextlib.suppress(SettingError):  # 1 is no value of each of them
        HostSettings.load()
    warning = f"{name} is set, but there is no such setting{nearest}"
    assert [record.getMessage() for record in caplog.records] == ([] if nearest is None else [warning])


@pytest.mark.parametrize(
    ("typed", "environment", "device"),
    [
        ({"gpu": "2"}, {}, "cuda:2"),
        ({"gpu": "2", "device": "cuda:2"}, {}, "cuda:2"),
        ({"gpu": "2, 0"}, {}, "cuda:2,cuda:0"),
        ({}, {P + "IPC_GPU": "0,1"}, "cuda:0,cuda:1"),
        ({"gpu": "0,1", "device": "cuda:1"}, {}, "--device: 'cuda:1'"),
        ({}, {P + "IPC_GPU": "1"}, "cuda:1"),
        ({"gpu": "1"}, {"MOEOFFLOAD_DEVICE": "cpu"}, "cuda:1"),
        ({"device": "cpu"}, {"MOEOFFLOAD_GPU": "1"}, "cpu"),
        ({"gpu": "1", "device": "cpu"}, {}, "--device: 'cpu'"),
        ({}, {"MOEOFFLOAD_GPU": "1", "MOEOFFLOAD_DEVICE": "cuda:0"}, "MOEOFFLOAD_DEVICE: 'cuda:0'"),
        ({"gpu": "0,1", "device": "cpu"}, {}, "--device: 'cpu' is not allowed (gpu 0,1 was given too, which is cuda:0"),
        ({"gpu": "0,0"}, {}, "--gpu: '0,0' is not allowed (0 is there twice)"),
        ({"gpu": "a,b"}, {}, "--gpu: 'a,b' is not allowed ('a' is no number of a GPU)"),
        ({"gpu": "0,"}, {}, "--gpu: '0,' is not allowed ('' is no number of a GPU)"),
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
        assert "--gpu" in device or "cuda:1" in message
    else:
        assert ExpertServerSettings.load(typed).device == device


def test_page_is_fresh() -> None:
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == markdown(), "run: make docs"


def call(app: typer.Typer, *words: str, columns: int = 250) -> Any:
    return CliRunner().invoke(app, words, terminal_width=columns, env={"COLUMNS": str(columns)})


def test_options_reach_the_settings_and_others_come_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()

    @app.command()
    @with_settings(HostSettings)
    def run(settings: HostSettings, model: str, prompt: Annotated[str, typer.Option("--prompt")] = "hello") -> None:
        print(model, prompt, settings.slots, settings.required, settings.experts, settings.seed)

    words = "m --slots 7 --no-required --experts a:1,b:2 --seed -1 --prompt hi"
    assert call(app, *words.split()).stdout == "m hi 7 False ('a:1', 'b:2') -1\n"
    monkeypatch.setenv("MOEOFFLOAD_REQUIRED", "no")
    monkeypatch.setenv("MOEOFFLOAD_SLOTS", "9")
    assert call(app, "m").stdout == "m hello 9 False () None\n"
    assert call(app, "m", "--required").stdout == "m hello 9 True () None\n"


@pytest.mark.parametrize(
    ("app", "command", "model"),
    [(host_app, "run", HostSettings), (host_app, "serve", ServeSettings), (expert_app, "", ExpertServerSettings)],
)
def test_help_tells_the_common_settings_and_help_all_every_one(
    app: Any, command: str, model: type[SettingsBase]
) -> None:
    texts = []
    for option, columns in (("--help", 80), ("--help-all", 80), ("--help-all", 250)):
        done = call(app.app, *command.split(), option, columns=columns)
        assert done.exit_code == 0
        # Without colours, which typer turns on where it believes to be in a build service.
        texts.append(" ".join(re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).replace("│", " ").split()))
    usual, narrow, wide = texts
    assert "…" not in narrow, "something was cut"
    for info in model.infos():
        assert f" {info.flag} " in narrow
        words = info.choices or (info.hint[1:],)
        assert all(each in wide for each in (info.default, info.panel, *words))
        assert (f" {info.flag} " in usual) == info.is_common
    assert 9 < sum(info.is_common for info in model.infos()) < 20
    assert "--no-required" in narrow or model is ExpertServerSettings


@pytest.mark.parametrize("command", ["", "run", "profile", "chat", "serve", "top", "keys", "keys new", "expert"])
def test_flags_have_no_placeholder_in_help_and_lists_a_plain_word(command: str) -> None:
    app, words = (expert_app, []) if command == "expert" else (host_app, command.split())
    text = call(app.app, *words, "--help").stdout
    assert "--help" in text
    assert [word for word in ("bool>", "list[") if word in text] == []
    if command in ("run", "keys new"):
        assert re.search(r"--(prompt|name) +(TEXT|ADDRESS) ", text)


def test_help_is_short() -> None:
    text = call(host_app.app, "run", "--help", columns=80).stdout
    assert len(text.splitlines()) < 90
    assert "Allowed" not in text


def test_shells_complete_commands() -> None:
    code = "import sys; sys.argv[0] = 'moeoffload'; from moeoffload.cli.entry import moeoffload; moeoffload()"
    done = run_python(code, _MOEOFFLOAD_COMPLETE="complete_bash", COMP_WORDS="moeoffload r", COMP_CWORD="1")
    assert done.out.split() == ["run"], done.err


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
    done = run_python(code)
    assert (done.code, done.out.splitlines()[-1].split()) == (0, ["imported:"])
