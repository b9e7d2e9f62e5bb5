"""What numba programs that are not in C yet share."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from moeoffload.kernels.vector_ir import bits_of, float_of, fma, pointer_to


@njit(nogil=True)
def view(address: int, dtype: Any, count: int) -> Any:
    """``count`` elements of ``dtype`` at an address."""
    return carray(pointer_to(address, dtype), count)


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
