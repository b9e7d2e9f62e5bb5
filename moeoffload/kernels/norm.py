"""RMS norms in one call of the C library, for modules of any family whose results are those of a `NormKind`.

Results differ from the module's own only in the order in which the squares are summed.
"""

from __future__ import annotations

import ctypes
import functools
from enum import IntEnum
from typing import Any, Final

import torch
from torch import nn

from moeoffload import native
from moeoffload.kernels import calls
from moeoffload.kernels.calls import DTYPE_CODES, HALF_DTYPES, NormCall
from moeoffload.kernels.threads import parallel_address


class NormKind(IntEnum):
    """How a norm combines y = x / rms(x) and its weight w. Roundings are to the model's dtype."""

    ROUNDED = 0
    """round(w * round(y))"""
    WEIGHTED = 1
    """round(w * y)"""
    SHIFTED = 2
    """round((1 + w) * y)"""


_ITEM_ELEMENTS: Final = 1 << 16
"""Elements that a thread claims at a time; a smaller call is not worth a second thread."""

_SAME_SIZE: Final = torch.int16
_PROBE_ROWS: Final = 32
# A difference of one unit in the first rounding can become two units in the product with the weight.
_ULPS: Final = 2


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, kind: NormKind) -> torch.Tensor:
    """Returns rows ``x`` (..., dim) divided by their root mean square, times ``weight`` (dim), on the CPU, no gradient.

    ``x``, ``weight`` and the contiguous result have the same dtype: bfloat16, float16 or float32. ``epsilon`` is added
    to the mean of the squares. Raises ValueError: dtypes or sizes do not match.
    """
    dim = weight.numel()
    if x.shape[-1] != dim or x.dtype != weight.dtype:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype}")
    x = x.contiguous()
    out = torch.empty_like(x)
    n_rows, item_rows = x.numel() // dim, _ITEM_ELEMENTS // dim or 1
    n_threads = 1 if n_rows <= item_rows else min(torch.get_num_threads(), -(-n_rows // item_rows))
    call = NormCall(
        *(native.cpu_features(), parallel_address(), n_threads, item_rows, DTYPE_CODES[x.dtype], kind, n_rows, dim),
        *(x.data_ptr(), weight.data_ptr(), out.data_ptr(), epsilon),
    )
    calls.library().moe_norm(ctypes.addressof(call))
    return out


class FusedNorm(nn.Module):
    """Mixin for a norm's class; calls that class's own ``forward`` where the fused norm does not apply."""

    weight: nn.Parameter
    fused_epsilon: float
    fused_kind: NormKind

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Maps (..., dim) to (..., dim) of the same dtype."""
        weight: Any = self._parameters["weight"]
        if (
            args
            or kwargs
            or x.dtype != weight.dtype
            or x.dtype not in HALF_DTYPES
            or not x.is_cpu
            or not weight.is_cpu
            or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
            or torch.compiler.is_compiling()
            or x.shape[-1] != weight.numel()
            or not weight.is_contiguous()
        ):
            result: torch.Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            return result
        return rms_norm(x, weight, self.fused_epsilon, self.fused_kind)


def accelerate_norms(model: nn.Module) -> None:
    """Fuses the RMS norms of a model on the CPU in bfloat16 or float16.

    Applies to modules whose class name ends in RMSNorm, that have a ``weight`` and an epsilon, and whose results on
    random rows are those of a `NormKind`. Its class is replaced by a subclass of it; parameters, hooks and names stay.
    """
    kinds: dict[Any, NormKind | None] = {}
    for module in model.modules():
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = module._parameters.get("weight")
        if (
            not type(module).__name__.endswith("RMSNorm")
            or isinstance(module, FusedNorm)
            or not isinstance(epsilon, float)
            or type(weight) is not nn.Parameter
            or weight.ndim != 1
            or weight.device.type != "cpu"
            or weight.dtype not in HALF_DTYPES
        ):
            continue
        case = (type(module), weight.dtype, weight.numel(), epsilon)
        if case not in kinds:
            kinds[case] = _find_kind(module, weight, epsilon)
        kind = kinds[case]
        if kind is not None:
            cls: Any = type(module)
            module.__class__ = _fused(cls, epsilon, kind)


@functools.cache
def _fused(cls: Any, epsilon: float, kind: NormKind) -> type[nn.Module]:
    return type(f"Fused{cls.__name__}", (FusedNorm, cls), {"fused_epsilon": epsilon, "fused_kind": kind})


def _find_kind(module: nn.Module, weight: nn.Parameter, epsilon: float) -> NormKind | None:
    """Returns the kind that gives the module's results on random rows, with a random weight; None if there is none."""
    random = torch.Generator().manual_seed(0)
    dim, dtype = weight.numel(), weight.dtype
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin_weight = nn.Parameter((1 + 0.3 * torch.randn(dim, generator=random)).to(dtype), requires_grad=False)
    twin.__dict__["_parameters"] = {**module._parameters, "weight": twin_weight}
    # Rows of small values reveal the epsilon.
    scale = torch.logspace(-3, 1, _PROBE_ROWS).unsqueeze(-1)
    x = (torch.randn(_PROBE_ROWS, dim, generator=random) * scale).to(dtype)
    try:
        with torch.no_grad():
            theirs = type(module).forward(twin, x)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        return None
    if not isinstance(theirs, torch.Tensor) or theirs.shape != x.shape or theirs.dtype != dtype:
        return None
    for kind in NormKind:
        ours = rms_norm(x, twin_weight, epsilon, kind)
        apart = (ours.view(_SAME_SIZE).int() - theirs.contiguous().view(_SAME_SIZE).int()).abs()
        # A different order of summation changes few results; a different rounding changes many.
        if int(apart.max()) <= _ULPS and float((apart != 0).float().mean()) < 0.01:
            return kind
    return None
