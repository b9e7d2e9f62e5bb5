"""The projections of `phases` on CPUs with a matrix unit: rows packed once for a phase, weights multiplied as they lie.

Packing is a phase of its own, before its products. Rows of an expert are packed in groups of 16; one that is left alone
is read where it lies, so a decode step packs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import njit, types
from numba.extending import overload

from moeoffload.kernels.matrix_tile import (
    ACCUMULATOR_BYTES,
    MATRIX_ROWS,
    MATRIX_STEP,
    SCRATCH_BYTES,
    STREAMS,
    begin_tiles,
    end_tiles,
    matrix_products,
    may_use_matrix_unit,
    pack_step,
    stack_memory,
    write_products,
)
from moeoffload.kernels.phases import N_HIT, WEIGHT_ROWS, plan_parts, project, view, wait_for_items
from moeoffload.kernels.vector_ir import claim, finish

_ROW_BYTES: Final = 2
_LINE_BYTES: Final = 64
_WEIGHT_TILES: Final = 2
"""Of 16 weight rows; as many tiles of rows: four products for four operands that are read."""


@njit(nogil=True)
def _pack(rows: int, row_index: Any, first: int, count: int, inner: int, packed: int) -> None:
    """Rows ``row_index[first..first + count]``, of which there are 2 to 16, as one packed tile for each step."""
    places = stack_memory()
    addresses = view(places, np.int64, MATRIX_ROWS)
    for row in range(MATRIX_ROWS):
        addresses[row] = rows + row_index[first + min(row, count - 1)] * inner * _ROW_BYTES
    for at in range(0, inner * _ROW_BYTES, _LINE_BYTES):
        pack_step(places, at, count, packed + at * count)


@njit(nogil=True)
def pack_rows(
    packed: int,
    plan: Any,
    n_experts: int,
    n_routes: int,
    inner: int,
    rows: Any,
    rows_are_sorted: bool,
    counter: int,
    limit: int,
) -> None:
    """Packs the rows of every expert that is hit, for `project_as_fits`; an expert is an item.

    Args:
        packed: address of memory for (positions, inner); 0 if nothing is to be packed.
        plan, n_experts, n_routes, inner, rows, rows_are_sorted, counter, limit: see `phases.project`.
    """
    if packed == 0:
        return
    _, first, row_of, _, identity, _ = plan_parts(plan, n_experts, n_routes)
    row_index = identity if rows_are_sorted else row_of
    place = rows.ctypes.data
    n_hit = plan[N_HIT]
    while True:
        group = claim(counter)
        if group >= n_hit or group >= limit:
            return
        position, last = first[group], first[group + 1]
        while last - position > 1:
            count = min(MATRIX_ROWS, last - position)
            _pack(place, row_index, position, count, inner, packed + position * inner * _ROW_BYTES)
            position += count
        finish(counter + 8)


@njit(nogil=True)
def _multiply(
    weights: int,
    following: int,
    start: int,
    end: int,
    n_out: int,
    inner: int,
    rows: int,
    row_index: Any,
    packed: int,
    first: int,
    last: int,
    bias: int,
    bias_mode: int,
    out: int,
) -> None:
    """Positions ``first..last`` times the weight tiles ``start..end`` of an expert at ``weights``.

    ``following`` is the address of what is read afterwards, or 0.
    """
    memory = stack_memory()
    config = memory + SCRATCH_BYTES
    row_bytes = inner * _ROW_BYTES
    n_steps = inner // MATRIX_STEP
    n_groups = (last - first + MATRIX_ROWS - 1) // MATRIX_ROWS
    n_passes = (n_groups + 1) // 2
    columns = more_columns = 0
    tile = start
    while tile < end:
        n_weights = min(_WEIGHT_TILES, end - tile)
        weight_row = tile * MATRIX_ROWS
        tile += n_weights
        ahead = weights + tile * MATRIX_ROWS * row_bytes if tile < end else following
        lines = _WEIGHT_TILES * MATRIX_ROWS // STREAMS if ahead != 0 else 0
        n_ahead = (lines + n_passes - 1) // n_passes
        for group in range(0, n_groups, 2):
            position = first + group * MATRIX_ROWS
            n_rows = min(2, n_groups - group)
            count = min(MATRIX_ROWS, last - position)
            more = min(MATRIX_ROWS, last - position - MATRIX_ROWS) if n_rows > 1 else count
            if count != columns or more != more_columns:
                begin_tiles(config, count, more)
                columns, more_columns = count, more
            some = packed + position * row_bytes if count > 1 else rows + row_index[position] * row_bytes
            others = position + MATRIX_ROWS
            if n_rows > 1:
                other = packed + others * row_bytes if more > 1 else rows + row_index[others] * row_bytes
            else:
                other = some
            matrix_products(
                n_weights,
                n_rows,
                weights + weight_row * row_bytes,
                row_bytes,
                some,
                count,
                other,
                more,
                n_steps,
                ahead,
                min(n_ahead, lines),
                memory,
            )
            lines -= min(n_ahead, lines)
            ahead += n_ahead * n_steps * _LINE_BYTES
            for weight_tile in range(n_weights):
                column = weight_row + weight_tile * MATRIX_ROWS
                for row_tile in range(n_rows):
                    write_products(
                        memory + (2 * weight_tile + row_tile) * ACCUMULATOR_BYTES,
                        count if row_tile == 0 else more,
                        bias + column * _ROW_BYTES,
                        bias_mode,
                        out + ((position + row_tile * MATRIX_ROWS) * n_out + column) * _ROW_BYTES,
                        n_out * _ROW_BYTES,
                    )
    end_tiles()


@njit(nogil=True)
def _project_by_matrix(
    packed: int,
    packing: int,
    yield_address: int,
    plan: Any,
    n_experts: int,
    n_routes: int,
    weights: Any,
    n_out: int,
    inner: int,
    rows: Any,
    rows_are_sorted: bool,
    bias: Any,
    bias_mode: int,
    out: Any,
    item_groups: int,
    counter: int,
    limit: int,
) -> int:
    """As `project`, with as many items."""
    hit, first, row_of, _, identity, _ = plan_parts(plan, n_experts, n_routes)
    row_index = identity if rows_are_sorted else row_of
    row_place, weight_place = rows.ctypes.data, weights.ctypes.data
    bias_place, out_place = bias.ctypes.data, out.ctypes.data
    n_hit = plan[N_HIT]
    wait_for_items(packing, n_hit, yield_address)
    per_expert = (n_out // WEIGHT_ROWS + item_groups - 1) // item_groups
    n_tiles = n_out // MATRIX_ROWS
    per_item = (n_tiles + per_expert - 1) // per_expert
    n_items = n_hit * per_expert
    while True:
        item = claim(counter)
        if item >= n_items or item >= limit:
            return n_items
        group = item // per_expert
        start = (item - group * per_expert) * per_item
        end = min(start + per_item, n_tiles)
        expert_bytes = n_out * inner * _ROW_BYTES
        following = weight_place + hit[group + 1] * expert_bytes if per_expert == 1 and group + 1 < n_hit else 0
        _multiply(
            weight_place + hit[group] * expert_bytes,
            following,
            start,
            end,
            n_out,
            inner,
            row_place,
            row_index,
            packed,
            first[group],
            first[group + 1],
            bias_place + hit[group] * n_out * _ROW_BYTES,
            bias_mode,
            out_place,
        )
        finish(counter + 8)


def multiplies_by_matrix(n_in: int, n_out: int) -> bool:
    """Whether the unit multiplies rows of ``n_in`` bfloat16 by ``n_out`` weight rows: in all calls, or in none."""
    return n_in % MATRIX_STEP == 0 and n_out % MATRIX_ROWS == 0 and may_use_matrix_unit()


def uses_matrix_unit(hidden: int, inter: int, up_columns: int, item_bytes: int, row_item_bytes: int) -> bool:
    """Whether a layer of this shape is multiplied by the unit: all of its calls are, or none.

    Args:
        hidden, inter, up_columns: inner dimensions and columns of its projections.
        item_bytes, row_item_bytes: of weights and of operands; bfloat16 has 2 and 2, and no other dtype has.
    """
    fits = multiplies_by_matrix(hidden, up_columns) and multiplies_by_matrix(inter, hidden)
    return fits and item_bytes == row_item_bytes == _ROW_BYTES


def project_as_fits(packed: Any, packing: Any, yield_address: Any, *job: Any) -> Any:
    """As `project`; by the matrix unit if ``packed`` is not 0. For compiled code only.

    Args:
        packed: address of rows that `pack_rows` packs, perhaps in other threads meanwhile.
        packing: its counter.
        yield_address: see `wait_for_items`.
        job: the arguments of `project`.
    """
    raise TypeError("project_as_fits is called by compiled code only")


@overload(project_as_fits, jit_options={"nogil": True})
def _project_as_fits(packed: Any, packing: Any, yield_address: Any, *job: Any) -> Callable[..., int]:
    def either(packed: Any, packing: Any, yield_address: Any, *job: Any) -> Any:
        if packed == 0:
            return project(*job)
        return _project_by_matrix(packed, packing, yield_address, *job)

    def plain(packed: Any, packing: Any, yield_address: Any, *job: Any) -> Any:
        return project(*job)

    # Numba compares the annotations, too. Code for a unit that is not there could not be compiled; where the unit is of
    # no use, compiling takes time.
    weights, rows = job[3], job[6]
    multiplies = weights.dtype == rows.dtype == types.uint16
    return either if multiplies and may_use_matrix_unit() else plain
