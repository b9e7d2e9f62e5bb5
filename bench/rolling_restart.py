"""All servers restarted one after the other under one long generation: ``python bench/rolling_restart.py --json FILE``.

Three servers, each with a third of every layer; SIGTERM, wait for exit code 0, start on the same port, wait until the
host uses it, then the next. The demo model in float32 generates on past its end token. Exit code 1 if a token differs.
"""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import fault_path  # noqa: F401  (before what it makes importable)
import tasks
import typer
from devices import CPU, HostDevice, ServerDevice
from fault_kit.rolling import Rolling, rolling_restart
from fault_results import write_results
from server_processes import DEMO, ServerProcess

from moeoffload.host.session import open_model

N_SERVERS = 3


def _totals(result: Rolling) -> dict[str, Any]:
    return {name: value for name, value in vars(result).items() if name != "restarts"}


def main(
    tokens: Annotated[int, typer.Option("--tokens", help="How many are generated.")] = 2000,
    token_ms: Annotated[
        float, typer.Option("--token-ms", help="Longer by so many milliseconds, as a larger model's token.")
    ] = 10.0,
    replicas: Annotated[int, typer.Option("--replicas", help="Servers that hold each expert.")] = 1,
    transport: Annotated[str, typer.Option("--transport", help="shared or stream.")] = "shared",
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Where the result goes.")] = None,
    host_device: HostDevice = CPU,
    server_device: ServerDevice = CPU,
) -> None:
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(N_SERVERS) as pool:
        servers = list(pool.map(lambda _: ServerProcess(Path(name), "--device", server_device), range(N_SERVERS)))
        try:
            with open_model(
                DEMO,
                experts=[server.address for server in servers],
                threads=1,
                device=host_device,
                model_dtype="f32",
                transport=transport,
                replicas=replicas,
            ) as offloaded:
                result = rolling_restart(offloaded, servers, tasks.prompts(1, seed=5)[0], tokens, token_ms / 1000)
                recovery = offloaded.report().to_json()["recovery"]
        finally:
            for server in servers:
                server.close()
    for restart in result.restarts:
        print(
            f"server {restart.server}: SIGTERM at token {restart.layer_call // 4}, exit code {restart.exit_code} after "
            f"{restart.drain_s:.2f} s, ready after {restart.start_s:.2f} s more, used after {restart.back_s:.2f} s more"
        )
    print(
        f"{result.equal_tokens} of {result.tokens} tokens equal; {result.undisturbed_s:.2f} s undisturbed, "
        f"{result.disturbed_s:.2f} s with restarts: {result.added_s:+.2f} s; longest pause {result.pause_s:.3f} s; "
        f"all back before the end: {result.finished}"
    )
    if json is not None:
        settings = {"tokens": tokens, "token_ms": token_ms, "replicas": replicas, "transport": transport}
        settings |= {"host_device": host_device, "server_device": server_device}
        write_results(json, "rolling_restart", settings, result.restarts, _totals(result) | recovery, [])
    codes = [restart.exit_code for restart in result.restarts]
    if result.equal_tokens != result.tokens or codes != [0] * N_SERVERS or not result.finished:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
