"""Single components of pi07: engine, video encoder, formulas, trainable parameters."""

import json
from typing import Any

import numpy as np
import paddle

from paddle_vl.families.pi07.checkpoint_map import UNUSED_KEYS
from paddle_vl.families.pi07.decoder import SuffixView, block_mask, prefix_positions, suffix_mask
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching, time_embedding
from paddle_vl.families.pi07.layers import rotary_tables
from paddle_vl.families.pi07.vision import frame_codes, visible_frames
from paddle_vl.families.policy.images import letterbox
from paddle_vl.nn.attention import apply_rotary
from parity.comparison import CaseReport
from parity.pi07_golden import GoldenCase, model_of
from parity.pi07_quantities import Comparison, array, video_encoder

_ENGINE = "gemma3_with_expert."


def run_engine(case: GoldenCase, report: CaseReport) -> None:
    """Both streams in two passes and in one; a case with key names has no expert."""
    if "state_dict_keys" in case.meta:
        _run_without_expert(case, report)
        return
    model, compare = model_of(case), Comparison(case, report)
    for joint in (False, True):
        group = "joint" if joint else "two passes"
        inputs, found = _engine_outputs(model, case, joint)
        compare.check(group, {name: array(x) for name, x in found.items()})
        squares = [(found[f"out.{name}_final"] ** 2).sum() for name in ("prefix", "suffix")]
        (squares[0] + squares[1]).backward()
        compare.check("grads", {f"grad.{name}": array(x.grad) for name, x in inputs.items()})
    compare.all_compared()
    compare.all_compared("grad.")


def _engine_outputs(model, case: GoldenCase, joint: bool) -> tuple[dict, dict]:
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


def _run_without_expert(case: GoldenCase, report: CaseReport) -> None:
    source = case.folders.case("11_")
    bare, whole = model_of(source, vlm_disable_action_expert=True), model_of(source)
    keys = {item.key for item in bare.stored_parameters() if item.key.startswith(_ENGINE)}
    keys = {key.removeprefix(_ENGINE) for key in keys}
    unused = {key.removeprefix(_ENGINE) for key in UNUSED_KEYS}
    wanted = set(case.meta["state_dict_keys"]) - unused
    report.exact("keys", "state_dict_keys", sorted(keys ^ wanted), [])
    found, inputs = [], {}
    for model in (whole, bare):
        embs = paddle.to_tensor(source.tensors["in.prefix_embs"])
        length = embs.shape[1]
        pad, marks = (
            paddle.to_tensor(source.tensors[f"in.{n}_masks"][:, :length]) for n in ("pad", "att")
        )
        inputs = {"prefix_view": model.decoder.view(prefix_positions(pad), block_mask(pad, marks))}
        found.append(array(model.decoder(embs, **inputs).prefix))
    report.exact("prefix", "with and without expert", found[1], found[0])
    Comparison(source, report).check("prefix", {"out.prefix_final": found[1]})
    suffix = paddle.to_tensor(source.tensors["in.suffix_embs"])
    try:
        bare.decoder(embs, suffix, suffix, **inputs)
        report.fail("suffix", "refusal", "a suffix was accepted without an expert")
    except ValueError:
        report.exact("suffix", "refusal", 0, 0)


def run_video(case: GoldenCase, report: CaseReport) -> None:
    """The tower layer by layer, for videos of several lengths and single images.

    Behind its last layer with temporal attention the tower has rows of current frames only, the
    last of each video; these layers are the group "layers of current frames".
    """
    compare = Comparison(case, report)
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
        compare.check("out", {f"{start}out": array(encoder(video, pad))})
        for hook in hooks:
            hook.remove()
        for i, layer in enumerate(layers):
            name, group = f"{start}layer{i}", "layers"
            wanted = case.tensors[name]
            if i >= encoder.tower.num_layers_with_past:
                group = "layers of current frames"
                wanted = wanted.reshape(*pad.shape, *wanted.shape[1:])[:, -1]
            compare.compared.add(name)
            compare.value(group, name, array(layer), wanted)
    image = paddle.to_tensor(case.tensors["embed_image.in"])
    found = array(video_encoder(models[0]).embed_image(image))
    compare.check("image", {"embed_image.out": found, "embed_image.equals_T1_video": found})
    compare.compared |= {name for name in case.tensors if "in." in name or name.endswith(".in")}
    compare.all_compared("")


def run_ops(case: GoldenCase, report: CaseReport) -> None:
    """Rotary embedding, masks, sinusoids and image resizing."""
    compare, given = Comparison(case, report), case.tensors
    x, positions = paddle.to_tensor(given["rope.in"]), paddle.to_tensor(given["rope.pos"])
    for name, base in (("rope.theta1e4", 1e4), ("rope.theta1e6", 1e6)):
        rotated, _ = apply_rotary(x, x, rotary_tables(positions, x.shape[-1], base))
        compare.check("rope", {name: array(rotated)})
    pad, marks, cross = (
        paddle.to_tensor(given[f"mask.{name}"]) for name in ("pad", "att", "cross_pad")
    )
    compare.check("mask", {"mask.2d": array(block_mask(pad, marks))})
    compare.check("mask", {"mask.2d_cross": array(suffix_mask(cross, pad, marks))})
    for name in given:
        if name.startswith("temporal_pe."):
            frames, width = (int(field[1:]) for field in name.split(".")[1:])
            compare.check("codes", {name: frame_codes(frames, width).astype(np.float32)})
        elif name.startswith("resize.") and name.endswith(".in"):
            out = name.removesuffix(".in") + ".out"
            compare.check("resize", {out: letterbox(given[name], given[out].shape[-2:])})
    time = paddle.to_tensor(given["time_emb.in"])
    width = given["time_emb.out_f64"].shape[-1]
    compare.check("codes", {"time_emb.out_f64": array(time_embedding(time, width))})
    visible = array(visible_frames(paddle.to_tensor(given["video_temporal_mask.pad"])))
    wanted = given["video_temporal_mask.out_N2"]
    compare.compared.add("video_temporal_mask.out_N2")
    report.exact("mask", "video_temporal_mask.out_N2", np.repeat(visible, 2, 0), wanted[:, 0] == 0)
    compare.compared |= {n for n in given if n.endswith((".in", ".pos", ".pad", ".att", "_pad"))}
    compare.all_compared("")


def run_freeze(case: GoldenCase, report: CaseReport) -> None:
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
        report.exact("trainable", mode, sorted(found ^ names), [])
