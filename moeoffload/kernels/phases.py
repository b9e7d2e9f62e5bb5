"""What the compiled experts program does, phase by phase, in numba.

plan -> up projections -> activation -> down projections -> weighted sum. Each phase's work is cut into items that
threads claim one after the other, and a phase begins when all items of the one before are finished: a thread that gets
no core holds nobody up. The results do not depend on who did what. "Positions" are routes sorted by expert. A phase
returns its number of items; ``counter`` is the address of how many are claimed, followed by how many are finished;
items from ``limit`` on are left for another time.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray, njit

from moeoffload.kernels.tile import IN_CACHE, IN_MEMORY, ONCE, TILE_ROWS, WEIGHT_ROWS, dot_tile
from moeoffload.kernels.vector_ir import (
    bits_of,
    call_address,
    claim,
    finish,
    finished,
    float_of,
    fma,
    narrow,
    pointer_to,
    widen,
)

BLOCK_GROUPS: Final = 16
"""Groups of four weight rows that all tiles of an expert pass through before the next ones come: the tiles' rows are
read from the second-level cache less often, and there is time to bring the next groups."""

SUM_COLUMNS: Final = 512
"""Columns of an item of the weighted sum."""

# Where the plan's parts begin, in int32 words, for n experts and m routes: see plan_words.
N_PRESENT: Final = 0
N_HIT: Final = 1
_PLAN_HEAD: Final = 16


@njit(nogil=True)
def plan_words(n_experts: int, n_routes: int) -> int:
    """int32 words of a plan."""
    return _PLAN_HEAD + 3 * n_experts + 1 + 3 * n_routes


@njit(nogil=True)
def view(address: int, dtype: Any, count: int) -> Any:
    """``count`` elements of ``dtype`` at an address."""
    return carray(pointer_to(address, dtype), count)


@njit(nogil=True)
def plan_parts(plan: Any, n_experts: int, n_routes: int) -> Any:
    """A plan's parts: experts hit, their first positions, row of a position, position of a route, 0.., counts."""
    start = _PLAN_HEAD
    hit = plan[start : start + n_experts]
    start += n_experts
    first = plan[start : start + n_experts + 1]
    start += n_experts + 1
    counts = plan[start : start + n_experts]
    start += n_experts
    row_of = plan[start : start + n_routes]
    start += n_routes
    position_of = plan[start : start + n_routes]
    start += n_routes
    return hit, first, row_of, position_of, plan[start : start + n_routes], counts


@njit(nogil=True)
def make_plan(slots: Any, top_k: int, n_experts: int, plan: Any) -> int:
    """Sorts routes by expert (a counting sort). Returns -1, or the first route whose slot does not exist."""
    n_routes = slots.size
    hit, first, row_of, position_of, identity, counts = plan_parts(plan, n_experts, n_routes)
    counts[:] = 0
    for route in range(n_routes):
        slot = slots[route]
        if slot < -1 or slot >= n_experts:
            return route
        if slot >= 0:
            counts[slot] += 1
    n_hit = 0
    position = 0
    for expert in range(n_experts):
        count = counts[expert]
        counts[expert] = position
        if count:
            hit[n_hit] = expert
            first[n_hit] = position
            n_hit += 1
            position += count
    first[n_hit] = position
    plan[N_PRESENT] = position
    plan[N_HIT] = n_hit
    for route in range(n_routes):
        identity[route] = route
        slot = slots[route]
        if slot < 0:
            position_of[route] = -1
            continue
        position = counts[slot]
        counts[slot] = position + 1
        row_of[position] = route // top_k
        position_of[route] = position
    return -1


@njit(nogil=True)
def plan_one(plan: Any, n_rows: int) -> None:
    """The plan of a single matrix that all rows meet."""
    hit, first, _, _, identity, _ = plan_parts(plan, 1, n_rows)
    plan[N_PRESENT] = n_rows
    plan[N_HIT] = 1
    hit[0] = 0
    first[0] = 0
    first[1] = n_rows
    for row in range(n_rows):
        identity[row] = row


@njit(nogil=True)
def convert(values: Any, out: Any) -> None:
    """Elements of one type into another, through float32."""
    for i in range(values.size):
        out[i] = narrow(widen(values[i]), out[0])


# Then a waiting thread lets others run: one of them may hold the item that it waits for.
_SPINS: Final = 200


@njit(nogil=True)
def wait_for_items(counter: int, n_items: int, yield_address: int) -> None:
    """Returns when ``n_items`` items of the phase are finished."""
    spins = 0
    while finished(counter + 8) < n_items:
        spins += 1
        if spins > _SPINS:
            call_address(yield_address)


@njit(nogil=True)
def project_groups(
    weights: Any,
    weight_row: int,
    last_row: int,
    row_step: int,
    inner: int,
    rows: Any,
    row_index: Any,
    first: int,
    last: int,
    bias: Any,
    bias_mode: int,
    out: Any,
    stride: int,
) -> None:
    """Positions ``first..last`` times weight rows r, r + row_step, .. (four) for r in ``weight_row..last_row``.

    ``weights`` and ``bias`` begin at the expert's; output column = weight row.
    """
    n_tiles = (last - first + TILE_ROWS - 1) // TILE_ROWS
    block = BLOCK_GROUPS if n_tiles > 1 else 1
    source = ONCE if n_tiles == 1 else IN_MEMORY
    start = weight_row
    while start < last_row:
        end = min(start + block, last_row)
        position = first
        n_ahead = 0
        for tile in range(n_tiles):
            size = (last - position + n_tiles - tile - 1) // (n_tiles - tile)
            for row in range(start, end):
                ahead = row
                if tile > 0 and n_ahead < 2 * block:
                    # While this block is computed, two rows at a time, the next one comes.
                    ahead = end + n_ahead // 2 + (n_ahead % 2) * 2 * row_step
                    n_ahead += 1
                dot_tile(
                    size,
                    source if tile == 0 else IN_CACHE,
                    weights,
                    inner,
                    row,
                    row_step,
                    inner,
                    ahead,
                    rows,
                    row_index,
                    position,
                    bias,
                    bias_mode,
                    out,
                    stride,
                )
            position += size
        start = end


