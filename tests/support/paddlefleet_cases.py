"""Batches, models and literal results for the tests of `paddle_vl.integrations.paddlefleet`.

Used with the stand-ins and with PaddleFleet itself: configurations and specs come from whichever of
them `import paddlefleet` finds. The configuration of PaddleFleet itself is written from its
published sources of 2026-11; no machine of this project has run it.
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

IMAGE, VIDEO, VOCAB, WIDTH, LAYERS, LEVELS = 30, 31, 32, 64, 4, 3
# Rows of ids by letter: a text token, # image, % video. Lengths divide by 4.
BATCHES = {
    "images": ["a##a#aa#", "aaaaaaa#"],
    "videos": ["%%aaa%%a", "a%aaaaaa", "aaaaaa%%"],
    "images and videos": ["a#%a##%a", "%%aaa#aa", "aaaaaaa#"],
    "one kind per sample": ["aa%%%aa%", "a#a#aaaa"],
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


def batch(name: str, has_levels: bool = True, num_more: int = 0) -> Batch:
    """A batch with drawn embeddings; the same at every call.

    Args:
        has_levels: with deepstack levels.
        num_more: text tokens after each row, for multi-token prediction.
    """
    rows = [row + "a" * num_more for row in BATCHES[name]]
    ids = np.array([[{"#": IMAGE, "%": VIDEO}.get(c, 1) for c in row] for row in rows])
    ids += (ids == 1) * (np.arange(ids.size).reshape(ids.shape) % 20)
    generator = np.random.default_rng(len(name))
    count, length = ids.shape
    positions = np.broadcast_to(np.arange(length), (3, *ids.shape)).astype("int64")
    dict_args: dict[str, Any] = {
        "input_ids": paddle.to_tensor(ids.astype("int64")),
        "position_ids": paddle.to_tensor(positions),
    }
    if not is_stand_in():
        dict_args["attention_mask"] = paddle.ones([count, 1, length, length], dtype="bool")
    leaves = {}
    for kind, token in (("image", IMAGE), ("video", VIDEO)):
        count = int((ids == token).sum())
        # PaddleFormers passes absent ones as None.
        dict_args[f"{kind}_embeds"] = dict_args[f"deepstack_{kind}_embeds"] = None
        if count:
            drawn = generator.standard_normal([1 + LEVELS, count, WIDTH]).astype("float32")
            drawn = drawn if has_levels else drawn[:1]
            tensors = [paddle.to_tensor(one, stop_gradient=False) for one in drawn]
            leaves |= {f"{kind} {number}": tensor for number, tensor in enumerate(tensors)}
            dict_args[f"{kind}_embeds"] = tensors[0]
            dict_args[f"deepstack_{kind}_embeds"] = tensors[1:] or None
    return Batch(dict_args, leaves)


def stands_for() -> str | None:
    """The version of the stand-in; None for PaddleFleet itself."""
    return getattr(importlib.import_module("paddlefleet"), "STANDS_FOR", None)


def is_stand_in() -> bool:
    return stands_for() is not None


def text_layer() -> type:
    """The published text layer of Qwen3-VL, where a release has it."""
    for home in ("paddlefleet", "paddleformers"):
        name = f"{home}.transformers.qwen3_vl.modeling_fleet"
        try:
            return importlib.import_module(name).Qwen3VLTextTransformerLayer
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    raise AssertionError("neither PaddleFleet nor PaddleFormers has Qwen3-VL's text layer")


def config(**changed) -> Any:
    """A text configuration; for the stand-ins with the fields that they read."""
    options = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "max_sequence_length": 64,
        "sequence_parallel": False,
        "pipeline_model_parallel_size": 1,
        "tensor_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "num_empty_layers_add_in_head": 0,
        "num_nextn_predict_layers": 0,
        "separate_mtp_input": False,
        "recompute_granularity": None,
    }
    later = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "multimodal_embedding": True,
        "specific_layer": text_layer(),
    }
    options |= {key: changed[key] for key in changed if key in options}
    later |= {key: changed[key] for key in changed if key not in options}
    if is_stand_in():
        fields = {
            "head_dim": WIDTH // 4,
            "mtp_load_weight_only": False,
            "pad_token_id": 0,
            "position_embedding_type": "mrope",
            "rope_theta": 10000,
            "rotary_percent": 1.0,
            "swa_rope_theta": 10000,
            "use_accuracy_compatible": False,
        }
        return SimpleNamespace(**(fields | options | later))
    made = importlib.import_module("paddlefleet.models.gpt.gpt_config").GPTConfig(
        **options,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=2 * WIDTH,
        normalization="RMSNorm",
        hidden_dropout_prob=0.0,
        attention_dropout=0.0,
        tie_word_embeddings=False,
        parallel_output=False,
        position_embedding_type="mrope",
        mrope_section=[4, 2, 2],
        rope_theta=10000,
        swa_rope_theta=10000,
        num_empty_layers_add_in_tail=0,
        separate_mtp_headloss=False,
        layer_types=None,
        rotary_percent=1.0,
        params_dtype=paddle.bfloat16,
    )
    for key, entry in later.items():
        setattr(made, key, entry)
    return made


def make_spec(text_config: Any) -> Any:
    """The spec of a model, as PaddleFleet's builder makes it before it builds the model."""
    builders = importlib.import_module("paddlefleet.gpt_builders")
    # Releases differ in the name of what builds a spec, and in whose it is.
    names = ("build_spec_layer", "build_layer")
    name = next(name for name in names if hasattr(builders, name))
    kept, specs = getattr(builders, name), []
    setattr(builders, name, lambda spec, **_: specs.append(spec))
    try:
        builders.gpt_builder(text_config, loss_fn=_no_loss)
    finally:
        setattr(builders, name, kept)
    return specs[0]


