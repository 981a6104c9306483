"""Pipeline stages of pi07's models, run one after the other on one device.

Guarantees: stages give the unsharded model's losses and every gradient for any cut of the layers,
any layout, with insulation and without, with a frozen tower, recomputation and the same dropout; a
stage knows the size of its input from host arrays; with a given presence, a batch on the device is
not read back; a stage has only its own parameters, drawn as on one device and read from a
checkpoint; the planner's last stage has a copy of the token table, and both gradients add up; a
batch without noise is refused; costs count tower, layers and heads.
"""

from collections.abc import Callable
from itertools import product

import numpy as np
import paddle
import pytest
from paddle import Tensor

from paddle_vl.families.pi07.checkpoint_map import PolicyCheckpoint, write_policy
from paddle_vl.families.pi07.flops import layer_costs
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching, PolicyModel, as_tensors
from paddle_vl.families.pi07.pipeline import PI07Stage
from paddle_vl.families.pi07.planner import PI07HighLevelPlanner
from paddle_vl.families.pi07.policy import PI07LowLevelPolicy
from paddle_vl.families.pi07.prefix import Presence, presence_of
from paddle_vl.nn.parameter_table import Tie
from paddle_vl.nn.placement import Placement, SingleDevicePlacement, StageLayers
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.testing import record_host_reads
from tests.single_card_tests.families.pi07 import test_planner as planner
from tests.support.pi07_golden import (
    CharacterTokenizer,
    FirstValueActionTokenizer,
    golden_batch,
    golden_model,
    golden_planner,
    policy_config,
)

NOTHING, EVERYTHING = Presence(False, False, False), Presence(True, True, True)
FIRST = StageLayers(layers=frozenset({0, 1}), head=False)
LAST = StageLayers(embedding=False, layers=frozenset({2}))


def low_level_batch() -> dict:
    return golden_batch() | {"delay": np.array([0, 1])}


def ranges(ends: list[int]) -> list[range]:
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def through(stages: list[PI07Stage], batch: dict) -> dict:
    """Losses of the last stage."""
    rows = None
    for stage in stages:
        if rows is not None:
            assert stage.input_shape(batch) == tuple(rows.shape)
        rows = stage(batch, rows)
    return rows


def gradients_of(model: PolicyModel, loss: Tensor | None = None) -> dict[str, np.ndarray | None]:
    if loss is not None:
        loss.backward()
    found = {n: None if p.grad is None else p.grad.numpy() for n, p in model.hf_named_parameters()}
    model.clear_gradients()
    return found


def assert_same_gradients(
    found: dict, wanted: dict, share: float = 2e-6, least: float = 1e-5
) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] is None) == (gradient is None), name
        if gradient is not None:
            error = np.abs(found[name] - gradient).max()
            assert error <= share * max(np.abs(gradient).max(), least), name


@pytest.mark.parametrize("ends", [[1, 2, 3], [2, 3]], ids=str)
@pytest.mark.parametrize("presence", [None, NOTHING, Presence(False, True, False)], ids=str)
@pytest.mark.parametrize("insulated", [True, False], ids=["insulated", "open"])
@pytest.mark.parametrize("recomputed", [True, False], ids=["recomputed", "kept"])
def test_stages_in_a_row_equal_the_whole_low_level_model(ends, presence, insulated, recomputed):
    # The tower is trained with one of the cuts.
    model = golden_model(knowledge_insulation=insulated, freeze_vision_encoder=len(ends) == 2)
    batch = low_level_batch()
    whole = model(batch, presence, per_sample=True)
    wanted = gradients_of(model, whole["MSE"] + 2 * whole["CE"])
    if recomputed:
        recompute_layers([*model.decoder_layers, *model.vision_blocks])
    stages = [PI07Stage(model, layers) for layers in ranges(ends)]
    losses = through(stages, batch if presence is None else batch | {"presence": presence})
    assert losses.keys() == whole.keys()
    for name in ("MSE", "CE"):
        np.testing.assert_allclose(losses[name].item(), whole[name].item(), rtol=1e-6)
    assert_same_gradients(gradients_of(model, losses["MSE"] + 2 * losses["CE"]), wanted)


