"""A tensor on its way to the host, which waits for it only when it is read."""

import numpy as np
import paddle
from paddle import Tensor


class HostCopy:
    """Starts to copy a tensor without waiting; on a CPU there is nothing to copy.

    The copy is ordered behind what the device computes the tensor with, and what is launched later
    does not wait for it.
    """

    def __init__(self, tensor: Tensor):
        self._event = None
        if tensor.place.is_gpu_place():
            self._tensor = tensor._copy_to(paddle.CUDAPinnedPlace(), False)
            self._event = paddle.device.cuda.Event()
            self._event.record()
            # Its memory must not be used anew before it has been copied.
            self._source = tensor
        else:
            self._tensor = tensor

    def read(self) -> np.ndarray:
        """The values; the only place where the host waits."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor.numpy()
