"""Kernels for CPUs, see `paddle_vl.nn.kernels`: in C where a compiler is found, and a few of
Paddle's own in a faster form."""
