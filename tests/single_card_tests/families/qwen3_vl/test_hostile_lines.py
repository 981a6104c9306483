"""A hostile line, image or video is one bad sample, in conversations and demonstrations."""

import json
import pickle
import tracemalloc

import pytest

from paddle_vl.data.jsonl import BadSampleError, bounded_lines, sample_at
from paddle_vl.families.policy.demonstrations.dataset import DemonstrationsDataset
from paddle_vl.families.vlm.inputs.dataset import MessagesDataset
from tests.single_card_tests.families.pi07.demonstration_builders import SHAPES, line
from tests.single_card_tests.families.qwen3_vl.chat_builders import question, tiny_processor

PROCESSOR = tiny_processor()
DEEP = "[" * 100_000


def escaped(record) -> bytes:
    return json.dumps(record).encode()


CONVERSATIONS = {
    "brackets": (b'{"messages": ' + DEEP.encode(), "broken_json", "nested too deep"),
    "key twice": (
        b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "broken_json",
        "the key 'content' is there twice",
    ),
    "not UTF-8": (b'{"messages": "\xff"}', "broken_json", "not UTF-8"),
    "surrogate": (escaped(question("a \ud800 b")), "bad_text", "half of a surrogate pair"),
    "surrogate in a path": (
        escaped(question("<image>", images=["\ud83d.png"])), "bad_text", "surrogate",
    ),
    "NaN": (escaped(question(score=float("nan"))), "broken_json", "NaN, which is no JSON"),
    "1e400": (b'{"messages": [], "score": 1e400}', "broken_json", "1e400 is beyond the range"),
    "5000 digits": (b'{"score": ' + b"9" * 5000 + b"}", "broken_json", "broken JSON"),
    "huge weight": (
        escaped({"messages": [{"role": "assistant", "content": "a", "weight": 10**30}]}),
        "bad_target", "'weight' '10000",
    ),
    "NUL in a path": (escaped(question("<image>", images=["a\0.png"])), "bad_path", "NUL"),
    "long path": (
        escaped(question("<image>", images=["a" * 5000])), "missing_image", r"\(50\d\d char",
    ),
    "number as a path": (escaped(question("<image>", images=[10**30])), "missing_key", "no.* path"),
    "many keys": (
        escaped({str(number): 1 for number in range(5000)}), "missing_key",
        r"its keys are \['0', .{200,400}\], which fit none of the formats",
    ),
    "long line": (escaped(question("a" * 70_000)), "line_too_long", "65536 bytes.*max_line_bytes"),
}  # fmt: skip


def file_of(tmp_path, bad, good):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n".join([escaped(good), bad, escaped(good)]) + b"\n")
    return file


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_hostile_conversation_is_a_bad_sample(tmp_path, name):
    bad, kind, message = CONVERSATIONS[name]
    limit = 65536 if kind == "line_too_long" else 1 << 20
    file = file_of(tmp_path, bad, question())
    with pytest.raises(BadSampleError, match=message) as info:
        MessagesDataset([file], PROCESSOR, max_line_bytes=limit)
    assert (info.value.kind, info.value.place) == (kind, f"{file}:2")
    dataset = MessagesDataset([file], PROCESSOR, None, "skip", max_line_bytes=limit)
    assert [dataset.place(i) for i in range(len(dataset))] == [f"{file}:1", f"{file}:3"]
    assert dataset.skipped == {kind: 1}
    assert dataset[1]["input_ids"].tolist() == dataset[0]["input_ids"].tolist()


DEMONSTRATIONS = {
    "brackets": (f'{{"state": {DEEP[:50_000]}', "broken_json", "nested too deep"),
    "speed": ({"speed": 10**30}, "out_of_range", "a number of 100 bits; it must be from 0 to"),
    "negative quality": ({"quality": -1}, "out_of_range", "'quality' is -1"),
    "no fps": ({"fps": 0}, "out_of_range", "'fps' is 0; it must be from 1"),
    "state": ({"state": [[10**30, 0]] * 3}, "bad_type", "'state' is .*numbers are needed"),
    "1e400": ('{"state": [[1e400, 0]]}', "missing_key", "no 'camera0'"),
    "surrogate": ({"prompt": "\ud800"}, "bad_text", "surrogate"),
    "NUL": ({"camera0": ["\0", "f1.png", "f2.png"]}, "bad_path", "'camera0' path .*NUL"),
    "long path": ({"camera0": ["a" * 5000] * 3}, "missing_image", "does not exist"),
    "objects": ({"state": [[{}, 0]] * 3}, "bad_type", "numbers are needed"),
    "long line": ({"prompt": "a" * 70_000}, "line_too_long", "65536 bytes"),
}


@pytest.mark.parametrize("name", DEMONSTRATIONS)
def test_a_hostile_demonstration_is_a_bad_sample(tmp_path, name):
    changes, kind, message = DEMONSTRATIONS[name]
    bad = changes if isinstance(changes, str) else json.dumps(line(tmp_path, **changes))
    file = file_of(tmp_path, bad.encode(), line(tmp_path))
    with pytest.raises(BadSampleError, match=message) as info:
        DemonstrationsDataset([file], SHAPES, max_line_bytes=65536)
    assert (info.value.kind, info.value.place) == (kind, f"{file}:2")
    dataset = DemonstrationsDataset([file], SHAPES, on_bad_sample="skip", max_line_bytes=65536)
    assert len(dataset) == 2
    assert dataset.skipped == {kind: 1}


def test_lines_keep_their_numbers_and_offsets_around_long_ones(tmp_path):
    file = tmp_path / "a.jsonl"
    lines = [b"ab\n", b"\n", b"x" * 35 + b"\n", b"exactly10\n", b"y" * 11]
    file.write_bytes(b"".join(lines))
    found = list(bounded_lines(file, 10))
    assert found == [
        (1, 0, b"ab\n"), (3, 4, b"x" * 11), (4, 40, b"exactly10\n"), (5, 50, b"y" * 11),
    ]  # fmt: skip


def test_a_long_line_takes_no_memory(tmp_path):
    file = tmp_path / "a.jsonl"
    with file.open("wb") as stream:
        stream.write(escaped(question()) + b"\n")
        for _ in range(50):
            stream.write(b"[" * (1 << 20))
    tracemalloc.start()
    try:
        dataset = MessagesDataset([file], PROCESSOR, None, "skip")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert dataset.skipped == {"line_too_long": 1}
    assert peak < 8 << 20


@pytest.mark.parametrize(
    "error", [ValueError("x"), RecursionError("x"), OverflowError("x"), OSError("x")]
)
def test_an_unforeseen_fault_is_a_bad_sample(error):
    with pytest.raises(BadSampleError) as info, sample_at("a.jsonl:7"):
        raise error
    copy = pickle.loads(pickle.dumps(info.value))
    assert (copy.kind, copy.place) == ("unreadable_sample", "a.jsonl:7")
    assert type(error).__name__ in str(copy)


def test_what_is_wrong_with_the_machine_is_no_bad_sample():
    with pytest.raises(RuntimeError, match="^no PyAV$"), sample_at("a.jsonl:7"):
        raise RuntimeError("no PyAV")
