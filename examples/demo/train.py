"""Trains the demo checkpoint on one CPU core: ``python examples/demo/train.py --out FOLDER``; with tools: ``--start``.

The training step is written out here over the parameters of a plain `Qwen3MoeForCausalLM`, in bf16 with f32 master
weights and compiled by `torch.compile`: some ten times faster than calling the model. What is saved is that model.
"""

import argparse
import random
import string
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from muon import Muon  # type: ignore[import-not-found]
from tasks import Task, chat_steps, conversation, sample, tools_text  # type: ignore[import-not-found]
from tokenizer import build_tokenizer  # type: ignore[import-not-found]
from torch import Tensor
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

EOS_ID, PAD_ID = 256, 257
BLOCK_ROWS = 128  # rows of a block of tokens for one expert
QUERY_CHUNKS = 8
NOT_FOR_MUON = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
LOG_STEPS = 20
IGNORE = -100  # target of positions without loss
MAX_POSITION = 8192
AUX_COEF = 0.025  # of the load-balancing loss, so that all experts are used
NOISE_LINES = 0.02  # share of lines that are random text, so that foreign lines in a prompt do no harm

TASK_WEIGHTS = {Task.ADD: 7, Task.REVERSE: 3, Task.SORT: 4, Task.COUNT: 6}  # the harder ones more often

# How often a step has rows of so many tokens, after a first quarter of the steps with the shortest rows: short rows are
# cheap and learn fast, long ones make long prompts work. A step always has the same number of tokens.
ROW_LENGTHS = {128: 0.75, 512: 0.17, 2048: 0.08}
LONG_ROW_LENGTHS = (4096, 8192)  # of the few steps at the end
LONG_RATE = 0.1  # their peak learning rate, relative
TOOL_ROW_LENGTHS = {128: 0.12, 512: 0.74, 2048: 0.14}  # of training with tools; 128 tokens are too few for a chat
TOOL_ROWS = 0.85  # share of the other rows that are chats with tools


class Batch(NamedTuple):
    tokens: Tensor  # (rows, length) int64
    targets: Tensor  # (rows, length) int64, what to predict after each token; IGNORE outside answers
    positions: Tensor  # (rows, length) int64, rising, with gaps between lines


def demo_config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=258,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        intermediate_size=256,  # of dense layers, of which there are none
        mlp_only_layers=[],
        decoder_sparse_step=1,
        norm_topk_prob=True,
        router_aux_loss_coef=AUX_COEF,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


# --- data ---


def _line(rng: random.Random) -> tuple[list[int], list[int]]:
    """Tokens and targets of one line with its separator.

    The end token is the target after every answer and after every end token, whichever separator then follows: the
    model must stop after its answer also when the prompt's solved lines are separated by newlines alone.
    """
    if rng.random() < NOISE_LINES:
        text = "".join(rng.choices(string.printable[:95], k=rng.randint(0, 40))) + "\n"
        return list(text.encode()), [IGNORE] * len(text)
    (task,) = rng.choices(list(TASK_WEIGHTS), list(TASK_WEIGHTS.values()))
    prompt, answer = (s.encode() for s in sample("train", rng, task))
    tokens = [*prompt, *answer]
    targets = [IGNORE] * (len(prompt) - 1) + [*answer, EOS_ID]
    kind = rng.random()
    ends = 0 if kind < 0.5 else 1 if kind < 0.9 else rng.randint(2, 6)
    tokens += [EOS_ID] * ends
    targets += [EOS_ID] * ends
    if ends != 1 or kind < 0.75:
        tokens.append(ord("\n"))
        targets.append(IGNORE)
    return tokens, targets


def _chat(rng: random.Random) -> tuple[list[int], list[int]]:
    """Tokens and targets of one chat with tools."""
    tools, turns = conversation("train", rng)
    tokens = list(tools_text(tools).encode())
    targets = [IGNORE] * len(tokens)
    for turn in turns:
        for given, answer in chat_steps(turn):
            tokens += [*given.encode(), *answer.encode(), EOS_ID, ord("\n")]
            targets += [IGNORE] * (len(given) - 1) + [*answer.encode(), EOS_ID, EOS_ID, IGNORE]
    return tokens, targets


