"""Writing safetensors files. Guarantees: tensors of any shape are read back unchanged."""

import numpy as np
import pytest

from paddle_vl.checkpoint.safetensors_io import (
    TensorToWrite,
    encoded,
    read_header,
    write_file,
)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (2, 3)])
def test_tensor_of_any_shape_is_written(tmp_path, shape, dtype):
    file, values = tmp_path / "a.safetensors", np.full(shape, -1.5, np.float32)
    write_file(file, [TensorToWrite("x", shape, dtype, lambda: encoded(values, dtype))])
    read = read_header(file)["x"].read()
    assert read.shape == shape
    np.testing.assert_array_equal(read, values)
