"""Asynchronous checkpoint writing, its failures, and which checkpoints it deletes."""

import errno
import threading
import time

import numpy as np
import pytest

from paddle_vl.checkpoint.manifest import Manifest, SummedStream
from paddle_vl.checkpoint.safetensors_io import TensorToWrite, read_checkpoint_headers
from paddle_vl.train.saving import checkpoint_writer, commit
from paddle_vl.train.saving.checkpoint_writer import CheckpointWriter
from tests.single_card_tests.train.saved import (
    ARRAYS,
    filled,
    flip,
    on_ranks,
    save_checkpoint,
    settings,
    steps_in,
    without_manifest,
)


class Gate:
    """A disk that blocks writes until it is opened."""

    def __init__(self, monkeypatch):
        self.opened, plain = threading.Event(), SummedStream.write
        self.error: OSError | None = None

        def write(stream, *arguments):
            assert self.opened.wait(30)
            if self.error is not None:
                raise self.error
            return plain(stream, *arguments)

        monkeypatch.setattr(SummedStream, "write", write)


@pytest.fixture
def gate(monkeypatch):
    return Gate(monkeypatch)


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_a_save_returns_before_its_files_are_written_and_keeps_what_was_there(tmp_path, gate):
    array = np.arange(6, dtype=np.float32)
    with CheckpointWriter(tmp_path, settings()) as writer:
        folder = writer.save(2, filled(2, {"a": array}))
        array += 1
        writer.poll()
        assert not folder.exists()
        assert not any(thread.daemon for thread in threading.enumerate() if "write" in thread.name)
        gate.opened.set()
        writer.wait()
        assert folder.exists()
    stored = read_checkpoint_headers(folder)
    np.testing.assert_array_equal(stored["a"].read(), np.arange(6))


def test_the_files_are_the_same_with_and_without_a_thread(tmp_path):
    one = save_checkpoint(tmp_path / "a", 2)
    other = save_checkpoint(tmp_path / "b", 2, async_save=False)
    assert contents(one) == contents(other)
    assert sorted(Manifest.read(one).files) == [
        "config.json", "config.yaml", "model.safetensors", "optimizer.safetensors",
        "parts/tokenizer.json", "trainer_state.json",
    ]  # fmt: skip


def test_layouts_are_changed_behind_the_snapshot(tmp_path):
    main, arranged_in = threading.current_thread(), []

    def transposed(array):
        arranged_in.append(threading.current_thread())
        return np.ascontiguousarray(array.T)

    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = TensorToWrite("m", (3, 2), "F32", lambda: matrix, transposed)
    with CheckpointWriter(tmp_path, settings()) as writer:
        folder = writer.save(2, lambda root, write: write(root / "model.safetensors", [tensor]))
    np.testing.assert_array_equal(read_checkpoint_headers(folder)["m"].read(), matrix.T)
    assert main not in arranged_in


def test_memory_of_a_copy_is_used_again(tmp_path, monkeypatch):
    made, plain = [], np.empty
    monkeypatch.setattr(np, "empty", lambda *args, **kw: made.append(args) or plain(*args, **kw))
    with CheckpointWriter(tmp_path, settings()) as writer:
        for step in (2, 4, 6):
            writer.save(step, filled(step))
    # One for the model, and one for the optimizer.
    assert made == [(ARRAYS["a"].shape, np.float32)] * 2


@pytest.mark.parametrize("is_async", [True, False])
def test_a_full_disk_is_raised_at_the_next_look_and_costs_nothing(tmp_path, gate, is_async):
    gate.opened.set()
    earlier = save_checkpoint(tmp_path, 2)
    before = contents(earlier)
    gate.error = OSError(errno.ENOSPC, "No space left on device")
    message = r"checkpoint-4 could not be written: .*No space left.*\.partial-checkpoint-4/\w+"

    def run():
        with CheckpointWriter(tmp_path, settings(async_save=is_async)) as writer:
            writer.save(4, filled(4))
            while True:
                writer.poll()
                time.sleep(0.01)

    with pytest.raises(RuntimeError, match=message):
        run()
    assert steps_in(tmp_path) == [2]
    assert contents(earlier) == before


@pytest.mark.parametrize(
    ("error", "left"),
    [(ValueError("of the run"), "checkpoint-2"), (KeyboardInterrupt(), ".partial-checkpoint-2")],
)
def test_an_error_of_the_run_lets_the_write_end_and_an_interruption_gives_it_up(
    tmp_path, gate, error, left
):
    def run():
        with CheckpointWriter(tmp_path, settings()) as writer:
            writer.save(2, filled(2))
            raise error

    threading.Timer(0.2, gate.opened.set).start()
    with pytest.raises(type(error)):
        run()
    assert [path.name for path in tmp_path.iterdir()] == [left]


