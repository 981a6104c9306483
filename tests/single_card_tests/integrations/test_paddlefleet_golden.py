"""The golden cases of Qwen3-VL and Qwen3.5 through PaddleFleet's embedding and text layers.

The stand-ins embed, place images, run the layers in their pipeline and add the levels; attention
and MLP within a layer, tower, norm and head are the package's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle.distributed import ParallelEnv
from paddle.distributed.fleet.meta_parallel import build_spec_layer

from paddle_vl.families.vlm.modeling import layers as own
from paddle_vl.integrations.paddlefleet import install
from parity import qwen3_5, qwen_vl
from parity.golden import QwenFolders
from tests.support import paddlefleet_cases as cases
from tests.support.paddlefleet_standin import VERSIONS, stand_in
from tests.support.tiny import GOLDEN

# Of every family: comparison and cases with a forward pass of its own; generation uses caches,
# which the drop-in has not.
FAMILIES: dict[str, tuple[Any, list[str]]] = {
    "qwen_vl": (
        qwen_vl.run_cases,
        ["mixed_image_video", "moe_aux_left", "multi_image_right_pad", "packed", "tied_one_image"],
    ),
    "qwen3_5": (
        qwen3_5.run_cases,
        ["moe_multi_image", "multi_image_right_pad", "packed", "tied_one_image"],
    ),
}


# Outputs of the embedding that the comparison takes.
RECORDED = ("visual_update_indices", "deepstack_visual_emb")


class _WithinALayer:
    """Before a published text layer: the package's decoder layer in place of its computation."""

    own_layer: Any = None
    shared: dict[str, Any]

    def _forward_impl(self, hidden_states, *_, **__):
        rows_TD = hidden_states.reshape([-1, hidden_states.shape[-1]])
        inputs, balance = self.shared["inputs"], self.shared["balance"]
        bias = None
        if inputs.get("attention_mask") is not None:
            bias = (1.0 - inputs["attention_mask"].astype("float32")) * own.MASKED_SCORE
        arguments = (inputs["rotary_pos_emb"], bias, None, inputs.get("packed"))
        if balance is not None and self.own_layer.has_experts:
            rows_TD, sums = self.own_layer(rows_TD, *arguments, inputs.get("routed_rows"), True)
            balance.add(sums)
        else:
            rows_TD = self.own_layer(rows_TD, *arguments, inputs.get("routed_rows"))
        return rows_TD.reshape(hidden_states.shape)


def in_paddlefleet(embedding: own.GPTEmbedding, published: type) -> tuple[Any, list[Any]]:
    """Embedding and text layers as PaddleFleet's builder makes them, with `install`."""
    text, whole = embedding.text, embedding.config
    config = cases.config(
        hidden_size=text.hidden_size,
        num_hidden_layers=text.num_hidden_layers,
        vocab_size=text.vocab_size,
        image_token_id=whole.image_token_id,
        video_token_id=whole.video_token_id,
        specific_layer=type("TransformerLayer", (_WithinALayer, published), {}),
    )
    first, *layers, _ = build_spec_layer(
        install(cases.make_spec(config)), num_stages=1
    ).run_function
    assert type(first).__name__ == "IndexedGPTEmbedding"
    first.embedding.embed_tokens = embedding.embed_tokens
    return first, layers


@contextmanager
def dropped_in(published: type) -> Iterator[list[str]]:
    """Every model of the package runs in PaddleFleet's classes while entered; names its layers."""
    made: dict[int, Any] = {}
    ran: list[str] = []

    def forward(self, batch, features=None):
        first, layers = made.setdefault(id(self), in_paddlefleet(self, published))
        inputs = own.decoder_inputs(self.config, self.placement.ops, batch)
        dict_args = inputs | {"input_ids": batch.input_ids}
        if features is not None:
            # The features of images come before those of videos.
            ids = (self.config.image_token_id, self.config.video_token_id)
            counts = [int((batch.input_ids == token_id).sum()) for token_id in ids]
            for kind, rows in zip(("image", "video"), counts, strict=True):
                begin = counts[0] if kind == "video" else 0
                merged, *levels = (
                    x[begin : begin + rows] for x in (features.merged, *features.levels)
                )
                if rows:
                    dict_args |= {f"{kind}_embeds": merged, f"deepstack_{kind}_embeds": levels}
        outputs = first(dict_args)
        flat = outputs["hidden_states"].reshape([-1, self.text.hidden_size])
        recorded = {key: outputs[key] for key in RECORDED if outputs.get(key) is not None}
        return inputs | recorded | {"hidden_states": flat, "in_paddlefleet": (layers, outputs)}

    def run(self, inputs, caches=None, balance=None):
        layers, outputs = inputs["in_paddlefleet"]
        for layer, own_layer in zip(layers, self.layers, strict=True):
            # Not as a sublayer: the model has it already.
            object.__setattr__(layer, "own_layer", own_layer)
            layer.shared = {"inputs": inputs, "balance": balance}
            outputs = layer(outputs)
            ran.append(type(layer).__name__)
        hidden = outputs["hidden_states"]
        return self.norm(hidden.reshape([-1, hidden.shape[-1]]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own.GPTEmbedding, "forward", forward)
        patch.setattr(own.VLLanguageModel, "run", run)
        if not paddle.is_compiled_with_cuda():
            # `PipelineLayer` asks for the number of the card.
            patch.setattr(ParallelEnv, "_device_id", 0, raising=False)
        yield ran


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in FAMILIES for name in FAMILIES[family][1]]
)
def test_golden_case_in_paddlefleet(family, name, version):
    run_cases, _ = FAMILIES[family]
    golden = QwenFolders([Path(GOLDEN / family)])
    chosen = [case for case in golden.cases if case.name == name]
    assert chosen
    with stand_in(version):
        published = cases.text_layer()
        if family == "qwen3_5":
            published = published.__mro__[1]
        with dropped_in(published) as ran:
            found = list(run_cases(golden, chosen, 1.0, "float32"))
    assert all(("Indexed" in layer) == (family == "qwen_vl") for layer in ran)
    assert ran
    for report in found:
        # Recorded at the package's own deepstack layers, which do not run.
        failures = [x for x in report.failures if not x.name.startswith("lm.layer_ds")]
        assert not report.unsupported
        assert not failures, "\n".join([report.line(), *report.failure_lines()])
