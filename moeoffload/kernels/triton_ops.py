"""Triton programs for routed experts. Importing this needs triton; `moeoffload.kernels.triton_experts` launches them.

One program instance computes one tile of columns of one projection of one expert, for a tile of the rows routed to it,
so that weights are read once per tile of rows. A position is the number of a route, row * top_k + choice.

- Few rows: the grid has one instance per route and tile of columns. The instance of an expert's first route computes
  all rows of the expert and the instances of its other routes exit at once, so that nothing has to be sorted. If a row
  names an expert twice, its first position holds the row's values for that expert.
- More rows: routes come sorted by expert, with the end of each expert's group; an instance looks up its tile of rows.

The CPU does not wait. A row's bits are the same in every tile. Rounding follows transformers' ``grouped_mm``
(``transformers.integrations.moe``): sums are float32, and every tensor that transformers writes in the compute dtype is
rounded to it here; packed weights are rounded to it when they are unpacked.

Checked in Triton's interpreter (where bf16 has neither products nor rounding: `INTERPRETED` compensates for both) and
compiled for sm_80, 86, 89, 90, 100 and 120, not run on a GPU.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

from moeoffload.kernels.triton_packed import unpacked

INTERPRETED: Final = tl.constexpr(knobs.runtime.interpret)


class Matrix(NamedTuple):
    """One projection of all experts, (n_experts, columns, length), plain or packed.

    Attributes:
        data: weights of the compute dtype with any strides; or packed rows, uint8, with strides in bytes.
        stride_expert, stride_out, stride_in: strides of ``data``; the last is not used if it is packed.
        shared: float32 scales that rows of packed weights share.
        stride_shared: stride of ``shared`` from one expert to the next.
    """

    data: torch.Tensor
    stride_expert: int
    stride_out: int
    stride_in: int
    shared: torch.Tensor | None = None
    stride_shared: int = 0


@triton.jit
def _rounded(values: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Returns float32 values rounded to ``dtype``, as float32."""
    if INTERPRETED and dtype == tl.bfloat16:  # the interpreter truncates
        bits = values.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(values == values, bits.to(tl.float32, bitcast=True), values)  # noqa: PLR0124 (not for NaN)
    return values.to(dtype).to(tl.float32)


@triton.jit
def _routing(
    slots: tl.tensor,
    by_expert: tl.tensor,
    n_rows: tl.tensor,
    top_k: tl.tensor,
    n_experts: tl.tensor,
    top_k_padded: tl.constexpr,
    n_experts_padded: tl.constexpr,
    tile_rows: tl.constexpr,
) -> tl.tensor:
    """Returns this instance's expert, positions and mask of its rows, (tile_rows,) each, and whether it has work.

    Few rows: for each row its first position that names the expert; there is work for the expert's first route. Sorted
    routes: those of a tile, counted over all experts; there is work if the tile exists.
    A slot that does not exist counts as absent: whatever a peer sent, no memory beyond the weights is read.
    """
    number, row = tl.program_id(0), tl.arange(0, tile_rows)
    if by_expert is None:
        expert = tl.load(slots + number)
        choice = tl.arange(0, top_k_padded)
        exists = (row[:, None] < n_rows) & (choice[None, :] < top_k)
        picked = tl.load(slots + row[:, None] * top_k + choice[None, :], mask=exists, other=-1) == expert
        first_choice = tl.min(tl.where(picked & exists, choice[None, :], top_k_padded), axis=1)
        is_member = first_choice < top_k_padded
        position = row * top_k + first_choice
        first = tl.min(tl.where(is_member, position, tile_rows * top_k_padded), axis=0)
        has_work = (expert >= 0) & (expert < n_experts) & (first == number)
    else:
        index = tl.arange(0, n_experts_padded)
        end = tl.load(by_expert.offsets + index, mask=index < n_experts, other=0)
        start = tl.load(by_expert.offsets + index - 1, mask=(index > 0) & (index < n_experts), other=0)
        n_tiles = (end - start + tile_rows - 1) // tile_rows
        tiles_end = tl.cumsum(n_tiles, axis=0)
        is_mine = (number >= tiles_end - n_tiles) & (number < tiles_end)
        expert = tl.sum(tl.where(is_mine, index, 0), axis=0).to(tl.int64)
        first = tl.sum(tl.where(is_mine, start + (number - tiles_end + n_tiles) * tile_rows, 0), axis=0)
        last = tl.sum(tl.where(is_mine, end, 0), axis=0)
        is_member = first + row < last
        position = tl.load(by_expert.routes + first + row, mask=is_member, other=0)
        has_work = last > 0
    return expert, position, is_member, has_work


@triton.jit
def _product(
    operand: tl.tensor,
    operand_row: tl.tensor,
    is_member: tl.tensor,
    matrix: tl.tensor,
    expert: tl.tensor,
    column: tl.tensor,
    column_exists: tl.tensor,
    length: tl.tensor,
    form: tl.constexpr,
    depth: tl.constexpr,
) -> tl.tensor:
    """Multiplies rows ``operand_row`` of operand (any, length) by columns of an expert's matrix: (rows, columns)
    float32.

    Results are zero for rows that are not members and columns that do not exist; neither is read.
    """
    total = tl.zeros((operand_row.shape[0], column.shape[0]), tl.float32)
    step = tl.arange(0, depth)
    operand_at = operand + operand_row[:, None] * length + step[None, :]
    weights = matrix.data + expert * matrix.stride_expert
    if form is None:
        weight_at = weights + column[None, :] * matrix.stride_out + step[:, None] * matrix.stride_in
    elif matrix.shared is not None:
        shared = matrix.shared + expert * matrix.stride_shared
    else:
        shared = None
    for start in range(0, length, depth):
        inside = start + step < length
        # Weights are read once and should not evict the rows, which all instances read, from the cache.
        values = tl.load(operand_at, mask=is_member[:, None] & inside[None, :], other=0.0, eviction_policy="evict_last")
        if form is None:
            tile = tl.load(
                weight_at, mask=column_exists[None, :] & inside[:, None], other=0.0, eviction_policy="evict_first"
            )
            weight_at += depth * matrix.stride_in
        else:
            numbers = unpacked(weights, shared, column, column_exists, start, form, depth)
            tile = tl.trans(_rounded(numbers, values.dtype) if INTERPRETED else numbers.to(values.dtype))
        if INTERPRETED:
            values, tile = values.to(tl.float32), tile.to(tl.float32)
        total = tl.dot(values, tile, total, input_precision="ieee")
        operand_at += depth
    return total


