"""The small interface of every expert kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn


class ExpertKernel(ABC):
    """Computes the weighted sum of routed experts for a batch of rows on one device."""

    name: ClassVar[str]

    @abstractmethod
    def __call__(
        self, experts: nn.Module, rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Runs rows through their experts.

        Args:
            experts: the model's own experts class, holding only the experts of this server (their number is the first
                dimension of its parameters).
            rows: hidden states (n, hidden) in the compute dtype.
            slots: (n, top_k) int64, the local expert of each route; -1 where the expert is not on this server.
            weights: (n, top_k) routing weights, float32 or the compute dtype.

        Returns:
            (n, hidden) float32: for each row the sum over its local experts, weighted.
        """
