"""Building blocks of one device: norms, rotary embedding, attention, linears, experts, losses.

Every operation has an implementation in plain Paddle operations, correct on any device and in a
traced program. `paddle_vl.nn.cpu` and `paddle_vl.nn.gpu` register faster kernels for the same
functions, see `paddle_vl.nn.operations`. Nothing here depends on a rank.
"""

# Registers the kernels. Those of a GPU are imported when an operation first needs them.
import paddle_vl.nn.cpu  # noqa: F401
