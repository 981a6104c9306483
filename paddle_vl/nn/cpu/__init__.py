"""Kernels for CPUs, see `paddle_vl.nn.kernels`.

On Paddle's CPU kernels, mathematically equal formulas differ tenfold in time.
"""
