"""Checks what a host asks for and states when it attaches: which model, and whether it is the one that is here."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.errors import ModelError, ServerError
from moeoffload.formats.quantise import FORMATS
from moeoffload.model_name import check_revision
from moeoffload.payload import PayloadDtype, Payloads
from moeoffload.placement import ExpertTable
from moeoffload.text import one_line
from moeoffload.wire import MAX_SLOTS

if TYPE_CHECKING:
    from moeoffload.checkpoint import Checkpoint

MOST_KEPT: Final = 2
OnRefused = Callable[[str], None]
"""Called with the reason for which a host may not read the model that it has named."""


class Models:
    """The models that hosts may make this server read: those below allowed folders and those in the hub cache.

    Keeps the `MOST_KEPT` most recently used ones open: the next host need not wait for headers and the digest.
    Thread-safe.
    """

    def __init__(self, own: str | None, roots: tuple[Path, ...], any_model: bool) -> None:
        """``own`` is this server's copy, read whatever hosts name; ``roots`` are folders with all links resolved; with
        ``any_model`` hosts may name anything that this process can read or download."""
        self._own = own
        self._roots = roots
        self._any_model = any_model
        self._kept: dict[tuple[object, ...], Checkpoint] = {}
        self._lock = threading.Lock()

    def open(self, model: pb.ModelReference, on_refused: OnRefused) -> Checkpoint:
        """Returns the host's ``model``, or this server's own copy of it; reopens it if its files have changed.
        Raises ModelError: it cannot be read, or see `resolve`; ServerError: the host's model differs."""
        reference = self._own or self.resolve(model.reference, model.revision or None, on_refused)
        from moeoffload.checkpoint import Checkpoint
        from moeoffload.checkpoint.locate import locate

        dtype = read_payload("compute dtype", model.compute_dtype, computes=True).torch_dtype
        form = read_format(model.expert_format)
        path = locate(reference, model.revision or None)
        # The digest is part of the key: the host's model may differ from the one that is cached for this path.
        key = path, dtype, form, model.config, model.digest
        with self._lock:
            checkpoint = self._kept.pop(key, None)
        if checkpoint is None or not checkpoint.is_current:
            checkpoint = Checkpoint.open(path, dtype=dtype, expert_format=form, config_text=model.config)
            # Hosts share experts by digest and dtype, so no host may load other experts under these names.
            check_model(model, checkpoint)
        with self._lock:
            self._kept[key] = checkpoint
            for old in list(self._kept)[:-MOST_KEPT]:
                del self._kept[old]
        return checkpoint

    def resolve(self, reference: str, revision: str | None, on_refused: OnRefused) -> str | Path:
        """Returns what to open for a host's ``reference``: a folder or file, or the reference itself if all is allowed.
        Raises ModelError, after ``on_refused``: the revision is not a valid name, or the reference is not allowed,
        whether or not such a model exists, so that a host learns nothing about other folders."""
        # The whole package: if one thread imports a part while another imports all, transformers returns half a module.
        import moeoffload.checkpoint  # noqa: F401
        from moeoffload.checkpoint.locate import locate_cached

        try:
            check_revision(revision)
        except ModelError:
            on_refused("it named a revision that is no name")
            raise
        if self._any_model:
            return reference
        if reference.startswith(("/", "~", ".")) or "\0" in reference:
            folder = self._inside(reference)
        else:
            folder = locate_cached(reference, revision)
        if folder is None:
            where = f"below {', '.join(map(str, self._roots))} or " if self._roots else ""
            on_refused("it named a model outside of what --model-root allows")
            raise ModelError(
                f"{reference!r} is no model {where}in the hub cache of this server, which reads no others for hosts; "
                "start it with --model or with another --model-root"
            )
        return folder

    def _inside(self, reference: str) -> Path | None:
        """Returns the folder with all links resolved, or a GGUF file, if it is a root or below one; else None.

        A GGUF file keeps its name even if that is a link to another file below a root, as in a hub cache.
        """
        from moeoffload.checkpoint.gguf_file import is_gguf

        try:
            found = Path(os.path.realpath(reference))
            named = Path(os.path.realpath(Path(reference).parent)) / Path(reference).name
        except (OSError, ValueError):  # not a possible file name
            return None
        chosen = named if is_gguf(named) else found
        inside = (any(path.is_relative_to(root) for root in self._roots) for path in (found, chosen))
        return chosen if all(inside) else None


def read_format(name: str) -> str | None:
    """Returns the format to pack experts in; None: as they are stored. Raises ServerError for an unknown format."""
    if name and name not in FORMATS:
        raise ServerError(f"expert format is {one_line(name, 24)!r} (host), known here are {', '.join(FORMATS)}")
    return name or None


def read_payload(field: str, label: str, *, computes: bool = False) -> PayloadDtype:
    """Returns the payload dtype that the host named, of those that a model ``computes`` in; ``field`` is for the error
    message."""
    allowed = [each.label for each in PayloadDtype if not computes or each is not PayloadDtype.F8]
    if label.lower() not in allowed:
        raise ServerError(f"{field} is {label!r} (host), allowed are {', '.join(allowed)}")
    return PayloadDtype[label.upper()]


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
    compare("compute dtype", model.compute_dtype, checkpoint.dtype_label)


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


def check_activate(request: pb.Activate, checkpoint: Checkpoint, table: ExpertTable) -> Payloads:
    """Returns the payload dtypes. Raises ServerError naming the field that differs from what is loaded."""
    compare("model digest", request.model_digest, checkpoint.digest)
    compare("expert table", request.table_digest, table.digest)
    compare("compute dtype", request.compute_dtype, checkpoint.dtype_label)
    compare("hidden size", request.hidden_size, checkpoint.hidden_size)
    compare("top-k", request.top_k, checkpoint.top_k)
    payloads = Payloads(
        read_payload("payload dtype out", request.dtype_out),
        read_payload("payload dtype back", request.dtype_back),
    )
    for field, value in (("batch capacity", request.batch_capacity), ("number of slots", request.n_slots)):
        if value < 1:
            raise ServerError(f"{field} is {value} (host), at least 1 is needed")
    return payloads


def check_transport(wanted: str, offered: list[str]) -> list[str]:
    """Returns the offered transports that match ``wanted``: one name, or all of them for ``auto``."""
    found = [name for name in offered if wanted in ("auto", name)]
    if not found:
        raise ServerError(f"transport is {wanted} (host), this server offers {', '.join(offered)}")
    return found
