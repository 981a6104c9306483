"""Which prompts a generation has: TRL's order, from a seed alone.

An epoch is a permutation of the prompts, cut into generations; those that fill none are left out.

Source: TRL's RepeatSampler; `torch.randperm` on a CPU, which it calls.
"""

from collections.abc import Iterator

import numpy as np


def generations(
    num_prompts: int, prompts_per_generation: int, seed: int, is_shuffled: bool = True
) -> Iterator[list[int]]:
    """Numbers of the prompts of each generation, epoch after epoch without end.

    Raises:
        ValueError: there are fewer prompts than a generation has.
    """
    if num_prompts < prompts_per_generation:
        raise ValueError(
            f"data.train has {num_prompts} prompts and a generation {prompts_per_generation}, so "
            "that there is no step: give more prompts, or lower train.per_device_train_batch_size "
            "or grpo.steps_per_generation"
        )
    draws = np.random.RandomState(seed)
    while True:
        order = list(range(num_prompts))
        for place in range(num_prompts - 1 if is_shuffled else 0):
            # A draw of all 32 bits is the Mersenne Twister's own.
            drawn = int(draws.randint(1 << 32, dtype=np.uint32))
            other = place + drawn % (num_prompts - place)
            order[place], order[other] = order[other], order[place]
        for begin in range(0, num_prompts - prompts_per_generation + 1, prompts_per_generation):
            yield order[begin : begin + prompts_per_generation]
