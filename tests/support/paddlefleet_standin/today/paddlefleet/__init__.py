"""STAND-IN for PaddleFleet, see tests/support/paddlefleet_standin."""

from pathlib import Path

STANDS_FOR = "today"
# Modules that are the same in all versions. Packages below have no __init__.py, so that each may
# have modules in both folders.
__path__.append(str(Path(__file__).parents[2] / "shared" / "paddlefleet"))