@pytest.mark.parametrize("name", ["_write_files", "_finish"])
def test_a_thread_that_dies_is_raised_at_the_next_save(tmp_path, monkeypatch, name):
    def die(*_):
        raise MemoryError("at once")

    with CheckpointWriter(tmp_path, settings()) as writer:
        monkeypatch.setattr(commit.FolderWrite, name, die)
        writer.save(2, filled(2))
        with pytest.raises(RuntimeError, match="checkpoint-2 could not be written: at once"):
            writer.save(4, filled(4))


def several(tmp_path, changes=None, last=lambda writer: None):
    """A save on two ranks: the first writes the model, the second its own file."""

    def work(processes):
        def fill(folder, write):
            if processes.is_main:
                filled(2)(folder, write)
            else:
                tensor = TensorToWrite("b", (6,), "F32", lambda: ARRAYS["a"])
                write(folder / "other.safetensors", [tensor])

        with CheckpointWriter(tmp_path, settings(**(changes or {})), processes) as writer:
            writer.save(2, fill)
            last(writer)

    return on_ranks(2, work)


@pytest.mark.parametrize("is_async", [True, False])
def test_the_parts_of_all_ranks_are_one_manifest(tmp_path, is_async):
    assert several(tmp_path, {"async_save": is_async}) == [None, None]
    folder = tmp_path / "checkpoint-2"
    files = Manifest.read(folder).files
    assert {"model.safetensors", "other.safetensors"} <= files.keys()
    assert sorted(contents(folder)) == sorted([*files, "manifest.json"])


def test_a_rank_that_cannot_write_is_named_on_all_ranks(tmp_path, monkeypatch):
    plain = SummedStream.to_disk

    def to_disk(stream):
        if "other" in stream._stream.name:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return plain(stream)

    monkeypatch.setattr(SummedStream, "to_disk", to_disk)
    first, second = several(tmp_path)
    assert "other.safetensors" in str(second)
    assert "Disk quota exceeded" in str(second)
    assert "rank 1" in str(first)
    assert "Disk quota exceeded" in str(first)
    assert steps_in(tmp_path) == []


@pytest.fixture
def _second_leaves_nothing(monkeypatch):
    """The second rank's files never arrive."""
    plain = commit.leave_part
    monkeypatch.setattr(
        commit, "leave_part", lambda to, rank, *what: None if rank else plain(to, rank, *what)
    )


@pytest.mark.usefixtures("_second_leaves_nothing")
def test_a_rank_that_is_gone_is_not_waited_for_when_the_run_ends_by_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "_PATIENCE_S", 0.2)

    def last(writer):
        raise ValueError("of the run")

    begin = time.monotonic()
    assert all(isinstance(error, ValueError) for error in several(tmp_path, last=last))
    assert time.monotonic() - begin < 20
    assert steps_in(tmp_path) == []


@pytest.mark.usefixtures("_second_leaves_nothing")
def test_a_folder_that_is_not_shared_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "_VISIBLE_WITHIN_S", 0.1)
    first, second = several(tmp_path)
    assert "a file system that all ranks share" in str(first)
    assert "failed on rank 0" in str(second)


@pytest.mark.parametrize(("limit", "verifies"), [(2, True), (1, False)])
def test_old_checkpoints_go_when_a_newer_one_has_been_read_back(tmp_path, limit, verifies):
    given = settings(save_total_limit=limit, verify_checkpoint=verifies)
    with CheckpointWriter(tmp_path, given) as writer:
        for step in (2, 9, 10, 11):
            writer.save(step, filled(step))
    assert steps_in(tmp_path) == [10, 11][-limit:]


def test_old_checkpoints_stay_when_a_newer_one_reads_back_differently(tmp_path, monkeypatch):
    plain = commit.damaged_files

    def worn(folder, files, **settings):
        flip(folder / "model.safetensors")
        return plain(folder, files, **settings)

    save_checkpoint(tmp_path, 2, save_total_limit=1)
    monkeypatch.setattr(commit, "damaged_files", worn)
    with pytest.raises(RuntimeError, match="reads back differently: model.safetensors does not"):
        save_checkpoint(tmp_path, 4, save_total_limit=1)
    assert steps_in(tmp_path) == [2]


def test_only_good_checkpoints_count(tmp_path):
    """A damaged checkpoint, or one without a manifest, does not displace a good one."""
    for step in (1, 2, 5):
        save_checkpoint(tmp_path, step)
    flip(save_checkpoint(tmp_path, 3) / "optimizer.safetensors")
    without_manifest(save_checkpoint(tmp_path, 6))
    save_checkpoint(tmp_path, 9)
    save_checkpoint(tmp_path, 7, save_total_limit=3)
    # 7, 5 and 2 are good; 9 is later than the last save, so this writer leaves it alone.
    assert steps_in(tmp_path) == [2, 3, 5, 6, 7, 9]


def test_a_copy_that_does_not_fit_into_memory_names_the_setting(tmp_path, monkeypatch):
    def empty(*args, **kw):
        raise MemoryError

    monkeypatch.setattr(np, "empty", empty)
    with (
        pytest.raises(RuntimeError, match=r"no host memory .* set train\.async_save=false"),
        CheckpointWriter(tmp_path, settings()) as writer,
    ):
        writer.save(2, filled(2))
