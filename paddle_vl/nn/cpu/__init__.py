"""Kernels for the CPU in eager mode, registered behind the operations of `paddle_vl.nn`.

Paddle's CPU kernels differ tenfold in time between formulas that are equal.
"""

from paddle_vl.nn.cpu import attention, products  # noqa: F401
