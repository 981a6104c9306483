"""Programs of an exported policy (prefix, step, actions) and planner (images, prefill, decode).

Each is a function of the model and of tensors by name, which `ProgramToExport` traces, with a
function of its inputs' specs. All blocks of inference are laid out in a prefix. Those that a batch
does not need are padding, which no token sees and which counts for no position, so real tokens have
the same numbers as in the model's own prefix.

Shapes: B batch, c cameras, V = c * B videos of F frames and Z = c * B images, camera-major, S goal
images, G of them of a sample, M tokens of an image, D width, L prefix tokens, n new tokens, S keys,
C steps of a chunk (policy) or capacity of the buffers (planner), A action values, K key heads, H
head width.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import paddle
from paddle import Tensor
from paddle.static import InputSpec

from paddle_vl.export.pi07.program_attention import ProgramView, shared_by_steps
from paddle_vl.export.writing import cache_specs, spec
from paddle_vl.families.pi07.decoder import KeyValue, StreamView
from paddle_vl.families.pi07.flow import GivenActions, PI07LowLevelFlowMatching
from paddle_vl.families.pi07.planner import PI07HighLevelPlannerModel
from paddle_vl.families.pi07.prefix import Prefix, PrefixEmbedding, look_up, of_cameras
from paddle_vl.families.pi07.prefix_layout import CAMERA_MASKS, Source, When

Given = Mapping[str, Tensor]


def prefix(model: PI07LowLevelFlowMatching, given: Given) -> list[Tensor]:
    """Observations to `pad_masks` `[B, L]` and each layer's keys and values `[B, L, K, H]`."""
    batch: dict[str, Any] = {
        **given,
        "frame_is_pad": given.get("frame_is_pad"),
        "subgoal_img_masks": given["subgoal_masks"],
        "obs_history_is_pad": given["history_is_pad"],
        "group_index": given.get("group_index"),
    }
    encoder = model.prefix.video_encoder
    rows_ZMD = encoder.project(
        encoder.pooled_rows(given["videos"], batch["frame_is_pad"], given["stills"])
    )
    videos_ZMD = rows_ZMD[: given["videos"].shape[0]]
    goals_BGMD = paddle.gather_nd(rows_ZMD, given["subgoal_rows"].unsqueeze(-1))
    rows = {
        "videos": of_cameras(videos_ZMD, given["vid_masks"].shape[1]),
        "subgoals": goals_BGMD.flatten(1, 2),
        "state": model.prefix.embed_state(batch),
    }
    found = _laid_out(model.prefix, batch, rows)
    view = ProgramView(model.prefix_view(found), _backbone(model).text_config)
    cache = model.decoder(found.embs, prefix_view=view, keep=True).cache
    return [found.pad_masks, *[x for pair in cache for x in pair]]


def prefix_specs(model: PI07LowLevelFlowMatching) -> list[InputSpec]:
    """Without a history there is no `frame_is_pad`, without groups no index.

    `videos` `[V, F, 3, H, W]` and `stills` are in [-1, 1]; S may be 0. `subgoal_rows` are rows of
    each sample's goal images among videos and stills, any row where it is masked; G may be 0.
    """
    config, side = model.config, _backbone(model).vision_config.image_size
    image, looks_back = [3, side, side], config.n_obs_steps > 1
    return [
        spec("videos", [None, None if looks_back else 1, *image], "float32"),
        *([spec("frame_is_pad", [None, None], "bool")] if looks_back else []),
        spec("stills", [None, *image], "float32"),
        spec("subgoal_rows", [None, None], "int64"),
        spec("vid_masks", [None, None], "bool"),
        spec("subgoal_masks", [None, None], "bool"),
        *_text_specs("lang", "response", "metadata"),
        spec("state", [None, None, config.max_state_dim], "float32"),
        spec("history_is_pad", [None, None], "bool"),
        *_group_specs(config),
    ]


def step(model: PI07LowLevelFlowMatching, given: Given) -> Tensor:
    """One Euler step: noisy actions to the actions one step later, `[B, C, A]`."""
    known, view, cache = _chunk(model, given)
    group = given.get("group_index")
    return model.euler_step(given["x"], given["time"], given["step"], known, view, cache, group)


