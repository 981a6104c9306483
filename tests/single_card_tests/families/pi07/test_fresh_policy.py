"""Policies built for a run.

Guarantees: with one seed, `from_config` draws the same weights as the class itself, at construction
or when materialized, in the default dtype; `whole_shapes` are those of the checkpoint; a sharded
model is refused where the full one is needed.
"""

import numpy as np
import paddle
import pytest

from paddle_vl.families.pi07.planner import PI07HighLevelPlannerModel
from paddle_vl.families.pi07.policy import PI07LowLevelPolicy
from paddle_vl.nn.placement import SingleDevicePlacement, StageLayers
from tests.single_card_tests.families.pi07.test_planner import make_batch, make_model
from tests.support.pi07_golden import CharacterTokenizer, FirstValueActionTokenizer, policy_config


def tokenizers() -> tuple[CharacterTokenizer, FirstValueActionTokenizer]:
    return CharacterTokenizer(), FirstValueActionTokenizer()


def test_fresh_weights_are_those_that_the_class_draws():
    config, found = policy_config(dataset_names=None), []
    for materialize in (None, True, False):
        paddle.seed(3)
        if materialize is None:
            policy = PI07LowLevelPolicy(config, *tokenizers())
        else:
            policy = PI07LowLevelPolicy.from_config(config, *tokenizers(), materialize=materialize)
            assert all(p._is_initialized() == materialize for p in policy.parameters())
            policy.model.materialize_all()
        found.append({i.key: i.parameter.numpy() for i in policy.model.stored_parameters()})
    for key, value in found[0].items():
        np.testing.assert_array_equal(found[1][key], value, err_msg=key)
        np.testing.assert_array_equal(found[2][key], value, err_msg=key)
    assert policy.whole_shapes() == {
        i.key: i.layout.to_stored(i.of_own(i.parameter.numpy())).shape
        for i in policy.model.stored_parameters()
    }


def test_a_sharded_planner_does_not_generate():
    whole = make_model()
    shard = PI07HighLevelPlannerModel(
        whole.config, whole.label_ids, SingleDevicePlacement(StageLayers(head=False))
    )
    with pytest.raises(ValueError, match="one rank's shard of a model; to generate, load"):
        shard.generate(make_batch(), 2, 1)


def test_a_stage_of_a_policy_does_not_act():
    config = policy_config(dataset_names=None)
    placement = SingleDevicePlacement(StageLayers(embedding=False))
    stage = PI07LowLevelPolicy.from_config(config, *tokenizers(), placement=placement)
    with pytest.raises(ValueError, match="one stage of a pipeline; to act, load the checkpoint"):
        stage.model.sample_actions(make_batch())
