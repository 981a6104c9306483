"""The high-level planner: its model, texts in and texts out, and its files.

Guarantees: cached greedy decoding equals uncached predictions token by token, also after padding,
which follows the end token and which later tokens do not see; a token writes its own keys only;
losses are means over all tokens but the first of each segment; metadata is always embedded, and
laid out if any sample or another rank has it; the prompt has task, memory and the state's bins,
targets end with EOS; a saved planner is the same planner, and OpenTau's files are read; inputs and
labels that are missing or do not fit are refused by name.
"""

import json

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

from paddle_vl import PI07HighLevelPlanner
from paddle_vl.families.pi07.config import PI07PlannerConfig
from paddle_vl.families.pi07.decoder import block_mask, prefix_positions
from paddle_vl.families.pi07.flow import as_tensors
from paddle_vl.families.pi07.planner import PI07HighLevelPlannerModel, _Reader
from paddle_vl.families.pi07.prefix import Presence, presence_of
from paddle_vl.families.policy.model_inputs import planner_targets, state_texts
from paddle_vl.families.policy.tokenizers import PromptTokenizer
from paddle_vl.nn import head_loss, placement
from tests.support.gpu_stubs.pretended import pretended_gpu
from tests.support.operators import recorded_operators
from tests.support.pi07_golden import (
    case,
    character_tokenizer,
    config_values,
    golden_planner,
    group_statistics,
    with_window,
)

BOS, NO_END = 2, 10_000
MEMORY, RESPONSE = 6, 5


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


@pytest.mark.parametrize("window", [0, 5])
def test_decoding_equals_the_whole_model(window):
    model, batch = golden_planner(), make_batch()
    if window:
        model = golden_planner(vlm_config=with_window(model.config, window).vlm_config)
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


@pytest.mark.parametrize("window", [0, 5])
def test_a_token_writes_its_own_keys_only(window):
    """By operators, where views are not copied, as on a GPU: the second token makes as many values
    as the first but for a place in each mask, and none as large as a layer's keys."""
    paddle.set_flags({"FLAGS_use_stride_kernel": True})
    model, batch = golden_planner(), make_batch()
    if window:
        model = golden_planner(vlm_config=with_window(model.config, window).vlm_config)
    del batch["memory_tokens"], batch["response_tokens"]
    text = model.config.vlm_config.gemma3_config.text_config
    ids, is_real, made = np.full((2, 1), BOS), np.array([[True], [False]]), []
    new_keys = 2 * text.num_key_value_heads * text.head_dim
    with pretended_gpu():
        prefix = model.prefix(as_tensors(batch), presence_of(batch), training=False)
        reader = _Reader(model, prefix, 2)
        for _ in range(2):
            with recorded_operators() as operators:
                reader.read(ids, is_real)
            written = [x.arguments[0].size for x in operators if x.name == "assign_out_"]
            assert written == [new_keys] * 2 * text.num_hidden_layers
            made.append([x.new_elements for x in operators])
            assert max(made[-1]) < new_keys * prefix.pad_masks.shape[1]
    growth = [after - before for before, after in zip(*made, strict=True)]
    assert set(growth) == {0, 2, 2 * text.num_attention_heads}


def test_padding_follows_the_end_and_is_not_seen():
    model, batch = golden_planner(), make_batch()
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
    model, batch = golden_planner(), make_batch()
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
    plain = placement.F.cross_entropy

    def measured(logits, *args, **kwargs):
        largest.append(logits.shape[0])
        return plain(logits, *args, **kwargs)

    monkeypatch.setattr(placement.F, "cross_entropy", measured)
    monkeypatch.setattr(head_loss, "CHUNK_LOGITS", 4000)
    for given in (batch, batch | planner_targets(batch)):
        model = golden_planner()
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


def test_metadata_is_embedded_once_whether_laid_out_or_not():
    model, batch = golden_planner(), make_batch()
    lengths = []
    table, prefix = model.prefix.embed_tokens, model.prefix
    # One sample with metadata suffices.
    batch["metadata_masks"][0] = False
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
    model = golden_planner()
    model(make_batch())["CE"].backward()
    assert not any("expert" in name for name, _ in model.named_parameters())
    assert all(p.grad is not None for p in model.parameters() if not p.stop_gradient)