def make_batch(rows: int, length: int, rng: random.Random, with_tools: bool = False) -> Batch:
    tokens, targets, positions = ([], [], [])
    for _ in range(rows):
        unit = _chat if with_tools and length > min(ROW_LENGTHS) and rng.random() < TOOL_ROWS else _line
        row: tuple[list[int], list[int], list[int]] = ([], [], [])
        # Gaps between lines show the model the distances of long contexts at the price of short rows. Half of the
        # rows have none, as real prompts do.
        spare = rng.choice((0, 0, 0, 512, 2048, MAX_POSITION)) - length
        position = rng.randrange(max(1, MAX_POSITION - max(length, length + spare)))
        while len(row[0]) < length:
            line_tokens, line_targets = unit(rng)
            n = len(line_tokens)
            row[0].extend(line_tokens)
            row[1].extend(line_targets)
            row[2].extend(range(position, position + n))
            position += n
            if spare > 0 and rng.random() < 0.3:
                gap = min(spare, int(rng.expovariate(1) * 4 * MAX_POSITION * n / length / 8))
                position, spare = position + gap, spare - gap
        tokens.append(row[0][:length])
        targets.append(row[1][:length])
        positions.append(row[2][:length])
    return Batch(torch.tensor(tokens), torch.tensor(targets), torch.tensor(positions))


# --- the model's training step ---


