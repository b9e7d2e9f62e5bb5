"""Keeps models that hosts have named open, so that the next host need not wait for headers and the digest."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.expert_server.agreement import check_model, read_dtype, read_format

if TYPE_CHECKING:
    from moeoffload.checkpoint import Checkpoint

MOST_KEPT: Final = 2


class OpenModels:
    """Keeps the `MOST_KEPT` most recently used models open. Thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Checkpoint] = {}
        self._lock = threading.Lock()

    def open(self, model: pb.ModelReference, reference: str | Path) -> Checkpoint:
        """Returns the model at ``reference`` (folder, file or hub id), which must match the host's ``model``; reopens
        it if its files have changed. Raises ModelError: it cannot be read; ServerError: the host's model differs."""
        from moeoffload.checkpoint import Checkpoint
        from moeoffload.checkpoint.locate import locate

        dtype, form = read_dtype("compute dtype", model.compute_dtype), read_format(model.expert_format)
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