def test_recomputed_stages_drop_the_same():
    found = []
    for recomputed in (False, True, False):
        model = golden_model(dropout=0.3)
        if recomputed:
            recompute_layers([*model.decoder_layers, *model.vision_blocks])
        paddle.seed(7 + len(found) // 2)
        stages = [PI07Stage(model, layers) for layers in ranges([1, 3])]
        losses = through(stages, low_level_batch())
        found.append(gradients_of(model, losses["MSE"] + losses["CE"]))
    assert_same_gradients(found[1], found[0])
    with pytest.raises(AssertionError):
        assert_same_gradients(found[2], found[0])


@pytest.mark.parametrize("presence", [None, NOTHING])
def test_stages_in_a_row_equal_the_whole_planner(presence):
    model, batch = golden_planner(), planner.make_batch()
    whole = model(batch, presence)
    wanted = gradients_of(model, whole["CE"])
    stages = [PI07Stage(model, layers) for layers in ranges([1, 3])]
    losses = through(stages, batch if presence is None else batch | {"presence": presence})
    np.testing.assert_allclose(losses["CE"].item(), whole["CE"].item(), rtol=1e-6)
    assert_same_gradients(gradients_of(model, losses["CE"]), wanted)


def test_stages_do_not_read_a_batch_back_from_the_device():
    model, batch = golden_model(), low_level_batch()
    stages = [PI07Stage(model, layers) for layers in ranges([1, 3])]
    wanted = through(stages, batch)["MSE"].item()
    on_device = as_tensors(batch) | {"presence": presence_of(batch)}
    with record_host_reads() as reads:
        loss = through(stages, on_device)["MSE"]
    # Kernels for the CPU read masks.
    kernels = ("nn/attention_masks.py", "nn/cpu/")
    assert [place for place in reads if not place.startswith(kernels)] == []
    assert loss.item() == wanted


def test_what_arrives_is_known_for_every_presence():
    model, batch = golden_model(), low_level_batch()
    first, last = (PI07Stage(model, layers) for layers in ranges([2, 3]))
    sizes = set()
    for flags in product([True, False], repeat=3):
        with_presence = batch | {"presence": Presence(*flags)}
        sizes.add(last.input_shape(with_presence))
        assert sizes >= {tuple(first(with_presence).shape)}
    assert len(sizes) == 8


def stage_models(make: Callable[[Placement], PolicyModel]) -> list[PolicyModel]:
    return [make(SingleDevicePlacement(held)) for held in (FIRST, LAST)]


def assert_stages_have_their_own(
    models: list[PolicyModel], whole: PolicyModel, shared: set[str]
) -> None:
    held = [dict(model.hf_named_parameters()) for model in models]
    values = dict(whole.hf_named_parameters())
    assert held[0].keys() | held[1].keys() == values.keys()
    assert held[0].keys() & held[1].keys() == shared
    assert [len(model.decoder_layers) for model in models] == [2, 1]
    assert models[0].vision_blocks
    assert not models[1].vision_blocks
    for model, parameters in zip(models, held, strict=True):
        assert model.whole_shapes() == whole.whole_shapes()
        for name, parameter in parameters.items():
            np.testing.assert_array_equal(parameter.numpy(), values[name].numpy(), err_msg=name)


def test_a_stage_draws_its_own_parameters_only():
    def make(placement: Placement | None = None) -> PI07LowLevelFlowMatching:
        paddle.seed(3)
        tokenizers = CharacterTokenizer(), FirstValueActionTokenizer()
        config = policy_config(dataset_names=None)
        return PI07LowLevelPolicy.from_config(config, *tokenizers, placement=placement).model

    assert_stages_have_their_own(stage_models(make), make(), set())


def test_both_copies_of_the_planners_table_make_its_gradient(tmp_path):
    whole, batch = golden_planner(), planner.make_batch()
    write_policy(tmp_path, whole, {})

    def read(placement: Placement) -> PolicyModel:
        with paddle.LazyGuard():
            model = type(whole)(whole.config, whole.label_ids, placement)
        PolicyCheckpoint(tmp_path).fill(model, {}, (), PI07HighLevelPlanner.unused_keys)
        model.materialize_all()
        return model

    models = stage_models(read)
    table = "gemma3_with_expert.gemma3.model.language_model.embed_tokens.weight"
    assert_stages_have_their_own(models, whole, {table})
    copies = [dict(model.hf_named_parameters())[table] for model in models]
    tables = [model.placement.parameter_table for model in models]
    ties = [of_stage[copy].tie for of_stage, copy in zip(tables, copies, strict=True)]
    assert ties == [Tie.OWNER, Tie.COPY]
    wanted = gradients_of(whole, whole(batch)["CE"])
    stages = [PI07Stage(model, r) for model, r in zip(models, ranges([2, 3]), strict=True)]
    through(stages, batch)["CE"].backward()
    summed = copies[0].grad + copies[1].grad
    np.testing.assert_allclose(summed.numpy(), wanted[table], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["noise", "time", "delay"])
def test_a_batch_without_its_draws_is_refused(name):
    batch = low_level_batch()
    del batch[name]
    with pytest.raises(ValueError, match=f"the batch has no {name}: a batch that goes through"):
        PI07Stage(golden_model(), range(3))(batch)


def test_costs_count_tower_layers_and_heads():
    model = golden_model(freeze_vision_encoder=False)
    config, vlm = model.config, model.config.vlm_config
    text, vision, expert = (
        vlm.gemma3_config.text_config,
        vlm.gemma3_config.vision_config,
        vlm.gemma_expert_config,
    )
    layers, before, after = layer_costs(config)
    assert len(layers) == text.num_hidden_layers
    # A token is multiplied once with every weight of a matrix.
    layer = model.decoder_layers[0]
    sizes = {
        half: sum(p.size for p in getattr(layer, half).parameters() if p.ndim == 2)
        for half in ("backbone_layer", "expert_layer")
    }
    cameras = sum(f.type == "VISUAL" for f in config.input_features.values())
    tokens = 2 * cameras * vlm.gemma3_config.mm_tokens_per_image + config.n_obs_steps
    tokens += config.prompt_max_length + config.response_max_length
    tokens += config.metadata_max_length + config.discrete_action_max_length
    wanted = tokens * sizes["backbone_layer"] + config.chunk_size * sizes["expert_layer"]
    assert layers[0] == layers[-1] == wanted
    tower = model.prefix.video_encoder.tower
    matrices = sum(p.size for p in tower.parameters() if p.ndim == 2)
    matrices -= vision.num_patches * vision.hidden_size
    frames = cameras * (config.n_obs_steps + 1)
    suffix = sum(p.size for p in model.suffix.parameters() if p.ndim == 2)
    assert before == frames * vision.num_patches * matrices + config.chunk_size * suffix
    frozen = layer_costs(config.changed(freeze_vision_encoder=True))[1]
    assert frozen - config.chunk_size * suffix == pytest.approx(
        frames * vision.num_patches * matrices / 3
    )
    assert after == (
        config.discrete_action_max_length * model.da_head.weight.size
        + config.chunk_size * expert.hidden_size * config.max_action_dim
    )


def test_costs_of_a_planner_count_its_table_as_the_head():
    config = golden_planner().config
    vlm = config.vlm_config
    text = vlm.gemma3_config.text_config
    written = config.memory_max_length + config.response_max_length
    assert layer_costs(config)[2] == (written - 2) * text.hidden_size * text.vocab_size
