"""Which files data may name: any, or with `allow_outside` off those of the data file's folder.

Pinned: absolute paths, `../` and links that lead out are taken or refused, of images and videos, of
conversations and demonstrations, when opening and when reading; what leads back is inside.
"""

import pytest

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.pi07.demonstrations.dataset import DemonstrationsDataset
from paddle_vl.families.qwen3_vl.inputs.dataset import MessagesDataset
from tests.single_card_tests.data.video_files import write_video
from tests.single_card_tests.families.pi07.demonstration_builders import SHAPES, line, write_lines
from tests.single_card_tests.families.qwen3_vl.chat_builders import (
    question,
    random_image,
    tiny_processor,
    write_jsonl,
)

PROCESSOR = tiny_processor()


@pytest.fixture
def folder(tmp_path):
    """`data/` with pictures of its own, and pictures and links beside and below it."""
    inside = tmp_path / "data"
    inside.mkdir()
    (tmp_path / "data2").mkdir()
    for place in (tmp_path, inside, tmp_path / "data2"):
        random_image(8, 8).save(place / "a.png")
        write_video(place / "v.mp4", 4, size=(16, 16))
    (inside / "link.png").symlink_to(tmp_path / "a.png")
    (inside / "linked").symlink_to(tmp_path / "data2")
    (inside / "own.png").symlink_to("a.png")
    return inside


OUTSIDE = ["../a.png", "{outer}/a.png", "file://{outer}/a.png", "link.png", "linked/a.png",
           "../data2/a.png"]  # fmt: skip
INSIDE = ["a.png", "own.png", "../data/a.png", "{outer}/data/a.png", "linked/../data/a.png"]


def conversations(folder, path, **options):
    row = question("<image>", images=[path])
    return MessagesDataset([write_jsonl(folder / "a.jsonl", [row])], PROCESSOR, **options)


def demonstrations(folder, path, **options):
    row = line(folder, 1, camera1=[path.removeprefix("file://")])
    return DemonstrationsDataset([write_lines(folder / "d.jsonl", row)], SHAPES, **options)


@pytest.mark.parametrize("opened", [conversations, demonstrations])
@pytest.mark.parametrize("path", OUTSIDE)
def test_paths_that_lead_outside_are_taken_or_refused(folder, opened, path):
    path = path.format(outer=folder.parent)
    assert opened(folder, path)[0]
    message = r"jsonl:1: .*a\.png.*outside the folder .*data\.allow_outside is false: move"
    with pytest.raises(BadSampleError, match=message) as info:
        opened(folder, path, allow_outside=False)
    assert info.value.kind == "outside_path"


@pytest.mark.parametrize("opened", [conversations, demonstrations])
@pytest.mark.parametrize("path", INSIDE)
def test_paths_that_stay_inside_are_taken(folder, opened, path):
    assert opened(folder, path.format(outer=folder.parent), allow_outside=False)[0]


def test_videos_and_goals_are_no_exception(folder):
    row = question("<video>", videos=["../v.mp4"])
    file = write_jsonl(folder / "a.jsonl", [row])
    assert MessagesDataset([file], PROCESSOR)[0]
    with pytest.raises(BadSampleError, match=r"video path '\.\./v\.mp4' leads to"):
        MessagesDataset([file], PROCESSOR, allow_outside=False)
    file = write_lines(folder / "d.jsonl", line(folder, 1, subgoal0="../a.png"))
    with pytest.raises(BadSampleError, match=r"'subgoal0' path '\.\./a\.png' leads to"):
        DemonstrationsDataset([file], SHAPES, ["subgoal"], allow_outside=False)


def test_a_link_that_is_turned_later_is_refused_when_reading(folder):
    dataset = conversations(folder, "own.png", allow_outside=False)
    (folder / "own.png").unlink()
    (folder / "own.png").symlink_to(folder.parent / "a.png")
    with pytest.raises(BadSampleError, match="outside the folder"):
        dataset[0]


def test_the_folder_may_be_a_link_itself(folder):
    linked = folder.parent / "through"
    linked.symlink_to(folder)
    assert conversations(linked, "a.png", allow_outside=False)[0]