def _no_loss(*_) -> None:
    raise AssertionError("the spec's loss is not used")


def build(text_config: Any, indexed: bool, **options) -> Any:
    """A model over `PipelineLayer`, as published or with `install`."""
    spec = make_spec(text_config)
    if indexed:
        install(spec)
    options = {"num_stages": text_config.pipeline_model_parallel_size} | options
    paddle.seed(1)
    return build_spec_layer(spec, **options)


def run(model: Any, made: Batch) -> tuple[np.ndarray, dict[str, np.ndarray | None]]:
    """Hidden states of the last layer and gradients of leaves and parameters, for a fixed loss."""
    hidden = model(dict(made.dict_args)).astype("float32")
    weighted_sum(hidden).backward()
    return hidden.numpy(), gradients(model, made)


def weighted_sum(hidden: Tensor) -> Tensor:
    """A loss whose gradient differs in every value of `[B, S, D]` hidden states."""
    return (hidden * loss_weights()[: hidden.shape[0]]).sum()


def loss_weights() -> Tensor:
    width = WIDTH if is_stand_in() else VOCAB
    drawn = np.random.default_rng(7).standard_normal([12, 8, width])
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
    visual = [key for key in made.dict_args if key.endswith("_embeds")]
    outputs = first({key: made.dict_args[key] for key in made.dict_args if key not in visual})
    outputs["hidden_states"] = placed(first, made)
    mask, levels = _levels_in_order(made)
    if levels:
        outputs |= {"visual_pos_masks": mask, "deepstack_visual_emb": levels}
    for layer in layers:
        outputs = layer(outputs)
    hidden = outputs.astype("float32")
    weighted_sum(hidden).backward()
    return hidden.numpy(), gradients(model, made)


def placed(embedding: Any, made: Batch) -> Tensor:
    """Embedded tokens `[B, S, D]` with every visual row put in place by itself."""
    ids = made.dict_args["input_ids"]
    text = embedding.embedding(input_ids=ids, position_ids=None)
    rows = [
        [
            text[b, s]
            if source is None
            else made.leaves[f"{source[0]} 0"][source[1]].astype(text.dtype)
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
    tolerance = 2e-5 if is_stand_in() else 2e-2
    assert found.keys() == expected.keys()
    for name in names or found:
        one, two = found[name], expected[name]
        assert (one is None) == (two is None), name
        if one is not None:
            np.testing.assert_allclose(one, two, rtol=tolerance, atol=tolerance, err_msg=name)