def test_no_engine_settings_are_the_default_ones():
    assert PI07PlannerConfig.from_dict({"vlm_config": None}) == PI07PlannerConfig()


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"\['chunk_size'\]"):
        golden_planner(chunk_size=4)
    with pytest.raises(ValueError, match="no token ids for the labels"):
        PI07HighLevelPlannerModel(golden_planner().config, {})


def test_an_image_that_is_masked_has_no_effect():
    model, batch = golden_planner(), make_batch()
    before = model(batch)["CE"].item()
    batch["images"][1][1] = 0.0
    assert model(batch)["CE"].item() == pytest.approx(before, rel=1e-6)
    batch["images"][1][0] = 0.0
    assert model(batch)["CE"].item() != pytest.approx(before, rel=1e-6)


def values(**changes) -> dict:
    low_level = config_values(case("18_policy_level")[0])
    kept = ("input_features", "normalization_mapping", "resize_imgs_with_padding", "vlm_config")
    lengths = {"memory_max_length": 8, "response_max_length": 6, "prompt_max_length": 90}
    own = {name: low_level[name] for name in kept} | lengths | changes
    own["vlm_config"] = own["vlm_config"] | {"disable_action_expert": True}
    return own


def planner(**changes) -> PI07HighLevelPlanner:
    config = PI07PlannerConfig.from_dict(values(**changes))
    paddle.seed(0)
    return PI07HighLevelPlanner(config, character_tokenizer(), group_statistics())


def batch(**changes) -> dict:
    """Two samples with changed entries; None removes one."""
    random = np.random.default_rng(1)
    made = {
        "state": np.stack([g["state"]["min"] for g in group_statistics()]),
        "camera0": random.uniform(0, 1, (2, 3, 40, 56)).astype(np.float32),
        "camera1": random.uniform(0, 1, (2, 3, 56, 56)).astype(np.float32),
        "prompt": ["go", "stay"],
        "past_memory": ["", "went"],
        "next_memory": ["went", "went far away"],
        "response": ["stop", ""],
        "dataset_index": [0, 1],
    }
    return {name: value for name, value in (made | changes).items() if value is not None}


def texts(inputs: dict, name: str) -> list[str]:
    rows = zip(inputs[f"{name}_tokens"], inputs[f"{name}_masks"], strict=True)
    tokenizer = character_tokenizer()
    return [tokenizer.decode(ids[mask], skip_special_tokens=False) for ids, mask in rows]


def joined(text: str) -> str:
    """Text without the spaces that decoding puts between tokens."""
    return text.replace(" ", "").replace("<bos>", "[").replace("<eos>", "]")


def test_states_are_texts_of_bins():
    states = np.array([[-1.0, 0.0, 1.0], [-2.0, -0.999, 0.5]])
    assert state_texts(states) == ["0 128 255", "0 0 192"]


def test_inputs_have_task_memory_state_and_targets():
    inputs = planner().inputs.training_inputs(batch(speed=[3, 4], speed_is_pad=[False, True]))
    # The smallest state of its group is in bin 0; the last value is constant and in the middle bin.
    assert [joined(text) for text in texts(inputs, "lang")] == [
        "[Task:go,PastMemory:,State:0000127,",
        "[Task:stay,PastMemory:went,State:0000127,",
    ]
    assert [joined(text) for text in texts(inputs, "memory")] == ["[went]", "[wentfa"]
    assert [joined(text) for text in texts(inputs, "response")] == ["[stop]", "[]"]
    assert [joined(text) for text in texts(inputs, "metadata")] == ["Metadata:Speed:3,", ""]
    assert [image.shape for image in inputs["images"]] == [(2, 3, 56, 56)] * 2
    # The letterbox's black borders in the tower's value range.
    assert (inputs["images"][0][:, :, :16] == -1).all()
    assert inputs["images"][1].min() < -0.9


def test_losses_are_the_models():
    made = planner()
    made.eval()
    losses = made(batch())
    assert losses["MSE"].item() == 0
    expected = made.model(made.inputs.training_inputs(batch()))["CE"].item()
    assert losses["CE"].item() == expected
    assert np.isfinite(expected)


def test_plans_are_texts():
    made = planner()
    written = np.array([[2, 52, 53, 1, 0, 0], [2, 54, 55, 56, 57, 58]])
    made.model.generate = lambda inputs, bos_id, eos_id: (
        written,
        written[::-1] if (bos_id, eos_id) == (2, 1) and "memory_tokens" not in inputs else None,
    )
    plan = made.plan(batch(next_memory=None, response=None))
    assert [joined(text) for text in plan.memory] == ["OP", "QRSTU"]
    assert [joined(text) for text in plan.response] == ["QRSTU", "OP"]