def actions(model: PI07LowLevelFlowMatching, given: Given) -> Tensor:
    """All Euler steps, from noise to actions `[B, C, A]`."""
    known, view, cache = _chunk(model, given)
    group = given.get("group_index")
    # As `flow.times`, in float32.
    step = (-1.0 / given["num_steps"].astype("float64")).astype("float32")
    last, time, x = -step / 2, paddle.ones_like(step), given["noise"]
    while time >= last:
        x = model.euler_step(x, time, step, known, view, cache, group)
        time = time + step
    return known.put(x)


def _chunk(model: PI07LowLevelFlowMatching, given: Given) -> tuple[GivenActions, Any, list[Any]]:
    """The known actions, and view and prefix of all Euler steps."""
    known = given["action_prefix"]
    known = GivenActions(known, known.shape[0], model.config.chunk_size, given["delay"])
    own = model.chunk_view(given["pad_masks"]).own
    return known, *shared_by_steps(own, _cache(model, given), model.config)


def step_specs(model: PI07LowLevelFlowMatching) -> list[InputSpec]:
    """`delay` is the number of known steps, the first of `action_prefix`."""
    return [spec("x", _chunk_shape(model), "float32"), *_steps_specs(model, "time", "step")]


def actions_specs(model: PI07LowLevelFlowMatching) -> list[InputSpec]:
    """As of a step."""
    number = spec("num_steps", [1], "int64")
    return [spec("noise", _chunk_shape(model), "float32"), number, *_steps_specs(model)]


def _steps_specs(model: PI07LowLevelFlowMatching, *times: str) -> list[InputSpec]:
    return [
        *[spec(name, [1], "float32") for name in times],
        spec("delay", [1], "int64"),
        spec("action_prefix", _chunk_shape(model), "float32"),
        spec("pad_masks", [None, None], "bool"),
        *_group_specs(model.config),
        *_cache_specs(model),
    ]


def _chunk_shape(model: PI07LowLevelFlowMatching) -> list[int | None]:
    return [None, model.config.chunk_size, model.config.max_action_dim]


def images(encoder: Any, given: Given) -> Tensor:
    """The planner's images in [-1, 1] to tokens `[Z, M, D]`."""
    return encoder.project(encoder.pooled_rows(None, None, given["images"]))


def images_specs(encoder: Any) -> list[InputSpec]:
    side = encoder.tower.config.image_size
    return [spec("images", [None, 3, side, side], "float32")]


def prefill(model: PI07HighLevelPlannerModel, given: Given) -> list[Tensor]:
    """Prompts to logits, `pad_masks` `[B, L]`, keys and values `[B, L, K, H]`."""
    images_BXD = of_cameras(given["image_rows"], given["img_masks"].shape[1])
    found = _laid_out(model.prefix, given, {"images": images_BXD})
    view = ProgramView(model.prefix_view(found), _backbone(model).text_config)
    out = model.decoder(found.embs, prefix_view=view, keep=True)
    return [_logits(model, out), found.pad_masks, *[x for pair in out.cache for x in pair]]


def prefill_specs(model: PI07HighLevelPlannerModel) -> list[InputSpec]:
    """Rows of the images are camera-major."""
    backbone = _backbone(model)
    rows = [None, backbone.mm_tokens_per_image, backbone.text_config.hidden_size]
    return [
        spec("image_rows", rows, "float32"),
        spec("img_masks", [None, None], "bool"),
        *_text_specs("lang", "metadata"),
    ]


def decode(model: PI07HighLevelPlannerModel, given: Given) -> Tensor:
    """n more tokens to the logits after them; the buffers are written in place."""
    place = given["place"]
    view = ProgramView(_new_tokens(model, given, place), _backbone(model).text_config, place)
    rows = model.prefix.embed_tokens.rows(given["input_ids"])
    return _logits(model, model.decoder(rows, prefix_view=view, cache=_cache(model, given)))


def decode_with_past(model: PI07HighLevelPlannerModel, given: Given) -> list[Tensor]:
    """`decode` for ONNX, whose programs cannot write into inputs: it returns longer copies.

    Logits, then each layer's keys and values with the new ones, `[B, S + n, K, H]`.
    """
    place = paddle.shape(given["key_0"])[1:2].astype("int64")
    view = ProgramView(_new_tokens(model, given, place), _backbone(model).text_config)
    rows = model.prefix.embed_tokens.rows(given["input_ids"])
    out = model.decoder(rows, prefix_view=view, cache=_cache(model, given), keep=True)
    return [_logits(model, out), *[x for pair in out.cache for x in pair]]


