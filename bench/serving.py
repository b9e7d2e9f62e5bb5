"""Many requests on one model: how much more comes out, and how long each one waits.

``python bench/serving.py --checkpoint DIR --json out.json``. The host is pinned to one core, the expert server to
another. Bursts of 1 to 16 requests take turns with transformers' ``generate_batch`` on the same model
all in this process on the host's core; then requests that arrive at random times,
a second turn with and without what the first left in the cache, and guesses on and off. The limit of a step is the
bytes of weights that it needs, each expert once, over the bandwidth of one reading core.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, TypedDict

import torch
import typer
from devices import CPU, HostDevice, ServerDevice
from limits import Demand, read_bandwidth
from local_model import benchmark_checkpoint, load_local
from rich.console import Console
from rich.table import Table
from servers import Spread, cores, expert_server, machine, write_json
from transformers import ContinuousBatchingConfig, GenerationConfig

from moeoffload import OffloadedModel, open_model
from moeoffload.config import ServeSettings
from moeoffload.host.generate import PreparedPrompt, generate
from moeoffload.host.speculative import GuessLength
from moeoffload.serve.engine import ServingEngine
from moeoffload.serve.request import Progress, SamplingOptions

PROMPT = 32
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Row:
    """One way to answer; times in milliseconds, ``limit`` in tokens per second, rows per dispatch on average."""

    way: str
    requests: int
    tokens_per_s: Spread
    limit: float | None
    first_p50: float | None = None
    first_p95: float | None = None
    between_p50: float | None = None
    between_p95: float | None = None
    rows_per_call: float | None = None
    details: dict[str, float] = field(default_factory=dict)


@dataclass
class Answer:
    """When the tokens of one request came."""

    sent: float = 0.0
    came: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    last: Progress | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def take(self, progress: Progress) -> None:
        if progress.choice is not None:
            self.came.append(perf_counter())
            self.tokens.append(progress.choice.token)
        self.last = progress
        if progress.finish is not None:
            self.over.set()

    def wait(self) -> None:
        if not self.over.wait(TIMEOUT_S) or self.last is None or self.last.error is not None:
            raise SystemExit(f"a request failed: {self.last}")


def ask(engine: ServingEngine, prompt: list[int], n_tokens: int) -> Answer:
    answer = Answer(perf_counter())
    engine.submit(prompt, SamplingOptions(max_tokens=n_tokens, temperature=0, ignore_eos=True), answer.take)
    return answer


class Latencies(TypedDict, total=False):
    """Milliseconds to the first token, and between two."""

    first_p50: float
    first_p95: float
    between_p50: float
    between_p95: float


def latencies(answers: Sequence[Answer]) -> Latencies:
    first = sorted(1e3 * (answer.came[0] - answer.sent) for answer in answers)
    between = sorted(1e3 * (b - a) for answer in answers for a, b in zip(answer.came, answer.came[1:], strict=False))
    return {
        "first_p50": statistics.median(first),
        "first_p95": first[int(0.95 * (len(first) - 1))],
        "between_p50": statistics.median(between),
        "between_p95": between[int(0.95 * (len(between) - 1))],
    }


class Bench:
    """All measurements of one run."""

    def __init__(
        self, offloaded: OffloadedModel, local: Any, n_tokens: int, repeats: int, console: Console, server_device: str
    ) -> None:
        self.offloaded, self.local = offloaded, local
        self.n_tokens, self.repeats, self.console = n_tokens, repeats, console
        self.vocab = local.config.get_text_config().vocab_size
        self.random = random.Random(1)
        self.demand = Demand.of(local, offloaded.checkpoint)
        host_device = str(local.device)
        self.bandwidth = read_bandwidth(host_device)
        self.server_bandwidth = self.bandwidth if server_device == host_device else read_bandwidth(server_device)
        self.rows: list[Row] = []

    def prompt(self, n: int = PROMPT) -> list[int]:
        return [self.random.randrange(5, self.vocab) for _ in range(n)]

    def limit(self, n_requests: int) -> float:
        """Tokens per second if weights were read once in a step, experts as often as random routes hit them."""
        layers = self.offloaded.checkpoint.layers
        top_k = self.offloaded.checkpoint.top_k
        experts = sum(
            layer.expert_bytes * layer.n_experts * (1 - (1 - top_k / layer.n_experts) ** n_requests) for layer in layers
        )
        return n_requests / (self.demand.dense_bytes / self.bandwidth + experts / self.server_bandwidth)

    def bursts(self, counts: Sequence[int]) -> None:
        """Requests that come together, both ways in turns."""
        for n in counts:
            prompts = [self.prompt() for _ in range(n)]
            local: list[float] = []
            whole: list[float] = []
            served: list[float] = []
            seen: list[Answer] = []
            for _ in range(self.repeats):
                local.append(self._generate_batch(prompts))
                for pipeline, times in (("off", whole), ("auto", served)):
                    answers, seconds = self._serve(prompts, pipeline)
                    times.append(seconds)
                seen += answers
            decode = self.offloaded.recorder.phases["decode"].servers[0]
            speeds = [Spread.of([n * self.n_tokens / each for each in times]) for times in (local, served, whole)]
            self.rows.append(Row("local, generate_batch", n, speeds[0], self.limit(n)))
            self.rows.append(
                Row("serve", n, speeds[1], self.limit(n), **latencies(seen), rows_per_call=decode.rows / decode.calls)
            )
            if n > 1:
                self.rows.append(Row("serve, whole steps", n, speeds[2], self.limit(n)))
            self.console.print(f"  {n} at once done", style="dim")

    def long_prompts(self, n: int, n_prompt: int) -> None:
        """Requests with long prompts, with steps in halves and whole in turns."""
        times: dict[str, list[float]] = {"off": [], "auto": []}
        seen: dict[str, list[Answer]] = {"off": [], "auto": []}
        for _ in range(self.repeats):
            for pipeline, its_times in times.items():
                answers, seconds = self._serve([self.prompt(n_prompt) for _ in range(n)], pipeline)
                its_times.append(seconds)
                seen[pipeline] += answers
        for pipeline, seconds_of in times.items():
            speed = Spread.of([n * self.n_tokens / each for each in seconds_of])
            name = f"serve, prompts of {n_prompt}" + (", whole steps" if pipeline == "off" else "")
            self.rows.append(Row(name, n, speed, None, **latencies(seen[pipeline])))
        self.console.print(f"  {n} with {n_prompt} tokens done", style="dim")

    def _serve(self, prompts: list[list[int]], pipeline: str) -> tuple[list[Answer], float]:
        """The answers to requests that come together, and the seconds that they took."""
        self.offloaded.settings = self.offloaded.settings.model_copy(update={"pipeline": pipeline})
        with ServingEngine(self.offloaded, ServeSettings(prefix_reuse=False)) as engine:
            self.offloaded.recorder.reset()
            started = perf_counter()
            answers = [ask(engine, prompt, self.n_tokens) for prompt in prompts]
            for answer in answers:
                answer.wait()
            return answers, perf_counter() - started

    def _generate_batch(self, prompts: list[list[int]]) -> float:
        config = ContinuousBatchingConfig(page_size=16, num_blocks=512, max_batch_tokens=512, use_async_batching=False)
        started = perf_counter()
        self.local.generate_batch(
            prompts,
            generation_config=GenerationConfig(max_new_tokens=self.n_tokens, do_sample=False, eos_token_id=-1),
            continuous_batching_config=config,
            warmup=False,
        )
        return perf_counter() - started

    def arrivals(self, share: float, n_requests: int) -> None:
        """Requests that arrive at random, at a share of the rate at which bursts of 8 were answered."""
        fastest = max(row.tokens_per_s.median for row in self.rows if row.requests == 8 and row.first_p50 is not None)
        rate = share * fastest / self.n_tokens
        with ServingEngine(self.offloaded, ServeSettings(prefix_reuse=False)) as engine:
            answers = []
            started = perf_counter()
            for _ in range(n_requests):
                time.sleep(self.random.expovariate(rate))
                answers.append(ask(engine, self.prompt(), self.n_tokens))
            for answer in answers:
                answer.wait()
            took = perf_counter() - started
        speed = n_requests * self.n_tokens / took
        name = f"open loop, {rate:.2f} requests/s"
        self.rows.append(Row(name, n_requests, Spread(speed, speed, speed), None, **latencies(answers)))

    def second_turn(self, n_prompt: int) -> None:
        """A conversation's second turn, with and without what the first one left."""
        firsts: dict[bool, list[float]] = {False: [], True: []}
        sent: dict[bool, list[float]] = {False: [], True: []}
        for reuse in (False, True):
            for _ in range(self.repeats):
                prompt = self.prompt(n_prompt)
                with ServingEngine(self.offloaded, ServeSettings(prefix_reuse=reuse)) as engine:
                    first = ask(engine, prompt, 16)
                    first.wait()
                    before = self._rows_sent()
                    second = ask(engine, [*prompt, *first.tokens, *self.prompt(16)], 16)
                    second.wait()
                    firsts[reuse].append((second.came[0] - second.sent) / (first.came[0] - first.sent))
                    sent[reuse].append((self._rows_sent() - before) / before)
        for reuse, name in ((False, "second turn, computed again"), (True, "second turn, reused")):
            details = {
                "time to first token / first turn": statistics.median(firsts[reuse]),
                "rows sent / first turn": statistics.median(sent[reuse]),
            }
            nothing = Spread(0, 0, 0)
            self.rows.append(Row(name, 1, nothing, None, details=details))

    def _rows_sent(self) -> int:
        return sum(server.rows for phase in self.offloaded.recorder.phases.values() for server in phase.servers)

    def guesses(self, n_tokens: int) -> None:
        """A repetitive prompt, without guesses and with prompt lookup."""
        pattern = self.prompt(12)
        ids = torch.tensor([pattern * 6], device=self.local.device)
        prepared = PreparedPrompt({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, n_tokens)
        results: dict[int, list[float]] = {0: [], 8: []}
        tokens: dict[int, list[int]] = {}
        details: dict[int, dict[str, float]] = {}
        for _ in range(self.repeats):
            for guesses, times in results.items():
                self.offloaded.settings = self.offloaded.settings.model_copy(update={"prompt_lookup": guesses})
                self.offloaded.guess_length = GuessLength(guesses, adaptive=False)
                self.offloaded.recorder.reset()
                started = perf_counter()
                tokens[guesses] = generate(self.offloaded, prepared, io.StringIO()).tokens.tolist()
                times.append(perf_counter() - started)
                report = self.offloaded.report()
                if report.guesses is not None:
                    details[guesses] = {
                        name: report.guesses[name] for name in ("acceptance", "tokens_per_pass", "calls_per_token")
                    }
        if tokens[0] != tokens[8]:
            raise SystemExit("guesses changed the tokens")
        for guesses, times in results.items():
            speed = Spread.of([len(tokens[guesses]) / each for each in times])
            name = f"prompt lookup, {guesses} guesses"
            self.rows.append(Row(name, 1, speed, self.limit(1), details=details.get(guesses, {})))


def table(rows: Sequence[Row]) -> Table:
    made = Table(title="many requests; times in ms")
    for name in ("way", "requests", "tok/s", "limit", "first p50", "p95", "between p50", "p95", "rows/call", ""):
        made.add_column(name, justify="left" if name in ("way", "") else "right")

    def cell(value: float | None, spec: str = ".1f") -> str:
        return "" if value is None else format(value, spec)

    for row in rows:
        made.add_row(
            row.way,
            str(row.requests),
            f"{row.tokens_per_s:.1f}" if row.tokens_per_s.median else "",
            cell(row.limit),
            cell(row.first_p50),
            cell(row.first_p95),
            cell(row.between_p50),
            cell(row.between_p95),
            cell(row.rows_per_call, ".2f"),
            ", ".join(f"{name} {value:.3g}" for name, value in row.details.items()),
        )
    return made


def main(
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint folder; default: one is written.")] = None,
    counts: Annotated[str, typer.Option(help="Requests of a burst, with commas between.")] = "1,2,4,8,16",
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 48,
    repeats: int = 5,
    json: Path | None = None,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    """Measure many requests at once on one model."""
    host_core, server_core = cores()
    console = Console(width=None if Console().is_terminal else 170)
    console.print(f"{machine()['cpu']}, host on core {host_core}, server on core {server_core}")
    with contextlib.ExitStack() as stack:
        if checkpoint is None:
            checkpoint = benchmark_checkpoint(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        address = stack.enter_context(expert_server(server_core, device=server_device))
        os.sched_setaffinity(0, {host_core})
        torch.set_num_threads(1)
        offloaded = stack.enter_context(open_model(checkpoint, experts=[address], device=host_device, threads=1))
        bench = Bench(offloaded, load_local(checkpoint, host_device), tokens, repeats, console, server_device)
        bench.bursts([int(part) for part in counts.split(",")])
        if "8" in counts.split(","):
            bench.arrivals(0.5, 24)
            bench.arrivals(0.8, 24)
        bench.long_prompts(4, 2000)
        bench.second_turn(2000)
        bench.guesses(96)
    console.print(table(bench.rows))
    if json is not None:
        settings = {"checkpoint": checkpoint.name, "tokens": tokens, "prompt": PROMPT, "repeats": repeats}
        settings |= {"host_device": host_device, "server_device": server_device}
        write_json(json, "serving", settings, bench.rows)


if __name__ == "__main__":
    typer.run(main)
