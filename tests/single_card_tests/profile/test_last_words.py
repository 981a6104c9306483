"""What a process leaves behind for its supervisor.

Pinned here: how a block ended is written, an interrupt too; what says that memory is used up is
told from other errors, Paddle's own message included; messages are one line, without C++ frames.
"""

import errno

import paddle
import pytest

from paddle_vl.profile.last_words import (
    MemoryLimitError,
    is_out_of_memory,
    leaving_word,
    read_words,
    short_message,
)

PADDLE_ERROR = """

--------------------------------------
C++ Traceback (most recent call last):
--------------------------------------
0   paddle::memory::allocation::Allocator::Allocate()

----------------------
Error Message Summary:
----------------------
ResourceExhaustedError: Out of memory error on GPU 0.
Cannot allocate 2GB."""


def test_how_a_block_ended_is_written(tmp_path):
    with leaving_word(tmp_path, 1):
        assert [(word.rank, word.state) for word in read_words(tmp_path)] == [(1, "running")]
    for rank, error in ((0, ValueError("bad key")), (2, MemoryError()), (3, KeyboardInterrupt())):
        with pytest.raises(type(error)), leaving_word(tmp_path, rank):
            raise error
    words = read_words(tmp_path)
    assert [word.state for word in words] == ["failed", "done", "oom", "failed"]
    assert words[0].detail == "ValueError: bad key"


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (MemoryLimitError("rank 0", 2, 1), True),
        (RuntimeError(PADDLE_ERROR), True),
        (RuntimeError("std::bad_alloc"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "out of memory.txt"), False),
        (ValueError("no sample named out of memory"), False),
        (RuntimeError("Connection reset by peer"), False),
    ],
)
def test_memory_errors_are_told_from_others(error, is_memory):
    assert is_out_of_memory(error) is is_memory


def test_an_allocation_that_paddle_refuses_is_a_memory_error():
    with pytest.raises(MemoryError) as caught:
        paddle.empty([10**14])
    assert is_out_of_memory(caught.value)


def test_messages_are_one_line_without_frames():
    message = short_message(RuntimeError(PADDLE_ERROR))
    assert message == (
        "RuntimeError: ResourceExhaustedError: Out of memory error on GPU 0. Cannot allocate 2GB."
    )
    assert len(short_message(RuntimeError("x" * 9999))) <= 400
