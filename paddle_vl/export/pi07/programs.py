"""The export of a policy (programs prefix, step, actions) and a planner (images, prefill, decode).

A program is a function of the model and of tensors by name, which `ProgramToExport` traces, with
its inputs' specs. All blocks of inference are laid out in a prefix. Those that a batch
does not need are padding, which no token sees and which counts for no position, so real tokens have
the same numbers as in the model's own prefix. Attention does not know the lengths when it is
traced; it equals `StreamView.attend` wherever a query sees a key.

Shapes: B batch, c cameras, V = c * B videos of F frames and Z = c * B images, camera-major, S goal
images, G of them of a sample, M tokens of an image, D width, L prefix tokens, n new tokens, S keys,
C steps of a chunk (policy) or capacity of the buffers (planner), A action values, N query heads, K
key heads, R = N / K * C, H head width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.static import InputSpec

from paddle_vl.config.families import FamilyEntry
from paddle_vl.export.attention import biased_attention, one_block
from paddle_vl.export.writing import ModelToExport, ProgramToExport, cache_specs, spec
from paddle_vl.families.pi07.config import PLANNER_TYPE, Gemma3TextConfig, PI07Config
from paddle_vl.families.pi07.decoder import KeyValue, StreamView, SuffixView
from paddle_vl.families.pi07.flow import GivenActions, PI07LowLevelFlowMatching
from paddle_vl.families.pi07.planner import PI07HighLevelPlanner, PI07HighLevelPlannerModel
from paddle_vl.families.pi07.policy import PI07LowLevelPolicy
from paddle_vl.families.pi07.prefix import (
    CAMERA_MASKS,
    PAD_ID,
    RESPONSE_LABEL,
    Prefix,
    PrefixEmbedding,
    TokenSource,
    When,
    look_up,
    of_cameras,
)
from paddle_vl.families.policy.images import cameras_of
from paddle_vl.families.policy.normalize import STATISTICS_FILE, save_statistics

Given = Mapping[str, Tensor]
# Sizes of the examples: samples, and tokens or frames where they are free.
_SAMPLES, _LENGTH, _FRAMES = 2, 6, 2


def to_export(family: FamilyEntry, folder: Path, base: str | None) -> ModelToExport:
    """The programs of a policy's or a planner's folder, or of adapters and their base."""
    policy = family.model_class().from_pretrained(folder, base=base)
    if policy.model.adapter is not None:
        policy.model.merge_lora()
    if policy.config.vlm_config.use_gemma3_attention:
        raise ValueError(
            f"{folder} has use_gemma3_attention, and exported layers share one mask: act with "
            "the policy itself"
        )
    if isinstance(policy, PI07HighLevelPlanner):
        return planner_to_export(policy)
    return policy_to_export(policy)


def policy_to_export(policy: PI07LowLevelPolicy) -> ModelToExport:
    """The three programs of a policy, with inputs to check them."""
    model, rng = policy.model, np.random.default_rng(0)
    cameras = len(cameras_of(model.config.input_features))
    specs = prefix_specs(model)
    example = _prefix_example(specs, cameras, rng)
    found = {"prefix": ProgramToExport(model, prefix, specs, "prefix", example)}
    for name, run, of in (("step", step, step_specs), ("actions", actions, actions_specs)):
        specs = of(model)
        found[name] = ProgramToExport(model, run, specs, "expert", _example(specs, rng))
    return _of_policy(policy, PI07Config.type_name, {}, found, found)


def planner_to_export(planner: PI07HighLevelPlanner) -> ModelToExport:
    """The three programs of a planner, with inputs to check them."""
    model, rng = planner.model, np.random.default_rng(0)
    encoder, cameras = model.prefix.video_encoder, len(cameras_of(model.config.input_features))
    prompt = _example(prefill_specs(model), rng)
    prompt["img_masks"] = np.ones((_SAMPLES, cameras), dtype=bool)
    prompt["image_rows"] = _drawn(rng, (cameras * _SAMPLES, *prompt["image_rows"].shape[1:]))
    # Two new tokens after others, and buffers that have one more.
    place, tokens = _LENGTH - 3, _example(decode_specs(model), rng)
    tokens["input_ids"] = tokens["input_ids"][:, :2]
    is_real = np.ones((_SAMPLES, place + 2), dtype=bool)
    caches = {name: array for name, array in tokens.items() if array.ndim == 4}
    past = {"input_ids": tokens["input_ids"], "pad_masks": is_real}
    past |= {name: array[:, :place] for name, array in caches.items()}
    tokens["pad_masks"] = np.pad(is_real, ((0, 0), (0, 1)))
    tokens["place"] = np.array([place])
    pixels = _example(images_specs(encoder), rng)
    found = {
        "images": ProgramToExport(encoder, images, images_specs(encoder), "images", pixels),
        "prefill": ProgramToExport(model, prefill, prefill_specs(model), "decoder", prompt),
        "decode": ProgramToExport(model, decode, decode_specs(model), "decoder", tokens),
    }
    with_past = ProgramToExport(
        model, decode_with_past, decode_with_past_specs(model), "decoder", past
    )
    sizes = {"response_label": model.tokens.label_ids[RESPONSE_LABEL], "pad_id": PAD_ID}
    return _of_policy(planner, PLANNER_TYPE, sizes, found, found | {"decode": with_past})


def _of_policy(
    policy: Any,
    model_type: str,
    sizes: dict[str, Any],
    found: dict[str, ProgramToExport],
    for_onnx: dict[str, ProgramToExport],
) -> ModelToExport:
    """An export with configuration, prompt tokenizer and statistics."""

    def save_files(folder: Path) -> None:
        config = policy.config
        replace(config, config_version=config.normalization_version).save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        save_statistics(policy.normalizers, folder / STATISTICS_FILE)

    num_groups = policy.normalizers["normalize_inputs"].num_groups
    return ModelToExport(
        model_type, {"num_groups": num_groups, **sizes}, found, save_files, for_onnx
    )


class ProgramView(StreamView):
    """A view whose layers share rotary tables and one bias, made outside of any loop.

    Args:
        view: of the decoder.
        place_1: int64, where the first new token is written into buffers, the keys and values of a
            fixed capacity; None to append to copies.
    """

    def __init__(self, view: StreamView, text: Gemma3TextConfig, place_1: Tensor | None = None):
        super().__init__(view.shape, view.rotary, view.mask, view.scale, view.implementation)
        self.num_rows, self._place_1 = view.num_rows, place_1
        heads, key_heads = text.num_attention_heads, text.num_key_value_heads
        for tables in view.rotary.values():
            tables.prepare([heads, key_heads])
        self._bias = one_block(view.mask.bias_B1LS.squeeze(1), heads // key_heads)

    def attend(
        self, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, past: Any
    ) -> tuple[Tensor, KeyValue]:
        """Attention output `[B, L, N, H]`, and all keys and values or the buffers in full."""
        k_BSKH, v_BSKH = k_BLKH, v_BLKH
        if self._place_1 is not None:
            k_BSKH, v_BSKH = past
            begin, end = self._place_1, self._place_1 + k_BLKH.shape[1]
            k_BSKH[:, begin:end] = k_BLKH
            v_BSKH[:, begin:end] = v_BLKH
        elif past is not None:
            k_BSKH = paddle.concat([past[0], k_BLKH], axis=1)
            v_BSKH = paddle.concat([past[1], v_BLKH], axis=1)
        # `biased_attention` scales by H^-0.5.
        factor = self.scale * q_BLNH.shape[-1] ** 0.5
        q_BLNH = q_BLNH if factor == 1.0 else q_BLNH * factor
        k_BKSH, v_BKSH = k_BSKH.transpose([0, 2, 1, 3]), v_BSKH.transpose([0, 2, 1, 3])
        return biased_attention(q_BLNH, k_BKSH, v_BKSH, self._bias), (k_BSKH, v_BSKH)


class StepView(StreamView):
    """The view of a suffix in all Euler steps; `past` is a prefix as `laid_out_keys` has it.

    What the steps share is made here, once. Each query must see a key.

    Args:
        own: the suffix's own view.
    """

    def __init__(self, own: StreamView, config: PI07Config):
        # With -1 for B, no reshape of a step needs to compute it.
        shape = (-1, config.chunk_size)
        super().__init__(shape, own.rotary, own.mask, own.scale, own.implementation)
        self.num_rows, expert = own.num_rows, config.vlm_config.gemma_expert_config
        key_heads = expert.num_key_value_heads
        groups = expert.num_attention_heads // key_heads
        for tables in own.rotary.values():
            tables.prepare([expert.num_attention_heads, key_heads])
        # In full, as Paddle's CPU kernels are slow at broadcasting over a middle dim.
        bias_B1RS = paddle.concat([own.mask.bias_B1LS] * groups, axis=2)
        self._bias_BKRS = paddle.concat([bias_B1RS] * key_heads, axis=1)

    def attend(
        self, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, past: Any
    ) -> tuple[Tensor, KeyValue]:
        (key_BKHL, value_BKLH), (steps, heads, width) = past, q_BLNH.shape[1:]
        key_heads = k_BLKH.shape[2]
        # The query heads of a key head become R rows of one product.
        q_BNCH = (q_BLNH * self.scale).transpose([0, 2, 1, 3])
        q_BKRH = q_BNCH.reshape([-1, key_heads, heads // key_heads * steps, width])
        k_BKHC, v_BKCH = k_BLKH.transpose([0, 2, 3, 1]), v_BLKH.transpose([0, 2, 1, 3])
        scores_BKRS = paddle.concat(
            [paddle.matmul(q_BKRH, key_BKHL), paddle.matmul(q_BKRH, k_BKHC)], axis=-1
        )
        weights_BKRS = F.softmax(scores_BKRS.astype("float32") + self._bias_BKRS)
        weights_BKRS = weights_BKRS.astype(v_BKCH.dtype)
        out_BKRH = paddle.matmul(weights_BKRS[..., :-steps], value_BKLH)
        out_BKRH = out_BKRH + paddle.matmul(weights_BKRS[..., -steps:], v_BKCH)
        out_BNCH = out_BKRH.reshape([-1, heads, steps, width])
        return out_BNCH.transpose([0, 2, 1, 3]), (k_BLKH, v_BLKH)


def laid_out_keys(prefix: KeyValue) -> KeyValue:
    """Keys `[B, K, H, L]` and values `[B, K, L, H]` of a prefix, for the products of all steps."""
    key_BLKH, value_BLKH = prefix
    return key_BLKH.transpose([0, 2, 3, 1]), value_BLKH.transpose([0, 2, 1, 3])


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
    own = model.suffix_view(given["pad_masks"]).own
    view = SuffixView(StepView(own, model.config), None, insulated=False)
    return known, view, [laid_out_keys(prefix) for prefix in _cache(model, given)]


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
    return Prefix(paddle.concat(pads, axis=1), paddle.concat(marks, axis=1), 0, embs_BLD)


def _present(batch: Mapping[str, Any]) -> dict[When, Tensor]:
    """Whether any sample needs the optional blocks, as tensors."""
    names = {
        When.RESPONSE: "response_masks",
        When.METADATA: "metadata_masks",
        When.SUBGOAL: CAMERA_MASKS[TokenSource.SUBGOALS],
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
    return cache_specs(text.num_hidden_layers, shape)


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


def _prefix_example(
    specs: list[InputSpec], cameras: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Two samples, of which one has a subgoal and neither has a response."""
    found = _example(specs, rng)
    for name in ("vid_masks", "subgoal_masks", "subgoal_rows"):
        found[name] = np.ascontiguousarray(found[name][:, :cameras])
    frames = _FRAMES if "frame_is_pad" in found else 1
    shape = found["stills"].shape[1:]
    found["videos"] = rng.random((cameras * _SAMPLES, frames, *shape), dtype=np.float32)
    if "frame_is_pad" in found:
        found["frame_is_pad"] = np.zeros((cameras * _SAMPLES, frames), dtype=bool)
        found["frame_is_pad"][::2, 0] = True
    found["history_is_pad"] = np.zeros((_SAMPLES, frames), dtype=bool)
    found["state"] = _drawn(rng, (_SAMPLES, frames, found["state"].shape[-1]))
    found["stills"] = found["stills"][:1]
    found["subgoal_rows"][:] = len(found["videos"])
    found["subgoal_masks"][1:] = False
    found["response_masks"][:] = False
    return found


def _example(specs: list[InputSpec], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """An input of each spec: drawn floats, ones, and masks that end with padding."""
    found = {}
    for one in specs:
        shape = [size if size > 0 else _LENGTH for size in one.shape]
        if one.shape[0] < 1:
            shape[0] = _SAMPLES
        if str(one.dtype).endswith("float32"):
            found[one.name] = _drawn(rng, shape)
        elif str(one.dtype).endswith("bool"):
            found[one.name] = np.ones(shape, dtype=bool)
            found[one.name][1:, shape[1] * 2 // 3 + 1 :] = False
        else:
            found[one.name] = np.ones(shape, dtype=np.int64)
    if "num_steps" in found:
        found["num_steps"] = np.array([3])
    if "step" in found:
        found["step"] = np.array([-0.25], dtype=np.float32)
    if "group_index" in found:
        found["group_index"] = np.array([0, 1])
    return found


def _drawn(rng: np.random.Generator, shape: Any) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)
