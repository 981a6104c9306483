"""Building blocks of one device: norms, rotary embedding, attention, linears, experts, losses.

Every operation has an implementation in plain Paddle operations, correct on any device.
`paddle_vl.nn.kernels` has the table of faster ones. Nothing here depends on a rank.
"""

# Fills in the table of kernels.
import paddle_vl.nn.kernels  # noqa: F401
