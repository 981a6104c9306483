"""The indexed embedding and text layers in PaddleFleet's specs, before a model is built.

Source of the interface: `gpt_builders.py`, `gpt_layer_specs.py` and `gpt_model.py` in `models/gpt`,
and `transformers/qwen3_5/modeling_fleet.py` of PaddleFleet.
"""

import functools
import importlib
import importlib.util
from typing import Any

from paddle_vl.integrations.paddlefleet.embedding import indexed_embedding
from paddle_vl.integrations.paddlefleet.sources import published
from paddle_vl.integrations.paddlefleet.text_layer import indexed_text_layer, num_head_empty_layers

# Runs the parts of a layer in its own order, so a subclass's `forward` is not called.
_OVERLAPPED_LAYER = "TransformerLayerWithOverlap"
# Modules that call `get_gpt_spec` by a global name of their own: the builder of all models, and
# Qwen3.5 in releases whose embedding merges its images.
_BUILDERS = ("gpt_builders", "transformers.qwen3_5.modeling_fleet")


def switch_on() -> list[str]:
    """Install in every spec that PaddleFleet's builders make from now on.

    Returns:
        The modules whose `get_gpt_spec` now installs; a second call changes nothing.

    Raises:
        ImportError: PaddleFleet is not installed.
    """
    modules = [published(_BUILDERS[0])]
    modules += [published(name) for name in _BUILDERS[1:] if _is_there(name)]
    for module in modules:
        module.get_gpt_spec = _installing(module.get_gpt_spec)
    return [module.__name__ for module in modules]


def _installing(get_gpt_spec: Any) -> Any:
    @functools.wraps(get_gpt_spec)
    def installing(*args: Any, **options: Any) -> Any:
        return install(get_gpt_spec(*args, **options))

    return installing


def _is_there(module: str) -> bool:
    """Whether PaddleFleet has a module; one that fails while it is imported is there."""
    try:
        return importlib.util.find_spec(f"paddlefleet.{module}") is not None
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "paddlefleet":
            raise
        return False


def install(spec: Any) -> Any:
    """Set the indexed embedding and text layers on a spec, in place, before the model is built.

    Each new class is a subclass of the class that it replaces: parameters, their names and their
    initial values stay. Left as they are: text layers without a deepstack step, as Qwen3.5's, the
    embedding of a text model, and a spec that has the new classes already.

    Args:
        spec: what `get_gpt_spec` returns; its `sublayers_spec` holds `embedding` and
            `transformer_layers`.

    Returns:
        The same spec.

    Raises:
        ValueError: a layer whose deepstack level is uncertain, or one that does not run `forward`.
    """
    embedding, layers = spec.sublayers_spec.embedding, spec.sublayers_spec.transformer_layers
    parents = {position: _layer_class(layer) for position, layer in enumerate(layers)}
    parents = {i: parent for i, parent in parents.items() if hasattr(parent, "_deepstack_process")}
    for position, parent in parents.items():
        _check_layer(layers[position], parent, position)
    for position, parent in parents.items():
        layers[position].layer = indexed_text_layer(parent)
    config = (embedding.extra_kwargs or {}).get("config")
    if getattr(config, "multimodal_embedding", True):
        embedding.layer = indexed_embedding(_layer_class(embedding))
    return spec


def _layer_class(layer_spec: Any) -> type:
    """The class of a spec, which may be a pair of module and name."""
    layer = layer_spec.layer
    if isinstance(layer, tuple):
        return getattr(importlib.import_module(layer[0]), layer[1])
    return layer


def _check_layer(layer_spec: Any, parent: type, position: int) -> None:
    """Check that the layer at a position of the decoder will add the level of that number."""
    if any(cls.__name__ == _OVERLAPPED_LAYER for cls in parent.__mro__):
        raise ValueError(
            f"text layer {position} is {parent.__name__}, whose schedule does not call forward, so "
            "no deepstack level would be added: set forward_backward_overlap_scheduler to False"
        )
    options = layer_spec.extra_kwargs or {}
    if "layer_number" not in options:
        return
    num_empty = num_head_empty_layers(options.get("config"))
    if options["layer_number"] != position + num_empty:
        raise ValueError(
            f"text layer {position} has layer_number {options['layer_number']}, but with "
            f"num_empty_layers_add_in_head={num_empty} it should be {position + num_empty}, and "
            "its deepstack level is uncertain: set num_empty_layers_add_in_head to 0, or use a "
            "version of PaddleFleet that counts the empty layers"
        )
