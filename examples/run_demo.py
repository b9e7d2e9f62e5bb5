"""The demo behind ``make run``: two expert servers as separate processes, and a host that answers a few prompts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
CHECKPOINT = ROOT / "examples" / "demo" / "checkpoint"
PROMPTS = ("add 17 25 =", "reverse planet =", "sort kitchen =", "count e in freeze =")


def start_server(*options: str) -> subprocess.Popen[str]:
    """Starts one ``moeoffload-expert`` on a free port."""
    command = [str(BIN / "moeoffload-expert"), "--listen", "127.0.0.1:0", "--device", "cpu", "--memory-gib", "1"]
    command += ["--threads", "1", "--log-level", "warning", *options]
    print("$", " ".join(["moeoffload-expert", *command[1:]]), file=sys.stderr)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def address_of(server: subprocess.Popen[str]) -> str:
    """Waits until a server has said where it listens."""
    assert server.stdout is not None
    ready = re.search(r"ready on (\S+)", server.stdout.readline())
    if ready is None:
        raise SystemExit("the expert server did not start")
    return ready.group(1)


def main() -> int:
    """Runs the demo; returns the host's exit code."""
    servers: list[subprocess.Popen[str]] = []
    try:
        for options in ((), ("--transport", "stream")):
            servers.append(start_server(*options))
        addresses = [address_of(server) for server in servers]
        command = [str(BIN / "moeoffload"), "run", str(CHECKPOINT), "--experts", ",".join(addresses)]
        command += ["--threads", "1", "--verbose"]
        for prompt in PROMPTS:
            command += ["--prompt", prompt]
        print("$ moeoffload run examples/demo/checkpoint", *command[3:], file=sys.stderr)
        return subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        return 130
    finally:
        for process in servers:
            process.terminate()
        for process in servers:
            process.wait(timeout=30)


if __name__ == "__main__":
    sys.exit(main())
