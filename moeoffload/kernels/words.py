"""Words of the blocks through which Python and the compiled programs talk: int64 each, addresses included.

Addresses are of contiguous memory. "Positions" are routes sorted by expert.
"""

from __future__ import annotations

from typing import Final

# A call block.
LAYER: Final = 0
"""Address of the layer block."""
ROWS: Final = 1
"""(n_rows, hidden) compute dtype."""
SLOTS: Final = 2
"""(n_rows, top_k) int64."""
WEIGHTS: Final = 3
"""(n_rows, top_k) float32 or compute dtype."""
OUT: Final = 4
"""(n_rows, hidden) float32."""
N_ROWS: Final = 5
TOP_K: Final = 6
WEIGHTS_ARE_F32: Final = 7
PHASES: Final = 8
"""Sum of the phases to run, see below."""
YIELD: Final = 9
"""Address of a function that lets other threads run."""
ITEM_GROUPS: Final = 10
"""Groups of four weight rows of one item of the projections."""
PLAN: Final = 11
UP: Final = 12
"""(positions, up_columns) compute dtype."""
ACTIVATED: Final = 13
"""(positions, inter) row dtype."""
DOWN: Final = 14
"""(positions, hidden) compute dtype; may be the memory of UP."""
OPERANDS: Final = 15
"""(n_rows, hidden) row dtype: the rows themselves if they have it."""
BAD_ROUTE: Final = 16
"""Written by the plan: -1, or a route whose slot does not exist."""
LIMIT: Final = 17
"""No item from this number on is computed, in any phase: so a call can be computed in steps, phase by phase."""
NO_LIMIT: Final = 1 << 62
PACKED: Final = 18
"""(positions, max(hidden, inter)) row dtype for the matrix unit's operands; 0 where it is not used."""
COUNTERS: Final = 24
"""One cache line per phase: how many of its items are claimed, and how many finished. Two more for packing."""
PACK_UP: Final = 4
PACK_DOWN: Final = 5
N_COUNTERS: Final = 6
COUNTER_WORDS: Final = 8
CALL_WORDS: Final = COUNTERS + N_COUNTERS * COUNTER_WORDS

# The call block of a linear layer has ROWS, OUT (n_rows, n_out), N_ROWS, PHASES, ITEM_GROUPS, PLAN, OPERANDS,
# PACKED, YIELD and:
WEIGHT: Final = LAYER
"""(n_out, n_in)."""
BIAS: Final = SLOTS
"""(n_out), or 0."""
N_IN: Final = UP
N_OUT: Final = DOWN

# A layer block.
N_EXPERTS: Final = 0
HIDDEN: Final = 1
INTER: Final = 2
UP_COLUMNS: Final = 3
UP_WEIGHT: Final = 4
"""(n_experts, up_columns, hidden)."""
UP_BIAS: Final = 5
"""(n_experts, up_columns), or 0."""
DOWN_WEIGHT: Final = 6
"""(n_experts, hidden, inter)."""
DOWN_BIAS: Final = 7
"""(n_experts, hidden), or 0."""
LAYER_WORDS: Final = 8

# Phases.
PLAN_PHASE: Final = 1
UP_PHASE: Final = 2
ACTIVATE_PHASE: Final = 4
DOWN_PHASE: Final = 8
SUM_PHASE: Final = 16
PACK_UP_PHASE: Final = 32
"""Before UP_PHASE; nothing where the matrix unit is not used."""
PACK_DOWN_PHASE: Final = 64
PROJECT_UP: Final = PACK_UP_PHASE | UP_PHASE
PROJECT_DOWN: Final = PACK_DOWN_PHASE | DOWN_PHASE
COMPUTE_PHASES: Final = PROJECT_UP | ACTIVATE_PHASE | PROJECT_DOWN | SUM_PHASE