@triton.jit
def _biased(
    sums: tl.tensor,
    bias: tl.tensor,
    expert: tl.tensor,
    n_all: tl.tensor,
    column: tl.tensor,
    exists: tl.tensor,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Rounds the sums, adds the columns of an expert's bias (n_experts, n_all) if there is one, and rounds again."""
    values = _rounded(sums, dtype)
    if bias is not None:
        added = tl.load(bias + expert * n_all + column, mask=exists, other=0.0)
        values = _rounded(values + added.to(tl.float32)[None, :], dtype)
    return values


@triton.jit
def _function(values: tl.tensor, name: tl.constexpr) -> tl.tensor:
    """Applies an activation function in float32; NaN stays NaN."""
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
    """Applies a gated formula of `moeoffload.kernels.activation.Activation`, rounding as torch's operations do."""
    if name == "clamped_swiglu":
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        sigmoid = _rounded(1.0 / (1.0 + tl.exp(-_rounded(gate * alpha, dtype))), dtype)
        return _rounded(_rounded(up + 1.0, dtype) * _rounded(gate * sigmoid, dtype), dtype)
    return _rounded(_rounded(_function(gate, name), dtype) * up, dtype)


# Counts change from call to call and must not cause another compilation.
@triton.jit(do_not_specialize=["n_rows", "top_k"])
def projection_program(
    operands: tl.tensor,
    slots: tl.tensor,
    by_expert: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    n_rows: tl.tensor,
    top_k: tl.tensor,
    n_experts: tl.tensor,
    length: tl.tensor,
    n_out: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    form: tl.constexpr,
    second_form: tl.constexpr,
    tile_rows: tl.constexpr,
    top_k_padded: tl.constexpr,
    n_experts_padded: tl.constexpr,
    n_columns: tl.constexpr,
    depth: tl.constexpr,
    function: tl.constexpr,
    is_gated: tl.constexpr,
    is_interleaved: tl.constexpr,
) -> None:
    """Computes gate and up projection and activation, or the down projection, which has no ``function``; grid (routes
    or row tiles, tiles of ``n_columns`` weight columns).

    operands (n_rows, length), or (positions, length) for the down projection; slots (n_rows, top_k) int64; by_expert:
    `grouped.SortedRoutes`, or None for few rows; first: `Matrix` with n_out columns, or twice as many for gate and up;
    second: the `Matrix` of up if first is gate alone, else None; form, second_form: `RowFormat` if they are packed;
    bias (n_experts, columns) or None; out (positions, n_out), written.
    """
    expert, position, is_member, has_work = _routing(
        slots, by_expert, n_rows, top_k, n_experts, top_k_padded, n_experts_padded, tile_rows
    )
    if has_work:
        dtype: tl.constexpr = out.dtype.element_ty
        row = position if function is None else position // top_k
        n_all = n_out * 2 if is_gated else n_out
        if second is not None:
            column = tl.program_id(1) * (n_columns // 2) + tl.arange(0, n_columns // 2)
            exists = column < n_out
            gate = _product(operands, row, is_member, first, expert, column, exists, length, form, depth)
            up = _product(operands, row, is_member, second, expert, column, exists, length, second_form, depth)
            gate = _biased(gate, bias, expert, n_all, column, exists, dtype)
            up = _biased(up, bias, expert, n_all, n_out + column, exists, dtype)
            values = _gated(gate, up, limit, alpha, function, dtype)
        else:
            column = tl.program_id(1) * n_columns + tl.arange(0, n_columns)
            exists = column < n_all
            if is_gated and not is_interleaved:
                column = (column % 2) * n_out + column // 2  # gate and up alternate in the tile, however stored
            sums = _product(operands, row, is_member, first, expert, column, exists, length, form, depth)
            values = _biased(sums, bias, expert, n_all, column, exists, dtype)
            if is_gated:
                gate, up = tl.split(tl.reshape(values, (tile_rows, n_columns // 2, 2)))
                values = _gated(gate, up, limit, alpha, function, dtype)
                column = tl.program_id(1) * (n_columns // 2) + tl.arange(0, n_columns // 2)
            elif function is not None:
                values = _rounded(_function(values, function), dtype)
        at = out + position[:, None] * n_out + column[None, :]
        tl.store(at, values.to(dtype), mask=is_member[:, None] & (column < n_out)[None, :])


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
    """Computes the weighted sum of each row in the order of its slots; grid (rows, tiles of ``n_columns`` columns).

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
        # Positions of absent routes were never written and are not read; nor does a NaN weight add anything there.
        values = tl.load(down + position * hidden + column, mask=is_held & (column < hidden), other=0.0)
        product = values.to(tl.float32) * tl.load(weights + row * top_k + i).to(tl.float32)
        product = _rounded(product, weights.dtype.element_ty)
        total += tl.where(is_held, product, 0.0)
    tl.store(out + row * hidden + column, total, mask=column < hidden)
