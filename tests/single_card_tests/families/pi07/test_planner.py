"""The high-level planner's model.

Guarantees: cached greedy decoding equals uncached predictions token by token, also after padding;
after the end token there is padding, which later tokens do not see; losses are means over all
tokens but the first of each segment; metadata is always embedded, and laid out if any sample or
another rank has it; labels of the wrong length are refused; there is no expert.
"""

import numpy as np
import pytest

from paddle_vl.checkpoint.reading import fill_parameters
from paddle_vl.checkpoint.safetensors_io import read_header
from paddle_vl.families.pi07.checkpoint_map import engine_keys
from paddle_vl.families.pi07.config import PI07PlannerConfig
from paddle_vl.families.pi07.decoder import block_mask, prefix_positions
from paddle_vl.families.pi07.flow import as_tensors
from paddle_vl.families.pi07.objective import with_target_rows
from paddle_vl.families.pi07.planner import PI07HighLevelPlannerModel
from paddle_vl.families.pi07.prefix import Presence
from paddle_vl.nn import objective
from tests.support.pi07_golden import CASES, case

BOS, NO_END = 2, 10_000
MEMORY, RESPONSE = 6, 5


def make_model(**settings) -> PI07HighLevelPlannerModel:
    given = case("01_all_fields")[0]["config"]
    vlm = given["vlm"] | {
        "gemma3_config": given["gemma3"],
        "gemma_expert_config": given["expert"],
        "disable_action_expert": True,
    }
    config = PI07PlannerConfig.from_dict(
        {"vlm_config": vlm, "memory_max_length": MEMORY, "response_max_length": RESPONSE} | settings
    )
    model = PI07HighLevelPlannerModel(config, given["indicator_token_ids"])
    stored = engine_keys(read_header(CASES / "weights_A.safetensors"))
    fill_parameters(model.stored_parameters(), stored)
    return model


def make_batch() -> dict:
    rng = np.random.default_rng(0)
    batch = {
        "images": [rng.uniform(-1, 1, (2, 3, 56, 56)).astype(np.float32) for _ in range(2)],
        "img_masks": [np.array([True, True]), np.array([True, False])],
    }
    for name, length in (("lang", 9), ("metadata", 7), ("memory", MEMORY), ("response", RESPONSE)):
        batch[f"{name}_tokens"] = rng.integers(3, 250, (2, length))
        batch[f"{name}_masks"] = np.ones((2, length), bool)
    batch["lang_masks"][1, 6:] = False
    return batch


def test_decoding_equals_the_whole_model():
    model, batch = make_model(), make_batch()
    memory, response = model.generate(batch, BOS, NO_END)
    assert memory.shape == (2, MEMORY)
    assert response.shape == (2, RESPONSE)
    assert (memory[:, 0] == BOS).all()
    assert (response[:, 0] == BOS).all()
    batch |= {"memory_tokens": memory, "response_tokens": response}
    prefix = model.prefix(as_tensors(batch), Presence(False, True, False), training=True)
    rows = whole_rows(model, prefix)
    label = len(model.label_ids["Subtask: "])
    for tokens, behind in ((memory, label + RESPONSE), (response, 0)):
        end = rows.shape[1] - behind
        wanted = model.head(rows[:, end - tokens.shape[1] : end - 1]).argmax(axis=-1)
        assert (tokens[:, 1:] == wanted.numpy()).all()


def whole_rows(model, prefix):
    """Decoding without a cache: every step runs the complete sequence."""
    visible = block_mask(prefix.pad_masks, prefix.att_masks)
    view = model.decoder.view(prefix_positions(prefix.pad_masks), visible)
    return model.decoder(prefix.embs, prefix_view=view).prefix


def test_padding_follows_the_end_and_is_not_seen():
    model, batch = make_model(), make_batch()
    memory, _ = model.generate(batch, BOS, NO_END)
    end = int(memory[0, 1])
    stopped, after = model.generate(batch, BOS, end)
    assert stopped[0].tolist() == [BOS, end, 0, 0, 0, 0]
    # The same batch with the memory ending at this token.
    batch |= {
        "memory_tokens": stopped,
        "memory_masks": stopped != 0,
        "response_tokens": after,
        "response_masks": after != 0,
    }
    prefix = model.prefix(as_tensors(batch), Presence(False, True, False), training=True)
    rows = whole_rows(model, prefix)[:, -RESPONSE:-1]
    assert after[0, 1] == model.head(rows)[0, 0].argmax().item()


def test_losses_are_means_over_all_slots():
    model, batch = make_model(), make_batch()
    batch["memory_masks"][0, 3:] = False
    losses = model(batch)
    prefix = model.prefix(as_tensors(batch), Presence(False, True, False), training=True)
    rows, total = whole_rows(model, prefix), 0.0
    label = len(model.label_ids["Subtask: "])
    for name, behind in (("memory", label + RESPONSE), ("response", 0)):
        tokens, masks = batch[f"{name}_tokens"], batch[f"{name}_masks"]
        end = rows.shape[1] - behind
        logits = model.head(rows[:, end - tokens.shape[1] : end - 1]).numpy().astype(np.float64)
        picked = np.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        found = np.log(np.exp(logits).sum(-1)) - picked
        total += (found * masks[:, 1:]).mean()
    np.testing.assert_allclose(losses["CE"].item(), total, rtol=1e-5)
    assert losses["MSE"].item() == 0


