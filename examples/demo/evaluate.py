"""Measures a demo checkpoint on held-out prompts: ``python examples/demo/evaluate.py examples/demo/checkpoint``.

Greedy decoding in batches with the KV cache. Prints tables and, with ``--out``, writes the same numbers as JSON: exact
match per task alone and after long prompts, how sure the model is of its tokens, and how evenly experts are used.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from tasks import (  # type: ignore[import-not-found]
    TASKS,
    answer,
    chat_steps,
    check,
    conversation,
    long_prompt,
    prompts,
    tools_text,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
BATCH_TOKENS = 16384  # prompts of a batch times their length


@torch.inference_mode()
def complete(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], max_new_tokens: int = 12
) -> list[str]:
    """Greedy continuations, without the end token; one that never ends is cut and so counts as wrong."""
    results: dict[int, str] = {}
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    while order:
        size = max(1, BATCH_TOKENS // (len(texts[order[-1]]) + max_new_tokens))
        order, part = order[:-size], order[-size:]
        batch = tokenizer([texts[i] for i in part], return_tensors="pt", padding=True, padding_side="left")
        tokens = model.generate(**batch, do_sample=False, max_new_tokens=max_new_tokens)  # type: ignore[operator]
        for i, row in zip(part, tokens[:, batch["input_ids"].shape[1] :], strict=True):
            text, end, _ = tokenizer.decode(row).partition(str(tokenizer.eos_token))
            results[i] = text if end else text + "..."
    return [results[i] for i in range(len(texts))]


def chat_scores(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, n: int, seed: int) -> dict[str, float]:
    """Percentage of right calls, of right answers after a result and without a call, in `n` chats with tools."""
    rng = random.Random(seed)
    asked: list[tuple[str, str, str]] = []  # what is asked for, the text before it, the right continuation
    for _ in range(n):
        tools, turns = conversation("held-out", rng)
        text = tools_text(tools)
        for turn in turns:
            steps = chat_steps(turn)
            for kind, (given, right) in zip(("call", "answer") if turn.tool else ("plain",), steps, strict=True):
                asked.append((kind, text + given, right))
                text += f"{given}{right}{tokenizer.eos_token}\n"
    outputs = complete(model, tokenizer, [before for _, before, _ in asked], max_new_tokens=128)
    good: dict[str, list[bool]] = {}
    for (kind, _, right), output in zip(asked, outputs, strict=True):
        good.setdefault(kind, []).append(output == right)
    return {kind: round(100 * sum(each) / len(each), 2) for kind, each in good.items()}


@torch.inference_mode()
def margins(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> torch.Tensor:
    """Right token's logit less the best other's, for every answer token and the end token, the answer being given."""
    found = []
    for text in texts:
        start = len(text)  # one token per character
        ids = tokenizer(text + answer(text) + str(tokenizer.eos_token), return_tensors="pt")["input_ids"]
        logits = model(ids).logits[0, start - 1 : -1].float()
        right = ids[0, start:, None]
        found.append(logits.gather(1, right)[:, 0] - logits.scatter(1, right, -torch.inf).amax(1))
    return torch.cat(found)


@torch.inference_mode()
def routing(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> torch.Tensor:
    """Percentage of the routed (token, choice) pairs that each expert gets, (layers, experts)."""
    config = model.config
    counts = torch.zeros(config.num_hidden_layers, config.num_experts)
    for text in texts:
        ids = tokenizer(text + answer(text), return_tensors="pt")["input_ids"]
        for layer, logits in enumerate(model(ids, output_router_logits=True).router_logits):
            chosen = logits.topk(config.num_experts_per_tok, dim=-1).indices.flatten()
            counts[layer] += torch.bincount(chosen, minlength=config.num_experts)
    return 100 * counts / counts.sum(1, keepdim=True)


def measure(checkpoint: Path, n: int, n_long: int, contexts: list[int], seed: int) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    report: dict[str, Any] = {"prompts_per_task": n, "long_prompts_per_task": n_long, "seed": seed}
    texts = {task: prompts(n, seed, task=task) for task in TASKS}
    first: list[str] = []
    for name, dtype in DTYPES.items():
        begun = time.monotonic()
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
        result: dict[str, Any] = {"exact_match": {}, "exact_match_after_context": {}}
        everything: list[str] = []
        for task, task_texts in texts.items():
            outputs = complete(model, tokenizer, task_texts)
            everything += outputs
            wrong = [(t, o) for t, o in zip(task_texts, outputs, strict=True) if not check(t, o)]
            result["exact_match"][task] = round(100 * (1 - len(wrong) / n), 2)
            print(f"{name} {task:8} {result['exact_match'][task]:6.2f} %", *(f"{t}{o}" for t, o in wrong[:3]), sep="  ")
        for context in contexts:
            row = {}
            for t, task in enumerate(TASKS):
                long = [long_prompt(context, (seed + i) * len(TASKS) + t, task=task) for i in range(n_long)]
                outputs = complete(model, tokenizer, long)
                good = sum(check(p.rsplit("\n", 1)[-1], o) for p, o in zip(long, outputs, strict=True))
                row[str(task)] = round(100 * good / n_long, 2)
            result["exact_match_after_context"][str(context)] = row
            print(f"{name} after {context} tokens", row, flush=True)
        result["chats_with_tools"] = chat_scores(model, tokenizer, n // 20, seed)
        print(f"{name} chats with tools", result["chats_with_tools"], flush=True)
        sure = margins(model, tokenizer, [t for ts in texts.values() for t in ts[:100]])
        points = sure.quantile(torch.tensor([0.001, 0.01, 0.1, 0.5])).tolist()
        result["margin_quantiles"] = dict(zip(("0.1%", "1%", "10%", "50%"), (round(x, 2) for x in points), strict=True))
        print(f"{name} logit margins", result["margin_quantiles"])
        if first:
            same = sum(a == b for a, b in zip(first, everything, strict=True)) / len(first)
            report["answers_equal_between_dtypes_percent"] = round(100 * same, 2)
        else:
            first = everything
            shares = routing(model, tokenizer, [t for ts in texts.values() for t in ts[:100]])
            report["routing_percent"] = [[round(x, 2) for x in layer] for layer in shares.tolist()]
            for i, layer in enumerate(shares):
                print(f"layer {i}: experts get {layer.min():.2f} to {layer.max():.2f} % of the choices")
        result["seconds"] = round(time.monotonic() - begun)
        report[name] = result
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--n", type=int, default=1000, help="prompts per task")
    parser.add_argument("--n-long", type=int, default=50, help="prompts per task and context length")
    parser.add_argument("--contexts", type=int, nargs="*", default=[256, 1024, 4096], help="prompt lengths in tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report = measure(args.checkpoint, args.n, args.n_long, args.contexts, args.seed)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
