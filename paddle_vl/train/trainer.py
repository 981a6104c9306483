"""The training loop: steps, and what happens between them.

A little over 350 lines: what begins, stops and ends a run is told in one place.
"""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm.contrib.logging import logging_redirect_tqdm

from paddle_vl.batch.schema import Batch
from paddle_vl.checkpoint.safetensors_io import FileWriter
from paddle_vl.checkpoint.writing import DEFAULT_SHARD_BYTES, write_tensors
from paddle_vl.config.load import save_run_config
from paddle_vl.config.schema import RunConfig
from paddle_vl.families.base import MeanLosses
from paddle_vl.train import checkpoint as checkpoints
from paddle_vl.train.feeding.device_copies import device_copies
from paddle_vl.train.feeding.feed import BatchFeed, DataPlace, TrainingData
from paddle_vl.train.freeze import reported_rates
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.phases import Phase, phase
from paddle_vl.train.processes import ONE_PROCESS, SingleProcess
from paddle_vl.train.random_state import seed_step
from paddle_vl.train.reporting.gauges import Gauge
from paddle_vl.train.reporting.memory_in_use import memory_in_use
from paddle_vl.train.reporting.metrics import StepMeter, longest_skip
from paddle_vl.train.reporting.reporter import Reporter
from paddle_vl.train.reporting.run_record import RunRecord
from paddle_vl.train.run_lock import RunLock
from paddle_vl.train.saving.checkpoint_writer import CheckpointWriter
from paddle_vl.train.saving.snapshot import Fill
from paddle_vl.train.schedule import learning_rate
from paddle_vl.train.step import (
    Runner,
    StepOutcome,
    agree_on_step,
    leave_step,
    train_step,
)
from paddle_vl.train.step_trace import StepTrace
from paddle_vl.train.stop_signals import StopSignals

logger = logging.getLogger(__name__)


class DataWaitLeftError(Exception):
    """A stop signal came while a step waited for its data."""


