"""The training loop: steps, and reports, evaluations and checkpoints between them."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tqdm.contrib.logging import logging_redirect_tqdm

from paddle_vl.batch.schema import Batch
from paddle_vl.checkpoint.manifest import Manifest
from paddle_vl.checkpoint.safetensors_io import FileWriter
from paddle_vl.checkpoint.writing import DEFAULT_SHARD_BYTES, write_tensors
from paddle_vl.config.load import save_run_config
from paddle_vl.config.schema import RunConfig
from paddle_vl.data.corpus.loader import merged_states
from paddle_vl.data.prefetch import DataWaitLeftError, PrefetchingLoader
from paddle_vl.families.base import MeanLosses
from paddle_vl.files.text_file import write_text
from paddle_vl.parallel.ranks import ONE_RANK, SingleRank
from paddle_vl.train import checkpoint as checkpoints
from paddle_vl.train.best import BestEvaluation
from paddle_vl.train.feeding.device_copies import device_copies
from paddle_vl.train.feeding.feed import BatchFeed, DataPlace
from paddle_vl.train.freeze import reported_rates
from paddle_vl.train.guard import Guard
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.phases import Phase, StepTrace, phase
from paddle_vl.train.reporting.metrics import (
    SourceTotals,
    StepMeter,
    check_skipped,
    evaluation_entries,
)
from paddle_vl.train.reporting.reporter import Reporter, memory_in_use
from paddle_vl.train.reporting.run_files import ACTIONS_FILE, ROLLOUTS_FILE
from paddle_vl.train.reporting.run_record import RunRecord
from paddle_vl.train.rollouts import RolloutFeed
from paddle_vl.train.run_lock import RunLock
from paddle_vl.train.saving.checkpoint_writer import FINAL, CheckpointWriter
from paddle_vl.train.saving.commit import Fill
from paddle_vl.train.schedule import (
    RunLength,
    average_decay,
    learning_rate,
    restored_tokens,
    seed_step,
)
from paddle_vl.train.step import Runner, StepOutcome, agree_on_step, leave_step, train_step
from paddle_vl.train.stop_signals import StopSignals

logger = logging.getLogger(__name__)


class Trainer:
    """One run. All ranks run their trainers in step.

    Args:
        runner: the model, or this rank's pipeline stages.
        data: endless training batches.
        length: of the whole run.
        save_model: writes model and processor files into a folder, see `saving.commit`.
        evaluate: computes the evaluation losses, given a function that returns the stop signal
            received so far, and whether to generate answers; returns None if any rank received a
            signal. None without evaluation data.
        ranks: ranks of the run.
        peak_flops: peak FLOP/s of this rank's device, if known.
        count_flops: FLOPs of a batch.
        lock: lock of the output folder, released when the run ends.
        save_streamed: see `BuiltModel`.
        reference_checksum: see `Family`.
        feed: in place of one that takes the batches of `data`.
    """

    def __init__(
        self,
        config: RunConfig,
        runner: Runner,
        optimizer: Optimizer,
        data: PrefetchingLoader,
        length: RunLength,
        save_model: Fill,
        evaluate: Callable[[Callable[[], int | None], bool], MeanLosses | None] | None = None,
        ranks: SingleRank = ONE_RANK,
        peak_flops: float | None = None,
        count_flops: Callable[[Batch], int] | None = None,
        lock: RunLock | None = None,
        save_streamed: Fill | None = None,
        reference_checksum: str | None = None,
        feed: RolloutFeed | None = None,
    ):
        self.config, self.runner, self.optimizer = config, runner, optimizer
        self.data, self.length, self.num_steps = data, length, length.steps
        self.save_model, self.evaluate = save_model, evaluate
        self.save_streamed, self.reference_checksum = save_streamed, reference_checksum
        self.ranks, self._lock = ranks, lock
        self.output_dir = Path(config.train.output_dir)
        self.record = RunRecord(self.output_dir)
        self.reporter = Reporter(config.logging, self.output_dir, ranks)
        self.writer = CheckpointWriter(self.output_dir, config.train, ranks)
        self.trace = StepTrace(config.train.profile, self.output_dir, ranks.rank)
        self.meter = StepMeter(runner.loss, peak_flops, getattr(data, "target_sources", ()))
        self.feed = feed or BatchFeed(
            data,
            config.train.gradient_accumulation_steps,
            length.steps,
            wait_warning_s=config.logging.data_wait_warning_s,
            copies=device_copies(config.data.pin_memory),
            count_flops=count_flops,
        )
        self.step = 0
        # Of all ranks in all steps, see `RunLength`.
        self.tokens = 0
        self.sources = SourceTotals(data)
        self.stop = StopSignals()
        self.stop_signal: int | None = None
        self.best = None if config.train.best is None else BestEvaluation(config.train.best)
        self.guard = Guard(config.train.guard) if config.train.guard else None
        # Position after the last trained step, not after the last prefetched batch.
        self._data_place = DataPlace.of(data)
        self._data_state, self._feed_state = self._data_place.state, self.feed.state()
        self._rate = 0.0
        # Steps since the last report that were repeated with exact sizes.
        self._num_repeated = 0
        # Numbers in `agree_on_step`, known after the first step.
        self._num_agreed = 0
        # A stop signal interrupted the evaluation of the last step.
        self._owes_evaluation = False
        # It was due while updates were skipped.
        self._owes_checkpoint = False
        self._saved_settings = False
        self._last_saved: int | None = None

    def restore(self, folder: Path) -> None:
        """Load the state of a checkpoint; the model has its weights already.

        Raises:
            ValueError: trainer_state.json has keys or values that no checkpoint of this run has.
        """
        try:
            self._restore(checkpoints.TrainerState.read(folder), folder)
        except ValueError as error:
            file = folder / checkpoints.STATE_FILE
            raise ValueError(f"{file} does not fit this run: {error}") from error
        self.optimizer.load_state(checkpoints.StoredArrays(folder))

    def _restore(self, state: checkpoints.TrainerState, folder: Path) -> None:
        if state.reference != self.reference_checksum:
            raise ValueError(
                f"the reference's weights have the checksum {self.reference_checksum}, and the "
                f"checkpoint's had {state.reference}: give the run its reference again (the files "
                "in model.pretrained or preference.ref_model)"
            )
        self.step = self._last_saved = state.step
        self.tokens = restored_tokens(state.tokens, self.length, folder)
        self.sources.load_state_dict(state.sources)
        self.meter.load_state_dict(state.meter)
        batches = self.step * self.config.train.gradient_accumulation_steps
        if "lanes" in state.data and state.data.get("step") != batches:
            raise ValueError(f"data: step is {state.data.get('step')!r}, not {batches} batches")
        self.feed.continue_at(self.step, state.data)
        self.feed.restore(folder, state.rollouts)
        self._data_place = DataPlace.of(self.data)
        self._owes_evaluation = state.owes_evaluation and self.evaluate is not None
        if self.best is not None and state.best is not None:
            self.best.restore(state.best)
        if self.guard is not None:
            self.guard.restore(state.guard, state.step)
        # That of a later step is one that this run comes to again.
        if (kept := self._kept_step) is not None and self._final_step() < kept:
            raise ValueError(
                f"the best evaluation so far was that of step {kept}, whose model is not in "
                f"{self.output_dir / FINAL}: set train.best.load_at_end=false"
                + (" and train.guard.action=warn" if self._is_guarded else "")
            )

    @property
    def is_over(self) -> bool:
        """Whether the run has trained its whole length, train.best.patience is used up, or
        train.guard stops it."""
        is_stopped = any(each is not None and each.is_over for each in (self.best, self.guard))
        return is_stopped or self.length.is_reached(self.step, self.tokens)

    def run(self, stop: StopSignals | None = None) -> int | None:
        """Train until the last step or a stop signal.

        Args:
            stop: an entered StopSignals; None to enter one here.

        Returns:
            The signal's number; None if the run is complete.

        Raises:
            RuntimeError: train.max_nonfinite_steps updates in a row were skipped.
        """
        with ExitStack() as stack:
            self.stop = stop or stack.enter_context(StopSignals())
            stack.enter_context(self.stop.training(self.config.train.stop_grace_s))
            stack.enter_context(logging_redirect_tqdm())
            try:
                self._begin()
                self._train()
            except BaseException:
                # Raise this error, not one that follows from it in `_close`.
                try:
                    self._close()
                except OSError as error:
                    logger.warning("%s", error)
                raise
            self._close()
            # A launcher stops all ranks when one exits.
            self.ranks.wait()
        return self.stop_signal

    def _begin(self) -> None:
        if self.ranks.is_main:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            if self.step == 0:
                self._save_settings()
            self.record.start(self.config, self.step)
        total = self.length.tokens
        in_tokens = None if total is None else (self.tokens, total)
        self.reporter.open(self.step, self.num_steps, in_tokens)

    def _save_settings(self) -> None:
        """Write config.yaml once: before step 1, or after the first step of a resumed run."""
        if self.ranks.is_main and not self._saved_settings:
            save_run_config(self.config, self.output_dir / "config.yaml")
        self._saved_settings = True

    def _train(self) -> None:
        with self.writer:
            is_unmeasured = self.guard is not None and not self.guard.state.before
            if self._owes_evaluation or is_unmeasured:
                self._evaluate()
            while self.stop_signal is None and not self.is_over:
                self.turn()
            if self.stop_signal is not None:
                self._stop_early()
                return
            final = self._save_final()
        logger.info("trained %d steps; the model is in %s", self.step, final)

    def _close(self) -> None:
        with ExitStack() as stack:
            if self._lock is not None:
                stack.callback(self._lock.release)
            stack.callback(self.reporter.close)
            if self.ranks.is_main:
                stack.callback(self.record.end, self.step)
            stack.callback(self.trace.close)
            stack.callback(self.feed.close)

    def turn(self) -> None:
        """Train one step, report, evaluate and save where due; nothing after a stop signal."""
        with self.trace.step(self.step + 1):
            outcome = self.train_one_step()
        if outcome is None:
            return
        self._save_settings()
        # Write the previous report while the device runs this step.
        self.reporter.write()
        self.reporter.bar.advance()
        self._between_steps()

    def train_one_step(self) -> StepOutcome | None:
        """Fetch the next micro-batches and train on them.

        Returns:
            The outcome on the device; None if any rank received a stop signal.
        """
        begin = time.perf_counter()
        try:
            fed = self.feed.next_step()
        except DataWaitLeftError:
            self.stop_signal = leave_step(self._num_agreed, self.ranks, self.stop.received)
            return None
        micro_batches = fed.micro_batches
        totals = agree_on_step(micro_batches, self.runner.loss, self.ranks, self.stop.received)
        self._num_agreed = totals.num_agreed
        if totals.signal is not None:
            self.stop_signal = totals.signal
            return None
        self._rate = learning_rate(*self.length.place(self.step, self.tokens), self.config.train)
        self.optimizer.begin_step(self.step)
        outcome = train_step(
            self.runner, self.optimizer, micro_batches, self._rate, self.ranks, totals,
            self.feed.prepare_next,
            partial(seed_step, self.config.train.seed, self.step, self.ranks),
        )  # fmt: skip
        if self.config.train.ema is not None:
            decay = average_decay(self.config.train.ema, self.step + 1)
            with phase(Phase.OPTIMIZER):
                self.optimizer.update_average(decay, outcome.is_good)
        with phase(Phase.METRICS):
            self.step += 1
            self._num_repeated += outcome.is_repeated
            self.tokens += totals.num_tokens
            self.sources.add(totals.source_tokens, totals.source_documents)
            self._data_place = fed.place
            seconds = time.perf_counter() - begin
            self.meter.add(outcome, micro_batches, seconds, fed.data_wait_s)
        return outcome

    def check_data_wait(self) -> None:
        """Called by the loader while it waits; ends the wait after a stop signal.

        Before the first step the wait goes on, as `leave_step` needs `num_agreed`.

        Raises:
            DataWaitLeftError: a stop signal was received.
        """
        if self.stop.received is not None and self._num_agreed:
            raise DataWaitLeftError

    def _between_steps(self) -> None:
        """Report, evaluate and save where due; in this order, so that metrics.jsonl is never behind
        a checkpoint."""
        train, is_last = self.config.train, self.is_over
        self.writer.poll()
        if is_last or self.step % self.config.logging.logging_steps == 0:
            self._collect_report()
        if self.evaluate and (is_last or self._is_due(train.eval_steps)):
            self._evaluate()
            if self.is_over and not is_last:
                is_last = True
                self._end_early()
        if is_last or self._is_due(train.save_steps) or self._owes_checkpoint:
            self._save_checkpoint(must=is_last)

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0

    def _collect_report(self) -> None:
        ranks, loss = self.ranks, self.runner.loss
        counts, is_counted = loss.metric_counts(self.runner.model), int(ranks.counts_losses)
        own = {
            **self.meter.values(ranks.counts_data),
            "skipped_samples": self._data_place.skipped if ranks.counts_data else 0,
            "memory": memory_in_use(),
            **{name: value * is_counted for name, value in counts.items()},
        }
        passes = self.sources.passes
        passes = self._data_place.passes if passes is None else passes
        entries = {"epoch": round(passes, 4), "learning_rate": self._rate}
        entries |= reported_rates(self.config.train, self._rate)
        if self.tokens:
            entries["tokens"] = self.tokens
        entries |= self.sources.entries() | self.feed.entries()
        if getattr(self.config.parallel, "expert_capacity_factor", None) is not None:
            entries["repeated_steps"], self._num_repeated = self._num_repeated, 0
            if entries["repeated_steps"] and ranks.is_main:
                logger.warning(
                    "%d steps since the last report were repeated, as more rows went to a rank's "
                    "experts than parallel.expert_capacity_factor has room for: if that lasts, "
                    "raise it",
                    entries["repeated_steps"],
                )

        def line(values: dict[str, Any]) -> dict[str, Any]:
            return self.meter.line(values) | {
                "skipped_samples": int(values["skipped_samples"].sum()),
                "memory_gb": round(float(values["memory"].max()) / 1e9, 3),
                **entries,
                **loss.metrics({name: values[name].sum(axis=0) for name in counts}),
            }

        def check(values: dict[str, Any], line: dict[str, Any]) -> None:
            check_skipped(values, line, self.config.train.max_nonfinite_steps, self.output_dir)
            self.feed.check(line)

        self.reporter.collect(self.step, own, line, check)
        if ranks.is_main:
            self.reporter.show(self.step, self.feed.shown(), ROLLOUTS_FILE)

    def _evaluate(self) -> None:
        """Report the evaluation losses; after a stop signal the resumed run evaluates instead."""
        assert self.evaluate is not None
        with self._averaged():
            losses = self.evaluate(lambda: self.stop.received, self._asks_questions())
        self._owes_evaluation = losses is None
        if losses is None:
            self.stop_signal = self.ranks.agree([], self.stop.received)[1]
            return
        entries, holds = evaluation_entries(losses), True
        if "eval_loss" in entries:
            logger.info("step %d: eval loss %.4f", self.step, losses.loss)
        if self.guard is not None:
            holds, drops = self.guard.add(self.step, entries, self.ranks)
            entries |= drops
        self.reporter.write(self.step, entries)
        self.reporter.show(self.step, losses.answers)
        if losses.shown and self.ranks.is_main:
            text = json.dumps({"step": self.step, "chunks": losses.shown}, allow_nan=False)
            write_text(self.output_dir / ACTIONS_FILE, text)
        if holds is None:
            return
        if self.best is None:
            is_kept = holds and self._is_guarded
        else:
            is_kept = self.best.add(self.step, entries, self.ranks, holds)
        if is_kept:
            self._save_best()

    def _asks_questions(self) -> bool:
        """Whether this evaluation generates answers, where the run has questions."""
        settings = getattr(self.config.train, "eval", None)
        between = self.config.train.eval_steps
        if settings is None or between is None:
            return settings is not None
        return self.is_over or self.step // between % settings.every == 0

    @property
    def _is_guarded(self) -> bool:
        return self.guard is not None and self.guard.stops

    @property
    def _kept_step(self) -> int | None:
        """Step of the evaluation whose model is in `final/` until the run ends."""
        if self.best is not None:
            keeps = self.best.config.load_at_end or self._is_guarded
            return self.best.state.step if keeps else None
        return self.guard.state.step if self.guard is not None and self.guard.stops else None

    def _save_best(self) -> None:
        """Save what is kept of the best evaluation so far: its checkpoint, after `final/`."""
        if self._kept_step is not None:
            with self._averaged():
                self.writer.save_final(self.step, self.save_model, self.save_streamed)
        if self.best is not None:
            self._save_checkpoint(must=True)

    def _final_step(self) -> int:
        """Step of the model in `final/`, as rank 0 sees it; -1 without one."""
        manifest = Manifest.read(self.output_dir / FINAL) if self.ranks.is_main else None
        return self.ranks.gathered(-1 if manifest is None else manifest.step)[0]

    def _save_final(self) -> Path:
        loads = self.best is not None and self.best.config.load_at_end
        is_fallen = self.guard is not None and self.guard.is_over
        kept = self._kept_step if loads or is_fallen else None
        if kept is not None or self._is_guarded:
            if self._final_step() == (self.step if kept is None else kept):
                if is_fallen:
                    logger.info("final/ has the model of step %s, from before the fall", kept)
                return self.output_dir / FINAL
            if kept is not None:
                logger.warning("final/ gets the last model, as that of step %d is gone", kept)
        with self._averaged():
            return self.writer.save_final(self.step, self.save_model, self.save_streamed)

    def _end_early(self) -> None:
        """Say why the run ends, and report its last steps."""
        if self.best is not None and self.best.is_over:
            config, best = self.best.config, self.best.state.step
            logger.info(
                "step %d: %s was best at step %s, train.best.patience %s evaluations ago: the run "
                "ends",
                *(self.step, config.key, best, config.patience),
            )
        if self.step % self.config.logging.logging_steps:
            self._collect_report()

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """With train.ema, the model has the averaged weights inside the block."""
        self.optimizer.swap_average()
        # After an error other ranks may not be here, to gather the live weights.
        yield
        self.optimizer.swap_average()

    def _save_checkpoint(self, must: bool, is_stopping: bool = False) -> Path:
        """Start to write a checkpoint of this step, unless it exists.

        Args:
            must: save it even if the last update was skipped; False postpones it then.
            is_stopping: the run was asked to stop.
        """
        folder = self.output_dir / checkpoints.checkpoint_name(self.step)
        if self._last_saved == self.step:
            return folder
        skipped = self.meter.skipped_in_a_row  # The same on all ranks.
        if skipped and not must:
            if not self._owes_checkpoint and self.ranks.is_main:
                logger.warning(
                    "%s is put off until an update is not skipped: %d in a row were, as a loss or "
                    "the gradient norm was not finite",
                    folder.name,
                    skipped,
                )
            self._owes_checkpoint = True
            return folder
        self._owes_checkpoint = False
        self.reporter.write()
        state = self._data_place.state
        # In a mix of sources each rank knows its own lanes.
        in_lanes = "lanes" in state
        self._data_state = merged_states(self.ranks.gathered(state)) if in_lanes else state
        self._feed_state = self.feed.state()
        # Older ones stay while updates are skipped; and reading back takes time.
        prunes = not (skipped or is_stopping)
        best = None if self.best is None else self.best.folder
        self.writer.save(self.step, self._fill_checkpoint, prunes, best)
        self._last_saved = self.step
        return folder

    def _fill_checkpoint(self, folder: Path, write: FileWriter) -> None:
        self.save_model(folder, write)
        states, stem = self.optimizer.state_to_write(), checkpoints.OPTIMIZER_STEM
        ranks = self.runner.model.placement.checkpoint_ranks
        write_tensors(folder, stem, states, DEFAULT_SHARD_BYTES, ranks, write)
        if not self.ranks.is_main:
            return
        save_run_config(self.config, folder / "config.yaml")
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "sources": self.sources.state_dict(),
            "nonfinite_updates": self.meter.skipped_in_a_row,
            "meter": self.meter.state_dict(),
            "data": self._data_state,
            "owes_evaluation": self._owes_evaluation,
        }
        if self.best is not None:
            state["best"] = asdict(self.best.state)
        if self.guard is not None:
            state["guard"] = asdict(self.guard.state)
        if self._feed_state is not None:
            self.feed.write(folder, self._feed_state)
            plain = self._feed_state.items()
            state["rollouts"] = {name: value for name, value in plain if name != "arrays"}
        if self.reference_checksum is not None:
            state["reference"] = self.reference_checksum
        checkpoints.save_state(folder, state)

    def _stop_early(self) -> None:
        self.reporter.write()
        folder = self._save_checkpoint(must=True, is_stopping=True)
        self.writer.wait()
        logger.warning(
            "stopped after step %d%s; %s is saved, continue with train.resume_from_checkpoint=auto",
            self.step,
            f" of {self.num_steps}" if self.num_steps else f" with {self.tokens:,} tokens",
            folder,
        )
