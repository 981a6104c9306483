"""pi07's side of the colocated schedule on one device: items, encoder, stages, batches.

Guarantees: the tower's rows, in any division of the items, and stages that take them with the batch
give the full model's losses and every gradient, for the policy and the planner, with masked cameras
and goals, with and without past frames, without any image; masked images are no items, and a video
without a real past costs one frame; stages after the first have the tower and nothing else of the
prefix, with its values; pixels stay on the host; an idle batch has no items; settings and refusals.
"""

import numpy as np
import paddle
import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching
from paddle_vl.families.pi07.objective import PolicyBatchAdapter
from paddle_vl.families.pi07.pipeline import (
    ON_HOST,
    ColocatedBatchAdapter,
    ImageItems,
    PI07Encoder,
    PI07Stage,
)
from paddle_vl.families.pi07.prefix import Presence, presence_of
from paddle_vl.families.pi07.recipe import encoder_shape, model_shape
from paddle_vl.families.policy.model_inputs import PlannerBatch, PolicyBatch
from paddle_vl.nn.placement import SingleDevicePlacement, StageLayers
from paddle_vl.nn.transfer import on_device
from paddle_vl.parallel.colocated.runner import Leaves
from paddle_vl.parallel.degrees import ParallelDegrees, TopologyPlan, plan_problems
from paddle_vl.testing import record_device_copies
from tests.single_card_tests.families.pi07 import test_planner as planner
from tests.single_card_tests.families.pi07.test_pi07_stage import (
    assert_same_gradients,
    gradients_of,
    ranges,
)
from tests.support.pi07_golden import golden_batch, golden_model, golden_planner
from tests.support.pinned import pinned_on_a_cpu

PAST, NO_PAST = [False, False, False], [True, True, False]


def policy_batch(**changes) -> dict:
    """Two samples, two cameras, three frames: a camera and a goal are masked, a past is padded."""
    batch = golden_batch() | {"delay": np.array([0, 1])}
    batch["vid_masks"] = [np.array([True, True]), np.array([False, True])]
    batch["subgoal_img_masks"] = [np.array([True, False])] * 2
    batch["obs_history_is_pad"] = np.array([NO_PAST, PAST])
    return batch | changes


NONE = [np.array([False, False])] * 2
BATCHES = {
    "some images": {},
    "one past for each": {"obs_history_is_pad": np.array([PAST, [True, False, False]])},
    "no past": {"obs_history_is_pad": np.array([NO_PAST] * 2)},
    "unknown past": {"obs_history_is_pad": None},
    "no goals": {"subgoal_img_masks": NONE},
    "goals of another rank": {
        "subgoal_img_masks": NONE,
        "presence": Presence(True, True, True),
    },
    "no image": {"vid_masks": NONE, "subgoal_img_masks": NONE},
}


def colocated_losses(model, ends, batch) -> tuple[dict, paddle.Tensor, Leaves]:
    """Losses of stages in a row, with the encoder's rows as two ranks would make them; nothing is
    copied to the device but through pinned memory, and tables once."""
    with record_device_copies() as copies, pinned_on_a_cpu():
        losses = _colocated_losses(model, ends, batch)
    assert [place for place in copies if not place.startswith("nn/transfer.py")] == []
    return losses


