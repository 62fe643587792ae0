"""Megalith: from "this model, this cluster" to a trained language model."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalith.api import Run, TrainingError

__version__ = "0.1.0"
__all__ = ["Run", "TrainingError", "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import megalith` stays quick."""
    if name in ("Run", "TrainingError"):
        from megalith import api

        return getattr(api, name)
    raise AttributeError(f"module 'megalith' has no attribute {name!r}")
