"""FLOPs of pi07's models, counted from their configurations.

Guarantees: on batches without padding, forward and backward counts equal the matrix products of the
model: with goals and texts and without, one frame and several, groups, no insulation, any frozen
component, and either loss alone; insulation saves the gradient of the prefix's keys and values;
tokens and pairs follow the model's masks, frames follow the history; the tower's cost per image
equals the published one.
"""

import fnmatch
from dataclasses import replace

import numpy as np
import paddle
import pytest

from paddle_vl.families.pi07.checkpoint_map import is_reached
from paddle_vl.families.pi07.config import Gemma3Config, PI07PlannerConfig, SiglipVisionConfig
from paddle_vl.families.pi07.decoder import block_mask
from paddle_vl.families.pi07.flops import PI07Flops
from paddle_vl.families.pi07.flow import as_tensors
from paddle_vl.families.pi07.prefix import PLANNER_LABELS, Prefix, Presence, presence_of
from paddle_vl.families.pi07.settings import PARTS
from paddle_vl.families.pi07.vision import frames_in_use
from paddle_vl.nn.attention_masks import HistoryMask
from paddle_vl.train.freeze import freeze_parameters, trained_names, treated_apart
from tests.single_card_tests.families.pi07 import test_planner
from tests.support.counted_products import counted_products
from tests.support.pi07_golden import golden_batch, golden_model, golden_planner

# Kernels whose products can be counted.
pytestmark = pytest.mark.usefixtures("uncompiled")

GOALS = ("subgoal_images", "subgoal_img_masks")


def real_batch(without: tuple = (), num_frames: int = 3) -> dict:
    """A batch without padding."""
    batch = {name: value for name, value in golden_batch().items() if not name.startswith(without)}
    for name, value in batch.items():
        if name.endswith("masks"):
            is_list = isinstance(value, list)
            batch[name] = [np.ones_like(m) for m in value] if is_list else np.ones_like(value)
    batch["videos"] = [video[:, -num_frames:] for video in batch["videos"]]
    batch["state"] = batch["state"][:, -num_frames:]
    batch["obs_history_is_pad"] = np.zeros([2, num_frames], dtype=bool)
    return batch


def counts_of(model, batch, monkeypatch, losses=("MSE", "CE")) -> tuple[int, int]:
    with counted_products(monkeypatch) as counts:
        found = model(batch)
        sum(found[name] for name in losses).backward()
    model.clear_gradients()
    return counts.forward, counts.forward + counts.backward


def counter_of(model, patterns=(), losses=("MSE", "CE")) -> PI07Flops:
    """Counter of a run that freezes the patterns' parameters and those that no loss reaches."""
    parameters = [(f"model.{item.key}", item.parameter) for item in model.stored_parameters()]
    numbers = {id(p): name for name, p in model.named_parameters()}
    config = model.config
    reached = [name for name, p in parameters if is_reached(numbers[id(p)], config, losses)]
    shapes = dict(parameters)
    trained = trained_names(shapes, patterns, reached, PARTS)
    freeze_parameters(parameters, trained)
    return PI07Flops(config, model.label_ids, trained, losses)


@pytest.mark.parametrize(
    "batch",
    [
        real_batch(),
        real_batch(GOALS),
        real_batch((*GOALS, "response", "metadata")),
        real_batch(("response",), num_frames=1),
        real_batch(GOALS, num_frames=2),
    ],
    ids=["all", "no goals", "no fields", "one frame, no response", "two frames"],
)
def test_operations_are_those_of_the_products_that_the_policy_runs(batch, monkeypatch):
    model = golden_model(knowledge_insulation=False)
    counter = counter_of(model)
    found = counter.forward(batch), counter(batch)
    assert found == counts_of(model, batch, monkeypatch)
    assert found == tuple(
        getattr(PI07Flops(model.config, model.label_ids), name)(batch)
        for name in ("forward", "__call__")
    )


@pytest.mark.parametrize(
    ("patterns", "unasked"),
    [
        (["vision"], {}),
        (["vision", "projector", "backbone"], {}),
        # First the prefix, not the steps, carries a gradient into the first attention; then the
        # reverse.
        (["expert"], {"step_pairs": 3}),
        (
            ["*embed*", "vision", "projector", "state", "discrete_actions", "*layers.0.*"],
            {"cross_pairs": 2},
        ),
        (["*layers.1.*", "model.time_mlp_*"], {}),
        (["*.layers.[02].*", "*bias", "*norm*"], {}),
    ],
    ids=["tower", "tower and backbone", "expert", "first layers", "in between", "odd"],
)
def test_what_is_frozen_has_the_backward_that_its_place_asks_for(patterns, unasked, monkeypatch):
    model, batch = golden_model(knowledge_insulation=False), real_batch()
    counter = counter_of(model, patterns)
    # Keys of both streams are one tensor, which has a gradient if either stream needs one.
    more = sum(products(model, counter, batch, unit, n) for unit, n in unasked.items())
    assert (counter.forward(batch), counter(batch) + more) == counts_of(model, batch, monkeypatch)


