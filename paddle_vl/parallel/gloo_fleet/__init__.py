"""Paddle's fleet on CPU processes: what its CPU build leaves out, filled in by install()."""

from paddle_vl.parallel.gloo_fleet.installation import install

__all__ = ["install"]
