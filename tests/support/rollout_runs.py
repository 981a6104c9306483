"""A tiny run that learns given answers: prompts of conversations, with answers, advantages and
log-probabilities from numbers alone."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.families.vlm.inputs.open_data import open_conversations
from paddle_vl.families.vlm.inputs.rollouts import OLD, SAMPLER, Rollout
from tests.support.preference_runs import write_base
from tests.support.topology_runs import write_mixed_run

GIVEN = "paddle_vl.families.vlm.recipe.VLRecipe._dataset"
ANSWERS = 2


class GivenRollouts:
    """Two answers to each prompt of some data, some without a learned token, or with a tool's."""

    on_bad_sample, source_names = "fail", ()

    def __init__(self, data: Any):
        self.data, self.skipped, self._prompts = data, Counter(), {}
        self.fingerprint, self.files, self.contents = data.fingerprint, data.files, data.contents

    def __len__(self) -> int:
        return ANSWERS * len(self.data)

    def __getitem__(self, number: int) -> Rollout:
        prompt = number // ANSWERS
        if prompt not in self._prompts:
            sample = dict(self.data[prompt])
            labels_L = sample.pop("labels")
            length = int(np.argmax(labels_L != IGNORE_INDEX))
            self._prompts[prompt] = {**sample, "input_ids": sample["input_ids"][:length]}
        rng = np.random.default_rng(number)
        ids_C = rng.integers(5, 200, rng.integers(1, 8))
        is_learned_C = np.ones(len(ids_C), bool)
        if number % 5 == 0:
            is_learned_C[:] = False
        elif number % 3 == 0:
            is_learned_C[1:3] = False
        old_C = rng.normal(-5.6, 0.4, len(ids_C)).astype(np.float32)
        noise_C = rng.normal(0, 0.2, len(ids_C)).astype(np.float32)
        log_probs = {OLD: old_C, SAMPLER: old_C + noise_C}
        advantage = float(rng.normal())
        return Rollout(self._prompts[prompt], ids_C, advantage, is_learned_C, log_probs)


def given_rollouts(recipe: Any, entries: Sequence[Any], measures: bool = False) -> GivenRollouts:
    """What `GIVEN` is replaced with."""
    config = recipe.config
    data = open_conversations(entries, config.data, recipe.processor, config.train.seed)
    return GivenRollouts(data)


def write_rollout_run(folder: Path, model: dict[str, Any]) -> Path:
    """Prompts with two images, one or none; the base model in `base`."""
    run_file = write_mixed_run(folder, 12, model)
    write_base(run_file, model)
    return run_file
