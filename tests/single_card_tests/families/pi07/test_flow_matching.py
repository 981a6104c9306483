"""The low-level policy's model on prepared batches.

Guarantees: two seeded runs are bit-identical, also with dropout; masked inputs do not change losses
and actions; every layer runs once and in one order, whatever optional fields a batch has, and empty
fields change no number; given steps are returned unchanged; each group has its own projections; row
0 of the token tables gets no gradient; label ids and lengths are checked; in training the last
layer runs for the rows that the token loss reads, with the losses and gradients of all rows.
"""

import numpy as np
import paddle
import pytest

from paddle_vl.families.pi07.checkpoint_map import GroupWeights
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching, as_tensors, draw_time, times
from paddle_vl.families.pi07.prefix import (
    LABELS,
    PREFIX_BLOCKS,
    GroupedProjection,
    Presence,
    presence_of,
    real_frames,
)
from tests.support.pi07_golden import case, golden_batch, golden_model, with_window


def losses_and_gradients(model, batch) -> tuple[list[float], dict[str, np.ndarray]]:
    losses = model(batch)
    (losses["MSE"] + losses["CE"]).backward()
    found = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    model.clear_gradients()
    return [losses["MSE"].item(), losses["CE"].item()], found


def test_two_seeded_runs_are_bit_identical():
    model, batch = golden_model(dropout=0.3), golden_batch()
    for drawn in ("noise", "time"):
        del batch[drawn]
    runs = []
    for _ in range(2):
        paddle.seed(7)
        runs.append(losses_and_gradients(model, batch))
    other = losses_and_gradients(model, batch)
    assert runs[0][0] == runs[1][0] != other[0]
    for name, grad in runs[0][1].items():
        assert (grad == runs[1][1][name]).all(), name


def test_dropout_is_off_in_evaluation_and_for_the_representation_alone():
    batch, model = golden_batch(), golden_model(dropout=0.3)
    representation = model.config.changed(train_state_action_representation_only=True)
    labels = case("01_all_fields")[0]["config"]["indicator_token_ids"]
    assert model(batch)["MSE"].item() != model(batch)["MSE"].item()
    model.eval()
    for quiet in (model, PI07LowLevelFlowMatching(representation, labels)):
        assert quiet(batch)["MSE"].item() == quiet(batch)["MSE"].item()


def test_what_is_masked_has_no_effect():
    model, batch = golden_model(), golden_batch()
    batch["response_masks"][0, 3:] = False
    batch["metadata_masks"][1] = False
    batch["vid_masks"][1][0] = False
    batch["subgoal_img_masks"][0][1] = False
    batch["discrete_action_masks"][0, 4:] = False
    batch["obs_history_is_pad"][1] = [True, True, False]
    before, _ = losses_and_gradients(model, batch)
    batch["response_tokens"][0, 3:] = 9
    batch["metadata_tokens"][1] = 11
    batch["videos"][1][0] = 0.5
    batch["subgoal_images"][0][1] = -0.5
    batch["discrete_actions"][0, 4:] = 3
    batch["state"][1, :2] = 99.0
    batch["videos"][0][1, :2] = 0.0
    after, _ = losses_and_gradients(model, batch)
    np.testing.assert_allclose(after, before, rtol=1e-6)


def test_padded_states_are_zero_before_they_are_projected():
    model, batch = golden_model(), golden_batch()
    batch["obs_history_is_pad"][0] = [True, False, False]
    batch["state"][0, 0] = np.nan
    state = model.prefix.embed_blocks(as_tensors(batch), PREFIX_BLOCKS[1:4])["state"]
    rows, bias = state.numpy(), model.prefix.state_proj.linear.bias.numpy()
    np.testing.assert_allclose(rows[0, 0], bias, rtol=1e-6)
    assert real_frames(as_tensors(batch), paddle).numpy()[0].tolist() == [False, True, True]
    assert np.isfinite(losses_and_gradients(model, batch)[0]).all()
    batch["obs_history_is_pad"] = None
    assert real_frames(as_tensors(batch), paddle).numpy().tolist() == [[False, False, True]] * 2


