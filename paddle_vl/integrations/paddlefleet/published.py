"""Modules of PaddleFleet, imported when they are needed."""

import importlib
from typing import Any


def published(module: str) -> Any:
    """A module of PaddleFleet.

    Raises:
        ImportError: PaddleFleet is not installed, or its version has no such module.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} cannot be imported ({error}): paddle_vl.integrations.paddlefleet needs "
            "PaddleFleet, which is not a requirement of this package; install the paddlefleet "
            "wheel for your GPU build of Paddle"
        ) from error
