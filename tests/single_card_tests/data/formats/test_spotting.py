"""Spotted lines of text: what is read, written and refused."""

import pytest

from paddle_vl.data.formats.grounding import Box
from paddle_vl.data.formats.spotting import Spot, read_spotting, spotted_boxes, write_spotting

LOCATIONS = "".join(f"<|LOC_{value}|>" for value in (0, 40, 310, 40, 310, 88, 0, 1000))
CORNERS = (0, 40, 310, 40, 310, 88, 0, 1000)


def test_lines_are_read_and_written_again():
    answer = f"Total 12{LOCATIONS}\nVAT{LOCATIONS}"
    spots = [Spot("Total 12", CORNERS), Spot("VAT", CORNERS)]
    assert read_spotting(answer) == spots
    assert write_spotting(spots) == answer
    assert spotted_boxes(answer) == [Box(CORNERS, "Total 12"), Box(CORNERS, "VAT")]


@pytest.mark.parametrize(
    ("answer", "match", "kept"),
    [
        (f"a{LOCATIONS}\nb<|LOC_1|>", "line 2 has 1 location tokens, 1 of them behind", ["a"]),
        (f"a{LOCATIONS}{LOCATIONS}", "line 1 has 16 location tokens", ["a"]),
        (f"a{LOCATIONS}b{LOCATIONS}", "line 1 has 16 location tokens, 8 of them", None),
        (f"a{LOCATIONS} b", "line 1 has 8 location tokens, 0 of them behind its text", []),
        (f"a{LOCATIONS.replace('310', '1001')}", "line 1 has <.LOC_1001.>, outside", ["a"]),
        (f"a{LOCATIONS.replace('310', '-1')}", "line 1 has <.LOC_-1.>, outside", ["a"]),
        (LOCATIONS, "line 1 has no text", [""]),
        ("A page.", "line 1 has 0 location tokens", []),
        (" \n", "has no line of text", []),
    ],
)
def test_a_line_that_is_none_is_named_or_left_out(answer, match, kept):
    with pytest.raises(ValueError, match=match):
        read_spotting(answer)
    found = [spot.text for spot in read_spotting(answer, is_strict=False)]
    assert kept is None or found == kept
