"""A host in a process of its own, that generates the same again and again until it is killed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from server_processes import DEMO, PipedProcess

CLONE_NEWNET = 0x40000000
N_TOKENS = 32


@dataclass(frozen=True)
class Progress:
    """What the host has done so far."""

    n_generations: int
    results: list[list[int]]
    """Every different list of tokens that came out; one, if all is well."""
    recovery: dict[str, Any]


def _generate(pipe: Connection, namespace: str, options: dict[str, Any]) -> None:
    """In the child."""
    if namespace:  # while there are no threads yet
        with Path("/var/run/netns", namespace).open() as file:
            assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0
    import torch

    from moeoffload.host.session import open_model

    with open_model(DEMO, **options) as offloaded:
        ids = (torch.arange(24) * 7).remainder(200).add(5).unsqueeze(0)
        asked = {"do_sample": False, "min_new_tokens": N_TOKENS, "max_new_tokens": N_TOKENS}
        results: list[list[int]] = []
        for n in range(1, 1 << 40):
            tokens = offloaded.model.generate(ids, attention_mask=torch.ones_like(ids), **asked)[0].tolist()
            if tokens not in results:
                results.append(tokens)
            if pipe.poll():
                pipe.recv()
                pipe.send(Progress(n, results, offloaded.report().to_json()["recovery"]))


class SecondHost(PipedProcess):
    """Started, attached and generating when it is made, in float32, since what it generates means nothing."""

    def __init__(self, folder: Path, experts: Sequence[str], *, namespace: str = "", **options: Any) -> None:
        options |= {"experts": list(experts), "threads": 1, "device": "cpu", "model_dtype": "f32"}
        super().__init__(folder / f"second-host-{id(self)}.log", _generate, namespace, options)
        self.tokens = self.progress().results[0]

    def progress(self) -> Progress:
        """What it has done so far; waits for the end of a generation."""
        told: Progress = self.asks("?")
        return told
