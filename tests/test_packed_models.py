"""Packed models end to end: they answer as the model does whose weights a library has unpacked.

``bench/formats_parity.py`` is the first test for every format and 64 prompts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tasks
import torch
from checkpoint.quantised import CASES, Case, write
from conftest import DEMO
from formats_parity import measure
from models import answers, demo_inputs, expert_bytes, percent_right, random_call
from synthetic import Quantised, write_tiny
from synthetic.unpacked import save_plain, unpacked_model
from torch import nn

from moeoffload import open_model
from moeoffload.checkpoint import Checkpoint
from moeoffload.checkpoint.tensors import StoredTensor, TensorReader
from moeoffload.errors import ModelError
from moeoffload.formats.quantise import FORMATS
from moeoffload.host import packed_dense
from moeoffload.host.fallback import ExpertCache
from moeoffload.kernels import KernelInput, LayerKernels
from moeoffload.kernels.dense import MAX_ROWS, PackedLinear
from moeoffload.native import Features, cpu_features


@pytest.mark.parametrize("name", ["fp8", "awq", "Q4_K", "MXFP4"])
def test_answers_are_those_of_the_unpacked_model(name: str, three_servers: list[str], tmp_path: Path) -> None:
    for row in measure(name, tasks.prompts(8, seed=11), three_servers[:2], tmp_path):
        assert not row.differing
        assert row.right_percent == row.reference_percent > 80  # 4 bits cost some answers


LEAST_RIGHT = {"int8": 99, "fp8": 97, "int4": 97, "mxfp4": 97}
"""Percent of the demo model's tasks that have to be solved."""


@pytest.mark.parametrize("name", FORMATS)
def test_packed_experts_solve_the_tasks_wherever_they_are(name: str, three_servers: list[str]) -> None:
    both: dict[str, Any] = {"experts": three_servers[:2], "device": "cpu", "expert_format": name}
    with open_model(DEMO, **both) as offloaded:
        remote = answers(offloaded.model, demo_inputs())
        report = offloaded.report().to_json()
    assert percent_right(remote) >= LEAST_RIGHT[name]
    assert report["model"]["expert_format"] == name
    assert report["model"]["expert_bytes"] < 0.6 * expert_bytes(Checkpoint.open(DEMO))
    assert all(0 < error < 0.2 for server in report["servers"] for error in server["weight_errors"])
    with open_model(DEMO, local_experts_gib=64.0, **both) as offloaded:
        assert answers(offloaded.model, demo_inputs()) == remote


def test_experts_are_packed_the_same_in_any_choice_of_them() -> None:
    checkpoint = Checkpoint.open(DEMO, expert_format="int4")
    device = torch.device("cpu")
    some: Any = checkpoint.build_experts(1, [5, 2], device)
    every: Any = checkpoint.build_experts(1, range(checkpoint.layers[1].n_experts), device)
    for name in ("gate_up_proj", "down_proj"):
        (few,), (whole,) = getattr(some, name), getattr(every, name)
        assert torch.equal(few.data, whole.data[[5, 2]])
    per_expert = sum(getattr(every, name)[0].nbytes for name in ("gate_up_proj", "down_proj"))
    assert per_expert == checkpoint.layers[1].expert_bytes * checkpoint.layers[1].n_experts
    assert checkpoint.digest != Checkpoint.open(DEMO).digest


def test_experts_that_are_stored_packed_stay_as_they_are(tmp_path: Path) -> None:
    packed_checkpoint = write_tiny("qwen3_moe", tmp_path, form="fp8")
    with pytest.raises(ModelError, match=r"its experts are stored as fp8; they cannot be packed again as int4"):
        Checkpoint.open(packed_checkpoint, expert_format="int4")


BOUND = 1e-5
"""Largest difference of logits relative to the largest logit, in float32."""
PROMPT = torch.randint(3, 300, (1, 40), generator=torch.manual_seed(3))
FEW_ROWS = MAX_ROWS
"""Up to so many rows plain dense layers are computed by our kernel, too; torch's sums have an order of their own."""
EXACT = (Quantised.FP8_FP4, Quantised.MXFP8, Quantised.MXFP4)
"""Layouts whose scales are powers of two: their weights are the same numbers in bfloat16 and in float32."""


