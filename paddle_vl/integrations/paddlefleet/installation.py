"""Sets the indexed embedding and text layers on a spec of PaddleFleet's GPT model.

Source of the interface: `gpt_layer_specs.py` and `gpt_model.py` in `models/gpt` of PaddleFleet.
"""

import importlib
from typing import Any

from paddle_vl.integrations.paddlefleet.embedding import indexed_embedding
from paddle_vl.integrations.paddlefleet.text_layer import (
    indexed_text_layer,
    num_head_empty_layers,
)

# Runs the parts of a layer in its own order, so a subclass's `forward` is not called.
_OVERLAPPED_LAYER = "TransformerLayerWithOverlap"


def install(spec: Any) -> Any:
    """Set the indexed embedding and text layers on a spec, in place, before the model is built.

    Each new class is a subclass of the class that it replaces: parameters, their names and their
    initial values stay. A spec that has them already stays as it is.

    Args:
        spec: what `get_gpt_spec` returns; its `sublayers_spec` holds `embedding` and
            `transformer_layers`.

    Returns:
        The same spec.

    Raises:
        ValueError: a layer whose deepstack level is uncertain, or one that does not run `forward`.
    """
    sublayers = spec.sublayers_spec
    parents = [_layer_class(layer_spec) for layer_spec in sublayers.transformer_layers]
    for position, (layer_spec, parent) in enumerate(
        zip(sublayers.transformer_layers, parents, strict=True)
    ):
        _check_layer(layer_spec, parent, position)
    sublayers.embedding.layer = indexed_embedding(_layer_class(sublayers.embedding))
    for layer_spec, parent in zip(sublayers.transformer_layers, parents, strict=True):
        layer_spec.layer = indexed_text_layer(parent)
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