def test_planning_has_no_dropout():
    made = planner()
    made.train()
    plan = made.plan(batch())
    assert len(plan.memory) == len(plan.response) == 2
    assert not made.model.training


def test_engine_has_no_expert_unless_the_file_says_so():
    config = PI07PlannerConfig.from_dict({"vlm_config": {"dropout": 0.0}})
    assert config.vlm_config.disable_action_expert
    assert config.dropout == 0.0
    written = PI07PlannerConfig().to_dict() | {"freeze_vision_encoder": False}
    # OpenTau writes the default at the other level.
    assert PI07PlannerConfig.from_dict(written).vlm_config.freeze_vision_encoder is False


def test_saved_planner_is_the_same_planner(tmp_path):
    made = planner(dataset_names=["a", "b"])
    made.save_pretrained(tmp_path)
    again = PI07HighLevelPlanner.from_pretrained(tmp_path)
    made.eval()
    assert again(batch())["CE"].item() == made(batch())["CE"].item()
    assert again.config.config_version == 1
    assert json.loads((tmp_path / "config.json").read_text())["type"] == "pi07_high_level"


def test_checkpoint_is_read_as_its_configuration_says(tmp_path):
    planner().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps(written | {"config_version": None}))
    assert PI07HighLevelPlanner.from_pretrained(tmp_path).config.config_version == 0
    file.write_text(json.dumps(written | {"skip_normalization_weights": True}))
    others = group_statistics()[::-1]
    again = PI07HighLevelPlanner.from_pretrained(tmp_path, statistics=others)
    rows = again.normalizers["normalize_inputs"].tensors["buffer_state.min"]
    assert (rows[0] == others[0]["state"]["min"]).all()
    assert not again.config.skip_normalization_weights


def test_files_of_the_original_are_read(tmp_path):
    made = planner()
    made.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "normalize_inputs.buffer_state.min" in tensors
    engine = "model.gemma3_with_expert"
    # The table has two names, of which the other one is read if it is there.
    table = tensors[f"{engine}.gemma3.lm_head.weight"]
    tensors |= {
        f"{engine}.da_head.bias": np.zeros(3),
        f"{engine}.gemma3.lm_head.weight": np.ones(2),
        f"{engine}.gemma3.model.language_model.embed_tokens.weight": table,
    }
    save_file(tensors, file)
    again = PI07HighLevelPlanner.from_pretrained(tmp_path)
    made.eval()
    assert again(batch())["CE"].item() == made(batch())["CE"].item()
    del tensors[f"{engine}.gemma3.model.language_model.norm.weight"]
    save_file(tensors | {"model.extra": np.zeros(1)}, file)
    with pytest.raises(ValueError, match=r"1 missing: .*norm\.weight; 1 unexpected: extra"):
        PI07HighLevelPlanner.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"state": None}, "no 'state'"),
        ({"state": np.zeros((2, 33), np.float32)}, r"\[2, 33\].*32 dims"),
        ({"state": np.zeros((2, 3, 5), np.float32)}, r"\[2, 3, 5\]"),
        ({"past_memory": None}, "no 'past_memory'; its entries are"),
        ({"next_memory": None}, "no 'next_memory'"),
        ({"response": ["one"]}, "'response' has 1 texts for a batch of 2"),
        ({"camera0": None}, r"lacks the cameras \['camera0'\]"),
        ({"dataset_index": [0, 2]}, r"dataset_index is \[0, 2\]"),
    ],
)
def test_bad_batches_are_named(changes, named):
    with pytest.raises(ValueError, match=named):
        planner()(batch(**changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_obs_steps": 2}, "n_obs_steps is 2; it must be 1"),
        ({"dataset_names": ["a"]}, r"statistics of 2 groups, dataset_names has \['a'\]"),
        ({"subtask_indicator_max_length": 4}, "the tokenizer makes 9 tokens of 'Subtask: '"),
    ],
)
def test_planners_that_do_not_fit_together_are_named(changes, named):
    with pytest.raises(ValueError, match=named):
        planner(**changes)


def test_tokenizer_without_special_tokens_is_named():
    made = planner()
    made.tokenizer = PromptTokenizer(Tokenizer(models.WordLevel({"a": 0}, "a")))
    with pytest.raises(ValueError, match="no token '<eos>'"):
        made.plan(batch())
