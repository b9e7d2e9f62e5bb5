"""Triton programs for few rows. Importing this needs triton; `moeoffload.kernels.triton_experts` launches them.

One program instance computes one tile of columns of one projection of one expert, for all rows that route to it: its
weights are read once. The grid has one instance per route and tile; the first route of an expert does the work, the
instances of the others end at once, so that nothing has to be sorted and the host waits for nothing. A position is the
number of a route, row * top_k + choice; the first one of a row that names an expert holds that row's values for it.

Rounding follows transformers' ``grouped_mm`` (``transformers.integrations.moe``): sums are float32, every tensor that
is written there in the compute dtype is rounded to it here.

Checked in Triton's interpreter (where bf16 has neither products nor rounding: `INTERPRETED` makes up for both) and
compiled for sm_80 and sm_90, not run on a GPU.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from triton import knobs

INTERPRETED: Final = tl.constexpr(knobs.runtime.interpret)
ROWS: Final = tl.constexpr(16)
"""Rows of a tile: the fewest that a tensor core product has. Rows that do not route to the expert are not read."""


@triton.jit
def _rounded(values: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Float32 values rounded to ``dtype``, as float32."""
    if INTERPRETED and dtype == tl.bfloat16:  # the interpreter cuts bits off
        bits = values.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(values == values, bits.to(tl.float32, bitcast=True), values)  # noqa: PLR0124 (not for NaN)
    return values.to(dtype).to(tl.float32)


@triton.jit
def _routing(
    slots: tl.tensor,
    route: tl.tensor,
    n_rows: tl.tensor,
    top_k: tl.tensor,
    n_experts: tl.tensor,
    top_k_padded: tl.constexpr,
) -> tl.tensor:
    """The expert of a route, (ROWS,) positions of the rows that name it, which rows do, and if this is its first route.

    A slot that does not exist counts as absent: whatever a peer sent, no memory beyond the weights is read.
    """
    expert = tl.load(slots + route)
    row, choice = tl.arange(0, ROWS), tl.arange(0, top_k_padded)
    exists = (row[:, None] < n_rows) & (choice[None, :] < top_k)
    picked = tl.load(slots + row[:, None] * top_k + choice[None, :], mask=exists, other=-1) == expert
    first_choice = tl.min(tl.where(picked & exists, choice[None, :], top_k_padded), axis=1)
    is_member = first_choice < top_k_padded
    position = row * top_k + first_choice
    first = tl.min(tl.where(is_member, position, ROWS * top_k_padded), axis=0)
    leads = (expert >= 0) & (expert < n_experts) & (first == route)
    return expert, position, is_member, leads


@triton.jit
def _product(
    operand: tl.tensor,
    operand_row: tl.tensor,
    is_member: tl.tensor,
    weight: tl.tensor,
    column: tl.tensor,
    column_exists: tl.tensor,
    length: tl.tensor,
    stride_out: tl.tensor,
    stride_in: tl.tensor,
    n_columns: tl.constexpr,
    depth: tl.constexpr,
) -> tl.tensor:
    """(ROWS, n_columns) float32: rows ``operand_row`` of operand (any, length) x columns of weight (out, length).

    Zero for rows that are no members and columns that do not exist: neither is read.
    """
    total = tl.zeros((ROWS, n_columns), tl.float32)
    step = tl.arange(0, depth)
    operand_at = operand + operand_row[:, None] * length + step[None, :]
    weight_at = weight + column[None, :] * stride_out + step[:, None] * stride_in
    for start in range(0, length, depth):
        inside = start + step < length
        # Weights are read once and should not drive the rows, which all instances read, out of the cache.
        values = tl.load(operand_at, mask=is_member[:, None] & inside[None, :], other=0.0, eviction_policy="evict_last")
        tile = tl.load(
            weight_at, mask=column_exists[None, :] & inside[:, None], other=0.0, eviction_policy="evict_first"
        )
        if INTERPRETED:
            values, tile = values.to(tl.float32), tile.to(tl.float32)
        total = tl.dot(values, tile, total, input_precision="ieee")
        operand_at += depth
        weight_at += depth * stride_in
    return total


@triton.jit
def _function(values: tl.tensor, name: tl.constexpr) -> tl.tensor:
    """An activation function in float32; NaN stays NaN."""
    if name == "silu":
        return values / (1.0 + tl.exp(-values))
    if name == "gelu":
        return 0.5 * values * (1.0 + tl.erf(values * 0.7071067811865476))
    if name == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) = sigmoid(2z); the constants are sqrt(2 / pi) and that of Hendrycks and Gimpel.
        z = 0.7978845608028654 * (values + 0.044715 * values * values * values)
        return values / (1.0 + tl.exp(-2.0 * z))
    positive = tl.where(values < 0.0, 0.0, values)
    return positive * positive if name == "relu2" else positive


@triton.jit
def _gated(
    gate: tl.tensor, up: tl.tensor, limit: tl.tensor, alpha: tl.tensor, name: tl.constexpr, dtype: tl.constexpr
) -> tl.tensor:
    """The gate formulas of `moeoffload.kernels.activation.Activation`, with the rounding of each torch operation."""
    if name == "clamped_swiglu":
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        sigmoid = _rounded(1.0 / (1.0 + tl.exp(-_rounded(gate * alpha, dtype))), dtype)
        return _rounded(_rounded(up + 1.0, dtype) * _rounded(gate * sigmoid, dtype), dtype)
    return _rounded(_rounded(_function(gate, name), dtype) * up, dtype)


