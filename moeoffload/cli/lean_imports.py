"""Keeps torch and transformers from importing what no host or server uses: seconds, and hundreds of MiB."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_COMPILER: Final = "torch._dynamo"
_USED: Final = "torch._dynamo._trace_wrapped_higher_order_op"  # by transformers, and it needs no compiler


def skip_triton_without_gpu() -> None:
    """Hides Triton from this process, before torch is imported, unless there is a GPU or its interpreter is wanted."""
    has_gpu = any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg"))  # the second in WSL2
    if not has_gpu and "TRITON_INTERPRET" not in os.environ:
        sys.modules["triton"] = None  # type: ignore[assignment]


def import_transformers() -> None:
    """Imports transformers without torch.distributed, and without torch's compiler until something uses it.

    transformers imports both with every model, to know a type of tensor and to decorate functions.
    """
    import torch

    if _COMPILER not in sys.modules:
        sys.modules[_COMPILER] = torch._dynamo = compiler = _LazyCompiler()  # type: ignore[assignment]
        import_module(_USED)
        del compiler.__path__
    is_available, torch.distributed.is_available = torch.distributed.is_available, lambda: False
    try:
        from transformers.utils.import_utils import is_torch_distributed_available

        is_torch_distributed_available()  # remembers its answer
    finally:
        torch.distributed.is_available = is_available


def _undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class _LazyCompiler(ModuleType):
    """torch._dynamo, which becomes itself when anything but decorators and the module of `_USED` is wanted of it."""

    allow_in_graph = assume_constant_result = staticmethod(_undecorated)

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        spec = find_spec(_COMPILER)
        assert spec is not None
        self.__spec__, self.__file__, self.__path__ = spec, spec.origin, list(spec.submodule_search_locations or ())

    @staticmethod
    def disable(function: Any, recursive: bool = True, **options: Any) -> Any:
        """The decorator of functions that are not compiled."""
        return function or _undecorated

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # of which a module inside it is imported
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__path__ = list(self.__spec__.submodule_search_locations or ())
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)
