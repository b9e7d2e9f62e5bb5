"""One contender of `ablations` and `against`: a host process with its own expert server, which does tasks it is told.

``python bench/contender.py CHECKPOINT OPTIONS``: reads one task per line (JSON) and answers with its seconds. It uses
nothing but the package's public interface, so that ``PYTHONPATH`` can name another checkout.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

TIMEOUT_S = 600.0


@contextlib.contextmanager
def process(core: int, entry: str, patch: str, words: list[str], ready: str) -> Iterator[str]:
    """Starts a command of the package pinned to ``core``, after ``patch``; yields what ``ready`` finds."""
    code = f"{patch}\nimport sys\nfrom moeoffload.cli.{entry} import main\nsys.argv[0] = 'bench'\nmain()"
    child = subprocess.Popen(
        ["taskset", "-c", str(core), sys.executable, "-c", code, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        for line in child.stdout:
            found = re.search(ready, line)
            if found is not None:
                yield found.group(1)
                return
        raise SystemExit(f"{entry} did not start")
    finally:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=30)
        child.kill()


def random_ids(n: int, vocab: int, seed: int) -> list[int]:
    """``n`` token ids, the same for the same seed."""
    import torch

    return torch.randint(5, vocab, (n,), generator=torch.manual_seed(seed)).tolist()


def settle(device: Any) -> None:
    """Waits for what a GPU was told to compute."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Direct:
    """Models that are open in this process: the same one several times where a task wants several hosts."""

    def __init__(self, models: list[Any]) -> None:
        self._models = models
        self._vocab = models[0].config.get_text_config().vocab_size

    def run(self, task: dict[str, Any]) -> float:
        """Seconds of a prefill of ``prompt`` tokens, or of ``tokens`` greedy ones after it, by one host or by all."""
        if task["task"] != "hosts":
            return self._run(self._models[0], task)
        one = task | {"task": "decode"}
        started = perf_counter()
        with ThreadPoolExecutor(len(self._models)) as threads:
            list(threads.map(lambda model: self._run(model, one), self._models))
        return perf_counter() - started

    def _run(self, model: Any, task: dict[str, Any]) -> float:
        import torch
        from transformers import DynamicCache

        prompt = torch.tensor([random_ids(task["prompt"], self._vocab, task["prompt"])], device=model.device)
        cache = DynamicCache(config=model.config)
        started = perf_counter()
        with torch.inference_mode():
            logits = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            if task["task"] == "decode":
                settle(model.device)
                started = perf_counter()
                for _ in range(task["tokens"]):
                    # As `generate` does; torch's argmax of bfloat16 takes five times as long.
                    token = logits[:, -1].float().argmax(-1, keepdim=True)
                    logits = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        settle(model.device)
        return perf_counter() - started


class Served:
    """``moeoffload serve`` as clients see it."""

    def __init__(self, url: str, name: str, vocab: int) -> None:
        self._url, self._name, self._vocab = url, name, vocab
        self._turn = 0

    def run(self, task: dict[str, Any]) -> float:
        """Seconds until ``requests`` requests of ``tokens`` tokens, sent together, are answered.

        With ``again`` all turns have the same prompts, whose keys and values are kept from the first one on.
        """
        self._turn += 0 if task.get("again") else 1
        failed: list[BaseException] = []

        def ask(number: int) -> None:
            body = {
                "model": self._name,
                "prompt": random_ids(task.get("prompt", 32), self._vocab, 1000 * self._turn + number),
                "max_tokens": task["tokens"],
                "temperature": 0,
                "ignore_eos": True,
            }
            request = urllib.request.Request(
                f"{self._url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
                    reply.read()
            except OSError as error:
                failed.append(error)

        started = perf_counter()
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(task["requests"])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise SystemExit(f"a request failed: {failed[0]}")
        return perf_counter() - started


def main() -> None:
    """Start the server and the host, then do tasks until stdin ends."""
    checkpoint, options = sys.argv[1], json.loads(sys.argv[2])
    host_core, server_core = options["cores"]
    host_device = options.get("host_device", "cpu")
    server_words = ["--listen", "127.0.0.1:0", "--exit-with-stdin", "--device", options.get("server_device", "cpu")]
    server_words += ["--threads", "1", "--log-level", "warning", *options.get("server_options", [])]
    with contextlib.ExitStack() as stack:
        patch = options.get("server_patch", "")
        addresses = [
            stack.enter_context(process(server_core, "expert_app", patch, server_words, r"ready on (\S+)"))
            for _ in range(options.get("servers", 1))
        ]
        os.sched_setaffinity(0, {host_core})
        import torch
        from transformers import AutoConfig
        from transformers.utils.logging import disable_progress_bar

        torch.set_num_threads(1)
        disable_progress_bar()
        contender: Direct | Served
        if options.get("served"):
            vocab = AutoConfig.from_pretrained(checkpoint).get_text_config().vocab_size
            words = ["serve", checkpoint, "--experts", ",".join(addresses), "--device", host_device, "--threads", "1"]
            words += ["--port", "0", "--log-level", "warning", *options.get("host_options", [])]
            url = stack.enter_context(
                process(host_core, "host_app", options.get("host_patch", ""), words, r"(http://\S+)")
            )
            with urllib.request.urlopen(f"{url}/models", timeout=TIMEOUT_S) as reply:
                contender = Served(url, json.load(reply)["data"][0]["id"], vocab)
        else:
            exec(options.get("host_patch", ""), {})
            from moeoffload import open_model

            settings = options.get("settings", {})
            models = []
            for _ in range(options.get("hosts", 1)):
                opened = open_model(checkpoint, experts=addresses, device=host_device, **settings)
                models.append(stack.enter_context(opened).model)
            contender = Direct(models)
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            print(json.dumps(contender.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
