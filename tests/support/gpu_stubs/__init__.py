"""CPU stand-ins of kernels that Paddle has for GPUs only, by the contracts of the 3.3.1 kernels."""
