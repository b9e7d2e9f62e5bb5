"""Run Mixture-of-Experts models with their routed experts on other devices and machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moeoffload.host.session import OffloadedModel, open_model

__version__ = "0.1.0"

__all__ = ["OffloadedModel", "__version__", "open_model"]


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import; --help and setting errors need not wait for them.
    if name in ("open_model", "OffloadedModel"):
        from moeoffload.host import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
