"""A static program on Paddle's predictor, or in ONNX on onnxruntime."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import paddle
from paddle import Tensor, inference

from paddle_vl.compat import configure_cpu_runtime

# Freed at once on a CPU; more would not stay in the caches.
_GARBAGE_GB = 0.004
DEVICE_VARIABLE = "FLAGS_selected_gpus"
_threads: int | None = None


class Program:
    """Runs a saved program; inputs by name, outputs in order.

    Args:
        file, weights: the program and its weights, as `paddle.jit.save` writes them.

    Attributes:
        inputs: shape and dtype of each input by name, -1 for a free size.

    Raises:
        RuntimeError: Paddle cannot load them.
    """

    def __init__(self, file: Path, weights: Path, inputs: Mapping[str, tuple[list[int], str]]):
        config = inference.Config(str(file), str(weights))
        config.disable_glog_info()
        config.enable_new_ir(True)
        config.enable_new_executor(True)
        config.switch_ir_optim(True)
        config.enable_memory_optim()
        if has_gpu():
            # As Paddle's launcher sets it; the first one without a launcher.
            number = os.environ.get(DEVICE_VARIABLE, "0").split(",")[0]
            config.enable_use_gpu(256, int(number))
        else:
            # Tensors that are no longer needed go to a thread that frees them: one by one they cost
            # as much as a small kernel, and keep a second core busy.
            paddle.set_flags({"FLAGS_eager_delete_tensor_gb": _GARBAGE_GB})
            config.disable_gpu()
            # oneDNN's in-place pass gives wrong cosines in silence (paddlepaddle 3.3.1).
            config.disable_mkldnn()
        config.set_cpu_math_library_num_threads(num_threads())
        with _loading(f"{file} and {weights.name}", ""):
            self._predictor = inference.create_predictor(config)
        self._order, self.inputs = self._predictor.get_input_names(), inputs

    def __call__(self, inputs: Mapping[str, np.ndarray | Tensor]) -> list[Tensor]:
        """The outputs. Tensors among the inputs are not copied; a program may write into them."""
        tensors = [inputs[name] for name in self._order]
        return self._predictor.run(
            [x if isinstance(x, Tensor) else paddle.to_tensor(x) for x in tensors]
        )


class OnnxProgram:
    """Runs an ONNX program; inputs by name, outputs in order.

    Args:
        file: the program; its weights lie beside it.

    Attributes:
        inputs: shape and dtype of each input by name, -1 for a free size.

    Raises:
        ValueError: onnxruntime is not installed.
        RuntimeError: onnxruntime cannot load the file.
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
        with _loading(str(file), " --onnx"):
            self._session = onnxruntime.InferenceSession(str(file), options, chosen)
        self.inputs = inputs

    def __call__(self, inputs: Mapping[str, np.ndarray | Tensor]) -> list[Tensor]:
        """The outputs as tensors."""
        arrays = {
            name: x.numpy() if isinstance(x, Tensor) else np.asarray(x)
            for name, x in ((name, inputs[name]) for name in self.inputs)
        }
        return [paddle.to_tensor(np.asarray(found)) for found in self._session.run(None, arrays)]


def by_layer(keys_values: Sequence[Tensor]) -> dict[str, Tensor]:
    """Keys and values of each layer, by the names of a program's inputs."""
    kinds, layers = ("key", "value"), range(len(keys_values) // 2)
    names = [f"{kind}_{i}" for i in layers for kind in kinds]
    return dict(zip(names, keys_values, strict=True))


def with_room(keys_values: Sequence[Tensor], room: int, axis: int) -> list[Tensor]:
    """Buffers with keys and values, and `room` free positions of zeros behind them."""
    buffers = []
    for tensor in keys_values:
        shape = [room if i == axis else size for i, size in enumerate(tensor.shape)]
        free = paddle.zeros(shape, dtype=tensor.dtype)
        buffers.append(paddle.concat([tensor, free], axis=axis))
    return buffers


@contextmanager
def _loading(what: str, option: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RuntimeError(
            f"{what} cannot be loaded ({str(error).strip()[-300:]}): export the checkpoint again "
            f"(paddle-vl export{option})"
        ) from error


def has_gpu() -> bool:
    """Whether programs run on a GPU here."""
    return paddle.device.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0


def use_threads(number: int | None) -> None:
    """Set the threads of runtimes, and tune Paddle's CPU kernels in this process.

    Args:
        number: None for OMP_NUM_THREADS. Paddle sets it to 1, when it is imported, if it is unset.
    """
    global _threads
    if number is not None and number < 1:
        raise ValueError(f"num_threads is {number}: give at least 1, or None")
    _threads = number
    configure_cpu_runtime(num_threads())


def num_threads() -> int:
    """Threads of a runtime: those of `use_threads`, else OMP_NUM_THREADS, or all cores."""
    if _threads is not None:
        return _threads
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