def _colocated_losses(model, ends, batch) -> tuple[dict, paddle.Tensor, Leaves]:
    encoder = PI07Encoder(model)
    rows, costs = encoder.items(batch)
    assert (costs > 0).all()
    items, full = np.arange(len(rows)), None
    if len(rows):
        shares = [items[::2], items[1::2]]
        outputs = [
            encoder.encode([{}, batch], [items[:0], share]) for share in shares if len(share)
        ]
        count = encoder.video_encoder.num_tokens
        parts = [out.reshape([-1, count, out.shape[1]]) for out in outputs]
        full = paddle.concat([parts[i % 2][i // 2] for i in items])
    needs_gradient = not all(p.stop_gradient for p in encoder.parameters())
    widths = encoder.section_widths
    none = paddle.zeros([0, widths[0]])
    leaves = Leaves(none if full is None else full, [int(rows.sum())], widths, {0}, needs_gradient)
    arrived = None
    for layers in ranges(ends):
        stage = PI07Stage(model, layers)
        sections = leaves.sections(0, encoder.sections_of(stage))
        stage_batch = encoder.language_batch(batch, sections)
        if arrived is not None:
            assert stage.input_shape(stage_batch) == tuple(arrived.shape)
        arrived = stage(stage_batch, arrived)
    return arrived, full, leaves


def gradients_of_both(model, loss, full, leaves) -> dict:
    loss.backward()
    if full is not None and not full.stop_gradient:
        paddle.autograd.backward([full], [leaves.gradient()])
    return gradients_of(model)


def assert_same(found: dict, wanted: dict) -> None:
    """Biases of keys, which a softmax ignores, have rounding noise alone."""
    assert_same_gradients(found, wanted, 1e-5, 2e-3)


def without_zeros(gradients: dict) -> dict:
    """The tower's gradients of masked images alone as None: the runner adds zeros instead."""
    return {
        name: None
        if "vision_tower" in name and gradient is not None and np.abs(gradient).max() < 1e-20
        else gradient
        for name, gradient in gradients.items()
    }


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_rows_and_stages_are_the_full_policy(name, frozen):
    batch = policy_batch(**BATCHES[name])
    model = golden_model(knowledge_insulation=False, freeze_vision_encoder=frozen)
    given = {n: value for n, value in batch.items() if n != "presence" and value is not None}
    whole = model(given, batch.get("presence"), per_sample=True)
    wanted = gradients_of(model, whole["MSE"] + 2 * whole["CE"])
    losses, full, leaves = colocated_losses(model, [1, 3], batch)
    for term in ("MSE", "CE"):
        np.testing.assert_allclose(losses[term].item(), whole[term].item(), rtol=1e-6)
    found = gradients_of_both(model, losses["MSE"] + 2 * losses["CE"], full, leaves)
    assert_same(without_zeros(found), without_zeros(wanted))
    tower = [g for n, g in found.items() if "vision_tower" in n]
    if name != "no image" and not frozen:
        assert all(gradient is not None for gradient in tower)
        assert any(gradient.any() for gradient in tower)


@pytest.mark.parametrize("masks", [[True, True], [False, True]], ids=str)
def test_rows_and_stages_are_the_full_planner(masks):
    model, batch = golden_planner(freeze_vision_encoder=False), planner.make_batch()
    batch["img_masks"][0] = np.array(masks)
    whole = model(batch)
    wanted = gradients_of(model, whole["CE"])
    losses, full, leaves = colocated_losses(model, [2, 3], batch)
    np.testing.assert_allclose(losses["CE"].item(), whole["CE"].item(), rtol=1e-6)
    assert_same(gradients_of_both(model, losses["CE"], full, leaves), wanted)


def test_masked_images_are_no_items_and_a_padded_past_costs_nothing():
    model = golden_model()
    items = ImageItems.of(policy_batch())
    # The second camera of the first sample and the goals of the second one are masked.
    videos = [("videos", 0, 0), ("videos", 0, 1), ("videos", 1, 1)]
    assert items.places == [*videos, ("subgoal_images", 0, 0), ("subgoal_images", 1, 0)]
    assert items.item_of["videos"].tolist() == [0, 1, -1, 2]
    assert items.item_of["subgoal_images"].tolist() == [3, -1, 4, -1]
    rows, costs = PI07Encoder(model).items(policy_batch())
    assert costs.tolist() == [1, 3, 3, 1, 1]
    assert rows.tolist() == [model.tokens.camera_tokens] * 5
    assert [len(each) for each in PI07Encoder(model).items({})] == [0, 0]


def test_rows_of_another_order_are_seen(monkeypatch):
    model, batch, of = golden_model(freeze_vision_encoder=False), policy_batch(), ImageItems.of
    wanted = model(batch, per_sample=True)["CE"].item()
    items = ImageItems.of(batch)
    items.places[0], items.places[1] = items.places[1], items.places[0]
    items.frames[:2] = items.frames[1::-1].copy()
    monkeypatch.setattr(ImageItems, "of", lambda found: items if found else of({}))
    losses, *_ = colocated_losses(model, [1, 3], batch)
    assert abs(losses["CE"].item() - wanted) > 1e-5 * wanted


def test_a_later_stage_has_the_tower_and_nothing_else_of_the_prefix():
    whole = golden_model()
    for held, last in (
        (StageLayers(layers=frozenset({0, 1}), head=False, encoder_everywhere=True), False),
        (StageLayers(embedding=False, layers=frozenset({2}), encoder_everywhere=True), True),
    ):
        model = PI07LowLevelFlowMatching(whole.config, whole.label_ids, SingleDevicePlacement(held))
        names = {name for name, _ in model.named_parameters() if name.startswith("prefix.")}
        tower = {name for name in names if name.startswith("prefix.video_encoder.tower.")}
        assert tower == {
            name for name, _ in whole.named_parameters() if name in tower or "tower." in name
        }
        assert (names == tower) == last
        assert len(model.vision_blocks) == len(whole.vision_blocks)
        assert len(model.tables) == (not last)
        assert model.whole_shapes() == whole.whole_shapes()


def test_images_and_what_tells_of_items_stay_on_the_host():
    fields = {name: value for name, value in policy_batch().items() if name in PolicyBatch.names()}
    batch = PolicyBatch(**fields, on_host=ON_HOST)
    there = on_device(batch)
    assert there.videos[0] is batch.videos[0]
    assert len(ImageItems.of(there).places) == 5
    assert isinstance(there.state, paddle.Tensor)


@pytest.mark.parametrize("make", [policy_batch, planner.make_batch], ids=["policy", "planner"])
def test_an_idle_batch_has_no_items(make):
    fields, kind = make(), PolicyBatch if make is policy_batch else PlannerBatch
    batch = kind(**{name: value for name, value in fields.items() if name in kind.names()})
    idle = ColocatedBatchAdapter(lambda: batch).idle_batch(None)
    assert ImageItems.of(batch).places
    assert ImageItems.of(idle).places == []
    assert not presence_of(idle).subgoal
    assert ImageItems.of(PolicyBatchAdapter(lambda: batch).idle_batch(None)).places


def test_sizes_of_the_tower_that_its_ranks_divide():
    config = golden_model().config
    vision = config.vlm_config.gemma3_config.vision_config
    assert encoder_shape(config).widths == {
        "vision_config.num_attention_heads": vision.num_attention_heads,
        "vision_config.intermediate_size": vision.intermediate_size,
    }
    heads = vision.num_attention_heads
    degrees = ParallelDegrees(
        pp_degree=3, schedule="colocated", encoder={"mp_degree": 3}, num_micro_batches=3
    )
    plan = TopologyPlan(degrees, 3, model_shape(config), None, encoder_shape(config))
    wanted = f"vision_config.num_attention_heads {heads} does not divide by parallel.encoder.mp"
    assert any(wanted in problem for problem in plan_problems(plan))


def test_a_run_takes_the_schedule_with_its_settings():
    config = load_run_config(
        "configs/pi07/tiny_cpu.yaml",
        [
            *("parallel.schedule=colocated", "parallel.pp_degree=2"),
            "parallel.encoder={mp_degree: 2, offload_rows: true}",
        ],
    )
    assert config.parallel.encoder.mp_degree == 2
    with pytest.raises(
        ValueError, match=r"parallel\.encoder is .*mp_degree.*2.* but parallel\.schedule is plain"
    ):
        load_run_config("configs/pi07/tiny_cpu.yaml", ["parallel.encoder.mp_degree=2"])