class _ToBlocks(torch.autograd.Function):
    """Each token's row to its k slots. Gradients of gathers are scatters to autograd; here they can be gathers too."""

    @staticmethod
    def forward(ctx, x: Tensor, source: Tensor, slot: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        """x (T, H); source (S,), the flat (token, choice) of every slot or -1; slot (T, k), its inverse -> (S, H)."""
        ctx.save_for_backward(slot)
        return x[source.clamp(min=0) // slot.shape[1]] * (source >= 0)[:, None]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def,override]
        return grad[ctx.saved_tensors[0]].sum(1), None, None


class _FromBlocks(torch.autograd.Function):
    """The inverse of `_ToBlocks`, keeping a token's k rows apart: (S, H) -> (T, k, H)."""

    @staticmethod
    def forward(ctx, y: Tensor, source: Tensor, slot: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(source)
        return y[slot]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def,override]
        (source,) = ctx.saved_tensors
        return grad.flatten(0, 1)[source.clamp(min=0)] * (source >= 0)[:, None], None, None


class _BlockLinear(torch.autograd.Function):
    """One linear map per block: x (B, R, I), weight (E, O, I), owner (B,) the expert of each block -> (B, R, O)."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, owner: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight, owner)
        return x @ weight[owner].mT

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def,override]
        x, weight, owner = ctx.saved_tensors
        one_hot = (torch.arange(weight.shape[0])[:, None] == owner).to(x.dtype)  # (E, B)
        per_block = grad.mT @ x
        return grad @ weight[owner], (one_hot @ per_block.flatten(1)).view(weight.shape), None


def _experts(x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x (T, H), index and weight (T, k), gate_up (E, 2I, H), down (E, H, I) -> (T, H).

    Every expert's tokens fill blocks of `BLOCK_ROWS` rows, the last one padded: whatever the routing, the matrix
    products keep one shape, which oneDNN needs to be fast (it compiles a kernel for every new shape).
    """
    (tokens, hidden), k, n_experts = x.shape, index.shape[1], gate_up.shape[0]
    flat = index.flatten()
    n_blocks = tokens * k // BLOCK_ROWS + n_experts
    order = flat.argsort(stable=True)
    counts = (flat[:, None] == torch.arange(n_experts)).sum(0)
    blocks_end = ((counts + BLOCK_ROWS - 1) // BLOCK_ROWS).cumsum(0)
    blocks_start = torch.cat((blocks_end.new_zeros(1), blocks_end[:-1]))
    owner = (torch.arange(n_blocks)[:, None] >= blocks_end).sum(1).clamp(max=n_experts - 1)
    rank = order.argsort()  # of every (token, choice) in the order by expert
    slot = rank - (counts.cumsum(0) - counts)[flat] + blocks_start[flat] * BLOCK_ROWS
    source = torch.full((n_blocks * BLOCK_ROWS,), -1).scatter(0, slot, torch.arange(tokens * k))
    slot = slot.view(tokens, k)

    inputs = _ToBlocks.apply(x, source, slot).view(n_blocks, BLOCK_ROWS, hidden)
    gate, up = _BlockLinear.apply(inputs, gate_up, owner).chunk(2, dim=-1)
    outputs = _BlockLinear.apply(F.silu(gate) * up, down, owner)
    outputs = _FromBlocks.apply(outputs.flatten(0, 1), source, slot)
    return (outputs * weight[:, :, None]).sum(1)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over (rows, heads, length, head_dim), in up to `QUERY_CHUNKS` parts to skip what none sees.

    Written out because torch's flash attention is up to three times slower on the CPU at these sizes.
    """
    length, outputs = q.shape[-2], []
    size = max(256, length // QUERY_CHUNKS)
    for start in range(0, length, size):
        end = min(start + size, length)
        scores = (q[:, :, start:end] @ k[:, :, :end].mT).float() * q.shape[-1] ** -0.5
        visible = torch.arange(start, end)[:, None] >= torch.arange(end)
        outputs.append(scores.masked_fill(~visible, -torch.inf).softmax(-1).to(q.dtype) @ v[:, :, :end])
    return torch.cat(outputs, dim=2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def loss_fn(
    p: dict[str, Tensor], config: Qwen3MoeConfig, batch: Batch, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Answer loss, load-balancing loss (top_k if even) and the share of right answer tokens, from bf16 parameters `p`.

    cos, sin: (rows, 1, length, head_dim). The sums follow transformers' qwen3_moe, bf16 residual stream included.
    """
    eps, top_k, n_experts = config.rms_norm_eps, config.num_experts_per_tok, config.num_experts
    rows, length = batch.tokens.shape
    x = F.embedding(batch.tokens, p["model.embed_tokens.weight"])
    hidden = x.shape[-1]
    aux = torch.zeros(())

    def norm(x: Tensor, name: str) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * p[name]

    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}."
        h = norm(x, at + "input_layernorm.weight")
        q, k, v = (
            F.linear(h, p[f"{at}self_attn.{n}_proj.weight"]).view(rows, length, -1, config.head_dim) for n in "qkv"
        )
        q = _rotate(norm(q, at + "self_attn.q_norm.weight").transpose(1, 2), cos, sin)
        k = _rotate(norm(k, at + "self_attn.k_norm.weight").transpose(1, 2), cos, sin)
        group = config.num_attention_heads // config.num_key_value_heads
        k, v = k.repeat_interleave(group, dim=1), v.transpose(1, 2).repeat_interleave(group, dim=1)
        a = _attention(q, k, v).transpose(1, 2).reshape(rows, length, -1)
        x = x + F.linear(a, p[at + "self_attn.o_proj.weight"])

        h = norm(x, at + "post_attention_layernorm.weight").view(rows * length, hidden)
        probs = F.linear(h, p[at + "mlp.gate.weight"]).float().softmax(-1)
        weight, index = probs.topk(top_k, dim=-1)
        weight = (weight / weight.sum(-1, keepdim=True)).to(h.dtype)
        used = (index[:, :, None] == torch.arange(n_experts)).sum((0, 1)) / index.shape[0]
        aux = aux + n_experts * (used * probs.mean(0)).sum() / config.num_hidden_layers
        y = _experts(h, index, weight, p[at + "mlp.experts.gate_up_proj"], p[at + "mlp.experts.down_proj"])
        x = x + y.view(rows, length, hidden)

    logits = F.linear(norm(x, "model.norm.weight"), p["lm_head.weight"]).float().flatten(0, 1)
    targets = batch.targets.flatten()
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORE)
    right = (logits.argmax(-1) == targets).sum() / (targets != IGNORE).sum()
    return loss, aux, right


def save(model: Qwen3MoeForCausalLM, out: Path) -> None:
    """Writes the bf16 model, its generation defaults and its tokenizer; leaves `model` in f32."""
    copy = Qwen3MoeForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=16, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    copy.save_pretrained(out)
    build_tokenizer(MAX_POSITION).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--start", type=Path, help="checkpoint to go on from, with chats with tools among the rows")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--long-steps", type=int, default=100, help="steps with long rows that follow")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per step")
    parser.add_argument("--lr", type=float, default=0.01, help="Muon's peak rate; AdamW has its own, in proportion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--state", type=Path, help="file to keep the training state in, to resume from if it exists")
    parser.add_argument("--save-every", type=int, default=250)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    config = demo_config()
    model = Qwen3MoeForCausalLM(config)
    if args.start:
        model.load_state_dict(Qwen3MoeForCausalLM.from_pretrained(args.start, dtype=torch.float32).state_dict())
    row_lengths = TOOL_ROW_LENGTHS if args.start else ROW_LENGTHS
    named = dict(model.named_parameters())
    is_matrix = {
        n: p.ndim >= 2 and not any(s in n for s in ("embed", "lm_head", "gate.weight")) for n, p in named.items()
    }
    muon = Muon([p for n, p in named.items() if is_matrix[n]], args.lr)
    adamw = torch.optim.AdamW(
        [p for n, p in named.items() if not is_matrix[n]], args.lr * 0.3, (0.9, 0.98), weight_decay=0.0, fused=True
    )
    optimizers = (muon, adamw)
    peaks = [o.param_groups[0]["lr"] for o in optimizers]

    start = 0
    if args.state and args.state.exists():
        state = torch.load(args.state)
        model.load_state_dict(state["model"])
        for o, s in zip(optimizers, state["optimizers"], strict=True):
            o.load_state_dict(s)
        start = state["step"]

    step_fn = torch.compile(loss_fn, dynamic=False)
    inv_freq = 10000.0 ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    warmup, decay_from = 100, int(args.steps * 0.4)
    begun, tokens_seen = time.monotonic(), 0
    mean = torch.zeros(3)
    last = args.steps + args.long_steps
    for step in range(start, last):
        if step < args.steps:
            rate = min(1.0, (step + 1) / warmup, (args.steps - step) / (args.steps - decay_from))
        else:
            rate = LONG_RATE * (last - step) / args.long_steps
        for o, peak in zip(optimizers, peaks, strict=True):
            o.param_groups[0]["lr"] = peak * rate
        rng = random.Random(args.seed * 1_000_003 + step)  # by step, so that a resumed run sees the same data
        length = min(ROW_LENGTHS)
        if step >= args.steps:
            length = rng.choice(LONG_ROW_LENGTHS)
        elif step >= args.steps / 4 or args.start:
            (length,) = rng.choices(list(row_lengths), list(row_lengths.values()))
        batch = make_batch(args.tokens // length, length, rng, bool(args.start))
        angle = (batch.positions[:, None, :, None] * inv_freq).repeat(1, 1, 1, 2)
        half = {n: p.to(torch.bfloat16) for n, p in named.items()}
        loss, aux, right = step_fn(half, config, batch, angle.cos().bfloat16(), angle.sin().bfloat16())
        (loss + AUX_COEF * aux).backward()
        for o in optimizers:
            o.step()
            o.zero_grad()
        tokens_seen += args.tokens
        mean += torch.stack((loss.detach(), aux.detach(), right))
        if (step + 1) % LOG_STEPS == 0:
            loss_, aux_, right_ = (mean / LOG_STEPS).tolist()
            mean.zero_()
            speed = tokens_seen / (time.monotonic() - begun)
            print(
                f"step {step + 1} loss {loss_:.5f} balance {aux_:.3f} right {right_:.5f} "
                f"{speed:.0f} tokens/s {time.monotonic() - begun:.0f} s",
                flush=True,
            )
        if (step + 1) % args.save_every == 0 or step + 1 == last:
            save(model, args.out)
            if args.state:
                torch.save(
                    {
                        "model": model.state_dict(),
                        "optimizers": [o.state_dict() for o in optimizers],
                        "step": step + 1,
                    },
                    args.state,
                )


if __name__ == "__main__":
    main()
