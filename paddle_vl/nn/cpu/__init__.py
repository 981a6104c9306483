"""Kernels for the CPU in eager mode, registered behind the operations of `paddle_vl.nn`.

On Paddle's CPU kernels, mathematically equal formulas differ tenfold in time. What needs no
gradient imports `inference`, kernels without a backward pass.
"""

from paddle_vl.nn.cpu import (  # noqa: F401
    attention,
    dropout,
    masked_attention,
    onednn_kernels,
    products,
)
