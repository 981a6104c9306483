"""STAND-INS, written for tests, for PaddleFleet, whose wheel needs a GPU build of Paddle.

`today` stands for PaddleFleet as stored in 2026-11, `before` for PaddleFleet 0.3 with PaddleFormers
1.2.0; `shared` has what is the same in both. They have the modules, names and signatures that the
integration touches, and little else: layers work on single rows, so that a sequence can be cut
anywhere. Each file names the published file, and version, whose contract it keeps. Nothing here is
copied from it.

The pipeline, its messages and the specs are Paddle's own (`PipelineLayer`, `LayerSpec`,
`build_spec_layer`), as in PaddleFleet.

    with stand_in("today"): ...    # `import paddlefleet` finds the stand-in
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).parent
VERSIONS = ("today", "before")
_PACKAGES = ("paddlefleet", "paddleformers")


def use_stand_in(version: str) -> None:
    """Let this process import a stand-in as `paddlefleet`; for worker processes."""
    forget()
    sys.path.insert(0, str(FOLDER / version))
    importlib.invalidate_caches()
    assert version == importlib.import_module("paddlefleet").STANDS_FOR


def forget() -> None:
    """Make `import paddlefleet` look for the package again."""
    for name in [name for name in sys.modules if name.partition(".")[0] in _PACKAGES]:
        del sys.modules[name]
    for folder in (str(FOLDER / version) for version in VERSIONS):
        if folder in sys.path:
            sys.path.remove(folder)
    importlib.invalidate_caches()


@contextmanager
def stand_in(version: str) -> Iterator[None]:
    """`import paddlefleet` gives a stand-in while entered."""
    use_stand_in(version)
    try:
        yield
    finally:
        forget()
