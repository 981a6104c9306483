"""Kernels for GPUs, see `paddle_vl.nn.kernels`."""
