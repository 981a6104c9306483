"""Settings shared by all tests."""

import os

from paddle_vl.compat import amd_instruction_set

# Read by Paddle's matrix library at its first product; without it tests run several times longer
# on AMD processors.
if (instructions := amd_instruction_set()) is not None:
    os.environ.setdefault("MKL_DEBUG_CPU_TYPE", instructions)
