"""Evaluation of a policy's or planner's folder: its losses, and the errors of actions."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from paddle_vl.config.families import FamilyEntry
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.families.base import Evaluation, EvaluationOptions, losses_report
from paddle_vl.families.pi07.objective import PolicyBatchAdapter, PolicyLoss, first_batch
from paddle_vl.families.pi07.recipe import (
    EVALUATION_SEED,
    action_errors,
    check_trainable,
    flow_draws,
    sample_shapes,
)
from paddle_vl.families.policy.demonstrations.dataset import DemonstrationsDataset
from paddle_vl.families.policy.demonstrations.robot_mixture import RobotDemonstrations
from paddle_vl.families.policy.demonstrations.sample import NO_DROPS, DrawnDemonstrations
from paddle_vl.families.policy.model_inputs import PolicyCollator
from paddle_vl.families.policy.robot_settings import folders_among, mixture_of


def build_evaluation(family: FamilyEntry, folder: Path, options: EvaluationOptions) -> Evaluation:
    """Losses, and errors of actions, over all samples; nothing is dropped, noise and times are
    the same every time.

    Raises:
        ValueError: an option about answers, or data that do not fit.
    """
    replace(options, base=None).refuse_answer_options(f"{folder} is a pi07 policy")
    recipe, policy_class = family.recipe_class(), family.model_class()
    config = policy_class.config_class.from_pretrained(folder)
    shapes, files = sample_shapes(config), options.files
    if folders_among(files):
        source = RobotDemonstrations(mixture_of(files), shapes, None, config.dataset_names)
    else:
        source = DemonstrationsDataset(files, shapes, None, config.dataset_names)
    recipe.check_fields(source)
    samples = DrawnDemonstrations(source, NO_DROPS, flow_draws(config), EVALUATION_SEED)
    policy = policy_class.from_pretrained(folder, config=config, base=options.base)
    check_trainable(policy)
    collator = PolicyCollator(policy.inputs)
    loader = PrefetchLoader(
        samples, collator, options.batch_size, shuffle=False, drop_last=False, num_epochs=1
    )
    adapter = PolicyBatchAdapter(partial(first_batch, samples, collator))
    loss, measure = PolicyLoss(recipe.losses), action_errors(policy)
    return Evaluation(policy.model, loss, adapter, loader, losses_report, measure)
