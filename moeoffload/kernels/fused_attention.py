"""Attention of few rows in one call of the C library: projections, norms and rotary embedding; in decode all of it.

A transformers module calls torch two or three dozen times, which for one row takes about as long as reading the weights
if these have 4 bits. Results have the bits of the separate layers as `accelerate_dense` makes them.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moeoffload import native
from moeoffload.kernels import calls, sdpa
from moeoffload.kernels.calls import DTYPE_CODES, HALF_DTYPES, FusedLayer, Projection
from moeoffload.kernels.dense import MAX_ROWS, FewRowLinear, PackedLinear, buffers
from moeoffload.kernels.growing_cache import GrowingLayer
from moeoffload.kernels.norm import FusedNorm
from moeoffload.kernels.threads import parallel_address, threads_for

_LINEARS: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS: Final = ("q_norm", "k_norm")
_TAKES: Final = ["self", "hidden_states", "position_embeddings", "attention_mask", "past_key_values", "kwargs"]
_PROBE: Final = "moeoffload_probe"
_SAME_SIZE: Final = torch.int16

Embeddings = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the rotary embedding: (1 or batch, tokens, elements of a head that are turned)."""


class AttentionLayers:
    """The linear layers and norms of one attention module, for the C library.

    Attributes:
        dtype: of rows and results.
        options: what the module hands to its attention function besides tensors; see `FusedAttention`.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Raises ValueError: the C library does not compute these layers together in ``dtype``."""
        if dtype not in HALF_DTYPES:
            raise ValueError(f"dtype {dtype}")  # packed weights may be laid out for another one later
        self.dtype = dtype
        self.options: dict[str, Any] = {}
        self._modules = module._modules
        self._parts = [(name, module._modules.get(name)) for name in (*_LINEARS, *_NORMS)]
        self._tensors: list[tuple[dict[str, Any], str, torch.Tensor, int]] = []
        self._dim: int = module.head_dim  # type: ignore[assignment]
        self._n_bytes = 0
        linears, norms = [part for _, part in self._parts[:4]], [*(part for _, part in self._parts[4:]), None, None]
        described = [self._describe(*pair) for pair in zip(linears, norms, strict=True)]
        query, key, value, out = described
        sizes = query.n_in, query.n_out, key.n_out, key.n_out * getattr(module, "num_key_value_groups", 1)
        if sizes != (key.n_in, out.n_in, value.n_out, query.n_out) or key.n_in != value.n_in:
            raise ValueError(f"projections of {[(each.n_in, each.n_out) for each in described]}")
        self._hidden, self._n_out = query.n_in, (query.n_out, key.n_out, value.n_out)
        self._layer = FusedLayer(
            DTYPE_CODES[dtype], native.cpu_features(), self._dim, (Projection * len(described))(*described)
        )
        self._address = ctypes.addressof(self._layer)
        library, is_packed = calls.library(), any(each.parts for each in described)
        operand_bytes, widest = library.moe_operand_bytes, max(query.n_in, query.n_out)
        self._row_bytes = max(3 * operand_bytes(query.n_in), operand_bytes(query.n_out))
        self._scratch_bytes = library.moe_scratch_bytes(self._layer.dtype, widest) if is_packed else 0

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of the module has its own weights, and describes them again."""
        return type(None), ()

    def _describe(self, linear: Any, norm: Any) -> Projection:
        if isinstance(linear, FewRowLinear):
            addresses, n_bytes = (self._address_of(linear, "weight"), 0), linear.weight.nbytes
        elif isinstance(linear, PackedLinear) and (matrix := linear.matrix(self.dtype)) is not None:
            addresses, n_bytes = matrix.addresses, matrix.nbytes
        else:
            raise ValueError(f"a {type(linear).__name__}")
        if linear.out_features % self._dim and linear is not self._modules["o_proj"]:
            raise ValueError(f"{linear} and heads of {self._dim}")
        if _has_hooks(linear) or _has_hooks(norm):
            raise ValueError("hooks")
        self._n_bytes += n_bytes
        bias, sizes = self._address_of(linear, "bias"), (linear.in_features, linear.out_features)
        if norm is None:
            return Projection(*addresses, bias, 0, *sizes)
        if not isinstance(norm, FusedNorm) or norm.weight.numel() not in (self._dim, linear.out_features):
            raise ValueError(f"a {type(norm).__name__}")
        about = norm.weight.numel(), norm.fused_kind, norm.fused_epsilon
        return Projection(*addresses, bias, self._address_of(norm, "weight"), *sizes, *about)

    def _address_of(self, part: nn.Module, name: str) -> int:
        tensor = part._parameters.get(name)
        if tensor is None:
            return 0
        if tensor.dtype != self.dtype or not tensor.is_cpu or not tensor.is_contiguous():
            raise ValueError(f"{name} {tensor.dtype} on {tensor.device}")
        self._tensors.append((part._parameters, name, tensor, tensor.data_ptr()))
        return tensor.data_ptr()

    def are_current(self) -> bool:
        """Whether the module has the same layers with the same weights as before, and no hooks on them."""
        modules = self._modules
        for name, part in self._parts:
            if modules.get(name) is not part or _has_hooks(part):
                return False
        for parameters, name, tensor, address in self._tensors:
            if parameters.get(name) is not tensor or tensor.data_ptr() != address:
                return False
        return True

    def fit(self, rows: torch.Tensor, embeddings: Embeddings) -> bool:
        """Whether the C library computes ``rows`` (batch, tokens, hidden)."""
        (cos, sin), dtype = embeddings, self.dtype
        return (
            rows.ndim == cos.ndim == 3
            and rows.is_cpu
            and rows.shape[2] == self._hidden
            and 0 < rows.numel() <= MAX_ROWS * self._hidden
            and rows.dtype is dtype
            and cos.dtype is dtype
            and sin.dtype is dtype
            and cos.shape == sin.shape
            and cos.shape[0] in (1, rows.shape[0])
            and cos.shape[1] == rows.shape[1]
            and cos.shape[2] <= self._dim
            and not cos.shape[2] % 2
        )

    def project(self, rows: torch.Tensor, embeddings: Embeddings) -> list[torch.Tensor]:
        """Returns queries, keys and values (batch, heads, tokens, dim); the arguments must `fit`."""
        shape, dim = rows.shape[:2], self._dim
        parts = [torch.empty((*shape, n_out // dim, dim), dtype=self.dtype) for n_out in self._n_out]
        call = buffers.attention
        call.query, call.key, call.value = (part.data_ptr() for part in parts)
        call.keys = 0
        self._call(rows, embeddings)
        return [part.transpose(1, 2) for part in parts]

    def attend(self, rows: torch.Tensor, embeddings: Embeddings, cache: GrowingLayer) -> torch.Tensor | None:
        """Adds one token of each sequence, ``rows`` (batch, 1, hidden), to the cache; returns the output projection of
        its attention to all tokens there. None: the cache is of other shapes."""
        batch, (n_query, n_key, _), dim = len(rows), self._n_out, self._dim
        if not cache.holds((batch, n_key // dim, dim), self.dtype):
            return None
        n_kept = cache.grow(1)
        assert cache.buffers is not None
        keys, values = cache.buffers
        # What is computed on the way: queries, keys, values, and what attention makes of them.
        column_bytes = self.dtype.itemsize * batch
        at = buffers.room_for(column_bytes * 2 * (n_query + n_key))
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        call = buffers.attention
        call.query, call.attended = at, at + column_bytes * n_query
        call.key, call.value = (at + column_bytes * (2 * n_query + n * n_key) for n in (0, 1))
        call.keys, call.values, call.out = keys.data_ptr(), values.data_ptr(), out.data_ptr()
        call.n_kept, call.room = n_kept, keys.shape[2]
        scale = self.options.get("scaling")
        call.scale = dim**-0.5 if scale is None else scale
        n_bytes = 2 * column_bytes * n_key * (n_kept + 1)
        call.attention_threads = min(batch * n_key // dim, threads_for(n_bytes))
        self._call(rows, embeddings)
        return out

    def _call(self, rows: torch.Tensor, embeddings: Embeddings) -> None:
        batch, n_tokens, _ = rows.shape
        rows, (cos, sin) = rows.contiguous(), embeddings
        if len(cos) != batch or not (cos.is_contiguous() and sin.is_contiguous()):
            cos, sin = (each.expand(batch, -1, -1).contiguous() for each in embeddings)
        call = buffers.attention
        call.layer, call.rows = self._address, rows.data_ptr()
        call.cos, call.sin, call.rotary = cos.data_ptr(), sin.data_ptr(), cos.shape[2]
        call.n_rows = batch * n_tokens
        call.n_threads = n_threads = threads_for(self._n_bytes)
        call.parallel = parallel_address()  # attention may have more threads than the products
        buffers.fill(call, self._row_bytes, batch * n_tokens, n_threads * self._scratch_bytes)
        if calls.library().moe_fused_attention(buffers.attention_address):
            raise MemoryError("no memory for attention of one query")


def _has_hooks(module: nn.Module | None) -> bool:
    return module is not None and bool(module._forward_hooks or module._forward_pre_hooks)


class FusedAttention(nn.Module):
    """Mixin for an attention module's class: few rows are computed as that class does, but by `AttentionLayers`.

    The first call of each module is also computed by its class, with an attention function that only tells what it got;
    if anything differs, the class computes all calls.
    """

    config: Any
    layer_idx: int
    o_proj: nn.Module
    fused_layers: AttentionLayers | bool | None = None
    """None: not described yet; False: the class computes all calls."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Embeddings | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """See transformers: maps (batch, tokens, hidden) to the same shape, with attention weights or None."""
        attend = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation)
        layers = None
        if attend is not None and position_embeddings is not None and self.fused_layers is not False:
            layers = self._described(hidden_states, position_embeddings)
        if layers is None or position_embeddings is None:
            mine = hidden_states, position_embeddings, attention_mask, past_key_values
            result: tuple[torch.Tensor, Any] = super().forward(*mine, **kwargs)  # type: ignore[misc]
            return result
        if attention_mask is None and hidden_states.shape[1] == 1:
            caches = getattr(past_key_values, "layers", ())  # none in a cache of another kind
            cache = caches[self.layer_idx] if self.layer_idx < len(caches) else None
            if (
                type(cache) is GrowingLayer
                and attend is sdpa.attention
                and sdpa.is_plain(self, **layers.options, **kwargs)
            ):
                out = layers.attend(hidden_states, position_embeddings, cache)
                if out is not None:
                    return out, None
        query, key, value = layers.project(hidden_states, position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        out, weights = attend(self, query, key, value, attention_mask, **layers.options, **kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights

    def _described(self, rows: torch.Tensor, embeddings: Embeddings) -> AttentionLayers | None:
        """Returns the layers that compute these rows; None if the module's class must."""
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        layers = self.fused_layers
        if not isinstance(layers, AttentionLayers) or layers.dtype is not rows.dtype or not layers.are_current():
            try:
                layers = AttentionLayers(self, rows.dtype)
            except ValueError:
                return None
            if not layers.fit(rows, embeddings):
                return None
            self.fused_layers = self._is_same(layers, *_trial(rows, embeddings)) and layers
        return layers if self.fused_layers and layers.fit(rows, embeddings) else None

    def _is_same(self, layers: AttentionLayers, rows: torch.Tensor, embeddings: Embeddings) -> bool:
        """Whether the module's class computes the same; takes over the options of its attention."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.__dict__["config"] = _ProbeConfig(self.config)
        theirs, _ = super(FusedAttention, twin).forward(rows, embeddings, None, None)  # type: ignore[misc]
        told, layers.options = twin.__dict__["told"], twin.__dict__["options"]
        told_out = told[0].transpose(1, 2).reshape(*rows.shape[:-1], -1)
        ours = [*layers.project(rows, embeddings), self.o_proj(told_out)]
        return all(_same_bits(*pair) for pair in zip(ours, (*told, theirs), strict=True))


def _trial(rows: torch.Tensor, embeddings: Embeddings) -> tuple[torch.Tensor, Embeddings]:
    """Returns random rows of all sizes, and angles as of late tokens: those at position 0 turn nothing."""
    random = torch.Generator().manual_seed(0)
    half = embeddings[0].shape[2] // 2
    angles = (6 * torch.rand(1, 3, half, generator=random)).repeat(1, 1, 2)
    values = torch.randn(1, 3, rows.shape[2], generator=random) * torch.tensor([1.0, 30.0, 1000.0])[:, None]
    return values.to(rows.dtype), (angles.cos().to(rows.dtype), angles.sin().to(rows.dtype))


class _ProbeConfig:
    """A config with another attention function; setting that of a config would set it for all its modules."""

    _attn_implementation = _PROBE

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _probe(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Leaves with the module what its attention is called with; returns the queries as its result."""
    module.__dict__.update(told=(query, key, value), options=options)
    return query.transpose(1, 2).contiguous(), None


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(_SAME_SIZE), b.contiguous().view(_SAME_SIZE))


@functools.cache
def _fused(cls: Any) -> type[nn.Module]:
    return type(f"Fused{cls.__name__}", (FusedAttention, cls), {"__module__": cls.__module__})


def fuse_attention(model: nn.Module) -> None:
    """Lets attention modules of the usual form compute few rows in one call.

    They have linear layers ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``, possibly norms ``q_norm`` and ``k_norm``,
    all accelerated before, and take arguments as transformers' do. Their class is replaced by a subclass of it. Other
    modules stay as they are; so do calls with autograd, in training or under ``torch.compile``.
    """
    AttentionInterface.register(_PROBE, _probe)
    for module in model.modules():
        cls: Any = type(module)
        if (
            all(isinstance(module._modules.get(name), FewRowLinear | PackedLinear) for name in _LINEARS)
            and not isinstance(module, FusedAttention)
            and hasattr(module, "head_dim")
            and list(inspect.signature(cls.forward).parameters) == _TAKES
        ):
            module.__class__ = _fused(cls)
