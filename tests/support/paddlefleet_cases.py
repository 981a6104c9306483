"""Batches, models and literal results for the tests of `paddle_vl.integrations.paddlefleet`.

Used with the stand-ins and with PaddleFleet itself; `PACKAGE` builds configurations and specs from
whichever of them `import paddlefleet` finds.
"""

import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor
from paddle.distributed.fleet.meta_parallel import build_spec_layer

from paddle_vl.integrations.paddlefleet import install

IMAGE, VIDEO, VOCAB, WIDTH, LAYERS, LEVELS = 30, 31, 32, 8, 4, 3
# Rows of ids by letter: a text token, # image, % video. Lengths divide by 4.
BATCHES = {
    "images": ["a##a#aa#", "aaaaaaa#"],
    "videos": ["%%aaa%%a", "a%aaaaaa", "aaaaaa%%"],
    "images and videos": ["a#%a##%a", "%%aaa#aa", "aaaaaaa#"],
    "one kind per sample": ["a#a#aaaa", "aa%%%aa%"],
    "a sample without": ["aaaaaaaa", "##aaaa##", "aaaaaaaa"],
    "one sample": ["a###aaaa"],
    "all in one slice": ["##aaaaaa", "#aaaaaaa"],
    "text": ["aaaaaaaa", "aaaaaaaa"],
}
ONE_KIND = [name for name, rows in BATCHES.items() if not {"#", "%"} <= set("".join(rows))]


class Batch(NamedTuple):
    """One micro-batch.

    Attributes:
        dict_args: the input of the embedding.
        leaves: image and video embeddings and levels, whose gradients are compared, by name.
    """

    dict_args: dict[str, Any]
    leaves: dict[str, Tensor]


def batch(name: str) -> Batch:
    """A batch with drawn embeddings; the same at every call."""
    rows = BATCHES[name]
    ids = np.array([[{"#": IMAGE, "%": VIDEO}.get(c, 1) for c in row] for row in rows])
    ids += (ids == 1) * (np.arange(ids.size).reshape(ids.shape) % 20)
    generator = np.random.default_rng(len(name))
    dict_args: dict[str, Any] = {"input_ids": paddle.to_tensor(ids.astype("int64"))}
    leaves = {}
    for kind, token in (("image", IMAGE), ("video", VIDEO)):
        count = int((ids == token).sum())
        # PaddleFormers passes absent ones as None.
        dict_args[f"{kind}_embeds"] = dict_args[f"deepstack_{kind}_embeds"] = None
        if count:
            drawn = generator.standard_normal([1 + LEVELS, count, WIDTH]).astype("float32")
            tensors = [paddle.to_tensor(one, stop_gradient=False) for one in drawn]
            leaves |= {f"{kind} {number}": tensor for number, tensor in enumerate(tensors)}
            dict_args[f"{kind}_embeds"] = tensors[0]
            dict_args[f"deepstack_{kind}_embeds"] = tensors[1:]
    return Batch(dict_args, leaves)


def config(**changed) -> SimpleNamespace:
    """A text configuration with the fields that the stand-ins read."""
    layer = importlib.import_module("paddlefleet.models.qwen3_vl.qwen3_vl_model")
    return SimpleNamespace(
        **{
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "vocab_size": VOCAB,
            "max_sequence_length": 64,
            "position_embedding_type": "none",
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "multimodal_embedding": True,
            "sequence_parallel": False,
            "pipeline_model_parallel_size": 1,
            "num_empty_layers_add_in_head": 0,
            "recompute_granularity": None,
            "specific_layer": layer.Qwen3VLTextTransformerLayer,
        }
        | changed
    )


def make_spec(text_config: Any) -> Any:
    """The spec of a model, as PaddleFleet's builder makes it."""
    return captured_spec(text_config)


def captured_spec(text_config: Any) -> Any:
    """What the builder passes to `build_spec_layer`, without building."""
    builders = importlib.import_module("paddlefleet.gpt_builders")
    kept, specs = builders.build_spec_layer, []
    builders.build_spec_layer = lambda spec, **_: specs.append(spec)
    try:
        builders.gpt_builder(text_config)
    finally:
        builders.build_spec_layer = kept
    return specs[0]


