"""Checks what a host states when it attaches against what the server has; every function raises ServerError."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.errors import ServerError
from moeoffload.formats.quantise import FORMATS
from moeoffload.payload import PayloadDtype
from moeoffload.placement import ExpertTable
from moeoffload.text import one_line
from moeoffload.wire import MAX_SLOTS

if TYPE_CHECKING:
    from moeoffload.checkpoint import Checkpoint


def read_format(name: str) -> str | None:
    """Returns the format to pack experts in; None: as they are stored. Raises ServerError for an unknown format."""
    if name and name not in FORMATS:
        raise ServerError(f"expert format is {one_line(name, 24)!r} (host), known here are {', '.join(FORMATS)}")
    return name or None


def read_payload(field: str, label: str) -> PayloadDtype:
    """Returns the payload dtype that the host named; ``field`` is for the error message."""
    try:
        return PayloadDtype[label.upper()]
    except KeyError:
        raise ServerError(f"{field} is {label!r} (host), allowed are f32, f16, bf16 and f8") from None


def read_dtype(field: str, label: str) -> torch.dtype:
    """As `read_payload`, for a compute dtype."""
    payload = read_payload(field, label)
    if payload is PayloadDtype.F8:
        raise ServerError(f"{field} is {label!r} (host), allowed are f32, f16 and bf16")
    return payload.torch_dtype


def compare(field: str, host: str | int, here: str | int) -> None:
    """Raises ServerError if the host's value of ``field`` differs from this server's."""
    if host != here:
        raise ServerError(f"{field} is {str(host)[:24]} (host), {str(here)[:24]} here")


def check_model(model: pb.ModelReference, checkpoint: Checkpoint) -> None:
    """Raises ServerError unless ``checkpoint`` has the digest and dtype of the host's ``model``."""
    here = checkpoint.digest
    if model.digest != here:
        raise ServerError(
            f"the host's model is not {checkpoint.path}, which this server reads: "
            f"model digest is {model.digest[:12]} (host), {here[:12]} here"
        )
    compare("compute dtype", model.compute_dtype, PayloadDtype.from_torch(checkpoint.dtype).label)


def check_table(request: pb.LoadExpertsRequest, checkpoint: Checkpoint) -> ExpertTable:
    """Returns a load request's expert table, checked against the model: known layers and experts, each at most once."""
    if len(request.layers) != len(checkpoint.layers):
        raise ServerError(f"expert table has {len(request.layers)} layers, the model has {len(checkpoint.layers)}")
    tables: list[tuple[int, ...]] = []
    for wanted, layer in zip(request.layers, checkpoint.layers, strict=True):
        # Reads at most one entry more than the layer has experts, which is enough to refuse a longer list.
        experts = tuple(wanted.experts[: layer.n_experts + 1])
        known = wanted.layer == layer.index and all(expert < layer.n_experts for expert in experts)
        if not known or len(set(experts)) != len(experts) or len(experts) > MAX_SLOTS:
            raise ServerError(
                f"expert table: layer {wanted.layer} names experts the model does not have, or one twice "
                f"(layer {layer.index} has {layer.n_experts})"
            )
        tables.append(experts)
    return ExpertTable(tuple(tables))


def check_activate(
    request: pb.Activate, checkpoint: Checkpoint, table: ExpertTable
) -> tuple[PayloadDtype, PayloadDtype]:
    """Returns the payload dtypes out and back. Raises ServerError naming the field that differs from what is loaded."""
    compare("model digest", request.model_digest, checkpoint.digest)
    compare("expert table", request.table_digest, table.digest)
    compare("compute dtype", request.compute_dtype, PayloadDtype.from_torch(checkpoint.dtype).label)
    compare("hidden size", request.hidden_size, checkpoint.hidden_size)
    compare("top-k", request.top_k, checkpoint.top_k)
    dtypes = (
        read_payload("payload dtype out", request.dtype_out),
        read_payload("payload dtype back", request.dtype_back),
    )
    for field, value in (("batch capacity", request.batch_capacity), ("number of slots", request.n_slots)):
        if value < 1:
            raise ServerError(f"{field} is {value} (host), at least 1 is needed")
    return dtypes


def check_transport(wanted: str, offered: list[str]) -> list[str]:
    """Returns the offered transports that match ``wanted``: one name, or all of them for ``auto``."""
    found = [name for name in offered if wanted in ("auto", name)]
    if not found:
        raise ServerError(f"transport is {wanted} (host), this server offers {', '.join(offered)}")
    return found
