"""The models that hosts name: decides which this server reads for them, and keeps the last ones open."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.errors import ModelError
from moeoffload.expert_server.agreement import check_model, read_dtype, read_format
from moeoffload.model_name import check_revision

if TYPE_CHECKING:
    from moeoffload.checkpoint import Checkpoint

MOST_KEPT: Final = 2


@dataclass(frozen=True)
class ModelRoots:
    """Decides which models a host may make this server read: those below allowed folders and those in the hub cache.

    ``on_refused`` is called with the reason for every refused reference.
    """

    roots: tuple[Path, ...]
    """Folders with all links resolved."""
    any_model: bool
    """Whether hosts may name anything that this process can read or download."""
    on_refused: Callable[[str], None]

    def resolve(self, reference: str, revision: str | None) -> str | Path:
        """Returns what to open for a host's ``reference``: a folder or file, or the reference itself if all is allowed.
        Raises ModelError: the revision is not a valid name, or the reference is not allowed, whether or not such a
        model exists, so that a host learns nothing about other folders."""
        # The whole package: if one thread imports a part while another imports all, transformers returns half a module.
        import moeoffload.checkpoint  # noqa: F401
        from moeoffload.checkpoint.locate import locate_cached

        try:
            check_revision(revision)
        except ModelError:
            self.on_refused("it named a revision that is no name")
            raise
        if self.any_model:
            return reference
        if reference.startswith(("/", "~", ".")) or "\0" in reference:
            folder = self._inside(reference)
        else:
            folder = locate_cached(reference, revision)
        if folder is None:
            where = f"below {', '.join(map(str, self.roots))} or " if self.roots else ""
            self.on_refused("it named a model outside of what --model-root allows")
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
        inside = (any(path.is_relative_to(root) for root in self.roots) for path in (found, chosen))
        return chosen if all(inside) else None


class OpenModels:
    """Keeps the `MOST_KEPT` most recently used models open: the next host need not wait for headers and the digest.

    Thread-safe.
    """

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