def build(text_config: Any, indexed: bool, **options) -> Any:
    """A model over `PipelineLayer`, as published or with `install`."""
    spec = make_spec(text_config)
    if indexed:
        install(spec)
    options = {"num_stages": text_config.pipeline_model_parallel_size} | options
    return build_spec_layer(spec, **options)


def run(model: Any, made: Batch) -> tuple[np.ndarray, dict[str, np.ndarray | None]]:
    """Hidden states of the last layer and gradients of leaves and parameters, for a fixed loss."""
    hidden = model(dict(made.dict_args))
    weighted_sum(hidden).backward()
    return hidden.numpy(), gradients(model, made)


def weighted_sum(hidden: Tensor) -> Tensor:
    """A loss whose gradient differs in every value of `[B, S, D]` hidden states."""
    return (hidden * loss_weights()[: hidden.shape[0]]).sum()


def loss_weights() -> Tensor:
    drawn = np.random.default_rng(7).standard_normal([4, 8, WIDTH])
    return paddle.to_tensor(drawn.astype("float32"))


def gradients(model: Any, made: Batch) -> dict[str, np.ndarray | None]:
    found = {**made.leaves, **dict(model.named_parameters())}
    return {name: None if x.grad is None else x.grad.numpy() for name, x in found.items()}


def literal(text_config: Any, name: str) -> tuple[np.ndarray, dict[str, np.ndarray | None]]:
    """What the model should give for a batch: the published layers behind an embedding that puts
    every token's row and levels in place one by one, in a loop.
    """
    model, made = build(text_config, indexed=False), batch(name)
    first, *layers = model.run_function
    outputs = {"hidden_states": _placed(first, made)}
    mask, levels = _levels_in_order(made)
    if levels:
        outputs |= {"visual_pos_masks": mask, "deepstack_visual_emb": levels}
    for layer in layers:
        outputs = layer(outputs)
    weighted_sum(outputs).backward()
    return outputs.numpy(), gradients(model, made)


def _placed(embedding: Any, made: Batch) -> Tensor:
    ids = made.dict_args["input_ids"]
    text = embedding.embedding(ids, None)
    rows = [
        [
            text[b, s] if source is None else made.leaves[f"{source[0]} 0"][source[1]]
            for s, source in enumerate(sources)
        ]
        for b, sources in enumerate(_sources(ids))
    ]
    return paddle.stack([paddle.stack(row) for row in rows])


def _levels_in_order(made: Batch) -> tuple[Tensor, list[Tensor]]:
    found = [source for row in _sources(made.dict_args["input_ids"]) for source in row if source]
    ids = made.dict_args["input_ids"]
    levels = [
        paddle.stack([made.leaves[f"{kind} {1 + level}"][number] for kind, number in found])
        for level in range(LEVELS if found else 0)
    ]
    return (ids == IMAGE) | (ids == VIDEO), levels


def _sources(ids: Tensor) -> list[list[tuple[str, int] | None]]:
    """For every token None, or its modality and its number among the modality's tokens."""
    seen = {"image": 0, "video": 0}
    sources: list[list[tuple[str, int] | None]] = []
    for row in ids.tolist():
        sources.append([])
        for token in row:
            kind = {IMAGE: "image", VIDEO: "video"}.get(token)
            sources[-1].append(None if kind is None else (kind, seen[kind]))
            if kind is not None:
                seen[kind] += 1
    return sources


def assert_same(found: dict[str, Any], expected: dict[str, Any], names: Sequence[str] = ()) -> None:
    """Compare gradients: equal numbers up to the order of sums; None where the other has None."""
    assert found.keys() == expected.keys()
    for name in names or found:
        one, two = found[name], expected[name]
        assert (one is None) == (two is None), name
        if one is not None:
            np.testing.assert_allclose(one, two, rtol=2e-5, atol=2e-6, err_msg=name)
