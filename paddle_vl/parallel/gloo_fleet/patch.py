"""A replaced symbol of Paddle, as data that can be checked before it is applied."""

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle

# The patches were written against 3.3.1.
KNOWN_VERSIONS = re.compile(r"3\.3\.\d+")
NOT_IN_GLOO = "ProcessGroupGloo does not implement it (Unimplemented)"


@dataclass(frozen=True)
class Patch:
    """A symbol of Paddle 3.3 that the CPU build lacks or that fails there.

    Attributes:
        owner: module, or `module:Class`.
        name: attribute of the owner.
        reason: what fails without the patch.
        make: takes Paddle's own and returns the replacement.
        is_missing: whether the CPU build has no such attribute; `make` gets None.
    """

    owner: str
    name: str
    reason: str
    make: Callable[[Any], Any]
    is_missing: bool = False

    @property
    def symbol(self) -> str:
        return f"{self.owner}.{self.name}"

    def check(self) -> None:
        """Raise RuntimeError unless Paddle has the symbol, or lacks it, as this patch expects."""
        own = getattr(self._find_owner(), self.name, None)
        if (own is None) != self.is_missing:
            raise self._mismatch("it is missing" if own is None else "it exists, and was missing")

    def apply(self) -> None:
        """Replace the symbol in its owner, and wherever Paddle imported it by name."""
        owner = self._find_owner()
        own = getattr(owner, self.name, None)
        replacement = self.make(own)
        setattr(owner, self.name, replacement)
        if not inspect.isfunction(own):
            return
        for name, module in list(sys.modules.items()):
            if name.startswith("paddle.") and vars(module).get(self.name) is own:
                setattr(module, self.name, replacement)

    def _find_owner(self) -> Any:
        module, _, attribute = self.owner.partition(":")
        try:
            found = importlib.import_module(module)
            return getattr(found, attribute) if attribute else found
        except (ImportError, AttributeError) as error:
            raise self._mismatch(f"{self.owner} is missing") from error

    def _mismatch(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"paddlepaddle {paddle.__version__} has another {self.symbol} than the CPU fleet was "
            f"written for: {what}. Install paddlepaddle 3.3.1, or adapt the patch "
            f"({self.reason})."
        )


def group_method(name: str, reason: str, function: Callable) -> Patch:
    """A patch of a method of gloo's process groups."""
    return Patch("paddle.base.core:ProcessGroupGloo", name, reason, lambda _: function)


def check_version() -> None:
    """Raise RuntimeError unless Paddle is of the version that the patches were written for."""
    if KNOWN_VERSIONS.fullmatch(paddle.__version__) is None:
        raise RuntimeError(
            f"paddlepaddle {paddle.__version__} runs here, but several ranks on CPUs need patches "
            "of Paddle, which were written for paddlepaddle 3.3: install paddlepaddle 3.3.1, or "
            "use GPUs."
        )