class Trainer:
    """One run.

    Args:
        runner: the model, or this process's stages of it.
        data: training batches, without end.
        num_steps: updates of the whole run.
        save_model: fills a folder with model and processor files, see `saving.snapshot`.
        evaluate: computes the evaluation losses, None where a rank received a stop signal, which
            it asks for; None without evaluation data.
        processes: those of the run; all of them run their trainers in step.
        peak_flops: operations per second of this process's device, if known.
        count_flops: counts those of a batch.
        lock: of the output folder, released when the run ends.
    """

    def __init__(
        self,
        config: RunConfig,
        runner: Runner,
        optimizer: Optimizer,
        data: TrainingData,
        num_steps: int,
        save_model: Fill,
        evaluate: Callable[[Callable[[], int | None]], MeanLosses | None] | None = None,
        processes: SingleProcess = ONE_PROCESS,
        peak_flops: float | None = None,
        count_flops: Callable[[Batch], int] | None = None,
        lock: RunLock | None = None,
    ):
        self.config, self.runner, self.optimizer = config, runner, optimizer
        self.data, self.num_steps = data, num_steps
        self.save_model, self.evaluate = save_model, evaluate
        self.processes, self._lock = processes, lock
        self.output_dir = Path(config.train.output_dir)
        self.record = RunRecord(self.output_dir)
        self.reporter = Reporter(config.logging, self.output_dir, processes)
        self.trace = StepTrace(config.train.profile, self.output_dir, processes.rank)
        self.meter = StepMeter(runner.loss, peak_flops)
        self.step = 0
        self.stop = StopSignals()
        self.stop_signal: int | None = None
        # A stop came before the evaluation of the last step was done.
        self._owes_evaluation = False
        self._saved_settings = False
        self._num_agreed: int | None = None
        self.feed = BatchFeed(
            data,
            runner.adapter,
            config.train.gradient_accumulation_steps,
            num_steps,
            wait_warning_s=config.logging.data_wait_warning_s,
            copies=device_copies(config.data.pin_memory, processes.is_main),
            count_flops=count_flops,
        )
        # Behind the last step that was trained, whatever was fetched since.
        self._data_place = DataPlace.of(data)
        self._last_saved: int | None = None
        self.writer = CheckpointWriter(self.output_dir, config.train, processes)

    def restore(self, folder: Path) -> None:
        """Continue where a checkpoint was written; the model has its weights already."""
        state = checkpoints.load_state(folder)
        self.optimizer.load_state(checkpoints.StoredArrays(folder))
        self.step = self._last_saved = state["step"]
        self.meter.load_state_dict(state["meter"])
        self.feed.continue_at(self.step, state["data"])
        self._data_place = DataPlace.of(self.data)
        self._owes_evaluation = state.get("owes_evaluation", False) and self.evaluate is not None

    def run(self, stop: StopSignals | None = None) -> int | None:
        """Train to the end, or until a signal asks to stop.

        Args:
            stop: entered already; None for one of its own.

        Returns:
            The signal's number, None at the end.

        Raises:
            RuntimeError: train.max_nonfinite_steps updates in a row had to be skipped.
        """
        with ExitStack() as stack:
            self.stop = stop or stack.enter_context(StopSignals())
            stack.enter_context(self.stop.training(self.config.train.stop_grace_s))
            stack.enter_context(logging_redirect_tqdm())
            try:
                self._begin()
                self._train()
            except BaseException:
                # What ended the run is to be told, not what a full disk then makes of its end.
                try:
                    self._close()
                except OSError as error:
                    logger.warning("%s", error)
                raise
            self._close()
            # A rank that ends takes the others with it, in a launcher's eyes.
            self.processes.wait()
        return self.stop_signal

    def _begin(self) -> None:
        if self.processes.is_main:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            checkpoints.remove_partial_folders(self.output_dir)
            if self.step == 0:
                self._save_settings()
            self.record.start(self.config, self.step)
        self.reporter.open(self.step, self.num_steps)

    def _save_settings(self) -> None:
        """Write config.yaml once, when its settings have trained a step or will train the first."""
        if self.processes.is_main and not self._saved_settings:
            save_run_config(self.config, self.output_dir / "config.yaml")
        self._saved_settings = True

    def _train(self) -> None:
        with self.writer:
            share = self.runner.model.placement.checkpoint_ranks.size
            self.writer.prepare(self.optimizer.bytes_to_write() // share)
            if self._owes_evaluation:
                self._evaluate()
            while self.stop_signal is None and self.step < self.num_steps:
                self.turn()
            if self.stop_signal is not None:
                self._stop_early()
                return
            final = self.writer.save_final(self.step, self.save_model)
        logger.info("trained %d steps; the model is in %s", self.step, final)

    def _close(self) -> None:
        with ExitStack() as stack:
            if self._lock is not None:
                stack.callback(self._lock.release)
            stack.callback(self.reporter.close)
            if self.processes.is_main:
                stack.callback(self.record.end, self.step)
            stack.callback(self.trace.close)
            stack.callback(self.feed.close)

    def turn(self) -> None:
        """One turn of the loop: a step, and what is due behind it; no step where a rank received a
        stop signal."""
        with self.trace.step(self.step + 1):
            outcome = self.train_one_step()
        if outcome is None:
            return
        self._save_settings()
        # Of an earlier step: this one runs meanwhile.
        self.reporter.write()
        self.reporter.bar.advance()
        self._between_steps()

    def check_data_wait(self) -> None:
        """Leave a wait for data when a stop signal came, if it is known what ranks agree on.

        Raises:
            DataWaitLeftError: it is left.
        """
        if self.stop.received is not None and self._num_agreed is not None:
            raise DataWaitLeftError

    def train_one_step(self) -> StepOutcome | None:
        """Take the next batches and train on them: all of a run that a profile looks at.

        Returns:
            What the step did; None where a rank received a stop signal, and the batches were left.
        """
        begin = time.perf_counter()
        try:
            fed = self.feed.next_step()
        except DataWaitLeftError:
            self.stop_signal = leave_step(self._num_agreed, self.processes, self.stop.received)
            return None
        micro_batches = fed.micro_batches
        totals = agree_on_step(micro_batches, self.runner.loss, self.processes, self.stop.received)
        self._num_agreed = totals.num_agreed
        if totals.signal is not None:
            self.stop_signal = totals.signal
            return None
        rate = learning_rate(self.step, self.num_steps, self.config.train)
        seed_step(self.config.train.seed, self.step, self.processes)
        outcome = train_step(
            self.runner, self.optimizer, micro_batches, rate, self.processes, totals
        )
        self.feed.prepare_next()
        with phase(Phase.METRICS):
            self.step += 1
            self._data_place = fed.place
            seconds = time.perf_counter() - begin
            self.meter.add(outcome, micro_batches, seconds, fed.data_wait_s)
        return outcome

    def _between_steps(self) -> None:
        """Evaluate, report and save, whatever is due; the report first, so that a checkpoint never
        knows more than metrics.jsonl."""
        train, is_last = self.config.train, self.step == self.num_steps
        self.writer.poll()
        if is_last or self.step % self.config.logging.logging_steps == 0:
            self._collect_report()
        if self.evaluate and (is_last or _is_due(self.step, train.eval_steps)):
            self._evaluate()
        if is_last or _is_due(self.step, train.save_steps) or self.writer.is_overdue:
            self._save_checkpoint(must=is_last)

    def _collect_report(self) -> None:
        processes, loss = self.processes, self.runner.loss
        gauges = self.meter.gauges(processes.counts_data)
        # All processes of a part of the data load the same samples.
        skipped = self._data_place.skipped if processes.counts_data else 0
        gauges += [
            Gauge("skipped_samples", "sum", skipped),
            Gauge("memory", "max", memory_in_use()),
        ]
        counts = loss.metric_counts(self.runner.model)
        is_counted = int(processes.counts_losses)
        gauges += [Gauge(name, "sum", value * is_counted) for name, value in counts.items()]
        rate = learning_rate(self.step - 1, self.num_steps, self.config.train)
        entries = {"epoch": round(self._data_place.passes, 4), "learning_rate": rate}
        entries |= reported_rates(self.config.train, rate)

        longest = 0

        def line(values: dict[str, Any]) -> dict[str, Any]:
            nonlocal longest
            longest = longest_skip(values)
            return self.meter.line(values) | {
                "skipped_samples": int(values["skipped_samples"]),
                "memory_gb": round(values["memory"] / 1e9, 3),
                **entries,
                **loss.metrics(values),
            }

        def look_at(line: dict[str, Any]) -> None:
            if longest:
                self._check_skipped(longest, line)

        self.reporter.collect(self.step, gauges, line, look_at)

    def _check_skipped(self, longest: int, line: dict[str, Any]) -> None:
        """Say that so many updates in a row were skipped; end the run where that is too many.

        Raises:
            RuntimeError: it is.
        """
        logger.warning(
            "up to %d updates in a row were skipped since the last report, as a loss or the "
            "gradient norm was not finite; %d of the run so far",
            longest,
            line["skipped_updates"],
        )
        if longest < self.config.train.max_nonfinite_steps:
            return
        saved = checkpoints.complete_checkpoints(self.output_dir)
        raise RuntimeError(
            f"{longest} updates in a row were skipped up to step {line['step']}, as a loss or the "
            "gradient norm was not finite: train.max_nonfinite_steps is reached. "
            + (f"The last checkpoint is {saved[-1][1]}. " if saved else "")
            + "Look at the data of these steps, or lower train.learning_rate"
        )

    def _evaluate(self) -> None:
        """Report the evaluation losses; where a rank received a stop signal the evaluation is left
        for when the run continues."""
        with self.reporter.bar.evaluating():
            losses = self.evaluate(lambda: self.stop.received)
        self._owes_evaluation = losses is None
        if losses is None:
            # Every rank left it; which signal it was is agreed on when the run is stopped.
            self.stop_signal = self.processes.agree([], self.stop.received)[1]
            return
        logger.info("step %d: eval loss %.4f", self.step, losses.loss)
        line = {"eval_loss": losses.loss}
        if len(losses.terms) > 1:
            line |= {f"eval_{name}": mean for name, mean in losses.terms.items()}
        self.reporter.write(self.step, line)

    def _save_checkpoint(self, must: bool, is_last_word: bool = False) -> Path:
        """Begin to write a checkpoint of this step, unless there is one.

        Args:
            must: also while updates are being skipped. It is marked then; otherwise it is put off.
            is_last_word: the run is being stopped.
        """
        folder = self.output_dir / checkpoints.checkpoint_name(self.step)
        if self._last_saved == self.step:
            return folder
        # The same on all processes.
        skipped = self.meter.skipped_in_a_row
        if skipped and not must:
            self.writer.put_off(self.step, skipped)
            return folder
        self.reporter.write()
        self.writer.save(self.step, self._fill_checkpoint, skipped, is_last_word)
        self._last_saved = self.step
        return folder

    def _fill_checkpoint(self, folder: Path, write: FileWriter) -> None:
        self.save_model(folder, write)
        write_tensors(
            folder,
            checkpoints.OPTIMIZER_STEM,
            self.optimizer.state_to_write(),
            DEFAULT_SHARD_BYTES,
            self.runner.model.placement.checkpoint_ranks,
            write,
        )
        if not self.processes.is_main:
            return
        save_run_config(self.config, folder / "config.yaml")
        checkpoints.save_state(
            folder,
            {
                "step": self.step,
                "nonfinite_updates": self.meter.skipped_in_a_row,
                "meter": self.meter.state_dict(),
                "data": self._data_place.state,
                "owes_evaluation": self._owes_evaluation,
            },
        )

    def _stop_early(self) -> None:
        self.reporter.write()
        folder = self._save_checkpoint(must=True, is_last_word=True)
        self.writer.wait()
        logger.warning(
            "stopped after step %d of %d; %s is saved, continue with "
            "train.resume_from_checkpoint=auto",
            self.step,
            self.num_steps,
            folder,
        )


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
