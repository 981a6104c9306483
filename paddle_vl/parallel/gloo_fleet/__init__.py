"""Patches that Paddle's CPU build needs for fleet over gloo; install() applies them."""

from paddle_vl.parallel.gloo_fleet.installation import install

__all__ = ["install"]