def products(model, counter: PI07Flops, batch: dict, unit: str, number: int) -> int:
    """Operations of this many of an attention's products."""
    text = model.config.vlm_config.gemma3_config.text_config
    width = text.num_attention_heads * text.head_dim
    return number * 2 * width * counter.units(batch)[unit]


TOWER, LANGUAGE = "*vision_model", "*language_model"
BACKBONE, EXPERT = "*layers.1.backbone_layer", "*layers.1.expert_layer"


@pytest.mark.parametrize(
    "pattern",
    [
        f"{TOWER}.e*s.p*", f"{TOWER}.*.layers.1.self_attn.*", f"{TOWER}.*.layers.0.[lm]*",
        f"{TOWER}.post*", "*projector*", f"{LANGUAGE}.*", f"{BACKBONE}.self_attn.*",
        f"{BACKBONE}.[!s]*", "*.da_head*", "*discrete_action_embedding*", "model.state_proj*",
    ],
)  # fmt: skip
def test_a_gradient_begins_at_any_parameter_of_the_prefix(pattern, monkeypatch):
    check_single_parameters(pattern, "CE", lambda name: 0, monkeypatch)


@pytest.mark.parametrize(
    "pattern",
    [f"{EXPERT}.self_attn.*", f"{EXPERT}.[!s]*", "*expert.model.norm*", "model.action*", "*time*"],
)
def test_a_gradient_begins_at_any_parameter_of_the_suffix(pattern, monkeypatch):
    def unasked(name: str) -> int:
        """Products for untrained prefix keys and values, computed because they share a tensor with
        the suffix's: in the parameter's own layer and in those after it."""
        own = {"k_proj": 2, "v_proj": 1, "input_layernorm": 2}
        if ".interleaved_layers.1." in name:
            return 2 + sum(number for module, number in own.items() if module in name)
        return 6 if name.startswith(("model.action_in", "model.time")) else 0

    check_single_parameters(pattern, "MSE", unasked, monkeypatch)


def check_single_parameters(pattern: str, loss: str, unasked, monkeypatch) -> None:
    model, batch = golden_model(), real_batch()
    parameters = [(f"model.{item.key}", item.parameter) for item in model.stored_parameters()]
    names = fnmatch.filter(dict(parameters), pattern)
    assert names
    for name in names:
        model.separate(treated_apart(parameters, name.__eq__))
        parameters = [(f"model.{item.key}", item.parameter) for item in model.stored_parameters()]
        freeze_parameters(parameters, [name])
        counter = PI07Flops(model.config, model.label_ids, [name], [loss])
        more = products(model, counter, batch, "cross_pairs", unasked(name))
        expected = counts_of(model, batch, monkeypatch, [loss])[1]
        assert counter(batch) + more == expected, name


@pytest.mark.parametrize(
    ("losses", "insulated"), [(("MSE",), False), (("CE",), False), (("CE",), True)]
)
def test_a_loss_alone_has_the_backward_of_what_it_reaches(losses, insulated, monkeypatch):
    model, batch = golden_model(knowledge_insulation=insulated), real_batch()
    counter = counter_of(model, losses=losses)
    assert (counter.forward(batch), counter(batch)) == counts_of(model, batch, monkeypatch, losses)


@pytest.mark.parametrize("losses", [("MSE",), ("MSE", "CE")])
def test_insulation_saves_the_gradients_of_keys_and_values_that_are_detached(losses, monkeypatch):
    model, batch = golden_model(), real_batch()
    counter = counter_of(model, losses=losses)
    layers = model.config.vlm_config.gemma3_config.text_config.num_hidden_layers
    # The kernel still computes them, because keys of both streams are one tensor.
    saved = layers * products(model, counter, batch, "cross_pairs", 2)
    assert counter(batch) + saved == counts_of(model, batch, monkeypatch, losses)[1]


def masked_batch() -> dict:
    batch = real_batch()
    batch["lang_masks"][0, 5:] = False
    batch["response_masks"][1] = False
    batch["metadata_masks"][:, 3:] = False
    batch["discrete_action_masks"][1, 2:] = False
    batch["vid_masks"][1][0] = False
    batch["subgoal_img_masks"][0][1] = batch["subgoal_img_masks"][1][1] = False
    batch["obs_history_is_pad"][1] = [True, False, False]
    return batch


def checked_units(model, batch: dict) -> tuple[dict, Prefix]:
    """Units of a batch, whose tokens and pairs are those of the model's masks; and these."""
    units, presence = PI07Flops(model.config, model.label_ids).units(batch), batch.get("presence")
    prefix = model.prefix(as_tensors(batch | {"presence": None}), presence or presence_of(batch))
    assert units["tokens"] == prefix.pad_masks.sum().item()
    assert units["token_pairs"] == block_mask(prefix.pad_masks, prefix.att_masks).sum().item()
    return units, prefix