@njit(nogil=True)
def project(
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
    """Every present route times its expert's matrix (n_out, inner): ``out`` (positions, n_out)."""
    hit, first, row_of, _, identity, _ = plan_parts(plan, n_experts, n_routes)
    row_index = identity if rows_are_sorted else row_of
    quarter = n_out // WEIGHT_ROWS
    per_expert = (quarter + item_groups - 1) // item_groups
    n_items = plan[N_HIT] * per_expert
    while True:
        item = claim(counter)
        if item >= n_items or item >= limit:
            return n_items
        group = item // per_expert
        start = (item - group * per_expert) * item_groups
        end = min(start + item_groups, quarter)
        expert = hit[group]
        matrix = weights[expert * n_out * inner :]
        expert_bias = bias[expert * n_out :] if bias_mode else bias
        top, bottom = first[group], first[group + 1]
        project_groups(
            matrix, start, end, quarter, inner, rows, row_index, top, bottom, expert_bias, bias_mode, out, n_out
        )
        if end == quarter and quarter * WEIGHT_ROWS < n_out:
            # Rows that make no four: the last four, some of them once more with the same result.
            row = n_out - WEIGHT_ROWS
            project_groups(
                matrix, row, row + 1, 1, inner, rows, row_index, top, bottom, expert_bias, bias_mode, out, n_out
            )
        finish(counter + 8)


@njit(nogil=True, error_model="numpy")
def exp(x: Any) -> Any:
    """e to the x in float32, within one unit in the last place.

    Steps and constants are those of SLEEF's expf_u10 (Boost licence), which torch's vector code calls: so activations
    have torch's bits.
    """
    magic = np.float32(12582912.0)
    shifted = np.float32(x * np.float32(1.442695040888963407359924681001892137426645954152985934135449406931))
    shifted = np.float32(shifted + magic)
    whole = np.float32(shifted - magic)
    power = bits_of(shifted) - np.int32(0x4B400000)
    s = fma(whole, np.float32(-0.693145751953125), x)
    s = fma(whole, np.float32(-1.428606765330187045e-06), s)
    u = np.float32(0.000198527617612853646278381)
    u = fma(u, s, np.float32(0.00139304355252534151077271))
    u = fma(u, s, np.float32(0.00833336077630519866943359))
    u = fma(u, s, np.float32(0.0416664853692054748535156))
    u = fma(u, s, np.float32(0.166666671633720397949219))
    u = fma(u, s, np.float32(0.5))
    u = np.float32(np.float32(1.0) + fma(np.float32(s * s), u, s))
    half = power >> np.int32(1)
    u = np.float32(u * float_of((half + np.int32(127)) << np.int32(23)))
    u = np.float32(u * float_of((power - half + np.int32(127)) << np.int32(23)))
    u = np.float32(0.0) if x < np.float32(-104.0) else u
    return np.float32(np.inf) if x > np.float32(100.0) else u


@njit(nogil=True, error_model="numpy")
def silu_times_up(plan: Any, inter: int, values: Any, out: Any, counter: int, limit: int) -> int:
    """``out = silu(gate) * up`` for ``values`` (positions, [gate | up]); rounds after each step to their type."""
    one = np.float32(1.0)
    while True:
        position = claim(counter)
        if position >= plan[N_PRESENT] or position >= limit:
            return plan[N_PRESENT]
        gate = values[position * 2 * inter : position * 2 * inter + inter]
        up = values[position * 2 * inter + inter : (position + 1) * 2 * inter]
        target = out[position * inter : (position + 1) * inter]
        for i in range(inter):
            x = widen(gate[i])
            activated = widen(narrow(np.float32(x / np.float32(one + exp(-x))), gate[i]))
            product = widen(narrow(np.float32(activated * widen(up[i])), gate[i]))
            target[i] = narrow(product, target[i])
        finish(counter + 8)


@njit(nogil=True)
def weighted_sum(
    plan: Any,
    n_experts: int,
    n_rows: int,
    top_k: int,
    hidden: int,
    values: Any,
    weights: Any,
    rounds: bool,
    out: Any,
    counter: int,
    limit: int,
) -> None:
    """``out[row] = sum of values[position] * weight`` over the row's routes in their order, in float32.

    ``rounds``: each product is rounded to the type of ``values`` first.
    """
    position_of = plan_parts(plan, n_experts, n_rows * top_k)[3]
    per_row = (hidden + SUM_COLUMNS - 1) // SUM_COLUMNS
    n_items = n_rows * per_row
    while True:
        item = claim(counter)
        if item >= n_items or item >= limit:
            return
        row = item // per_row
        start = (item - row * per_row) * SUM_COLUMNS
        end = min(start + SUM_COLUMNS, hidden)
        total = out[row * hidden + start : row * hidden + end]
        total[:] = np.float32(0.0)
        for route in range(row * top_k, (row + 1) * top_k):
            position = position_of[route]
            if position < 0:
                continue
            weight = widen(weights[route])
            some = values[position * hidden + start : position * hidden + end]
            if rounds:
                for i in range(total.size):
                    product = narrow(np.float32(widen(some[i]) * weight), some[i])
                    total[i] = np.float32(total[i] + widen(product))
            else:
                for i in range(total.size):
                    total[i] = np.float32(total[i] + np.float32(widen(some[i]) * weight))
