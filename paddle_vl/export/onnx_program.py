"""A program in ONNX on onnxruntime."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.export.program import num_threads


class OnnxProgram:
    """Runs an ONNX program; inputs by name, outputs in order.

    Args:
        file: the program; its weights lie beside it.
        inputs: shape and dtype of each input by name, -1 for a free size.

    Raises:
        ValueError: onnxruntime is not installed.
        RuntimeError: onnxruntime cannot load the file, or it takes other inputs.
    """

    def __init__(self, file: Path, inputs: Mapping[str, tuple[list[int], str]]):
        try:
            import onnxruntime
        except ImportError as error:
            raise ValueError(
                f"{file.name} needs onnxruntime: pip install 'paddle-vl[onnx]'"
            ) from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads()
        options.log_severity_level = 3
        providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
        available = onnxruntime.get_available_providers()
        chosen = [provider for provider in providers if provider in available]
        try:
            self._session = onnxruntime.InferenceSession(str(file), options, chosen)
        except Exception as error:
            raise RuntimeError(
                f"{file} cannot be loaded ({str(error).strip()[-300:]}): export the checkpoint "
                "again (paddle-vl export --onnx)"
            ) from error
        found = {one.name for one in self._session.get_inputs()}
        if found != set(inputs):
            raise RuntimeError(
                f"{file} takes {sorted(found)}, the manifest says {sorted(inputs)}: export "
                "the checkpoint again (paddle-vl export --onnx)"
            )
        self._inputs = inputs

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs."""
        return list(self._inputs)

    def input_width(self, name: str) -> int:
        """Size of an input's last dim."""
        return self._inputs[name][0][-1]

    def run(self, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The outputs as arrays."""
        outputs = self._session.run(None, {name: inputs[name] for name in self._inputs})
        return [np.asarray(output) for output in outputs]

    def __call__(self, inputs: Mapping[str, np.ndarray | Tensor]) -> list[Tensor]:
        """The outputs as tensors."""
        arrays = {
            name: x.numpy() if isinstance(x, Tensor) else np.asarray(x)
            for name, x in inputs.items()
        }
        return [paddle.to_tensor(array) for array in self.run(arrays)]
