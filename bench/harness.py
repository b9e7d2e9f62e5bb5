"""Real clients on the real process: lm-evaluation-harness and JSON schemas, ``python bench/harness.py --json FILE``.

`moeoffload serve` with the demo model answers lm_eval's ``local-completions``: a generation task, and one that chooses
the likeliest of several answers, both of held-out prompts. The baseline is the same model in this process by
transformers alone. Then OpenAI's client asks for answers by random JSON schemas, greedy and sampled.
lm_eval is no dependency: install it in an environment of its own and give its command.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import openai
import torch
import typer
from contender import process
from devices import CPU, HostDevice, ServerDevice
from parity import MAX_NEW_TOKENS, accuracy, complete, tasks
from prefill_ipc import DEMO
from random_schemas import ASK, CLOSING, Schema, different_schemas, validator
from rich.console import Console
from rich.table import Table
from servers import cores, expert_server, write_json
from transformers import AutoModelForCausalLM, AutoTokenizer

TIMEOUT_S = 900
N_CHOICES = 4
TASKS: dict[str, dict[str, Any]] = {
    "generate": {
        "output_type": "generate_until",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": MAX_NEW_TOKENS, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc"}],
    },
}


@dataclass(frozen=True)
class Row:
    """What one client asked for, and how much of it was right, in percent; ``local``: of transformers' answers."""

    client: str
    task: str
    asked: int
    right: float
    local: float | None = None


def documents(n: int) -> list[dict[str, Any]]:
    """Prompts with their answers, and for each the answers to others of its kind to choose from."""
    prompts = tasks.prompts(n, seed=7)
    made = []
    for number, prompt in enumerate(prompts):
        others = (prompts[(number + turn * len(tasks.TASKS)) % n] for turn in range(N_CHOICES))
        choices, answer = sorted({tasks.answer(each) for each in others}), tasks.answer(prompt)
        made.append({"prompt": prompt, "answer": answer, "choices": choices, "right": choices.index(answer)})
    return made


@torch.inference_mode()
def local(asked: list[dict[str, Any]], device: str) -> dict[str, float]:
    """Of each task, how much transformers alone gets right."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, experts_implementation="grouped_mm").to(device).eval()

    def score(prompt: str, answer: str) -> float:
        ids = tokenizer(prompt + answer, return_tensors="pt")["input_ids"].to(device)
        n_prompt = len(tokenizer(prompt)["input_ids"])
        logprobs = model(ids).logits[0, n_prompt - 1 : -1].float().log_softmax(-1)
        return float(logprobs.gather(1, ids[0, n_prompt:, None]).sum())

    prompts = [each["prompt"] for each in asked]
    n_right = 0
    for each in asked:
        scores = [score(each["prompt"], choice) for choice in each["choices"]]
        n_right += scores.index(max(scores)) == each["right"]
    generated = accuracy(tokenizer, prompts, complete(model, tokenizer, prompts))
    return {"generate": generated, "choose": 100 * n_right / len(asked)}


def harness(command: str, url: str, asked: list[dict[str, Any]]) -> dict[str, Any]:
    """What lm_eval found."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "documents.jsonl"
        file.write_text("".join(json.dumps(each) + "\n" for each in asked))
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
        for task, details in TASKS.items():
            how = {"task": task, "doc_to_text": "prompt", "target_delimiter": ""}
            (folder / f"{task}.yaml").write_text(json.dumps(data | how | details))
        arguments = f"model=demo,base_url={url}/completions,num_concurrent=8,tokenizer={DEMO},tokenized_requests=True"
        words = ["--model", "local-completions", "--model_args", arguments, "--tasks", ",".join(TASKS)]
        words += ["--include_path", name, "--output_path", str(folder / "out")]
        # Python of another environment; what it keeps goes with the folder.
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HOME": name}
        done = subprocess.run(
            [command, *words], env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if done.returncode:
            raise SystemExit(f"lm_eval failed:\n{done.stderr[-2000:]}")
        (told,) = (json.loads(each.read_text()) for each in (folder / "out").rglob("results_*.json"))
        return dict(told)


def valid(url: str, schemas: list[Schema], how: dict[str, Any]) -> list[bool]:
    """Whether each answer ends by itself and is valid by its schema; 16 are asked for at a time."""

    def ask(numbered: tuple[int, Schema]) -> bool:
        number, schema = numbered
        form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
        options = how | CLOSING | {"seed": number, "max_tokens": 1000}
        told = client.chat.completions.create(model="demo", messages=ASK, response_format=form, **options).choices[0]
        return told.finish_reason == "stop" and validator(schema).is_valid(json.loads(told.message.content or ""))

    with openai.OpenAI(base_url=url, api_key="none", timeout=TIMEOUT_S) as client, ThreadPoolExecutor(16) as threads:
        return list(threads.map(ask, enumerate(schemas)))


def main(
    lm_eval: Annotated[str, typer.Option(help="The command of lm-evaluation-harness.")] = "lm_eval",
    n_documents: Annotated[int, typer.Option("--documents", help="Of each of lm_eval's tasks.")] = 64,
    n_schemas: Annotated[int, typer.Option("--schemas", help="Random JSON schemas.")] = 200,
    json: Path | None = None,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    """Ask a server as harnesses and agents do; exit code 1 if an answer is not what it must be."""
    command = shutil.which(lm_eval)
    if command is None:
        raise typer.BadParameter(
            f"{lm_eval} is no command: pip install 'lm_eval[api]' transformers, in an environment of its own",
            param_hint="--lm-eval",
        )
    torch.set_num_threads(1)
    host_core, server_core = cores()
    schemas = different_schemas(n_schemas)
    with expert_server(server_core, "--memory-gib", "1", device=server_device) as address:
        words = ["serve", str(DEMO), "--experts", address, "--served-model-name", "demo", "--port", "0"]
        words += ["--device", host_device, "--threads", "1", "--kv-gib", "0.1", "--log-level", "warning"]
        with process(host_core, "host_app", "", words, r"(http://\S+)") as url:
            asked = documents(n_documents)
            told = harness(command, url, asked)
            here = local(asked, host_device)
            rows = [
                Row(
                    "lm_eval",
                    f"{task}, {metric}",
                    n_documents,
                    100 * told["results"][task][f"{metric},none"],
                    here[task],
                )
                for task, metric in (("generate", "exact_match"), ("choose", "acc"))
            ]
            for name, how in (("greedy", {"temperature": 0.0}), ("sampled", {"temperature": 1.0})):
                found = valid(url, schemas, how)
                rows.append(Row("openai", f"JSON schemas, {name}: valid", len(found), 100 * sum(found) / len(found)))
    table = Table(title="moeoffload serve with the demo model; local: transformers alone")
    for column in ("client", "task", "asked", "right %", "local %"):
        table.add_column(column, justify="left" if column in ("client", "task") else "right")
    for row in rows:
        there = "–" if row.local is None else f"{row.local:.1f}"
        table.add_row(row.client, row.task, str(row.asked), f"{row.right:.1f}", there)
    Console().print(table)
    if json is not None:
        versions = {"lm_eval": told["lm_eval_version"], "openai": openai.__version__}
        write_json(json, "harness", versions | {"host_device": host_device, "server_device": server_device}, rows)
    if any(row.right < (100.0 if row.local is None else row.local) for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