def test_real_tokens_and_pairs_are_those_of_the_models_masks():
    model, batch = golden_model(), masked_batch()
    units, prefix = checked_units(model, batch)
    seen = prefix.pad_masks[:, : prefix.num_seen].sum().item()
    steps = model.config.chunk_size
    assert units["cross_pairs"] == steps * seen
    assert (units["steps"], units["step_pairs"]) == (2 * steps, 2 * steps**2)
    assert units["action_tokens"] == 5 + 2
    # The first camera has three and two frames, the second only two; there are two goals.
    patches = model.config.vlm_config.gemma3_config.vision_config.num_patches
    assert units["patches"] == patches * (3 + 2 + 2 + 2)
    assert units["patch_pairs"] == patches * units["patches"]
    used = frames_in_use(paddle.to_tensor(batch["obs_history_is_pad"]))
    visible = HistoryMask(used, copies=1).visible_BLS.sum(axis=[1, 2])
    first, second = visible.tolist()
    # The model computes padded frames, which see no key.
    assert units["time_pairs"] == patches * (first + second + second)
    assert units["image_tokens"] == 4 * (3 + 2)
    assert units["states"] == 3 + 2


def test_without_a_history_only_current_frames_are_real():
    model, batch = golden_model(), real_batch()
    batch["obs_history_is_pad"] = None
    units, _ = checked_units(model, batch)
    patches = model.config.vlm_config.gemma3_config.vision_config.num_patches
    assert (units["patches"], units["time_pairs"]) == (patches * (4 + 4), patches * 4)


def test_parts_that_another_process_asked_for_are_laid_out():
    model, batch = golden_model(), real_batch()
    batch["metadata_masks"][:] = batch["response_masks"][:] = False
    for mask in batch["subgoal_img_masks"]:
        mask[:] = False
    batch["presence"] = Presence(False, True, True)
    checked_units(model, batch)


@pytest.mark.parametrize("losses", [("CE_memory", "CE_response"), ("CE_memory",)])
@pytest.mark.parametrize("has_metadata", [True, False])
@pytest.mark.parametrize("patterns", [[], ["vision"], ["backbone"]], ids=["all", "tower", "text"])
def test_operations_are_those_of_the_products_that_the_planner_runs(
    patterns, has_metadata, losses, monkeypatch
):
    model, batch = golden_planner(), planner_batch(has_metadata)
    parameters = [(f"model.{item.key}", item.parameter) for item in model.stored_parameters()]
    trained = trained_names(dict(parameters), patterns, None, PARTS)
    freeze_parameters(parameters, trained)
    counter = PI07Flops(model.config, model.label_ids, trained, losses)
    model.untrained_losses = {"CE_memory", "CE_response"} - set(losses)
    found = counts_of(model, batch, monkeypatch, [f"{name}_sum" for name in losses])
    assert (counter.forward(batch), counter(batch)) == found


def test_a_planners_tokens_and_pairs_are_those_of_its_masks():
    model, batch = golden_planner(), planner_batch(True)
    batch["lang_masks"][1, 6:] = False
    batch["memory_masks"][0, 4:] = False
    batch["response_masks"][1, 3:] = False
    batch["img_masks"][1][1] = False
    units, _ = checked_units(model, batch)
    assert (units["memory_tokens"], units["response_tokens"]) == (5 + 3, 4 + 2)
    assert units["image_tokens"] == 4 * 3


def planner_batch(has_metadata: bool) -> dict:
    batch = test_planner.make_batch()
    batch["lang_masks"][:] = True
    batch["img_masks"] = [np.ones([2], dtype=bool) for _ in range(2)]
    batch["metadata_masks"][:] = has_metadata
    return batch


@pytest.mark.parametrize(("side", "giga"), [(16, 220.35), (27, 670.35)])
def test_an_image_takes_what_is_published_of_its_tower(side, giga):
    vision = SiglipVisionConfig(image_size=14 * side)
    backbone = Gemma3Config(vision_config=vision, mm_tokens_per_image=1)
    config = PI07PlannerConfig(
        vlm_config=replace(PI07PlannerConfig().vlm_config, gemma3_config=backbone)
    )
    batch = test_planner.make_batch() | {"img_masks": [np.array([True, False])]}
    counter = PI07Flops(config, dict.fromkeys(PLANNER_LABELS, (1,)))
    units, costs = counter.units(batch), counter.operations(batch).forward
    parts = ("patches", "patch_pairs", "current_patches", "current_pairs")
    tower = sum(costs[unit] * units[unit] for unit in parts)
    # open_clip's table of ViT-SO400M-14-SigLIP at 224 and 384 pixels includes the pooling, one
    # query over all patches and an MLP, which pi07 lacks.
    width, patches = vision.hidden_size, side**2
    pooling = 4 * width * (width + width * patches + patches + vision.intermediate_size)
    assert (tower + pooling) / 1e9 == pytest.approx(giga, rel=2e-4)
