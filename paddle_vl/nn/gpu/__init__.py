"""Kernels for GPUs in eager mode, registered behind the operations of `paddle_vl.nn`."""

from paddle_vl.nn.gpu import activations, attention, experts, norm, rotary  # noqa: F401