def test_padding_of_actions_has_no_effect_on_the_flow():
    model, batch = golden_model(), golden_batch()
    batch["actions_is_pad"] = np.zeros((2, 6), bool)
    batch["actions_is_pad"][1, 4:] = True
    batch["real_action_dim"] = np.array([7, 5])
    model.eval()
    whole = model(batch, per_sample=True)
    sums, counts = (x.numpy() for x in whole["MSE_per_sample"])
    assert counts.tolist() == [42.0, 20.0]
    np.testing.assert_allclose(whole["MSE"].item(), sums.sum() / counts.sum(), rtol=1e-6)


def without_optional_parts(batch: dict) -> dict:
    """A batch without optional fields and with one frame."""
    for mask in ("response_masks", "metadata_masks"):
        batch[mask][:] = False
    batch["subgoal_img_masks"] = [np.zeros(2, bool)] * 2
    batch["videos"] = [video[:, -1:] for video in batch["videos"]]
    batch["state"], batch["obs_history_is_pad"] = batch["state"][:, -1:], None
    return batch


def test_fields_that_no_sample_fills_change_no_number():
    model, batch = golden_model(freeze_vision_encoder=False), without_optional_parts(golden_batch())
    found, grads = losses_and_gradients(model, batch)
    for name in ("response_tokens", "metadata_tokens", "subgoal_images"):
        del batch[name]
    wanted, wanted_grads = losses_and_gradients(model, batch)
    assert found == wanted
    assert set(grads) == set(wanted_grads)
    for name, grad in wanted_grads.items():
        np.testing.assert_allclose(grads[name], grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("freeze_vision_encoder", [True, False])
def test_every_layer_runs_once_and_in_one_order_whatever_is_present(freeze_vision_encoder):
    model = golden_model(freeze_vision_encoder=freeze_vision_encoder)
    calls, gradients, ids, frames = [], [], [], []
    layers = {n: x for n, x in model.named_sublayers() if any(True for _ in x.parameters())}
    for n, layer in layers.items():
        layer.register_forward_pre_hook(lambda *call, n=n: calls[-1].append(n))
    trained = {n: p for n, p in model.named_parameters() if not p.stop_gradient}
    for n, parameter in trained.items():
        parameter.register_hook(lambda grad, n=n: gradients[-1].append(n))
    table, tower = model.prefix.embed_tokens, model.prefix.video_encoder.tower
    table.register_forward_pre_hook(lambda _, given: ids.append(given[0].shape[1]))
    tower.register_forward_pre_hook(lambda _, given: frames.append(given[0].shape[0]))
    some, none = golden_batch(), golden_batch()
    some["metadata_masks"][:] = False
    for mask in ("response_masks", "metadata_masks"):
        none[mask][:] = False
    none["subgoal_img_masks"] = [np.zeros(2, bool)] * 2
    everything = Presence(True, True, True)
    for batch, presence in ((golden_batch(), None), (some, None), (none, None), (none, everything)):
        calls.append([])
        gradients.append([])
        losses = model(batch, presence)
        (losses["MSE"] + losses["CE"]).backward()
    containers = {n for n, x in layers.items() if isinstance(x, paddle.nn.LayerList)}
    assert sorted(calls[0]) == sorted(set(layers) - containers)
    assert sorted(gradients[0]) == sorted(trained)
    for of_others in (calls[1:], gradients[1:]):
        assert of_others[0] == of_others[1] == of_others[2]
    assert calls[1] == calls[0]
    assert gradients[1] == gradients[0]
    assert len(set(ids)) == 1
    # Two cameras, two samples, three frames; goals only in layouts that have them.
    assert frames == [16, 16, 12, 16]


def test_what_is_laid_out_needs_a_field():
    model, batch = golden_model(), without_optional_parts(golden_batch())
    del batch["metadata_tokens"]
    with pytest.raises(
        ValueError, match=r"\['metadata'\] are to be laid out, but the batch has no"
    ):
        model(batch, Presence(True, True, True))


def test_presence_is_that_of_any_sample():
    batch = golden_batch()
    batch["metadata_masks"][:] = False
    batch["response_masks"][1] = False
    batch["subgoal_img_masks"] = [np.zeros(2, bool), np.array([False, True])]
    assert presence_of(batch) == Presence(True, False, True)
    del batch["response_masks"], batch["subgoal_img_masks"]
    assert presence_of(batch) == Presence(False, False, False)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("presence", [Presence(True, False, True), Presence(False, False, False)])
def test_prefix_is_laid_out_as_described(presence, training):
    model, batch = golden_model(), as_tensors(golden_batch())
    prefix = model.prefix(batch, presence, training)
    sizes = {
        "videos": 8, "language": 9, "state": 3, "response": 6, "metadata": 7, "subgoals": 8,
        "actions": 5,
    }  # fmt: skip
    chosen = [block for block in PREFIX_BLOCKS if presence.has(block, training)]
    lengths = [sizes.get(b.name) or len(model.label_ids[b.text]) for b in chosen]
    assert prefix.embs.shape == [2, sum(lengths), 64]
    tail = len(model.label_ids["Action: "]) + 5 if training else 0
    assert prefix.num_seen == sum(lengths) - tail
    begin = 0
    for block, length in zip(chosen, lengths, strict=True):
        alone = model.prefix.embed_blocks(batch, [block, *PREFIX_BLOCKS[:2]])[block.name]
        part = prefix.embs[:, begin : begin + length]
        np.testing.assert_allclose(part.numpy(), alone.numpy(), atol=1e-6)
        begin += length


def test_steps_given_in_advance_are_kept():
    model, batch = golden_model(max_delay=3), golden_batch()
    batch["delay"] = np.array([0, 2])
    noisy = model.noisy_actions(as_tensors(batch))
    assert (noisy.x_t.numpy()[1, :2] == batch["actions"][1, :2]).all()
    assert (noisy.time.numpy() == 0).tolist() == [[False] * 6, [True, True] + [False] * 4]
    settled = np.random.default_rng(0).standard_normal((2, 6, 7)).astype(np.float32)
    del batch["delay"]
    chunk = model.sample_actions(batch, batch["noise"], 2, settled).numpy()
    assert (chunk[:, :2] == settled[:, :2]).all()
    other = settled.copy()
    other[:, 2:] = 0
    assert (model.sample_actions(batch, batch["noise"], 2, other).numpy() == chunk).all()


def test_delays_are_drawn_up_to_the_maximum():
    model, batch = golden_model(max_delay=2), as_tensors(golden_batch())
    found = {model.noisy_actions(batch).is_delayed.sum(axis=1)[0].item() for _ in range(40)}
    assert found == {0, 1, 2}


def test_euler_steps_run_from_noise_to_actions():
    assert [round(float(t), 5) for t in times(5)] == [1.0, 0.8, 0.6, 0.4, 0.2]
    assert all(len(times(n)) == n for n in (1, 3, 7, 10, 100))


def test_times_follow_the_beta_distribution():
    paddle.seed(0)
    time = draw_time(20000).numpy()
    assert time.min() >= 0.001
    assert time.max() <= 1.0
    # Beta(1.5, 1) has mean 0.6 and distribution x^1.5.
    np.testing.assert_allclose(time.mean(), 0.001 + 0.999 * 0.6, atol=0.01)
    np.testing.assert_allclose((time < 0.001 + 0.999 * 0.25).mean(), 0.125, atol=0.01)


def test_each_group_has_projections_of_its_own():
    model = golden_model(per_group_projection=True, dataset_names=["a", "b", "c"])
    batch = golden_batch()
    batch["group_index"] = np.array([2, 0])
    _, grads = losses_and_gradients(model, batch)
    for name in ("prefix.state_proj", "suffix.action_in_proj", "action_out_proj"):
        used = np.abs(grads[f"{name}.linear.weight"]).sum(axis=(1, 2)) > 0
        assert used.tolist() == [True, False, True], name
    losses = [model(batch)["MSE"].item()]
    for index in ([0, 0], None):
        batch["group_index"] = None if index is None else np.array(index)
        losses.append(model(batch)["MSE"].item())
    assert losses[0] != losses[1] == losses[2]
    shapes = {i.key: i.stored_shape for i in model.stored_parameters()}
    assert shapes["state_proj.weight"] == (3, 64, 5)
    assert shapes["action_out_proj.bias"] == (3, 7)
    stored = np.arange(24.0).reshape(2, 3, 4)
    layout = GroupWeights()
    assert (layout.to_stored(layout.to_parameter(stored)) == stored).all()
    assert layout.to_parameter(stored)[1, 2, 0] == stored[1, 0, 2]


def test_fresh_projections_are_as_wide_as_the_originals():
    paddle.seed(0)
    for num_groups in (None, 2):
        weight = GroupedProjection(300, 200, num_groups).linear.weight.numpy()
        np.testing.assert_allclose(weight.std(), (3 * 300) ** -0.5, rtol=0.02)


def test_padding_rows_of_tables_learn_nothing():
    model, batch = golden_model(), golden_batch()
    batch["lang_tokens"][0, 0] = batch["discrete_actions"][1, 2] = 0
    tables = ("prefix.embed_tokens.table.weight", "prefix.discrete_action_embedding.table.weight")
    _, grads = losses_and_gradients(model, batch)
    before = losses_and_gradients(model, batch)[0]
    for name in tables:
        assert np.abs(grads[name][0]).sum() == 0
        assert np.abs(grads[name]).sum() > 0
    with paddle.no_grad():
        # The forward pass still reads the row.
        table = model.prefix.embed_tokens.weight
        table[0] = table[0] + 1.0
    assert losses_and_gradients(model, batch)[0] != before


def test_labels_and_lengths_are_checked():
    config = golden_model().config
    labels = {label: [5] for label in LABELS} | {"Subgoal: ": []}
    with pytest.raises(ValueError, match=r"no token ids for the labels \['Subgoal: '\]"):
        PI07LowLevelFlowMatching(config, labels)
    batch = golden_batch()
    batch["discrete_actions"] = batch["discrete_actions"][:, :4]
    with pytest.raises(ValueError, match="4 tokens a sample; discrete_action_max_length is 5"):
        golden_model()(batch)


@pytest.mark.parametrize(("implementation", "window"), [("eager", 0), ("sdpa", 0), ("eager", 5)])
def test_the_last_layer_runs_for_the_rows_that_the_token_loss_reads(implementation, window):
    model, batch, rows = golden_model(), golden_batch(), []
    if window:
        model = golden_model(vlm_config=with_window(model.config, window).vlm_config)
    model.decoder.attention_implementation = implementation
    last = model.decoder.layers[-1].backbone_layer.mlp
    hook = last.register_forward_post_hook(lambda *call: rows.append(call[2].shape[0]))
    found = losses_and_gradients(model, batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "training_view", model.prefix_view)
        wanted = losses_and_gradients(model, batch)
    hook.remove()
    length = batch["lang_tokens"].shape[0] * model.config.discrete_action_max_length
    assert rows[0] == length < rows[1]
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
    assert found[1].keys() == wanted[1].keys()
    atol = 1e-6 * max(np.abs(gradient).max() for gradient in wanted[1].values())
    for name, gradient in wanted[1].items():
        np.testing.assert_allclose(found[1][name], gradient, atol=atol, err_msg=name)
