"""A pretended GPU: kernels that exist on GPUs only, with their contracts, computed on the CPU."""

from tests.support.gpu.attention_stubs import FLASH
from tests.support.gpu.contracts import ContractError, KernelCall, kernel_stub
from tests.support.gpu.pretended import implementation, pretended_gpu

__all__ = ["FLASH", "ContractError", "KernelCall", "implementation", "kernel_stub", "pretended_gpu"]
