"""What a host says when it attaches, compared with what the server has; every function raises ServerError."""

from __future__ import annotations

import torch

from moeoffload.checkpoint import Checkpoint
from moeoffload.control.protocol import dtype_of
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.errors import ServerError
from moeoffload.payload import PayloadDtype
from moeoffload.placement import ExpertTable
from moeoffload.wire import MAX_SLOTS


def read_dtype(field: str, label: str) -> torch.dtype:
    """The dtype that a host has named; ``field`` is for the message."""
    try:
        return dtype_of(label)
    except KeyError:
        raise ServerError(f"{field} is {label!r} (host), allowed are f32, f16 and bf16") from None


def read_payload(field: str, label: str) -> PayloadDtype:
    """As `read_dtype`, as a payload dtype."""
    return PayloadDtype.from_torch(read_dtype(field, label))


def compare(field: str, host: str | int, here: str | int) -> None:
    """Refuses a host that means something else by ``field`` than this server."""
    if host != here:
        raise ServerError(f"{field} is {str(host)[:24]} (host), {str(here)[:24]} here")


def check_model(model: pb.ModelReference, checkpoint: Checkpoint) -> None:
    """Raises ServerError unless ``checkpoint`` is what the host calls ``model``."""
    here = checkpoint.digest
    if model.digest != here:
        raise ServerError(f"model digest is {model.digest[:12]} (host), {here[:12]} for {checkpoint.path} here")
    compare("compute dtype", model.compute_dtype, PayloadDtype.from_torch(checkpoint.dtype).label)


def check_table(request: pb.LoadExpertsRequest, checkpoint: Checkpoint) -> ExpertTable:
    """The table of a load request, checked against the model: known layers and experts, each at most once."""
    if len(request.layers) != len(checkpoint.layers):
        raise ServerError(f"expert table has {len(request.layers)} layers, the model has {len(checkpoint.layers)}")
    tables: list[tuple[int, ...]] = []
    for wanted, layer in zip(request.layers, checkpoint.layers, strict=True):
        # Longer than the model has experts: not even looked at.
        experts = tuple(wanted.experts[: layer.n_experts + 1])
        known = wanted.layer == layer.index and all(expert < layer.n_experts for expert in experts)
        if not known or len(set(experts)) != len(experts) or len(experts) > MAX_SLOTS:
            raise ServerError(
                f"expert table: layer {wanted.layer} names experts the model does not have, or one twice "
                f"(layer {layer.index} has {layer.n_experts})"
            )
        tables.append(experts)
    return ExpertTable(tuple(tables))
