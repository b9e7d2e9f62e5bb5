"""Quantised checkpoints end to end: the numbers of the model whose weights the format's library has unpacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.quantised import CASES, Case, write
from synthetic import Quantised
from synthetic.unpacked import save_plain, unpacked_model

from moeoffload import open_model
from moeoffload.checkpoint import Checkpoint
from moeoffload.host.fallback import ExpertCache
from moeoffload.kernels import KernelInput, LayerKernels
from moeoffload.kernels.dense import MAX_ROWS
from moeoffload.native import Features, cpu_features

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
        else:
            # Weights in tiles are not rounded to bfloat16 (tests/cpu_kernels/test_tiles.py). Where the
            # routers of these random weights decide otherwise, a position and later ones are others: the first counts.
            first, expected = logits[:, 0].float(), expected_logits[:, 0].float()
            assert (first - expected).norm() <= 2**-5 * expected.norm()


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
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(40, checkpoint.hidden_size, generator=generator).to(checkpoint.dtype)
    ids = torch.stack([torch.randperm(layer.n_experts, generator=generator)[:2] for _ in range(40)])
    weights = torch.rand(40, 2, generator=generator)
    cache = ExpertCache(checkpoint, 3 * layer.expert_bytes, device)
    for index in (0, 1):
        expected, out = torch.empty(rows.shape), torch.empty(rows.shape)
        with torch.inference_mode():
            every = checkpoint.build_experts(index, range(layer.n_experts), device)
            LayerKernels(every)(KernelInput(rows, ids, weights, expected))
            cache.compute(index, rows, ids, weights, out)
        assert torch.equal(out, expected)
    assert [pool.n_slots for pool in cache._pools.values()] == [3]
