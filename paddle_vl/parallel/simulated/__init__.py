"""The ranks of a tensor-parallel group in one process, for `paddle_vl.testing`."""
