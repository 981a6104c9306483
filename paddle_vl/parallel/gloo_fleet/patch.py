"""A replaced symbol of Paddle, as data, and the version of Paddle that has these symbols."""

import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import paddle

logger = logging.getLogger(__name__)

# The parallel code uses private names of fleet, as they are in 3.3.1.
KNOWN_VERSIONS = re.compile(r"3\.3\.\d+.*")
# Of builds from Paddle's develop branch.
DEVELOPMENT = "0.0.0"
# Owner of gloo's methods.
GROUP = "paddle.base.core:ProcessGroupGloo"
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


Function = TypeVar("Function", bound=Callable)
# All patches; the modules with the replacements fill it.
PATCHES: list[Patch] = []


def replaces(
    owner: str, name: str, reason: str, makes: bool = False
) -> Callable[[Function], Function]:
    """Decorator: the function replaces a symbol, or makes the replacement from Paddle's own; see
    `Patch`."""

    def register(function: Function) -> Function:
        make = function if makes else lambda own: function
        PATCHES.append(Patch(owner, name, reason, make))
        return function

    return register


def group_method(name: str, reason: str) -> Callable[[Function], Function]:
    """Decorator: the function replaces a method of gloo's process groups."""
    return replaces(GROUP, name, reason)


def check_version() -> None:
    """Refuse a Paddle that the parallel code is not written for. A development build for GPUs,
    whose version says nothing, is warned of.

    Raises:
        RuntimeError: another version than 3.3.
    """
    version = paddle.__version__
    if KNOWN_VERSIONS.fullmatch(version) is not None:
        return
    message = (
        f"paddlepaddle {version} runs here, but several ranks need private parts of its fleet, "
        "which change between versions, as paddlepaddle 3.3 has them: install paddlepaddle 3.3.1"
    )
    if version != DEVELOPMENT or not paddle.is_compiled_with_cuda():
        raise RuntimeError(message)
    logger.warning("%s; results of this build are unchecked", message)