# Counts change from call to call and must not bring about another compilation.
@triton.jit(do_not_specialize=["n_rows", "top_k"])
def up_program(
    rows: tl.tensor,
    slots: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    activated: tl.tensor,
    n_rows: tl.tensor,
    top_k: tl.tensor,
    n_experts: tl.tensor,
    hidden: tl.tensor,
    inter: tl.tensor,
    stride_expert: tl.tensor,
    stride_out: tl.tensor,
    stride_in: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    top_k_padded: tl.constexpr,
    n_columns: tl.constexpr,
    depth: tl.constexpr,
    function: tl.constexpr,
    is_gated: tl.constexpr,
    is_interleaved: tl.constexpr,
    has_bias: tl.constexpr,
) -> None:
    """Gate and up projection and activation; grid (routes, tiles of ``n_columns`` weight columns).

    rows (n_rows, hidden); slots (n_rows, top_k) int64; weight (n_experts, columns, hidden) by its strides, with inter
    columns, or twice as many if gated; bias (n_experts, columns); activated (positions, inter), written.
    """
    route = tl.program_id(0)
    expert, position, is_member, leads = _routing(slots, route, n_rows, top_k, n_experts, top_k_padded)
    if leads:
        dtype: tl.constexpr = activated.dtype.element_ty
        n_weight_columns = inter * 2 if is_gated else inter
        column = tl.program_id(1) * n_columns + tl.arange(0, n_columns)
        column_exists = column < n_weight_columns
        if is_gated and not is_interleaved:
            column = (column % 2) * inter + column // 2  # gate and up side by side, however they are stored
        sums = _product(
            rows,
            tl.arange(0, ROWS),
            is_member,
            weight + expert * stride_expert,
            column,
            column_exists,
            hidden,
            stride_out,
            stride_in,
            n_columns,
            depth,
        )
        values = _rounded(sums, dtype)
        if has_bias:
            added = tl.load(bias + expert * n_weight_columns + column, mask=column_exists, other=0.0)
            values = _rounded(values + added.to(tl.float32)[None, :], dtype)
        if is_gated:
            gate, up = tl.split(tl.reshape(values, (ROWS, n_columns // 2, 2)))
            values = _gated(gate, up, limit, alpha, function, dtype)
            column = tl.program_id(1) * (n_columns // 2) + tl.arange(0, n_columns // 2)
        else:
            values = _rounded(_function(values, function), dtype)
        at = activated + position[:, None] * inter + column[None, :]
        tl.store(at, values.to(dtype), mask=is_member[:, None] & (column < inter)[None, :])


@triton.jit(do_not_specialize=["n_rows", "top_k"])
def down_program(
    activated: tl.tensor,
    slots: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    down: tl.tensor,
    n_rows: tl.tensor,
    top_k: tl.tensor,
    n_experts: tl.tensor,
    hidden: tl.tensor,
    inter: tl.tensor,
    stride_expert: tl.tensor,
    stride_out: tl.tensor,
    stride_in: tl.tensor,
    top_k_padded: tl.constexpr,
    n_columns: tl.constexpr,
    depth: tl.constexpr,
    has_bias: tl.constexpr,
) -> None:
    """Down projection; grid (routes, tiles of ``n_columns`` columns).

    activated (positions, inter); weight (n_experts, hidden, inter) by its strides; bias (n_experts, hidden); down
    (positions, hidden), written.
    """
    route = tl.program_id(0)
    expert, position, is_member, leads = _routing(slots, route, n_rows, top_k, n_experts, top_k_padded)
    if leads:
        dtype: tl.constexpr = down.dtype.element_ty
        column = tl.program_id(1) * n_columns + tl.arange(0, n_columns)
        column_exists = column < hidden
        sums = _product(
            activated,
            position,
            is_member,
            weight + expert * stride_expert,
            column,
            column_exists,
            inter,
            stride_out,
            stride_in,
            n_columns,
            depth,
        )
        values = _rounded(sums, dtype)
        if has_bias:
            added = tl.load(bias + expert * hidden + column, mask=column_exists, other=0.0)
            values = _rounded(values + added.to(tl.float32)[None, :], dtype)
        at = down + position[:, None] * hidden + column[None, :]
        tl.store(at, values.to(dtype), mask=is_member[:, None] & column_exists[None, :])


@triton.jit(do_not_specialize=["top_k"])
def sum_program(
    down: tl.tensor,
    slots: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    top_k: tl.tensor,
    n_experts: tl.tensor,
    hidden: tl.tensor,
    top_k_padded: tl.constexpr,
    n_columns: tl.constexpr,
) -> None:
    """The weighted sum of each row in the order of its slots; grid (rows, tiles of ``n_columns`` columns).

    down (positions, hidden); weights (n_rows, top_k) float32 or the dtype of down; out (n_rows, hidden) float32,
    written.
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * n_columns + tl.arange(0, n_columns)
    choice = tl.arange(0, top_k_padded)
    row_slots = tl.load(slots + row * top_k + choice, mask=choice < top_k, other=-1)
    total = tl.zeros((n_columns,), tl.float32)
    for i in range(0, top_k):
        expert = tl.load(slots + row * top_k + i)
        is_held = (expert >= 0) & (expert < n_experts)
        position = row * top_k + tl.min(tl.where(row_slots == expert, choice, top_k_padded), axis=0)
        # Positions of absent routes were never written: not read, and a weight that is no number adds nothing, either.
        values = tl.load(down + position * hidden + column, mask=is_held & (column < hidden), other=0.0)
        product = values.to(tl.float32) * tl.load(weights + row * top_k + i).to(tl.float32)
        product = _rounded(product, weights.dtype.element_ty)
        total += tl.where(is_held, product, 0.0)
    tl.store(out + row * hidden + column, total, mask=column < hidden)
