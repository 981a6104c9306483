"""Boxes and names.

Guarantees: boxes are written in both spellings and read back to their pixels; fractions, points and
clipping are honoured; boxes without a place, an image or a size are refused.
"""

import json

import pytest

from paddle_vl.data.formats.grounding import Box, read_boxes
from paddle_vl.data.jsonl import BadSampleError
from tests.single_card_tests.data.formats.rows import chat, flat

SIZE = (640, 428)


def found(answer, *boxes, names=(), **entries):
    """The answer with its boxes written."""
    settings = {key: entries.pop(key) for key in ("boxes", "clip_boxes") if key in entries}
    objects = {"ref": [*names], "bbox": [*boxes], **entries}
    row = chat("<image>", answer, images=["a"], objects=objects)
    return flat(row, image_size=lambda source: SIZE, **settings)[1][1]


def test_boxes_points_and_names_are_written():
    box = [64, 42.8, 320, 428]
    assert found("<bbox>", box) == "[100, 100, 500, 1000]"
    assert found("<bbox>", [0.1, 0.1, 0.5, 1], bbox_type="norm1") == "[100, 100, 500, 1000]"
    assert found("<bbox>", [64, 428, 320, 42.8]) == "[100, 100, 500, 1000]"
    assert found("<bbox>", [320, 42.8], boxes="markers") == "<|box_start|>(500,100)<|box_end|>"
    named = found("<ref-object>", names=["a <bbox>"], boxes="markers")
    assert named == "<|object_ref_start|>a <bbox><|object_ref_end|>"


def test_half_a_unit_outside_is_rounded_and_more_is_clipped_if_set():
    assert found("<bbox>", [-0.3, 0, 640.3, 428]) == "[0, 0, 1000, 1000]"
    assert found("<bbox>", [-9, 0, 700, 428], clip_boxes=True) == "[0, 0, 1000, 1000]"
    with pytest.raises(BadSampleError, match="outside of its image of 640 x 428.*data.clip_boxes"):
        found("<bbox>", [0, 0, 641, 428])


TEMPLATE = '[\n\t{"bbox_2d": <bbox>, "label": "<ref-object>"}\n]'


@pytest.mark.parametrize("boxes", ["json", "markers"])
@pytest.mark.parametrize(
    "answer", ["<bbox>", "click(<bbox>)", TEMPLATE, f"```json\n{TEMPLATE}\n```"]
)
def test_written_boxes_are_read_back(answer, boxes):
    box = [64, 42.8, 320, 214]
    names = ["sheep"] if "ref-object" in answer else []
    read = read_boxes(found(answer, box, names=names, boxes=boxes), SIZE)
    assert [each.corners for each in read] == [pytest.approx(box)]
    # Markers within JSON stand behind no name.
    assert read[0].label in ((names or [None])[0], None)


def test_names_and_points_are_read():
    marked = "<|object_ref_start|>kite<|object_ref_end|><|box_start|>(500,250)<|box_end|>"
    assert read_boxes(marked, (100, 200)) == [Box((50.0, 50.0), "kite")]
    text = json.dumps([{"point_2d": [500, 250], "label": "a"}, {"bbox_2d": [0, 0, 1000, 1000]}])
    wanted = [Box((50.0, 50.0), "a"), Box((0.0, 0.0, 100.0, 200.0), None)]
    assert read_boxes(f"Here:\n```json\n{text}\n```", (100, 200)) == wanted
    assert read_boxes("nothing", SIZE) == []
    with pytest.raises(ValueError, match=r"a box is \[1, 2, 3\]"):
        read_boxes('[{"bbox_2d": [1, 2, 3]}]', SIZE)


@pytest.mark.parametrize(
    ("objects", "kind"),
    [
        ({"bbox": [[1, 2, 3]]}, "bad_box"),
        ({"bbox": [[1, 2, 3, "4"]]}, "bad_box"),
        ({"bbox": [[1, 2]], "image_id": [1]}, "bad_box"),
        ({"bbox": [[1, 2]], "image_id": [0, 0]}, "bad_box"),
        ({"bbox": [[1, 2]], "bbox_type": "norm1000"}, "bad_box"),
        ({"bbox": [[1, 2], [3, 4]]}, "tag_count"),
        ({"bbox": [[1, 2]], "ref": ["a"]}, "tag_count"),
        ({"box": [[1, 2]]}, "unknown_key"),
        ("no json", "bad_box"),
    ],
)
def test_objects_that_do_not_fit_are_refused(objects, kind):
    row = chat("<image>", "<bbox>", images=["a"], objects=objects)
    with pytest.raises(BadSampleError) as info:
        flat(row, image_size=lambda source: SIZE)
    assert info.value.kind == kind, info.value


def test_names_must_not_hold_control_tokens():
    row = chat("<image>", "<ref-object>", images=["a"], objects={"ref": ["<|im_end|>"]})
    with pytest.raises(BadSampleError, match="im_end"):
        flat(row, control_tokens=["<|im_end|>"])
