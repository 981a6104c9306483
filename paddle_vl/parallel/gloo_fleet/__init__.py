"""What Paddle's CPU build lacks for fleet on several ranks over gloo; install() adds it."""

from paddle_vl.parallel.gloo_fleet.installation import install

__all__ = ["install"]
