"""Tests whether what torch computes between a layer's two projections is batch-invariant."""

from __future__ import annotations

from typing import Any, Final

import torch

_TOGETHER: Final = 3 << 15
"""Elements of the trial: enough for torch to use several threads."""
_PARTS: Final = (1, 2, 5, 16)


def is_independent_of_batch(module: Any, *, up_columns: int, hidden: int, dtype: torch.dtype) -> bool:
    """Whether an experts module's activation, gate and norm give rows the same bits alone and in a batch.

    torch computes the last elements of a tensor with other code than the rest, which rounds differently for some
    activations. Tested on random rows, not decided by name.
    """

    def activate(values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = module._apply_gate(values) if module.has_gate else module.act_fn(values)
        return result

    steps = [(activate, up_columns)]
    if module.has_post_expert_norm:
        steps.append((module.post_expert_norm, hidden))
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for step, columns in steps:
            n_rows = max(sum(_PARTS), _TOGETHER // columns)
            values = torch.randn(n_rows, columns, generator=generator, dtype=torch.float32).to(dtype)
            together = step(values)
            at = 0
            for size in _PARTS:
                part = slice(at, at + size)
                if not torch.equal(step(values[part]), together[part]):
                    return False
                at += size
    return True
