"""Feeds a run that learns from rewards: prompts are answered by the trained model, scored, and
learned, one generation after another.

A generation has the answers of all ranks to some prompts, which several updates may learn. Between
updates nothing of the next one is prefetched, as its answers are those of other weights. Every rank
knows numbers, rewards and advantages of all answers; the answers themselves stay with the data rank
that sampled them. An update has the answers to the same prompts under every topology.

Shapes: S answers, F rewards.
"""

import logging
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle

from paddle_vl.batch.schema import Batch, HostBatch
from paddle_vl.checkpoint.safetensors_io import TensorToWrite, read_header, write_file
from paddle_vl.data.prefetch import DataWaitLeftError, PrefetchingLoader
from paddle_vl.nn.transfer import on_device
from paddle_vl.parallel.ranks import ONE_RANK, SingleRank
from paddle_vl.processes import release_free_memory, resident_bytes
from paddle_vl.train.feeding.feed import DataPlace, FedStep, warning_of_wait
from paddle_vl.train.phases import Phase, phase
from paddle_vl.train.rollout_batches import RolloutBatches

logger = logging.getLogger(__name__)
STATE_STEM = "rollouts"
# Groups of a report that are shown.
_NUM_SHOWN = 4
# Counts of the whole run.
_COUNTS = ("prompts/used", "prompts/dropped", "completions", "updates_without_signal")
_DTYPES = {"int64": "I64", "float32": "F32", "bool": "BOOL"}
# From the arrays of prompts to the answers to each.
Sample = Callable[[Sequence[Any]], list[list[Any]]]


def memory_now() -> int:
    """Bytes in use: of tensors on a GPU, of this process on a CPU."""
    if paddle.get_device().startswith("cpu"):
        return resident_bytes()
    return int(paddle.device.cuda.memory_allocated())


