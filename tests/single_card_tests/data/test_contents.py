"""The fingerprint detects edited data when a run resumes.

Guarantees: the fingerprint of conversations and demonstrations changes with an answer of the same
length, the size of an image, and added or removed lines, but not with file times and unused lines;
a loader's state names the changed file; state from before content hashes is compared by line
positions; nothing is written next to the data.
"""

import json
import os

import pytest

from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.families.policy.demonstrations.dataset import DemonstrationsDataset
from paddle_vl.families.policy.demonstrations.sample import DrawnDemonstrations
from paddle_vl.families.vlm.inputs.dataset import MessagesDataset
from tests.single_card_tests.data.probe_datasets import NumberDataset, stack_numbers
from tests.single_card_tests.families.pi07.demonstration_builders import (
    SHAPES,
    line,
    save_image,
    write_lines,
)
from tests.single_card_tests.families.qwen3_vl.chat_builders import (
    question,
    random_image,
    tiny_processor,
    write_jsonl,
)

PROCESSOR = tiny_processor()


def conversations(folder):
    random_image(8, 8).save(folder / "a.png")
    first = write_jsonl(folder / "1.jsonl", [question(answer="A cat."), question(answer="A dog.")])
    second = write_jsonl(folder / "2.jsonl", [question("<image>", images=["a.png"])])
    return [first, second]


def demonstrations(folder):
    first = write_lines(folder / "1.jsonl", line(folder, 1, prompt="A cat."), line(folder, 1))
    save_image(folder / "a.png")
    second = write_lines(folder / "2.jsonl", line(folder, 1, camera0=["a.png"]))
    return [first, second]


def messages_dataset(files, **options):
    return MessagesDataset(files, PROCESSOR, **options)


def drawn_dataset(files, **options):
    return DrawnDemonstrations(DemonstrationsDataset(files, SHAPES, **options))


KINDS = {
    "conversations": (conversations, messages_dataset),
    "demonstrations": (demonstrations, drawn_dataset),
}


@pytest.fixture(params=KINDS)
def data(request, tmp_path):
    """Two data files and a function that opens them."""
    write, dataset = KINDS[request.param]
    return write(tmp_path), dataset


def loader(dataset):
    return PrefetchLoader(dataset, stack_numbers, 1, shuffle=True, drop_last=True)


def edit_answer(files):
    text = files[0].read_text()
    files[0].write_text(text.replace("A cat.", "A cow."))
    assert files[0].read_text() != text


def edit_picture(files):
    save_image(files[0].parent / "a.png", size=(30, 40))


EDITS = {
    "an answer": (edit_answer, r"lines of .*1\.jsonl were added, removed or edited"),
    "a picture": (edit_picture, r"images or videos that .*2\.jsonl names have other sizes"),
    "a line more": (
        lambda files: files[1].write_text(files[1].read_text() * 2),
        r"lines of .*2\.jsonl were added, removed or edited; num_samples was 3 and is 4",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_data_is_refused_by_its_file(data, edit):
    files, dataset = data
    before = dataset(files)
    state = json.loads(json.dumps(loader(before).state_dict()))
    loader(dataset(files)).load_state_dict(state)
    change, message = EDITS[edit]
    change(files)
    assert dataset(files).fingerprint != before.fingerprint
    with pytest.raises(ValueError, match=f"cannot continue in the data: {message}"):
        loader(dataset(files)).load_state_dict(state)


def test_times_and_folders_of_files_do_not_count(data, tmp_path):
    """A run resumes on a copy of its data."""
    files, dataset = data
    state = loader(dataset(files)).state_dict()
    moved = tmp_path.with_name(f"{tmp_path.name}-moved")
    tmp_path.rename(moved)
    files = [moved / file.name for file in files]
    for path in moved.iterdir():
        os.utime(path, ns=(1, 1))
    copied = loader(dataset(files))
    copied.load_state_dict(state)
    here, was = copied.state_dict()["stream"], state["stream"]
    assert here["fingerprint"] == was["fingerprint"]


def test_lines_that_are_not_used_do_not_count(tmp_path):
    prints = []
    for bad in ("{", "["):
        file = write_jsonl(tmp_path / "a.jsonl", [question(), bad])
        prints.append(messages_dataset([file], on_bad_sample="skip").fingerprint)
    assert prints[0] == prints[1]


def old_state(dataset):
    """State as written before content hashes."""
    state = loader(dataset).state_dict()
    del state["stream"]["contents"]
    state["stream"]["fingerprint"] = dataset.positions_fingerprint
    return state


def test_older_state_is_compared_by_positions(data):
    files, dataset = data
    state = old_state(dataset(files))
    edit_answer(files)
    loader(dataset(files)).load_state_dict(state)
    files[0].write_text(files[0].read_text().replace("A cow.", "A horse."))
    with pytest.raises(ValueError, match="fingerprint was"):
        loader(dataset(files)).load_state_dict(state)


def test_fingerprint_of_positions_is_the_one_of_older_checkpoints(tmp_path):
    """The value was written by an earlier version."""
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n' * 3)
    assert messages_dataset([tmp_path / "a.jsonl"]).positions_fingerprint == 2841616239


def test_datasets_without_files_are_compared_by_their_fingerprint():
    state = loader(NumberDataset(3)).state_dict()
    assert "contents" not in state["stream"]
    other = NumberDataset(3)
    other.fingerprint = 2
    with pytest.raises(ValueError, match="fingerprint was 1 and is 2"):
        loader(other).load_state_dict(state)


def test_nothing_is_written_beside_the_data(data):
    files, dataset = data
    before = sorted(files[0].parent.iterdir())
    assert dataset(files).fingerprint
    assert sorted(files[0].parent.iterdir()) == before
