"""GGUF files end to end: a real server process, and the tokens of a local run on the unpacked weights."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import gguf_models as models
import pytest
import torch
from command_lines import STEP_TIMEOUT_S, Commands, one_line_error
from conftest import DEMO, StartServer, connected
from models import n_tokens, reference_of
from synthetic.gguf_writer import write_gguf
from synthetic.unpacked import unpacked_gguf_model
from transformers import AutoModelForCausalLM

from moeoffload import open_model
from moeoffload.checkpoint import Checkpoint
from moeoffload.errors import ServerError
from moeoffload.kernels.dense import PackedEmbedding

PROMPT = torch.randint(3, 300, (1, 40), generator=torch.manual_seed(5))
N_NEW = 24
BOUND = 1e-4
"""Largest difference of logits relative to the largest logit, in float32."""


def check(path: Path, reference: Any, server: str, transport: str, **options: Any) -> None:
    """The model in ``path`` gives the logits and greedy tokens of ``reference``; a packed embedding stays packed."""
    with (
        open_model(path, experts=[server], transport=transport, device="cpu", model_dtype="f32", **options) as opened,
        torch.inference_mode(),
    ):
        assert [link.info.transport for link in opened.links] == [transport]
        stored = opened.checkpoint.dense_tensors()["model.embed_tokens.weight"].packed()
        assert isinstance(opened.model.get_input_embeddings(), PackedEmbedding) == (stored is not None)
        expected = reference(PROMPT).logits
        difference = (opened.model(PROMPT).logits - expected).abs().max() / expected.abs().max()
        assert difference < BOUND
        assert n_tokens(opened.model, PROMPT, N_NEW) == n_tokens(reference, PROMPT, N_NEW)


@pytest.mark.parametrize(
    ("family", "kind", "down_kind", "transport"),
    [
        ("qwen3_moe", "Q4_K", "Q6_K", "shared"),
        ("qwen2_moe", "IQ4_XS", "Q5_K", "stream"),
        ("gpt_oss", "MXFP4", "MXFP4", "stream"),
        ("gpt_oss", "Q8_0", "Q4_0", "shared"),
        ("qwen3_moe", "Q5_0", "Q8_0", "shared"),
        ("qwen3_moe", "Q5_K", "Q5_1", "stream"),
        ("qwen3_moe", "BF16", "IQ4_NL", "shared"),
    ],
)
def test_tokens_are_those_of_a_local_run_on_the_unpacked_weights(
    three_servers: list[str], tmp_path: Path, family: str, kind: str, down_kind: str, transport: str
) -> None:
    dense_kind = "BF16" if kind == "BF16" else "Q8_0"
    path = models.write_model(family, tmp_path, kind, down_kind=down_kind, dense_kind=dense_kind)
    reference = models.reference_model(tmp_path, path, torch.float32)
    alone = tmp_path / "alone"
    alone.mkdir()
    check(Path(shutil.move(path, alone)), reference, three_servers[0], transport)


def test_tokens_of_a_family_that_transformers_converts(three_servers: list[str], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    models.write_qwen35(path)
    check(path, unpacked_gguf_model(path, torch.float32), three_servers[0], "shared")


def test_a_family_with_dense_layers_from_its_vendors_folder(start_server: StartServer, tmp_path: Path) -> None:
    """The server has nothing but a copy of the file, in two parts, and is sent the config."""
    vendor, alone = tmp_path / "vendor", tmp_path / "alone"
    path = models.write_model("olmoe", vendor, "Q4_K", dense_kind="F32", part_tensors=16)
    reference = models.reference_model(vendor, path, torch.float32)
    alone.mkdir()
    for part in vendor.glob("*.gguf"):
        shutil.copy(part, alone)
    assert len(list(alone.iterdir())) == 2
    server = start_server("--model", str(alone / path.name))
    check(path, reference, server.address, "shared", dense=vendor)
    check(path, reference, server.address, "stream", dense=vendor)


def test_a_config_that_is_none_leaves_a_server_as_it_was(start_server: StartServer, tmp_path: Path) -> None:
    path = models.write_model("olmoe", tmp_path, "Q8_0")
    good = Checkpoint.open(path, dense=tmp_path)
    server = start_server("--model", str(path))
    with connected(server.address) as client:

        def calibrate(config: str) -> list[tuple[int, float]]:
            with contextlib.closing(client.attach(STEP_TIMEOUT_S)) as lease:
                return lease.calibrate(reference_of(good, "x", config=config), STEP_TIMEOUT_S)

        changed = good.config_text.replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-04')
        assert changed != good.config_text
        for config, words in (
            ("", "--dense DIR"),
            ("{", "not valid JSON"),
            ("[" * 200_000, "not valid JSON"),
            ("x" * 300_000, "more than 262144 characters"),
            ('{"model_type": "bert"}', "of another model|not a Mixture"),
            (good.config_text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 30000'), "claims 30000 layers"),
            (changed, "model digest is"),
        ):
            with pytest.raises(ServerError, match=words) as caught:
                calibrate(config)
            assert str(caught.value).isprintable()
        assert calibrate(good.config_text)


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """The demo model in 8 bits."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    values = model.state_dict()
    write_gguf(model.config, tmp_path / "demo.gguf", "Q8_0", lambda name, _: values[name], tokenizer=DEMO)
    return tmp_path / "demo.gguf"


def test_a_gguf_file_is_run_from_the_command_line(commands: Commands, three_servers: list[str], demo: Path) -> None:
    options = ["--prompt", "add 17 25 =", "--device", "cpu", "--experts", three_servers[0]]
    result = commands.run("moeoffload", "run", str(demo), *options)
    assert result.code == 0, result.err
    assert result.out.strip() == "42"


def test_bad_files_are_refused_in_one_line(commands: Commands, demo: Path, tmp_path: Path) -> None:
    cut, part = tmp_path / "cut.gguf", tmp_path / "demo-00001-of-00002.gguf"
    cut.write_bytes(demo.read_bytes()[:-100_000])
    shutil.copy(demo, part)
    unknown = tmp_path / "unknown.gguf"
    unknown.write_bytes(demo.read_bytes().replace(b"\x08\0\0\0\0\0\0\0qwen3moe", b"\x08\0\0\0\0\0\0\0qwen9moe"))
    for words, expected in (
        ([str(cut)], "truncated"),
        ([str(part)], "demo-00002-of-00002.gguf"),
        ([str(unknown)], "--dense DIR"),
        ([str(demo), "--dense", str(tmp_path)], "has no config.json"),
    ):
        result = commands.run("moeoffload", "run", *words, "--prompt", "add 1 2 =", "--device", "cpu")
        assert expected in one_line_error(result, 3)