@pytest.mark.parametrize("untrained", [frozenset(), frozenset({"CE_memory"})], ids=["all", "part"])
def test_losses_from_the_slots_with_a_token_are_those_of_all_slots(untrained, monkeypatch):
    """The head runs for tokens that are not masked; a loss without a weight has no gradients."""
    batch, found, largest = make_batch(), [], []
    batch["memory_masks"][0, 3:] = False
    batch["response_masks"][:] = False
    plain = objective.F.cross_entropy

    def measured(logits, *args, **kwargs):
        largest.append(logits.shape[0])
        return plain(logits, *args, **kwargs)

    monkeypatch.setattr(objective.F, "cross_entropy", measured)
    monkeypatch.setattr(objective, "CHUNK_LOGITS", 4000)
    for given in (batch, with_target_rows(batch)):
        model = make_model()
        model.untrained_losses = untrained
        largest.append(0)
        losses = model(given)
        (losses["CE_memory_sum"] + losses["CE_response_sum"]).backward()
        arrays = {name: losses[name].numpy() for name in ("CE_memory_sum", "CE_response_sum")}
        found.append(
            arrays | {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
        )
    assert sum(largest) == 2 * (MEMORY + RESPONSE - 2) + (2 + MEMORY - 1) + 1
    assert set(found[0]) == set(found[1])
    for name, array in found[0].items():
        # A constant added to all keys changes no probability: the gradient is 0 but for rounding.
        atol = 1e-7 if name.endswith("k_proj.bias") else 1e-5 * np.abs(array).max()
        np.testing.assert_allclose(found[1][name], array, rtol=0, atol=atol, err_msg=name)


def test_metadata_is_laid_out_if_any_sample_has_it():
    model, batch = make_model(), make_batch()
    batch["metadata_masks"][0] = False
    lengths = []
    for change in (None, "metadata_masks"):
        if change:
            batch[change][:] = False
        seen = []
        hook = model.prefix.register_forward_post_hook(
            lambda *call, kept=seen: kept.append(call[2])
        )
        model(batch)
        hook.remove()
        lengths.append(seen[0].embs.shape[1])
    assert lengths[0] - lengths[1] == 7 + len(model.label_ids[";\n "])


def test_metadata_is_embedded_once_whether_laid_out_or_not():
    model, batch = make_model(), make_batch()
    lengths = []
    table, prefix = model.prefix.embed_tokens, model.prefix
    table.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
    prefix.register_forward_post_hook(lambda *call: lengths.append(call[2].embs.shape[1]))
    losses = [model(batch)["CE"].item()]
    batch["metadata_masks"][:] = False
    nothing = Presence(False, False, False)
    losses += [model(batch, nothing)["CE"].item(), model(batch)["CE"].item()]
    model(batch, Presence(False, True, False))
    looked_up, laid_out = lengths[::2], lengths[1::2]
    assert len(looked_up) == 4
    assert len(set(looked_up)) == 1
    assert laid_out[0] == laid_out[3] > laid_out[1] == laid_out[2]
    assert losses[0] != losses[1] == losses[2]
    del batch["metadata_tokens"]
    with pytest.raises(ValueError, match="the batch has no field for them"):
        model(batch, Presence(False, True, False))


def test_gradients_reach_all_trained_parameters():
    model = make_model()
    model(make_batch())["CE"].backward()
    assert not any("expert" in name for name, _ in model.named_parameters())
    assert all(p.grad is not None for p in model.parameters() if not p.stop_gradient)


def test_no_engine_settings_are_the_default_ones():
    assert PI07PlannerConfig.from_dict({"vlm_config": None}) == PI07PlannerConfig()


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="subtask_indicator_max_length is 3, but the tokenizer"):
        make_model(subtask_indicator_max_length=3)
    with pytest.raises(ValueError, match="n_obs_steps is 2; it must be 1"):
        make_model(n_obs_steps=2)
    with pytest.raises(ValueError, match=r"\['chunk_size'\]"):
        make_model(chunk_size=4)
    with pytest.raises(ValueError, match="dropout is 0.5 in .* and 0.0 in vlm_config"):
        make_model(dropout=0.5)
    with pytest.raises(ValueError, match="no token ids for the labels"):
        PI07HighLevelPlannerModel(make_model().config, {})


def test_an_image_that_is_masked_has_no_effect():
    model, batch = make_model(), make_batch()
    before = model(batch)["CE"].item()
    batch["images"][1][1] = 0.0
    assert model(batch)["CE"].item() == pytest.approx(before, rel=1e-6)
    batch["images"][1][0] = 0.0
    assert model(batch)["CE"].item() != pytest.approx(before, rel=1e-6)