def decode_with_past_specs(model: PI07HighLevelPlannerModel) -> list[InputSpec]:
    """`pad_masks` `[B, S + n]` is True at real tokens, the new ones among them."""
    return [
        spec("input_ids", [None, None], "int64"),
        spec("pad_masks", [None, None], "bool"),
        *_cache_specs(model),
    ]


def decode_specs(model: PI07HighLevelPlannerModel) -> list[InputSpec]:
    """The same with the place where the new tokens are written; `pad_masks` is `[B, C]`."""
    return [*decode_with_past_specs(model), spec("place", [1], "int64")]


def _new_tokens(model: PI07HighLevelPlannerModel, given: Given, place: Tensor) -> StreamView:
    """Positions and mask of new tokens at a place."""
    length, pad_BS = given["input_ids"].shape[1], given["pad_masks"]
    numbers_S = paddle.arange(pad_BS.shape[1], dtype="int64")
    numbers_n = place + paddle.arange(length, dtype="int64")
    earlier_nS = numbers_S.unsqueeze(0) <= numbers_n.unsqueeze(1)
    visible_BnS = paddle.logical_and(pad_BS.unsqueeze(1), earlier_nS.unsqueeze(0))
    position_BS = paddle.cumsum(pad_BS.astype("int64"), axis=1) - 1
    return model.decoder.view(position_BS[:, place : place + length], visible_BnS)


def _logits(model: Any, out: Any) -> Tensor:
    """After the last token, `[B, vocabulary]`."""
    return model.lm_head(out.prefix[:, -1]).astype("float32")


def _laid_out(prefix: PrefixEmbedding, batch: Mapping[str, Any], rows: dict[str, Tensor]) -> Prefix:
    """The blocks of inference, whatever a batch has.

    Args:
        batch: has all fields of the layout; camera masks are `[B, c]`.
        rows: of the blocks that are no text.
    """
    tokens = prefix.tokens
    blocks = [block for block in tokens.blocks if block.when is not When.TRAINING]
    rows = rows | look_up(prefix.embed_tokens.rows, tokens.texts(blocks, batch))
    is_present = _present(batch)
    pads, marks = [], []
    for block in blocks:
        pad_Bn = tokens.pad(block, batch)
        if block.is_optional:
            pad_Bn = paddle.logical_and(pad_Bn, is_present[block.when])
        pads.append(pad_Bn)
        marks.append(tokens.marks(block, pad_Bn))
    embs_BLD = paddle.concat([rows[block.name] for block in blocks], axis=1)
    return Prefix(embs_BLD, paddle.concat(pads, axis=1), paddle.concat(marks, axis=1), 0)


def _present(batch: Mapping[str, Any]) -> dict[When, Tensor]:
    """Whether any sample needs the optional blocks, as tensors."""
    names = {
        When.RESPONSE: "response_masks",
        When.METADATA: "metadata_masks",
        When.SUBGOAL: CAMERA_MASKS[Source.SUBGOALS],
    }
    found = {when: batch[name].any() for when, name in names.items() if name in batch}
    found[When.ANY_FIELD] = paddle.stack([each for each in found.values()]).any()
    found[When.NO_FIELD] = paddle.logical_not(found[When.ANY_FIELD])
    return found


def _backbone(model: Any) -> Any:
    return model.config.vlm_config.gemma3_config


def _cache(model: Any, given: Given) -> list[KeyValue]:
    """Each layer's keys and values."""
    layers = range(_backbone(model).text_config.num_hidden_layers)
    return [(given[f"key_{i}"], given[f"value_{i}"]) for i in layers]


def _cache_specs(model: Any) -> list[InputSpec]:
    text = _backbone(model).text_config
    shape = [None, None, text.num_key_value_heads, text.head_dim]
    return cache_specs(text.num_hidden_layers, shape, "float32")


def _text_specs(*texts: str) -> list[InputSpec]:
    """Token ids and masks of the texts, of any length from 1."""
    return [
        spec(f"{name}_{kind}", [None, None], dtype)
        for name in texts
        for kind, dtype in (("tokens", "int64"), ("masks", "bool"))
    ]


def _group_specs(config: Any) -> Sequence[InputSpec]:
    """Group of each sample, where groups have projections of their own."""
    is_grouped = config.per_group_projection and config.num_groups > 1
    return [spec("group_index", [None], "int64")] if is_grouped else []