def outputs(folder: Path, prompt: torch.Tensor = PROMPT, **options: Any) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Logits of the prompt, greedy tokens, the format of the experts."""
    with open_model(folder, device="cpu", **options) as offloaded, torch.inference_mode():
        logits = offloaded.model(prompt).logits.clone()
        tokens = offloaded.model.generate(prompt, max_new_tokens=8, do_sample=False)
        return logits, tokens, offloaded.checkpoint.layers[0].format


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_are_those_of_the_unpacked_weights(case: Case, three_servers: list[str], tmp_path: Path) -> None:
    folder = write(case, tmp_path / "packed")
    plain = save_plain(unpacked_model(folder, case.form), tmp_path / "plain")
    # One server: two might get other parts of the experts on a busy machine, and sums another order.
    places: list[dict[str, Any]] = [{"experts": three_servers[:1]}, {"local_experts_gib": 1}]
    for where in places:
        logits, tokens, name = outputs(folder, PROMPT[:, :FEW_ROWS], **where)
        expected_logits, expected_tokens, plain_name = outputs(plain, PROMPT[:, :FEW_ROWS], **where)
        assert (name, plain_name) == (case.name, "bf16")
        if Features.MATRIX_UNIT in cpu_features():
            assert torch.equal(logits, expected_logits)
            assert torch.equal(tokens, expected_tokens)
        else:  # weights in tiles are not rounded to bfloat16 (tests/cpu_kernels/test_tiles.py)
            assert_same_first(logits, expected_logits)


@pytest.mark.parametrize("case", [case for case in CASES if case.form in EXACT], ids=str)
def test_tokens_are_those_of_transformers(case: Case, three_servers: list[str], tmp_path: Path) -> None:
    model = unpacked_model(write(case, tmp_path), case.form).float()
    logits, tokens, _ = outputs(tmp_path, experts=three_servers[:2], model_dtype="f32")
    assert torch.equal(tokens, model.generate(PROMPT, max_new_tokens=8, do_sample=False))
    with torch.inference_mode():
        expected = model(PROMPT).logits
    assert (logits - expected).abs().max() <= BOUND * expected.abs().max()


@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[8]], ids=str)
def test_a_cache_of_packed_experts_gives_the_bits_of_all_of_them(case: Case, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(case, tmp_path))
    device, layer = torch.device("cpu"), checkpoint.layers[0]
    rows, ids, weights = random_call(checkpoint, 40)
    cache = ExpertCache(checkpoint, 3 * layer.expert_bytes, device)
    for index in (0, 1):
        expected, out = torch.empty(rows.shape), torch.empty(rows.shape)
        with torch.inference_mode():
            every = checkpoint.build_experts(index, range(layer.n_experts), device)
            LayerKernels(every)(KernelInput(rows, ids, weights, expected))
            cache.compute(index, rows, ids, weights, out)
        assert torch.equal(out, expected)
    assert [pool.n_slots for pool in cache._pools.values()] == [3]


def packed_layers(model: nn.Module) -> set[str]:
    return {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def assert_same_first(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares the first position: where routers of random weights decide otherwise, it and later ones are others."""
    first, wanted = logits[:, 0].float(), expected[:, 0].float()
    assert (first - wanted).norm() <= 2**-5 * wanted.norm()


def test_dense_weights_are_read_once_and_again_only_where_transformers_changes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny("qwen3_moe", tmp_path, form="int4", dtype=torch.bfloat16)
    read, read_into = list[str](), TensorReader._read_into

    def counted(self: TensorReader, tensor: StoredTensor, *where: Any) -> None:
        read.append(tensor.name)
        read_into(self, tensor, *where)

    monkeypatch.setattr(TensorReader, "_read_into", counted)
    with open_model(folder, local_experts_gib=8.0, device="cpu") as offloaded, torch.no_grad():
        packed = offloaded.model(PROMPT).logits
        assert packed_layers(offloaded.model) >= {"q_proj", "k_proj", "v_proj", "o_proj"}
        assert offloaded.report().to_json()["model"]["dense_format"]
    dense = [name for name in read if ".experts." not in name]
    assert len(dense) == len(set(dense)) > 0
    monkeypatch.setattr(packed_dense, "_is_same", lambda packed, weight: False)
    with open_model(folder, local_experts_gib=8.0, device="cpu") as offloaded, torch.no_grad():
        assert not packed_layers(offloaded.model)
        assert_same_first(packed, offloaded.model(PROMPT).logits)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_linear_layers_packed_while_they_load_solve_the_tasks(name: str, three_servers: list[str]) -> None:
    with open_model(DEMO, experts=three_servers[:1], device="cpu", dense_format=name) as offloaded:
        assert packed_layers(offloaded.model) == {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}
        assert offloaded.model.lm_head.weight.format.name == "int8"
        assert percent_right(answers(offloaded.model, demo_inputs())) >= 97
