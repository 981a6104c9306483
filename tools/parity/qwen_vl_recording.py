"""Intermediate values of a Qwen3-VL, recorded with forward hooks."""

from collections.abc import Callable, Iterator

import numpy as np


def keep(values: dict, name: str, view: Callable = lambda x: x) -> Callable:
    """Hook that stores a layer's output as float32 under a name."""

    def hook(layer, inputs, output):
        values[name] = view(output.astype("float32").numpy())

    return hook


def keep_input(values: dict, name: str) -> Callable:
    """Hook that stores a layer's first input as float32 under a name."""

    def hook(layer, inputs):
        values[name] = inputs[0].astype("float32").numpy()

    return hook


class Recording(dict):
    """Context manager that records the decoder's intermediate values under their golden names."""

    def __init__(self, model):
        super().__init__()
        self.language_model = model.language_model
        self.hooks = []
        self.routings = {}

    def __enter__(self):
        language_model, shape = self.language_model, []

        def keep_embedding(layer, inputs, output):
            cos, sin = output["rotary_pos_emb"]
            shape[:] = cos.shape[:2]
            self["lm.rope_cos"], self["lm.rope_sin"] = cos.numpy(), sin.numpy()
            self["lm.inputs_embeds"] = rows(output["hidden_states"].astype("float32").numpy())
            for n, level in enumerate(output.get("deepstack_visual_emb", [])):
                self[f"lm.deepstack_visual_embeds.{n}"] = level.astype("float32").numpy()
            if "visual_pos_masks" in output:
                self["visual_pos_masks"] = output["visual_pos_masks"].numpy()

        def rows(x_TD):
            return x_TD.reshape(*shape, -1)

        def keep_layer(i):
            def hook(layer, inputs, output):
                # A layer with experts may return its routing sums too.
                hidden = output[0] if isinstance(output, tuple) else output
                # A deepstack level, if there is one, replaces the second value.
                self[f"lm.layer_out.{i}"] = rows(hidden.astype("float32").numpy())
                self[f"lm.layer_ds.{i}"] = self[f"lm.layer_out.{i}"]

            return hook

        def keep_routing(i):
            def hook(layer, inputs, output):
                self.routings[i] = output

            return hook

        self.hooks.append(language_model.embedding.register_forward_post_hook(keep_embedding))
        for i, layer in enumerate(language_model.layers):
            attention = keep(self, f"lm.attn_out.{i}", rows)
            self.hooks.append(layer.self_attn.register_forward_post_hook(attention))
            self.hooks.append(layer.register_forward_post_hook(keep_layer(i)))
            if layer.has_experts:
                self.hooks.append(layer.mlp.gate.register_forward_post_hook(keep_routing(i)))
        for i, layer in enumerate(language_model.deepstack_layers):
            self.hooks.append(
                layer.register_forward_post_hook(keep(self, f"lm.layer_ds.{i}", rows))
            )
        self.hooks.append(
            language_model.norm.register_forward_post_hook(keep(self, "lm.norm_out", rows))
        )
        return self

    def routers(self, tensors: dict) -> Iterator[tuple[str, np.ndarray]]:
        """Logits, weights and indices of the real tokens in the case's MoE layers, sorted by
        expert."""
        for i, routing in self.routings.items():
            indices = routing.indices.numpy()
            order = indices.argsort(axis=-1)
            values = {
                "logits": routing.logits.astype("float32").numpy(),
                "weights": np.take_along_axis(
                    routing.weights.astype("float32").numpy(), order, axis=-1
                ),
                "indices": np.take_along_axis(indices, order, axis=-1),
            }
            for kind, value in values.items():
                if (name := f"lm.router_{kind}.{i}") in tensors:
                    yield name, value

    def __exit__(self, *exception):
        for hook in self.hooks:
            hook.remove()