class RolloutFeed:
    """In place of `paddle_vl.train.feeding.feed.BatchFeed`, whose methods it has.

    Args:
        data: endless lists of prompts, the same number on every data rank.
        runner: a `ComparingRunner`, or a runner with a loss that has `values`.
        rollouts: of the family, e.g. `paddle_vl.families.vlm.grpo.rollouts.Rollouts`.
        sample: answers prompts with the weights as they are, on every rank of a data lane alike.
        batch_size: answers of a micro-batch of a rank.
        num_micro_batches: of an update.
        num_steps: of the whole run, for rewards.
    """

    def __init__(
        self,
        data: PrefetchingLoader,
        rollouts: Any,
        sample: Sample,
        runner: Any,
        batch_size: int,
        num_micro_batches: int,
        num_steps: int | None = None,
        ranks: SingleRank = ONE_RANK,
        wait_warning_s: float = 30.0,
        count_flops: Callable[[Batch], int] | None = None,
    ):
        self._data, self._rollouts, self._sample = data, rollouts, sample
        self._runner, self._ranks, self._num_steps = runner, ranks, num_steps
        self._batches = RolloutBatches(rollouts, runner, ranks, batch_size, num_micro_batches)
        self._wait_warning_s, self._count_flops = wait_warning_s, count_flops
        settings = rollouts.settings
        steps = settings.steps_per_generation or num_micro_batches
        self._num_parts = steps // num_micro_batches
        self._num_updates = self._num_parts * settings.num_iterations
        rows = batch_size * ranks.data_size
        # Prompts of a generation, and of one of its updates.
        self._num_prompts = rows * steps // rollouts.size
        self._per_update = rows * num_micro_batches // rollouts.size
        self._needs_old = settings.old_log_probs == "computed" and not settings.is_on_policy(
            num_micro_batches
        )
        self._groups: list[Any] = []
        # The next update of the generation.
        self._update = self._num_updates
        self.steps_fed = 0
        # Returns the stop signal that this rank has received.
        self.received: Callable[[], int | None] = lambda: None
        # Called with the number of the steps before a generation.
        self.before_generation: Callable[[int], None] = lambda steps: None
        self._counts = dict.fromkeys(_COUNTS, 0)
        # Numbers of each generation, and seconds and tokens of sampling, since the last report.
        self._metrics: list[dict[str, float]] = []
        self._seconds, self._tokens, self._reported = 0.0, 0, time.perf_counter()

    def continue_at(self, steps_fed: int, data_state: dict[str, Any]) -> None:
        """Resume after `steps_fed` steps, with the data at a saved position."""
        self.steps_fed = steps_fed
        self._groups, self._update = [], self._num_updates
        self._data.load_state_dict(data_state)

    def next_step(self) -> FedStep:
        """The micro-batches of the next update; those of a new generation are sampled first.

        Raises:
            DataWaitLeftError: any rank received a stop signal.
            ValueError: a reward failed, the same on all ranks.
        """
        wait_s = 0.0
        if self._update == self._num_updates:
            wait_s = self._generate()
        groups = self._part(self._update % self._num_parts)
        if self._rollouts.is_idle(groups):
            self._counts["updates_without_signal"] += 1
            groups = []
        batches: Sequence[HostBatch] = self._batches.of(groups)
        if self._count_flops is not None:
            batches = [each | {"flops": self._count_flops(each)} for each in batches]
        with phase(Phase.HOST_TO_DEVICE):
            batches = [on_device(each) for each in batches]
        self._update += 1
        self.steps_fed += 1
        return FedStep(batches, DataPlace.of(self._data), wait_s)

    def prepare_next(self) -> None:
        """Nothing: the next update may have answers that the running one changes."""

    def upcoming(self) -> Sequence[Batch]:
        """Nothing is known before its time."""
        return []

    def close(self) -> None:
        """Stop the loader."""
        self._data.close()

    # Generations.

    def _generate(self) -> float:
        """Sample a generation; the seconds that it waited for prompts."""
        settings, rollouts = self._rollouts.settings, self._rollouts
        begin, before, waited = time.perf_counter(), memory_now(), 0.0
        self.before_generation(self.steps_fed)
        everyone, kept = list[Any](), list[Any]()
        for _ in range(1 + (settings.max_resample_times if settings.dynamic_sample else 0)):
            groups, wait_s, memory = self._round()
            waited += wait_s
            everyone += groups
            kept += [g for g in groups if not settings.dynamic_sample or rollouts.has_signal(g)]
            if len(kept) >= self._num_prompts:
                break
        self._groups = kept = kept[: self._num_prompts]
        self._update = 0
        release_free_memory()
        seconds = time.perf_counter() - begin - waited
        if kept:
            self._learn()
        tokens = int(sum(each.lengths.sum() for each in everyone))
        self._counts["prompts/used"] += len(kept)
        self._counts["prompts/dropped"] += len(everyone) - len(kept)
        self._counts["completions"] += len(everyone) * rollouts.size
        self._seconds, self._tokens = self._seconds + seconds, self._tokens + tokens
        self._metrics.append(
            {
                **rollouts.metrics(everyone, kept),
                **rollouts.rewards.logged,
                "sampling/memory_gb": round((memory - before) / 1e9, 4),
                "sampling/memory_kept_gb": round((memory_now() - before) / 1e9, 4),
            }
        )
        return waited

    def _round(self) -> tuple[list[Any], float, int]:
        """The next prompts of all data ranks with their answers, in the order of the data; seconds
        of waiting, and the memory in use while it sampled."""
        begin, ranks, rollouts = time.perf_counter(), self._ranks, self._rollouts
        who = f"step {self.steps_fed + 1}"
        with (
            phase(Phase.DATA_WAIT),
            warning_of_wait(self._wait_warning_s, self._data.waiting_for, who),
        ):
            prompts = next(self._data)
        waited = time.perf_counter() - begin
        model = self._runner.model
        was_training = model.training
        model.eval()
        try:
            with phase(Phase.SAMPLING):
                sampled = self._sample(prompts)
        finally:
            if was_training:
                model.train()
        memory = memory_now()
        found, problem, cause = None, None, None
        if ranks.counts_data:
            try:
                state = SimpleNamespace(global_step=self.steps_fed, max_steps=self._num_steps)
                rewards_SF = rollouts.scored(prompts, sampled, state)
                found = rollouts.described(prompts, sampled, rewards_SF)
            except Exception as error:
                problem, cause = f"{error}", error
        own = [ranks.data_rank, found, problem, self.received()]
        told = sorted(ranks.gathered(own), key=lambda each: each[0])
        if problems := [each[2] for each in told if each[2] is not None]:
            raise ValueError(problems[0]) from cause
        if any(each[3] is not None for each in told):
            raise DataWaitLeftError
        by_rank = [
            rollouts.groups_of(rank, groups) for rank, groups, *_ in told if groups is not None
        ]
        for group, prompt, answers in zip(by_rank[ranks.data_rank], prompts, sampled, strict=True):
            group.prompt, group.answers = prompt, answers
        return [each for place in zip(*by_rank, strict=True) for each in place], waited, memory

    def _part(self, number: int) -> list[Any]:
        """The groups of an update."""
        return self._groups[number * self._per_update :][: self._per_update]

    def _own(self, groups: Sequence[Any]) -> list[Any]:
        return [each for each in groups if each.owner == self._ranks.data_rank]

    def _learn(self) -> None:
        """Give the groups advantages, and log-probabilities of the policy that answered where later
        updates or rewards need them."""
        rollouts, groups, kl_S = self._rollouts, self._groups, None
        settings, runner = rollouts.settings, self._runner
        takes_kl = settings.kl_in_reward
        if self._needs_old or takes_kl:
            parts = [self._part(number) for number in range(self._num_parts)]
            values = runner.loss.values
            old = self._batches.log_probs(parts, lambda batches: runner.values(batches, values))
            if self._needs_old:
                for group, own in zip(groups, old, strict=True):
                    group.old = own
            if takes_kl:
                others = self._batches.log_probs(parts, runner.reference_values)
                rows = zip(chain(*old), chain(*others), strict=True)
                kl_S = np.array([float((own - other).sum()) for own, other in rows])
        rollouts.learn_from(groups, kl_S)

    # Reports.

    def entries(self) -> dict[str, Any]:
        """Entries of a metrics line about the generations since the last one."""
        found: dict[str, Any] = {}
        for name in dict.fromkeys(name for each in self._metrics for name in each):
            values = [each[name] for each in self._metrics if name in each]
            of = min if "/min_" in name else max if "/max_" in name else np.mean
            found[name] = round(float(of(values)), 6)
        now = time.perf_counter()
        if self._metrics:
            found |= {
                "sampling/seconds": round(self._seconds / len(self._metrics), 4),
                "sampling/share_of_time": round(self._seconds / (now - self._reported), 4),
                "sampling/tokens_per_second": round(self._tokens / self._seconds, 1),
            }
        self._metrics, self._seconds, self._tokens, self._reported = [], 0.0, 0, now
        return {**found, **self._counts}

    def check(self, line: dict[str, Any]) -> None:
        """
        Raises:
            ValueError: the sampler's log-probabilities are too far from the trainer's.
        """
        self._rollouts.check(line)

    def shown(self) -> list[dict[str, Any]]:
        """Some groups of this rank as lines of predictions."""
        own = [each for each in self._groups if each.answers is not None]
        return [self._rollouts.shown(each) for each in own[:_NUM_SHOWN]]

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores: JSON values, and `arrays` of a generation that is not used up.
        Called by all ranks."""
        plain: dict[str, Any] = {"update": self._update, "data_size": self._ranks.data_size}
        plain |= {"counts": self._counts, "metrics": self._metrics}
        if self._update == self._num_updates:
            return plain
        own = {}
        if self._ranks.counts_data:
            own = {
                str(place): self._rollouts.told_answers(group)
                for place, group in enumerate(self._groups)
                if group.owner == self._ranks.data_rank
            }
        answers = {int(k): each for of in self._ranks.gathered(own) for k, each in of.items()}
        return plain | {"arrays": self._rollouts.arrays_of(self._groups, answers)}

    @staticmethod
    def write(folder: Path, state: dict[str, Any]) -> None:
        """Write the `arrays` of a state beside a checkpoint's other files."""
        if (arrays := state.get("arrays")) is not None:
            write_file(
                folder / f"{STATE_STEM}.safetensors",
                [
                    TensorToWrite(name, each.shape, _DTYPES[str(each.dtype)], lambda x=each: x)
                    for name, each in arrays.items()
                ],
            )

    def restore(self, folder: Path, state: dict[str, Any] | None) -> None:
        """Continue in the generation of a checkpoint.

        Raises:
            ValueError, RuntimeError: the state is of other settings, or the file is damaged.
        """
        if state is None:
            return
        if not 0 <= state["update"] <= self._num_updates:
            raise ValueError(
                f"rollouts: update {state['update']} of a generation, which has {self._num_updates}"
            )
        self._update = state["update"]
        self._counts |= state["counts"]
        self._metrics = [dict(each) for each in state["metrics"]]
        if self._update == self._num_updates:
            return
        stored = read_header(folder / f"{STATE_STEM}.safetensors")
        arrays = {name: each.read() for name, each in stored.items()}
        self._groups = self._rollouts.restored(arrays)
        ranks, prompts = self._ranks, self._rollouts.prompts
        if state["data_size"] != ranks.data_size:
            for place, group in enumerate(self._groups):
                group.owner = place % ranks.data_size
        for group in self._groups:
            if group.owner == ranks.data_rank:
                group.prompt = prompts.in_epoch(group.epoch)[group.number]
            else:
                group.answers = group.old = None
