"""Single components of pi07: engine, video encoder, formulas, trainable parameters, optimizer."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle

from paddle_vl.families.pi07.checkpoint_map import UNUSED_KEYS
from paddle_vl.families.pi07.decoder import (
    SuffixView,
    block_mask,
    prefix_positions,
    rotary_tables,
    suffix_mask,
)
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching, time_embedding
from paddle_vl.families.pi07.vision import frame_codes, frames_in_use
from paddle_vl.families.policy.images import letterbox
from paddle_vl.nn.attention import apply_rotary
from paddle_vl.nn.attention_masks import HistoryMask
from paddle_vl.nn.master_weights import MasterWeights
from paddle_vl.train.optimizer import Optimizer
from parity.golden import PI07Case
from parity.pi07_golden import Comparison, adamw, model_of, video_encoder
from parity.recording import array

_ENGINE = "gemma3_with_expert."
# Step and parameter whose gradient is dropped, although the case has one.
_WITHOUT_GRADIENT = (3, "p1")


def run_engine(case: PI07Case, compare: Comparison) -> None:
    """Both streams in two passes and in one; a case with key names has no expert."""
    if "state_dict_keys" in case.meta:
        _run_without_expert(case, compare)
        return
    model = model_of(case)
    for joint in (False, True):
        group = "joint" if joint else "two passes"
        inputs, found = _engine_outputs(model, case, joint)
        compare.check(group, found)
        squares = [(found[f"out.{name}_final"] ** 2).sum() for name in ("prefix", "suffix")]
        (squares[0] + squares[1]).backward()
        compare.check("grads", {name: x.grad for name, x in inputs.items()}, "grad.")
    for start in ("out.", "grad."):
        compare.all_compared(start)


def _engine_outputs(model, case: PI07Case, joint: bool) -> tuple[dict, dict]:
    names = ("prefix_embs", "suffix_embs", "adarms_cond")
    inputs = {
        name: paddle.to_tensor(case.tensors[f"in.{name}"], stop_gradient=False) for name in names
    }
    length = inputs["prefix_embs"].shape[1]
    pad, marks = (paddle.to_tensor(case.tensors[f"in.{n}_masks"]) for n in ("pad", "att"))
    positions, visible = prefix_positions(pad), block_mask(pad, marks)
    decoder = model.decoder
    prefix_view = decoder.view(positions[:, :length], visible[:, :length, :length])
    own = decoder.view(positions[:, length:], visible[:, length:])
    suffix_view = SuffixView(own, length, insulated=False)
    prefix, suffix, cond = inputs.values()
    if joint:
        output = decoder(prefix, suffix, cond, prefix_view, suffix_view, keep=True)
        suffix_out = output.suffix
    else:
        output = decoder(prefix, prefix_view=prefix_view, keep=True)
        suffix_out = decoder(None, suffix, cond, suffix_view=suffix_view, cache=output.cache).suffix
    found = {
        "out.att_2d_mask": visible,
        "out.position_ids": positions,
        "out.prefix_final": output.prefix,
        "out.suffix_final": suffix_out,
    }
    for i, (key, value) in enumerate(output.cache):
        found |= {f"out.kv.layer{i}.key": key, f"out.kv.layer{i}.value": value}
    return inputs, found


def _run_without_expert(case: PI07Case, compare: Comparison) -> None:
    source = case.folders.case("11_")
    bare, whole = model_of(source, vlm_disable_action_expert=True), model_of(source)
    keys = {item.key for item in bare.stored_parameters() if item.key.startswith(_ENGINE)}
    keys = {key.removeprefix(_ENGINE) for key in keys}
    unused = {key.removeprefix(_ENGINE) for key in UNUSED_KEYS}
    wanted = set(case.meta["state_dict_keys"]) - unused
    compare.exact("keys", "state_dict_keys", sorted(keys ^ wanted), [])
    found, inputs = [], {}
    for model in (whole, bare):
        embs = paddle.to_tensor(source.tensors["in.prefix_embs"])
        length = embs.shape[1]
        pad, marks = (
            paddle.to_tensor(source.tensors[f"in.{n}_masks"][:, :length]) for n in ("pad", "att")
        )
        inputs = {"prefix_view": model.decoder.view(prefix_positions(pad), block_mask(pad, marks))}
        found.append(array(model.decoder(embs, **inputs).prefix))
    compare.value("prefix", "with and without expert", found[1], found[0])
    compare.value("prefix", "out.prefix_final", found[1], source.tensors["out.prefix_final"])
    suffix = paddle.to_tensor(source.tensors["in.suffix_embs"])
    try:
        bare.decoder(embs, suffix, suffix, **inputs)
        compare.fail("suffix", "refusal", "a suffix was accepted without an expert")
    except ValueError:
        compare.exact("suffix", "refusal", 0, 0)


def run_video(case: PI07Case, compare: Comparison) -> None:
    """The tower layer by layer, for videos of several lengths and single images.

    Behind its last layer with temporal attention the tower has rows of current frames only, the
    last of each video; these layers are the group "layers of current frames".
    """
    starts = sorted({name.partition("in.video")[0] for name in case.tensors if ".in.video" in name})
    models: dict[int, PI07LowLevelFlowMatching] = {}
    for start in starts:
        settings: dict[str, Any] = (
            {"spacetime_layer_stride": 1} if start.startswith("stride1") else {}
        )
        model = model_of(case, **settings)
        models[len(settings)] = model
        encoder, layers = video_encoder(model), []
        hooks = [
            layer.register_forward_post_hook(lambda *call, kept=layers: kept.append(call[2]))
            for layer in encoder.tower.layers
        ]
        video, pad = (paddle.to_tensor(case.tensors[f"{start}in.{n}"]) for n in ("video", "pad"))
        compare.check("out", {f"{start}out": encoder(video, pad)})
        for hook in hooks:
            hook.remove()
        for i, layer in enumerate(layers):
            name, group = f"{start}layer{i}", "layers"
            wanted = case.tensors[name]
            if i >= encoder.tower.num_layers_with_past:
                group = "layers of current frames"
                wanted = wanted.reshape(*pad.shape, *wanted.shape[1:])[:, -1]
            compare.value(group, name, array(layer), wanted)
    image = paddle.to_tensor(case.tensors["embed_image.in"])
    found = video_encoder(models[0])(None, None, image)
    compare.check("image", {"out": found, "equals_T1_video": found}, "embed_image.")
    compare.compared |= {name for name in case.tensors if "in." in name or name.endswith(".in")}
    compare.all_compared()


def run_ops(case: PI07Case, compare: Comparison) -> None:
    """Rotary embedding, masks, sinusoids and image resizing."""
    given = case.tensors
    x, positions = paddle.to_tensor(given["rope.in"]), paddle.to_tensor(given["rope.pos"])
    for name, base in (("rope.theta1e4", 1e4), ("rope.theta1e6", 1e6)):
        rotated, _ = apply_rotary(x, x, rotary_tables(positions, x.shape[-1], base))
        compare.check("rope", {name: rotated})
    pad, marks, cross = (
        paddle.to_tensor(given[f"mask.{name}"]) for name in ("pad", "att", "cross_pad")
    )
    compare.check("mask", {"mask.2d": block_mask(pad, marks)})
    compare.check("mask", {"mask.2d_cross": suffix_mask(cross, pad, marks)})
    for name in given:
        if name.startswith("temporal_pe."):
            frames, width = (int(field[1:]) for field in name.split(".")[1:])
            compare.check("codes", {name: frame_codes(frames, width).astype(np.float32)})
        elif name.startswith("resize.") and name.endswith(".in"):
            out = name.removesuffix(".in") + ".out"
            compare.check("resize", {out: letterbox(given[name], given[out].shape[-2:])})
    time = paddle.to_tensor(given["time_emb.in"])
    width = given["time_emb.out_f64"].shape[-1]
    compare.check("codes", {"time_emb.out_f64": time_embedding(time, width)})
    used = frames_in_use(paddle.to_tensor(given["video_temporal_mask.pad"]))
    visible = array(HistoryMask(used, copies=1).visible_BLS)
    name = "video_temporal_mask.out_N2"
    compare.exact("mask", name, np.repeat(visible, 2, 0), given[name][:, 0] == 0)
    compare.compared |= {n for n in given if n.endswith((".in", ".pos", ".pad", ".att", "_pad"))}
    compare.all_compared()


def run_freeze(case: PI07Case, compare: Comparison) -> None:
    """The names of the trainable parameters in every mode."""
    switches = (
        "freeze_vision_encoder",
        "train_expert_only",
        "train_vision_encoder_only",
        "train_state_action_representation_only",
    )
    modes = {
        "default_freeze_vision": {"freeze_vision_encoder"},
        "unfrozen": set(),
        "train_expert_only": {"freeze_vision_encoder", "train_expert_only"},
    }
    source = case.folders.case("01_")
    for mode, wanted in json.loads(case.file.read_text(encoding="utf-8")).items():
        on = modes.get(mode, {mode})
        settings = {name: name in on for name in switches}
        shared: dict[str, Any] = {
            k: v for k, v in settings.items() if k != "train_vision_encoder_only"
        }
        vision_only = settings["train_vision_encoder_only"]
        model = model_of(source, vlm_train_vision_encoder_only=vision_only, **shared)
        found = {i.key for i in model.stored_parameters() if not i.parameter.stop_gradient}
        names = set(wanted["requires_grad_true"]) - UNUSED_KEYS
        compare.exact("trainable", mode, sorted(found ^ names), [])


def run_optimizer(case: PI07Case, compare: Comparison) -> None:
    """AdamW on float32 master weights of bfloat16 parameters: steps, clipping, a missing gradient.

    The case was written after its last step, from tensors that the steps had changed in place, so
    `init.*` and the values of every step are the final ones. Only the final values are compared,
    from initial bfloat16 values that lead to them.
    """
    given = case.tensors
    init = {name[5:]: value for name, value in given.items() if name.startswith("init.")}
    moved = [name for name in init if f"step0.master.{name}" in given]
    last = max(int(name[4]) for name in given if name.startswith("step"))
    if all(_is_end(given, name, last) for name in moved):
        *_, end = _steps(case, init)
        for name in moved:
            travelled = end[f"step{last}.master.{name}"] - init[name]
            init[name] = _bfloat16(given[f"step{last}.master.{name}"] - travelled)
        found = list(_steps(case, init))
        end = {name.partition(".")[2]: value for name, value in found[-1].items()}
        states = [
            {f"step{n}.{name}": value for name, value in end.items() if name != "grad_norm"}
            | {name: value for name, value in values.items() if name.endswith("grad_norm")}
            for n, values in enumerate(found)
        ]
    else:
        states = list(_steps(case, init))
    for values in states:
        for name, value in values.items():
            compare.check(name.split(".")[1], {name: value})
    compare.compared |= {n for n in given if ".grad." in n or n.startswith("init.")}
    compare.all_compared()


def _is_end(given: dict[str, np.ndarray], name: str, last: int) -> bool:
    """Whether all arrays of a parameter have the values of the last step."""
    masters = [given[f"step{n}.master.{name}"] for n in range(last + 1)]
    is_constant = all(np.array_equal(master, masters[0]) for master in masters)
    return is_constant and np.array_equal(given[f"init.{name}"], given[f"step{last}.live.{name}"])


def _steps(case: PI07Case, init: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Master weights, parameters and gradient norm after each step, by golden names."""
    given, settings, layer = case.tensors, case.meta["adamw"], paddle.nn.Layer()
    for name, value in init.items():
        parameter = layer.create_parameter(value.shape, dtype="bfloat16")
        paddle.assign(paddle.to_tensor(value).astype("bfloat16"), parameter)
        layer.add_parameter(name, parameter)
    parameters = dict(layer.named_parameters())
    store = MasterWeights(list(parameters.values()))
    train = adamw(settings, case.meta["clip"])
    optimizer = Optimizer(list(parameters.items()), train, set(parameters), store)
    for n in range(len({name[:5] for name in given if name.startswith("step")})):
        for name, parameter in parameters.items():
            grad = given.get(f"step{n}.grad.{name}")
            if grad is not None and (n, name) != _WITHOUT_GRADIENT:
                parameter.grad = paddle.to_tensor(grad).astype("bfloat16")
        store.end_backward()
        found = {}
        if f"step{n}.grad_norm" in given:
            norm = float(optimizer.squared_norm().sqrt())
            found[f"step{n}.grad_norm"] = np.float32(norm)
            optimizer.clip_gradients(norm)
        optimizer.step(train.learning_rate)
        optimizer.clear_gradients()
        for name, parameter in parameters.items():
            found[f"step{n}.master.{name}"] = array(store.shard_of(parameter))
            found[f"step{n}.live.{name}"] = array(parameter)
        yield found


def _bfloat16(values: np.ndarray) -> np.ndarray:
    return array(paddle.to_tensor(values).astype("bfloat16"))
