"""Modules of PaddleFleet, imported when they are needed."""

import importlib
from typing import Any

# Later releases of PaddleFormers carry PaddleFleet's modules in a package of their own.
_HOMES = ("paddlefleet", "paddleformers.fleet")


def published(module: str, home: str | None = None) -> Any:
    """A module of PaddleFleet.

    Args:
        module: its name below the package, such as `models.gpt.gpt_embedding`.
        home: the package; None for the first one that has it.

    Raises:
        ImportError: PaddleFleet is not installed, or its version has no such module.
    """
    reasons = []
    for package in _HOMES if home is None else (home,):
        try:
            return importlib.import_module(f"{package}.{module}")
        except ImportError as error:
            reasons.append(f"{package}.{module} cannot be imported: {error}")
    raise ImportError(
        "; ".join(reasons) + ". paddle_vl.integrations.paddlefleet needs PaddleFleet, which is not "
        "a requirement of this package; install the paddlefleet wheel for your GPU build of Paddle"
    )


def home_of(embedding: type) -> str:
    """The package of the `GPTEmbedding` that a class is or inherits from."""
    for base in embedding.__mro__:
        home, found, _ = base.__module__.partition(".models.")
        if base.__name__ == "GPTEmbedding" and found:
            return home
    return _HOMES[0]
