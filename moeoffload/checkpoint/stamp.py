"""Whether files are those that were opened: what the file system says of them, without reading them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def stamp_of(files: Iterable[Path]) -> str:
    """Changes when one of the files is written, replaced or gone (up to writes within the clock tick of a file system).

    The same for all names of a file.
    """
    return hashlib.sha256(repr([_facts(file) for file in files]).encode()).hexdigest()


def _facts(file: Path) -> tuple[int, ...]:
    try:
        facts = file.stat()
    except OSError:
        return ()
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns
