"""The training loop: steps, and what happens between them."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tqdm.contrib.logging import logging_redirect_tqdm

from paddle_vl.config.load import save_run_config
from paddle_vl.config.schema import RunConfig
from paddle_vl.models.checkpoint.pretrained import DEFAULT_SHARD_BYTES
from paddle_vl.models.checkpoint.sharded import write_tensors
from paddle_vl.train import checkpoint as checkpoints
from paddle_vl.train.evaluate import MeanLosses
from paddle_vl.train.loss_curve import CURVE_FILE, draw_loss_curve
from paddle_vl.train.metrics import StepMeter
from paddle_vl.train.metrics_file import METRICS_FILE, MetricsFile
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.part_rates import reported_rates
from paddle_vl.train.phases import Phase, phase
from paddle_vl.train.processes import ONE_PROCESS, SingleProcess
from paddle_vl.train.progress import ProgressBar
from paddle_vl.train.random_state import seed_step
from paddle_vl.train.run_record import RunRecord
from paddle_vl.train.scalar_writers import ScalarWriters
from paddle_vl.train.schedule import learning_rate
from paddle_vl.train.step import Batch, StepResult, WholeModel, train_step
from paddle_vl.train.stop_signals import StopSignals

logger = logging.getLogger(__name__)
FINAL = "final"


class TrainingData(Protocol):
    """An endless stream of training batches that knows its place; see PrefetchLoader."""

    epoch: int
    batches_consumed: int
    skipped: dict[str, int]

    def __len__(self) -> int: ...

    def __next__(self) -> Batch: ...

    def close(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Trainer:
    """One run.

    Args:
        runner: the model, or this process's stages of it.
        data: training batches, without end.
        num_steps: updates of the whole run.
        save_model: writes model and processor files into a folder.
        evaluate: computes the evaluation losses; None without evaluation data.
        processes: those of the run; all of them run their trainers in step.
    """

    def __init__(
        self,
        config: RunConfig,
        runner: WholeModel,
        optimizer: Optimizer,
        data: TrainingData,
        num_steps: int,
        save_model: Callable[[Path], None],
        evaluate: Callable[[], MeanLosses] | None = None,
        processes: SingleProcess = ONE_PROCESS,
    ):
        self.config, self.runner, self.optimizer = config, runner, optimizer
        self.data, self.num_steps = data, num_steps
        self.save_model, self.evaluate = save_model, evaluate
        self.processes = processes
        self.output_dir = Path(config.train.output_dir)
        self.metrics = MetricsFile(self.output_dir / METRICS_FILE)
        self.record = RunRecord(self.output_dir)
        self.meter = StepMeter(runner.objective)
        self.step = 0
        self.nonfinite_in_a_row = 0
        self._last_saved: int | None = None

    def restore(self, folder: Path) -> None:
        """Continue where a checkpoint was written; the model has its weights already."""
        state = checkpoints.load_state(folder)
        self.optimizer.load_state(checkpoints.StoredArrays(folder))
        self.step = self._last_saved = state["step"]
        self.nonfinite_in_a_row = state["nonfinite_in_a_row"]
        self.meter.load_state_dict(state["meter"])
        self.data.load_state_dict(state["data"])

    def run(self) -> int | None:
        """Train to the end, or until a signal asks to stop.

        Returns:
            The signal's number, None at the end.

        Raises:
            RuntimeError: train.max_nonfinite_steps updates in a row had to be skipped.
        """
        is_main = self.processes.is_main
        if is_main:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            checkpoints.remove_partial_folders(self.output_dir)
            save_run_config(self.config, self.output_dir / "config.yaml")
            self.record.start(self.config, self.step)
            self.metrics.drop_after(self.step)
        writers = ScalarWriters(self.config.logging.report_to if is_main else [], self.output_dir)
        is_shown = is_main and self.config.logging.progress_bar
        bar = ProgressBar(self.num_steps, self.step, is_shown)
        try:
            with StopSignals() as stop, logging_redirect_tqdm():
                while self.step < self.num_steps:
                    self.train_one_step(bar)
                    self._between_steps(writers)
                    signal_number = self.processes.agreed_signal(stop.received)
                    if signal_number is not None and self.step < self.num_steps:
                        return self._stop_early(signal_number)
        finally:
            self.data.close()
            bar.close()
            writers.close()
            if is_main:
                self.record.end(self.step)
                draw_loss_curve(self.metrics.read(), self.output_dir / CURVE_FILE)
        checkpoints.write_folder(self.output_dir / FINAL, self.save_model, self.processes)
        logger.info("trained %d steps; the model is in %s", self.step, self.output_dir / FINAL)
        return None

    def train_one_step(self, bar: ProgressBar) -> StepResult:
        """Take the next batches and train on them: all of a run that a profile looks at.

        Raises:
            RuntimeError: as `run`.
        """
        begin = time.perf_counter()
        count = self.config.train.gradient_accumulation_steps
        with phase(Phase.DATA_WAIT):
            micro_batches = [next(self.data) for _ in range(count)]
        rate = learning_rate(self.step, self.num_steps, self.config.train)
        seed_step(self.config.train.seed, self.step, self.processes)
        result = train_step(self.runner, self.optimizer, micro_batches, rate, self.processes)
        with phase(Phase.METRICS):
            self.step += 1
            self.meter.add(result, time.perf_counter() - begin)
            bar.advance(result.loss, rate, self.meter.speed())
            self._count_nonfinite(result)
        return result

    def _count_nonfinite(self, result: StepResult) -> None:
        self.nonfinite_in_a_row = self.nonfinite_in_a_row + 1 if result.is_skipped else 0
        if not result.is_skipped:
            return
        found = f"loss {result.loss}, gradient norm {result.grad_norm}"
        logger.warning("step %d: %s; the update is skipped", self.step, found)
        if self.nonfinite_in_a_row >= self.config.train.max_nonfinite_steps:
            saved = checkpoints.complete_checkpoints(self.output_dir)
            raise RuntimeError(
                f"{self.nonfinite_in_a_row} updates in a row were skipped, the last at step "
                f"{self.step} ({found}): train.max_nonfinite_steps is reached. "
                + (f"The last checkpoint is {saved[-1][1]}. " if saved else "")
                + "Look at the data of these steps, or lower train.learning_rate"
            )

    def _between_steps(self, writers: ScalarWriters) -> None:
        """Evaluate, report and save, whatever is due; the report first, so that a checkpoint never
        knows more than metrics.jsonl."""
        train, is_last = self.config.train, self.step == self.num_steps
        line: dict[str, Any] = {}
        if is_last or self.step % self.config.logging.logging_steps == 0:
            (skipped,) = self.processes.totals([sum(self.data.skipped.values())])
            rate = learning_rate(self.step - 1, self.num_steps, train)
            line = self.meter.report() | {
                "epoch": self._epoch(),
                "learning_rate": rate,
                "skipped_samples": skipped,
                **reported_rates(train, rate),
            }
            line |= self.runner.objective.metrics(self.runner.model, self.processes)
        if self.evaluate and (is_last or _is_due(self.step, train.eval_steps)):
            line |= self._evaluated()
        if line and self.processes.is_main:
            line = {"step": self.step, **line}
            self.metrics.append(line)
            writers.write(line)
        if is_last or _is_due(self.step, train.save_steps):
            self._save_checkpoint()

    def _evaluated(self) -> dict[str, float]:
        losses = self.evaluate()
        logger.info("step %d: eval loss %.4f", self.step, losses.loss)
        line = {"eval_loss": losses.loss}
        if len(losses.terms) > 1:
            line |= {f"eval_{name}": mean for name, mean in losses.terms.items()}
        return line

    def _epoch(self) -> float:
        """Passes over the training data so far."""
        return round(self.data.epoch + self.data.batches_consumed / len(self.data), 4)

    def _save_checkpoint(self) -> Path:
        folder = self.output_dir / checkpoints.checkpoint_name(self.step)
        if self._last_saved != self.step:
            checkpoints.write_folder(folder, self._fill_checkpoint, self.processes)
            self._last_saved = self.step
        # These weights gave no finite step yet: the last checkpoint that did must stay.
        if self.nonfinite_in_a_row == 0 and self.processes.is_main:
            checkpoints.prune_checkpoints(self.output_dir, self.config.train.save_total_limit)
        return folder

    def _fill_checkpoint(self, folder: Path) -> None:
        self.save_model(folder)
        write_tensors(
            folder,
            checkpoints.OPTIMIZER_STEM,
            self.optimizer.state_to_write(),
            DEFAULT_SHARD_BYTES,
            self.optimizer.placement.writers,
        )
        if not self.processes.is_main:
            return
        save_run_config(self.config, folder / "config.yaml")
        checkpoints.save_state(
            folder,
            {
                "step": self.step,
                "nonfinite_in_a_row": self.nonfinite_in_a_row,
                "meter": self.meter.state_dict(),
                "data": self.data.state_dict(),
            },
        )

    def _stop_early(self, signal_number: int) -> int:
        folder = self._save_checkpoint()
        logger.warning(
            "stopped after step %d of %d; %s is saved, continue with "
            "train.resume_from_checkpoint=auto",
            self.step,
            self.num_steps,
            folder,
        )
        return signal_number


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
