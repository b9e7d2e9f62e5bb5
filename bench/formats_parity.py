"""The demo model in every packed format: greedy tokens beside transformers' on the weights that a library unpacked.

``python bench/formats_parity.py --json FILE``: 64 held-out prompts, two servers, both transports. The demo model is
first made wider without a change of what it computes, so that its rows have whole blocks of every format. The reference
is never ours: transformers, compressed_tensors and gguf unpack; GPTQ, which none of them can on CPUs, is unpacked as
its documentation says. A prompt whose tokens differ is named, with the gap between the two logits where they part.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from devices import CPU, HostDevice, ServerDevice
from parity import MAX_NEW_TOKENS, accuracy, complete
from prefill_ipc import DEMO
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from servers import cores, expert_server, write_json
from synthetic import Quantised, write_checkpoint
from synthetic.gguf_writer import write_gguf
from synthetic.unpacked import save_plain, unpacked_gguf_model, unpacked_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from moeoffload import open_model

sys.path.insert(0, str(DEMO.parent))
import tasks

TRANSPORTS = ("shared", "stream")
FOLDERS = tuple(form.value for form in Quantised if form is not Quantised.FP8_FP4)
"""DeepSeek V4's layout is of that family alone; its own tiny model is in the tests."""
FILES = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "BF16", "F16")
LEAST_PERCENT = {8: 99, 4: 97}
"""Of the tasks that have to be solved, by bits of a weight."""


@dataclass(frozen=True)
class Row:
    """A format over a transport; ``differing`` names each prompt that has other tokens and the gap of the logits."""

    format: str
    transport: str
    prompts: int
    equal: int
    right_percent: float
    reference_percent: float
    differing: list[str]


def wide_values(narrow: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A tensor of a model twice as wide, with experts four times as wide, that computes the same numbers.

    Every hidden value and every value inside of an expert is there several times; what reads them has its share of the
    weight for each. Only powers of two are involved, so nothing is rounded.
    """
    tensor = narrow[name]
    if "norm" in name:
        return tensor if ".q_norm" in name or ".k_norm" in name else tensor.repeat(2)
    if "embed_tokens" in name:
        return tensor.repeat(1, 2)
    if "o_proj" in name:
        return tensor.repeat(2, 1)
    if "down_proj" in name:
        return tensor.repeat(2, 4) / 4
    return tensor.repeat(4 if ".experts." in name else 1, 2) / 2


def write_wide(folder: Path, form: Quantised | None = None) -> Path:
    """Writes the demo model, wider and in a layout; see `wide_values`."""
    narrow = load_file(DEMO / "model.safetensors")
    config = AutoConfig.from_pretrained(DEMO)
    config.update({"hidden_size": 2 * config.hidden_size, "moe_intermediate_size": 4 * config.moe_intermediate_size})
    write_checkpoint(config, folder, form=form, values=lambda name: wide_values(narrow, name))
    for file in DEMO.iterdir():
        if "token" in file.name or file.suffix == ".jinja" or file.name == "generation_config.json":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def converted(name: str, folder: Path) -> tuple[Path, Any]:
    """The wide demo model in a format, and the reference that a library has unpacked."""
    if name not in FILES:
        packed = write_wide(folder / name, Quantised(name))
        plain = save_plain(unpacked_model(packed, Quantised(name)), folder / f"{name}-plain")
        return packed, AutoModelForCausalLM.from_pretrained(plain, experts_implementation="grouped_mm").eval()
    path = folder / f"{name}.gguf"
    whole = AutoModelForCausalLM.from_pretrained(write_wide(folder / "wide"), dtype=torch.bfloat16)
    values = whole.state_dict()
    dense = name if name in ("BF16", "F16") else "Q8_0"
    write_gguf(whole.config, path, name, lambda name, _: values[name], dense_kind=dense, tokenizer=folder / "wide")
    return path, unpacked_gguf_model(path, torch.bfloat16, whole.config)


@torch.inference_mode()
def parting(reference: Any, tokenizer: Any, prompt: str, expected: list[int], got: list[int]) -> str:
    """Where two answers part: the token's number, and by how much the reference prefers its own."""
    pairs = enumerate(zip(expected, got, strict=False))
    at = next((at for at, (one, other) in pairs if one != other), min(len(expected), len(got)) - 1)
    ids = torch.cat([tokenizer(prompt, return_tensors="pt")["input_ids"], torch.tensor([expected[:at]]).long()], 1)
    logits = reference(ids.to(reference.device)).logits[0, -1].float()
    return f"{prompt} token {at}: gap {(logits[expected[at]] - logits[got[at]]).item():.3f}"


def measure(name: str, texts: Sequence[str], servers: Sequence[str], folder: Path, host_device: str = CPU) -> list[Row]:
    """The rows of a format."""
    path, reference = converted(name, folder)
    reference.to(host_device)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    expected = complete(reference, tokenizer, list(texts))
    rows = []
    for transport in TRANSPORTS:
        with open_model(path, experts=list(servers), transport=transport, device=host_device) as offloaded:
            got = complete(offloaded.model, tokenizer, list(texts))
        differing = [
            parting(reference, tokenizer, text, one, other)
            for text, one, other in zip(texts, expected, got, strict=True)
            if one != other
        ]
        right, right_there = (accuracy(tokenizer, list(texts), tokens) for tokens in (got, expected))
        equal = len(texts) - len(differing)
        rows.append(Row(name, transport, len(texts), equal, right, right_there, differing))
    return rows


def main(
    prompts: Annotated[int, typer.Option(min=1)] = 64,
    formats: Annotated[str, typer.Option(help="Names, with commas.")] = ",".join((*FOLDERS, *FILES)),
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the result goes.")] = None,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    """Compare tokens; exit code 1 if a format solves too few tasks."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    texts = tasks.prompts(prompts, seed=7)
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(expert_server(cores()[1], "--memory-gib", "1", device=server_device)) for _ in range(2)
        ]
        for name in formats.split(","):
            with tempfile.TemporaryDirectory() as folder:
                rows += measure(name, texts, servers, Path(folder), host_device)
    table = Table(title=f"{prompts} held-out prompts, up to {MAX_NEW_TOKENS} tokens, two servers")
    for column in ("format", "transport", "equal answers", "right %", "reference right %", "answers that differ"):
        table.add_column(column)
    for row in rows:
        cells = (f"{row.equal} of {row.prompts}", f"{row.right_percent:.1f}", f"{row.reference_percent:.1f}")
        table.add_row(row.format, row.transport, *cells, "\n".join(row.differing))
    Console().print(table)
    if json is not None:
        on = {"host_device": host_device, "server_device": server_device}
        write_json(json, "formats_parity", {"prompts": prompts, "servers": len(servers)} | on, rows)
    if any(row.right_percent < LEAST_PERCENT[4 if "4" in row.format else 8] for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
