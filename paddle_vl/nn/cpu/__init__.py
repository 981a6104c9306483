"""Kernels for the CPU in eager mode, registered behind the operations of `paddle_vl.nn`.

On Paddle's CPU kernels, mathematically equal formulas differ tenfold in time.
"""

from paddle_vl.nn.cpu import attention, inference, products  # noqa: F401
