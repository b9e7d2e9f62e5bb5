"""Keys and values that grow in place: the values of transformers' own cache, whatever is done to it, without copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from conftest import DEMO, local_model
from models import demo_inputs
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from moeoffload.kernels import fast_dense
from moeoffload.kernels.fast_dense import accelerate_dense
from moeoffload.kernels.growing_cache import GrowingLayer

BATCH, HEADS, DIM = 2, 3, 8
MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]


def rows(n_tokens: int, batch: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values; not contiguous, as attention's are."""
    keys, values = (torch.randn(batch, n_tokens, HEADS, DIM).transpose(1, 2) for _ in range(2))
    return keys, values


@pytest.mark.parametrize("modes", [MODES, MODES[::-1], [*MODES[1:], MODES[0]]], ids=str)
def test_values_are_those_of_a_dynamic_layer(modes: list[Callable[[], AbstractContextManager[None]]]) -> None:
    ours, theirs = GrowingLayer(), DynamicLayer()
    for round_number in range(6):
        with modes[round_number % len(modes)]():
            for n_tokens in (7, 1, 1, 300, 1, 90, 1):
                new = rows(n_tokens, theirs.keys.shape[0] if theirs.get_seq_length() else BATCH)
                for mine, their in zip(ours.update(*new), theirs.update(*new), strict=True):
                    assert torch.equal(mine, their)
            for layer in (ours, theirs):
                if round_number == 0:
                    layer.crop(-33)
                elif round_number == 1:
                    layer.reorder_cache(torch.tensor([1, 0]))
                elif round_number == 2:
                    layer.batch_repeat_interleave(2)
                elif round_number == 3:
                    layer.batch_select_indices(torch.tensor([0, 3]))
                elif round_number == 4:
                    layer.reset()
            if theirs.get_seq_length():
                assert ours.get_seq_length() == theirs.get_seq_length()
                assert torch.equal(ours.keys, theirs.keys)
                assert torch.equal(ours.values, theirs.values)


@torch.no_grad()
def test_new_tokens_are_added_without_a_copy_of_the_others() -> None:
    layer = GrowingLayer()
    layer.update(*rows(1000))
    places = set()
    for _ in range(200):
        keys, values = layer.update(*rows(1))
        places.add((keys.data_ptr(), values.data_ptr()))
    assert len(places) <= 2
    layer.crop(-100)
    keys, values = layer.update(*rows(1))
    assert (keys.data_ptr(), values.data_ptr()) in places
    assert layer.get_seq_length() == 1101
    # What it keeps free is little beside what it holds.
    assert all(buffer.shape[2] <= 1200 * 9 / 8 + 256 for buffer in layer.buffers or ())


@torch.no_grad()
def test_a_deep_copy_is_another_cache() -> None:
    layer = GrowingLayer()
    layer.update(*rows(5))
    layer.update(*rows(1))
    twin = copy.deepcopy(layer)
    kept = layer.keys.clone()
    twin.update(*rows(1))
    twin.crop(-3)
    twin.update(*rows(2))
    layer.update(*rows(1))
    assert torch.equal(layer.keys[:, :, :6], kept)
    assert not torch.equal(twin.keys[:, :, 4:6], kept[:, :, 4:6])


def test_a_models_cache_grows_in_place_with_equal_results(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = demo_inputs(6)
    options = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False}
    models = [local_model(DEMO, dtype=torch.bfloat16) for _ in range(2)]
    accelerate_dense(models[0])
    with monkeypatch.context() as patch:
        patch.setattr(fast_dense, "accelerate_cache", lambda model: None)
        accelerate_dense(models[1])
    for beams in (1, 3):
        ours, theirs = (model.generate(**inputs, **options, num_beams=beams) for model in models)
        assert torch.equal(ours, theirs)
    for model, kind in zip(models, (GrowingLayer, DynamicLayer), strict=True):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(**inputs, past_key_values=cache, use_cache=True)
        assert {type(layer) for layer in cache.layers} == {kind}
