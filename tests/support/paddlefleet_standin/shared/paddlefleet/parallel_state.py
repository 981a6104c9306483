"""STAND-IN. Contract of `src/paddlefleet/parallel_state.py`: the group is set once per process and
asked for by name; without `check_initialized` it may be None.
"""

_TENSOR_MODEL_PARALLEL_GROUP = None


def set_tensor_model_parallel_group(group) -> None:
    """Instead of `initialize_model_parallel(hcg)`, which takes fleet's groups."""
    global _TENSOR_MODEL_PARALLEL_GROUP
    _TENSOR_MODEL_PARALLEL_GROUP = group


def get_tensor_model_parallel_group(check_initialized=True):
    if check_initialized:
        assert _TENSOR_MODEL_PARALLEL_GROUP is not None
    return _TENSOR_MODEL_PARALLEL_GROUP
