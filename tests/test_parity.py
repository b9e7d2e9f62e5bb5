"""The same prompt gives the same tokens as a local run: every mode, transport, dtype, pipeline, number of servers."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEMO, demo_prompt, local_model
from local_experts import register_local_experts
from models import answers, demo_inputs, local_answers, percent_right, random_call
from synthetic import write_tiny
from transformers import DynamicCache

from moeoffload import open_model
from moeoffload.config import HostSettings, Mode
from moeoffload.errors import PayloadError
from moeoffload.host.flight import Flight
from moeoffload.host.pipeline import CHUNK_ROWS, LEAST_CHUNK_ROWS, MASKED_CHUNK_ROWS, chunk_rows
from moeoffload.kernels.fast_dense import accelerate_dense

TORCH = {"f32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize(("model_dtype", "transport"), [("f32", "shared"), ("bf16", "shared"), ("bf16", "stream")])
def test_the_grouped_kernel_gives_the_bits_of_a_local_run(
    grouped_server: str, model_dtype: str, transport: str
) -> None:
    prompt = torch.randint(5, 60, (1, 700), generator=torch.manual_seed(1))
    local = local_model(DEMO, dtype=TORCH[model_dtype])
    options: dict[str, Any] = {"mode": "batched", "transport": transport, "model_dtype": model_dtype}
    with (
        open_model(DEMO, experts=[grouped_server], fast_dense=False, device="cpu", **options) as offloaded,
        torch.inference_mode(),
    ):
        for tokens in (prompt, prompt[:, :1], prompt[:, :9]):
            assert torch.equal(offloaded.model(tokens).logits, local(tokens).logits)


@pytest.mark.parametrize("model_dtype", ["f32", "bf16"])
def test_the_default_kernel_gives_the_bits_of_a_local_run_with_it_in_every_mode(
    three_servers: list[str], model_dtype: str
) -> None:
    local = local_model(DEMO, dtype=TORCH[model_dtype], experts_implementation=register_local_experts())
    accelerate_dense(local)
    prompt = demo_prompt(700, seed=2)
    parts = (prompt, prompt[:, :1], prompt[:, :9])
    with torch.inference_mode():
        expected = [local(tokens).logits for tokens in parts]
        for mode, transport in (("batched", "shared"), ("stream", "shared"), ("auto", "stream")):
            options: dict[str, Any] = {"mode": mode, "transport": transport, "model_dtype": model_dtype}
            with open_model(DEMO, experts=three_servers[:1], batch_capacity=300, device="cpu", **options) as offloaded:
                for tokens, logits in zip(parts, expected, strict=True):
                    assert torch.equal(offloaded.model(tokens).logits, logits), (mode, tokens.shape)


@pytest.mark.parametrize(
    ("mode", "transport", "n_servers", "dtype", "model_dtype"),
    [("batched", "shared", 3, "f16", "bf16"), ("batched", "stream", 1, "f32", "bf16"),
     ("stream", "shared", 2, "bf16", "bf16"), ("stream", "stream", 3, "f16", "bf16"),
     ("auto", "shared", 1, "f32", "bf16"), ("auto", "stream", 2, "bf16", "bf16"),
     ("stream", "shared", 1, "f32", "f32"), ("batched", "stream", 3, "f32", "f32")],
)  # fmt: skip
def test_greedy_tokens_and_accuracy_match_a_local_run(
    three_servers: list[str], mode: str, transport: str, n_servers: int, dtype: str, model_dtype: str
) -> None:
    expected = local_answers(TORCH[model_dtype])
    options: dict[str, Any] = {"mode": mode, "transport": transport, "dtype": dtype, "model_dtype": model_dtype}
    with open_model(DEMO, experts=three_servers[:n_servers], device="cpu", **options) as offloaded:
        assert [link.info.transport for link in offloaded.links] == [transport] * n_servers
        got = answers(offloaded.model, demo_inputs())
    assert abs(percent_right(got) - percent_right(expected)) <= 100 / len(expected)
    if dtype != "f16":  # which does not hold every value of bf16
        assert got == expected


GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}


@pytest.mark.parametrize(
    ("mode", "transport", "capacity", "n_servers"),
    [
        ("batched", "shared", 64, 2),
        ("auto", "stream", 512, 2),
        ("auto", "shared", 512, 1),
        ("stream", "stream", 100, 1),
    ],
)
def test_a_pipelined_prefill_gives_the_same_tokens(
    three_servers: list[str], mode: str, transport: str, capacity: int, n_servers: int
) -> None:
    prompt = demo_prompt(700, seed=8)
    expected = local_model(DEMO).generate(prompt, **GREEDY)
    options: dict[str, Any] = {"mode": mode, "transport": transport, "batch_capacity": capacity}
    with open_model(DEMO, experts=three_servers[:n_servers], pipeline="on", device="cpu", **options) as offloaded:
        assert torch.equal(offloaded.model.generate(prompt, **GREEDY), expected)
        assert offloaded.report().phases["prefill"]["pipelined"] == 1
        cache = DynamicCache(config=offloaded.model.config)
        assert torch.equal(offloaded.model.generate(prompt, past_key_values=cache, **GREEDY), expected)
        assert offloaded.report().phases["prefill"]["pipelined"] == 2


def test_a_left_padded_batch_and_a_second_turn_go_through_the_pipeline(three_servers: list[str]) -> None:
    first, second = demo_prompt(300, seed=9), demo_prompt(420, seed=10)
    padded = torch.full((1, 420), 257)
    padded[:, -300:] = first
    batch = torch.cat([padded, second])
    mask = (torch.arange(420) >= torch.tensor([[120], [0]])).long()
    local = local_model(DEMO)
    expected = local.generate(batch, attention_mask=mask, **GREEDY)
    turn = torch.cat([second, demo_prompt(200, seed=11)], dim=1)
    with open_model(DEMO, experts=three_servers[:1], pipeline="on", device="cpu") as offloaded:
        assert torch.equal(offloaded.model.generate(batch, attention_mask=mask, **GREEDY), expected)
        cache = offloaded.model.generate(second, return_dict_in_generate=True, **GREEDY).past_key_values
        cache.crop(second.shape[1] - cache.get_seq_length())
        got = offloaded.model.generate(turn, past_key_values=cache, **GREEDY)
        assert offloaded.report().phases["prefill"]["pipelined"] >= 2
    assert torch.equal(got, local.generate(turn, **GREEDY))


def test_calls_that_ask_for_more_than_the_last_logits_run_whole(three_servers: list[str]) -> None:
    prompt = demo_prompt(600, seed=12)
    with open_model(DEMO, experts=three_servers[:1], pipeline="on", device="cpu") as offloaded, torch.inference_mode():
        assert offloaded.model(prompt).logits.shape[1] == 600
        offloaded.model(prompt, output_hidden_states=True, logits_to_keep=1)
        offloaded.model(prompt, use_cache=False, logits_to_keep=1)
        assert offloaded.report().phases["prefill"]["pipelined"] == 0


def test_an_error_in_one_chunk_ends_the_call_and_the_next_one_works(three_servers: list[str]) -> None:
    prompt = demo_prompt(600, seed=13)
    expected = local_model(DEMO).generate(prompt, **GREEDY)
    with open_model(DEMO, experts=three_servers[:2], pipeline="on", device="cpu") as offloaded:
        dense = offloaded.model.model.layers[2].post_attention_layernorm
        calls = 0

        def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return output * float("nan") if calls == 3 else output

        hook = dense.register_forward_hook(spoil)
        with pytest.raises(PayloadError, match="layer 2"):
            offloaded.model.generate(prompt, **GREEDY)
        hook.remove()
        assert torch.equal(offloaded.model.generate(prompt, **GREEDY), expected)


def test_ctrl_c_while_the_other_thread_computes_leaves_nobody_who_adds_to_the_cache(three_servers: list[str]) -> None:
    left = threading.Event()
    with open_model(DEMO, experts=three_servers[:1], pipeline="on", device="cpu") as offloaded, torch.inference_mode():

        def press(layer: int, ids: torch.Tensor) -> None:
            if layer == 0 and threading.current_thread() is not threading.main_thread():
                time.sleep(0.2)  # the thread of the first chunk waits for its turn
                os.kill(os.getpid(), signal.SIGINT)
                left.wait(0.5)

        offloaded.dispatcher.on_routes = press
        cache = DynamicCache(config=offloaded.model.config)
        with pytest.raises(KeyboardInterrupt):
            offloaded.model(demo_prompt(500, seed=15), past_key_values=cache, logits_to_keep=1)
        lengths = [layer.get_seq_length() for layer in cache.layers]
        left.set()
        offloaded.turns._pool.submit(int).result()
        assert [layer.get_seq_length() for layer in cache.layers] == lengths


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "mixtral", "qwen3_5_moe"])
def test_families_with_windows_dense_layers_or_linear_attention_stay_right(
    three_servers: list[str], tmp_path: Path, family: str
) -> None:
    write_tiny(family, tmp_path)
    prompt = torch.randint(3, 300, (1, 520), generator=torch.manual_seed(14))
    local = local_model(tmp_path, dtype=torch.float32)
    with (
        open_model(tmp_path, experts=three_servers[:1], model_dtype="f32", pipeline="on", device="cpu") as offloaded,
        torch.inference_mode(),
    ):
        got = offloaded.model(prompt, logits_to_keep=1)
        expected = local(prompt, logits_to_keep=1)
        assert torch.allclose(got.logits, expected.logits, rtol=0, atol=1e-4 * float(expected.logits.abs().max()))
        pipelined = offloaded.report().phases["prefill"]["pipelined"]
        assert pipelined == (0 if family == "qwen3_5_moe" else 1)


def test_sums_are_added_in_the_same_order_whichever_slots_another_thread_holds(three_servers: list[str]) -> None:
    options: dict[str, Any] = {"mode": "stream", "slots": 2, "threads": 1, "device": "cpu"}
    with open_model(DEMO, experts=three_servers, **options) as offloaded, torch.inference_mode():
        # In float32: the last bits are to be seen.
        rows, ids, weights = random_call(offloaded.checkpoint, 300, torch.float32)
        undisturbed = offloaded.dispatcher(0, rows, ids, weights)
        for link in offloaded.links:
            for n_held in (1, 2):
                held = [flight for flight in (link.take(wait=False) for _ in range(n_held)) if flight is not None]
                assert len(held) == n_held

                def let_go(held: list[Flight] = held) -> None:
                    for flight in held:
                        flight.link.release(flight)

                other = threading.Timer(0.1, let_go)
                other.start()
                assert torch.equal(offloaded.dispatcher(0, rows, ids, weights), undisturbed)
                other.join()


def chunks(
    n_rows: int, capacity: int = 4096, *, mode: Mode = "auto", size: int | None = MASKED_CHUNK_ROWS
) -> list[int]:
    step = chunk_rows(n_rows, capacity, size, HostSettings(mode=mode, pipeline="on"))
    assert step is not None
    return [min(step, n_rows - at) for at in range(0, n_rows, step)]


@pytest.mark.parametrize(
    ("size", "n_rows", "expected"),
    [
        (MASKED_CHUNK_ROWS, 64, [64]),
        (MASKED_CHUNK_ROWS, 200, [128, 72]),
        (MASKED_CHUNK_ROWS, 384, [192, 192]),
        (MASKED_CHUNK_ROWS, 2048, [256] * 8),
        (CHUNK_ROWS, 512, [256] * 2),
        (CHUNK_ROWS, 2048, [512] * 4),
        (None, 4096, [1024] * 4),  # a GPU host
        (None, 200, [128, 72]),
    ],
)
def test_a_prompt_is_cut_into_even_chunks(size: int | None, n_rows: int, expected: list[int]) -> None:
    assert chunks(n_rows, size=size) == expected


@pytest.mark.parametrize("size", [CHUNK_ROWS, MASKED_CHUNK_ROWS])
def test_no_chunk_is_much_longer_or_shorter_than_the_best(size: int) -> None:
    for n_rows in (*range(1, 3000, 7), 4248, 100_000):
        parts = chunks(n_rows, size=size)
        assert sum(parts) == n_rows
        assert max(parts) <= 1.5 * size
        assert len(parts) == 1 or min(parts[:-1]) >= LEAST_CHUNK_ROWS


@pytest.mark.parametrize("capacity", [1, 100, 300])
def test_a_chunk_fits_a_dispatch(capacity: int) -> None:
    assert max(chunks(1000, capacity)) <= capacity
    assert chunks(1000, capacity, mode="batched")[0] == capacity
    assert chunk_rows(1000, capacity, CHUNK_ROWS, HostSettings(pipeline="off")) is None
