"""Trains a draft head for a checkpoint: ``python examples/demo/train_head.py examples/demo/checkpoint OUT``.

Writes a copy of a checkpoint of one of the families in `NAMES` with a multi-token-prediction layer, trained to predict
what the model says after its next token, under the names that the family's releases have. The demo checkpoint, whose
family (qwen3_moe) has no such layer, is written in the layout of mellum, which computes the same.
"""

import argparse
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

NAMES = {
    "deepseek_v3": "model.layers.{n}.",
    "glm4_moe": "model.layers.{n}.",
    "mellum": "mtp.",
    "qwen3_next": "mtp.",
}
"""Where the layer's tensors are, by model_type."""
_BESIDE = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
"""Names of what is beside ``mtp.layers``."""


def train(folder: Path, tokens: torch.Tensor, steps: int, seed: int = 0, batch: int = 16) -> float:
    """Trains a head for the checkpoint in ``folder`` on ``tokens`` (rows, length) int64, and adds it to the file.

    Returns the share of the tokens of the last batches that it predicts.
    """
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="grouped_mm")
    config = model.config.get_text_config()
    config.num_mtp_layers = 1
    if getattr(config, "layer_types", None) and not getattr(config, "mtp_layer_types", None):
        config.mtp_layer_types = config.layer_types[-1:]
    head: Any = MtpModel(model, 1).float()
    own = list(head.layers.parameters())
    for values in (*own, *head.layers.buffers()):
        if values.ndim > 1:
            torch.nn.init.normal_(values, std=values.shape[-1] ** -0.5)
        else:
            torch.nn.init.constant_(values, float(isinstance(values, torch.nn.Parameter)))
    optimizer = torch.optim.AdamW(own, lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    right = 0.0
    for step in range(steps):
        rows = tokens[torch.randint(len(tokens), (batch,))]
        with torch.no_grad():
            hidden = model.get_decoder()(rows[:, :-2]).last_hidden_state
        positions = torch.arange(1, rows.shape[1] - 1)[None]
        cache = MtpCache(config=head.config)
        states = head.forward_layer(0, hidden, positions, cache, input_ids=rows[:, 1:-1])
        logits = head.shared_head(states).flatten(0, 1)
        wanted = rows[:, 2:].flatten()
        loss = cross_entropy(logits, wanted)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(own, 1.0)
        optimizer.step()
        schedule.step()
        right = 0.9 * right + 0.1 * float((logits.argmax(-1) == wanted).float().mean())
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}, right {100 * right:.1f} %", file=sys.stderr, flush=True)
    _add(folder, model, head)
    return right


def _add(folder: Path, model: Any, head: Any) -> None:
    """Adds the head's tensors to the checkpoint's file, under the names of the family's releases."""
    kind, file = model.config.model_type, folder / "model.safetensors"
    tensors = load_file(file)
    dtype = tensors["model.embed_tokens.weight"].dtype
    prefix = NAMES[kind].format(n=model.config.num_hidden_layers)
    for name, trained in head.layers[0].state_dict().items():
        values = trained.detach().to(dtype)
        inner, _, rest = name.partition(".")
        if inner != "mtp_block":
            inner = _BESIDE[inner] if prefix == "mtp." else inner.replace("post_norm", "shared_head.norm")
            tensors[f"{prefix}{inner}.{rest}"] = values
            continue
        stored = f"{prefix}layers.0.{rest}" if prefix == "mtp." else prefix + rest
        before, _, leaf = stored.rpartition(".")
        parts = {stored: values}
        if leaf == "gate_up_proj":
            gate, up = values.chunk(2, dim=1)
            parts = {f"{before}.{{}}.gate_proj.weight": gate, f"{before}.{{}}.up_proj.weight": up}
        elif leaf == "down_proj" and values.ndim == 3:
            parts = {f"{before}.{{}}.down_proj.weight": values}
        for each, whole in parts.items():
            if "{}" in each:
                tensors |= {each.format(expert): one.contiguous() for expert, one in enumerate(whole)}
            else:
                tensors[each] = whole.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def own_words(folder: Path, n: int, length: int, seed: int = 0) -> torch.Tensor:
    """(n, length) int64: random beginnings of a quarter of that, and what the model says to them."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="grouped_mm")
    start = torch.randint(model.config.vocab_size, (n, length // 4))
    said: torch.Tensor = model.generate(
        start, attention_mask=torch.ones_like(start), do_sample=False, eos_token_id=None, pad_token_id=0,
        min_new_tokens=length - length // 4, max_new_tokens=length - length // 4,
    )  # fmt: skip
    return said


def as_mellum(source: Path, folder: Path) -> None:
    """Writes a qwen3_moe checkpoint in mellum's layout."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    kinds = ["full_attention"] * config["num_hidden_layers"]
    rope = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
    config |= {
        "model_type": "mellum",
        "architectures": ["MellumForCausalLM"],
        "layer_types": kinds,
        "mlp_layer_types": ["sparse"] * len(kinds),
        "mtp_layer_types": ["full_attention"],
        "mtp_mlp_layer_types": ["sparse"],
        "num_nextn_predict_layers": 1,
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def solved_lines(folder: Path, n: int, length: int, seed: int = 0) -> torch.Tensor:
    """(n, length) int64 of solved training tasks, one line after the other."""
    from tasks import sample  # type: ignore[import-not-found]

    tokenizer, rng = AutoTokenizer.from_pretrained(folder), random.Random(seed)
    rows = []
    for _ in range(n):
        row: list[int] = []
        while len(row) < length:
            row += [*tokenizer("".join(sample("train", rng)))["input_ids"], tokenizer.eos_token_id, 10]
        rows.append(row[:length])
    return torch.tensor(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kind = json.loads((args.checkpoint / "config.json").read_text())["model_type"]
    if kind == "qwen3_moe":
        as_mellum(args.checkpoint, args.out)
        tokens = solved_lines(args.out, 4096, 192, args.seed)
    else:
        shutil.copytree(args.checkpoint, args.out, dirs_exist_ok=True)
        tokens = own_words(args.out, 256, 96, args.seed)
    train(args.out, tokens, args.steps, args.seed)


if __name__ == "__main__":
    main()
