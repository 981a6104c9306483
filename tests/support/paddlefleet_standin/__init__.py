"""STAND-INS, written for tests, for PaddleFleet, whose wheel needs a GPU build of Paddle.

`modules/paddlefleet` has the modules, names and signatures that the integration touches, and little
else: layers work on single rows, so that a sequence can be cut anywhere. Each file names the
published file whose contract it keeps. Nothing here is copied from it.

The pipeline, its messages and the specs are Paddle's own (`PipelineLayer`, `LayerSpec`,
`build_spec_layer`), as in PaddleFleet.

    with stand_in(): ...    # `import paddlefleet` finds the stand-in
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MODULES = Path(__file__).parent / "modules"


def use_stand_in() -> None:
    """Let this process import the stand-in as `paddlefleet`; for worker processes."""
    if str(MODULES) not in sys.path:
        sys.path.insert(0, str(MODULES))
    importlib.invalidate_caches()
    assert importlib.import_module("paddlefleet").IS_STAND_IN


def forget() -> None:
    """Make `import paddlefleet` look for the package again."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "paddlefleet"]:
        del sys.modules[name]
    if str(MODULES) in sys.path:
        sys.path.remove(str(MODULES))
    importlib.invalidate_caches()


@contextmanager
def stand_in() -> Iterator[None]:
    """`import paddlefleet` gives the stand-in while entered."""
    forget()
    use_stand_in()
    try:
        yield
    finally:
        forget()
