"""Computes the shared experts of a layer while servers compute its routed ones."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moeoffload.checkpoint import Checkpoint

Meanwhile = Callable[[torch.Tensor], None]
"""To be called with the rows (n, hidden) of a layer between sending them and waiting for the replies."""


def overlap_shared_experts(model: nn.Module, checkpoint: Checkpoint) -> list[Meanwhile | None]:
    """Moves the work of shared experts to the time in which the host waits; returns for each MoE layer what to call
    then, None for layers whose shared experts stay where they are.

    transformers' blocks compute them before or after the routed ones, and use the result after both. Whether a block
    does is tried once for each class, with a few random rows: its output must not change by a bit.
    """
    found: list[Meanwhile | None] = []
    comes_first: dict[type, bool | None] = {}
    for layer in checkpoint.layers:
        block = model.get_submodule(layer.module_name.rpartition(".")[0])
        experts = model.get_submodule(layer.module_name)
        shared = _shared_experts_of(block)
        if shared is not None and type(block) not in comes_first:
            rows = torch.randn(1, 3, checkpoint.hidden_size, generator=torch.Generator().manual_seed(0))
            device = next(shared.buffers(), next(shared.parameters(), rows)).device
            comes_first[type(block)] = _try(block, experts, shared, rows.to(device, checkpoint.dtype))
        first = comes_first[type(block)] if shared is not None else None
        found.append(None if shared is None or first is None else _Overlapped(shared, comes_first=first).compute)
    return found


def _shared_experts_of(block: nn.Module) -> nn.Module | None:
    """Returns the block's only child that is named as shared experts are and is no single layer, as their gate is."""
    named = [child for name, child in block.named_children() if name.startswith("shared")]
    several = [child for child in named if next(child.children(), None) is not None]
    return several[0] if len(several) == 1 else None


class _Given(threading.local):
    """What a thread has given to shared experts, and their result: promised or computed ahead."""

    rows: torch.Tensor | None = None
    result: torch.Tensor | None = None


class _Overlapped:
    """Takes the place of a module's ``forward``; `compute` does its work."""

    def __init__(self, shared: nn.Module, *, comes_first: bool) -> None:
        # Weak: a model that nobody has any more goes at once, and not at some collection of cycles.
        self._forward = weakref.WeakMethod(shared.forward)
        self._given = _Given()
        shared.forward = self._promise if comes_first else self._take
        self.compute = self._keep_promise if comes_first else self._compute_ahead

    def _compute(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._forward()(rows)  # type: ignore[misc]
        return result

    def _promise(self, rows: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return self._compute(rows)
        given = self._given
        # Not a number: a block that reads it too early would be noticed when it is tried.
        given.rows, given.result = rows, torch.full_like(rows, torch.nan)
        return given.result

    def _keep_promise(self, rows: torch.Tensor) -> None:
        given = self._given
        if given.rows is not None and given.result is not None:
            given.result.copy_(self._compute(given.rows))
        given.rows = given.result = None

    def _compute_ahead(self, rows: torch.Tensor) -> None:
        self._given.rows, self._given.result = rows, self._compute(rows)

    def _take(self, rows: torch.Tensor) -> torch.Tensor:
        given = self._given
        known, result = given.rows, given.result
        given.rows = given.result = None
        is_known = known is not None and known.data_ptr() == rows.data_ptr() and known.numel() == rows.numel()
        if result is None or not is_known or torch.is_grad_enabled():
            return self._compute(rows)
        return result.view(rows.shape)


@torch.no_grad()
def _try(block: Any, experts: Any, shared: Any, rows: torch.Tensor) -> bool | None:
    """Returns whether a block asks for its shared experts before its routed ones; None unless it may be overlapped."""
    calls: list[str] = []
    overlapped: _Overlapped | None = None

    def routed(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        calls.append("routed")
        if overlapped is not None:
            overlapped.compute(hidden)
        return hidden.clone()

    def noted(*inputs: torch.Tensor, **more: Any) -> torch.Tensor:
        calls.append("shared" if len(inputs) == 1 and not more else "")
        return compute(*inputs, **more)

    bound, compute = experts.moeoffload_call, shared.forward
    experts.moeoffload_call, shared.forward = routed, noted
    try:
        expected = block(rows)
        if sorted(calls) != ["routed", "shared"]:
            return None
        first = calls[0] == "shared"
        shared.forward = compute
        overlapped = _Overlapped(shared, comes_first=first)
        return first if _are_equal(block(rows), expected) else None
    except Exception:  # a block of another kind: it wants more inputs than rows, say
        return None
    finally:
        experts.moeoffload_call = bound
        del shared.forward


def _are_equal(output: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return isinstance(output, torch.Tensor) and torch.equal(output, expected)
    return len(output) == len(expected) and all(map(_are_equal, output, expected))
