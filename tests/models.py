"""What tests do with the demo model and small ones: greedy answers, their experts as servers are told of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tasks
import torch
from conftest import DEMO, local_model
from synthetic import tiny_config, write_checkpoint, write_tiny

from moeoffload.checkpoint import Checkpoint
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.host.generate import prepare_prompt
from moeoffload.placement import ExpertTable


@cache
def demo_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO, padding_side="left")


@cache
def demo_inputs(n: int = 64) -> dict[str, torch.Tensor]:
    """``n`` tasks of the demo model as one left-padded batch."""
    batch = demo_tokenizer()(tasks.prompts(n, seed=7), return_tensors="pt", padding=True)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def answers(model: Any, inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    """Greedy answers to a batch for the demo model, cut at the end token."""
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    rows: list[list[int]] = tokens[:, inputs["input_ids"].shape[1] :].tolist()
    end = demo_tokenizer().eos_token_id
    return [row[: row.index(end)] if end in row else row for row in rows]


def n_tokens(model: Any, ids: torch.Tensor, n: int) -> list[int]:
    """``n`` greedy tokens after one prompt, whatever they are."""
    options = {"min_new_tokens": n, "max_new_tokens": n, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    found: list[int] = tokens[0, ids.shape[1] :].tolist()
    return found


def next_logits(offloaded: Any) -> torch.Tensor:
    """Those of the demo model, and of others, to one of its tasks."""
    with torch.inference_mode():
        logits: torch.Tensor = offloaded.model(**prepare_prompt(offloaded, "add 17 25 =", chat=True).inputs).logits
    return logits


@cache
def local_answers(dtype: torch.dtype = torch.bfloat16, n: int = 64) -> list[list[int]]:
    """Those of transformers to `demo_inputs`."""
    return answers(local_model(DEMO, dtype=dtype), demo_inputs(n))


def percent_right(found: list[list[int]]) -> float:
    """How many of `demo_inputs` were solved."""
    texts = demo_tokenizer().batch_decode(found, skip_special_tokens=True)
    right = [tasks.check(prompt, text) for prompt, text in zip(tasks.prompts(len(found), seed=7), texts, strict=True)]
    return 100 * sum(right) / len(right)


def random_call(
    checkpoint: Checkpoint, n_rows: int, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, ids and weights of a call of a layer."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(n_rows, checkpoint.hidden_size, generator=generator).to(dtype or checkpoint.dtype)
    ids = torch.rand(n_rows, checkpoint.layers[0].n_experts, generator=generator).argsort(1)[:, : checkpoint.top_k]
    return rows, ids.contiguous(), torch.rand(ids.shape, generator=generator)


def all_experts(checkpoint: Checkpoint) -> ExpertTable:
    return ExpertTable(tuple(tuple(range(layer.n_experts)) for layer in checkpoint.layers))


def expert_bytes(checkpoint: Checkpoint) -> int:
    return sum(layer.n_experts * layer.expert_bytes for layer in checkpoint.layers)


def reference_of(checkpoint: Checkpoint, reference: object = DEMO, **more: str) -> pb.ModelReference:
    """How a host names the model to a server."""
    dtype = checkpoint.dtype_label
    return pb.ModelReference(reference=str(reference), digest=checkpoint.digest, compute_dtype=dtype, **more)


place_for_written = Path()
"""A folder of this process; conftest sets it."""
_written: dict[object, Path] = {}


def written_once(folder: Path, key: object, write: Callable[[Path], object]) -> None:
    """Has ``write`` make a model in ``folder`` the first time that ``key`` is asked for, then copies that one."""
    if key not in _written:
        write(place_for_written / str(len(_written)))
        _written[key] = place_for_written / str(len(_written))
    shutil.copytree(_written[key], folder, dirs_exist_ok=True)


def tiny(family: str, folder: Path) -> Path:
    """A tiny model of a family, which a test may damage."""
    written_once(folder, family, lambda place: write_tiny(family, place))
    return folder


def secret_file(path: Path, content: str | bytes) -> Path:
    """One that its user alone may read."""
    path.touch(0o600)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def two_devices() -> None:
    """In a server's process: two CPUs, as ``--gpu 0,1`` would give two GPUs."""
    from moeoffload.expert_server import server

    def resolve(setting: str, *, last: bool) -> tuple[torch.device, ...]:
        return torch.device("cpu"), torch.device("cpu")

    server.resolve_devices = resolve


def endless_model(folder: Path) -> Path:
    """A tiny model whose answers have no end token and a context that tests do not fill."""
    config = tiny_config("qwen3_moe")
    config.max_position_embeddings, config.eos_token_id = 1 << 20, None
    return write_checkpoint(config, folder, dtype=torch.float32)
