"""A replaced symbol of Paddle, as data, and the version of Paddle that has these symbols."""

import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle

logger = logging.getLogger(__name__)

# The parallel code uses private names of fleet, as they are in 3.3.1.
KNOWN_VERSIONS = re.compile(r"3\.3\.\d+.*")
NOT_IN_GLOO = "ProcessGroupGloo does not implement it (Unimplemented)"


@dataclass(frozen=True)
class Patch:
    """A symbol of Paddle 3.3 that the CPU build lacks or that fails there.

    Attributes:
        owner: module, or `module:Class`.
        name: attribute of the owner.
        reason: what fails without the patch.
        make: takes Paddle's own, None if it has none, and returns the replacement.
    """

    owner: str
    name: str
    reason: str
    make: Callable[[Any], Any]

    def find_owner(self) -> Any:
        module, _, attribute = self.owner.partition(":")
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found

    def apply(self) -> None:
        """Replace the symbol in its owner, and wherever Paddle imported it by name."""
        owner = self.find_owner()
        own = getattr(owner, self.name, None)
        replacement = self.make(own)
        setattr(owner, self.name, replacement)
        if not inspect.isfunction(own):
            return
        for name, module in list(sys.modules.items()):
            if name.startswith("paddle.") and vars(module).get(self.name) is own:
                setattr(module, self.name, replacement)


def group_method(name: str, reason: str, function: Callable) -> Patch:
    """A patch of a method of gloo's process groups."""
    return Patch("paddle.base.core:ProcessGroupGloo", name, reason, lambda _: function)


def check_version() -> None:
    """Refuse a Paddle that the parallel code is not written for; on GPUs a warning, as other
    versions and nightly builds may have the same fleet.

    Raises:
        RuntimeError: a CPU build that is not 3.3; its process groups are patched.
    """
    if KNOWN_VERSIONS.fullmatch(paddle.__version__) is not None:
        return
    message = (
        f"paddlepaddle {paddle.__version__} runs here, but several ranks need private parts of "
        "its fleet, which change between versions, as paddlepaddle 3.3 has them: install "
        "paddlepaddle 3.3.1"
    )
    if not paddle.is_compiled_with_cuda():
        raise RuntimeError(message)
    logger.warning("%s if a step fails", message)
