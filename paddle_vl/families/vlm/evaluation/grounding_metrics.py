"""How near boxes and points of an answer are to references, in thousandths of the image."""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import product

from paddle_vl.data.formats.grounding import boxes_in

# Two corners of a box, or a point.
Shape = tuple[float, ...]
# Thousandths of the image that a point may be away from the reference's.
_POINT_DISTANCE = 50.0


def _shapes(text: str) -> list[Shape]:
    # A point alone may have lost its markers.
    return [box.corners for box in boxes_in(re.sub(r"\A\(([^()]*)\)\Z", r"[\1]", text))]


def _wanted_shapes(reference: str, kinds: Mapping[int, str]) -> list[Shape]:
    found = _shapes(reference)
    if not found or any(len(each) not in kinds for each in found):
        raise ValueError(
            f"the reference {reference!r:.80} is no {' or '.join(kinds.values())}: write "
            "[x1, y1, x2, y2] in thousandths of the image"
        )
    return found


def _iou(first: Shape, second: Shape) -> float:
    (ax, ay, bx, by), (cx, cy, dx, dy) = first, second
    inner = max(0.0, min(bx, dx) - max(ax, cx)) * max(0.0, min(by, dy) - max(ay, cy))
    union = max(0.0, bx - ax) * max(0.0, by - ay) + max(0.0, dx - cx) * max(0.0, dy - cy) - inner
    return inner / union if union > 0 else 0.0


def _paired_ious(found: Sequence[Shape], wanted: Sequence[Shape]) -> list[float]:
    """IoU of each pair, the nearest first; 0 for a box without a partner."""
    ious, partners = list[float](), dict[int, int]()
    pairs = product(enumerate(found), enumerate(wanted))
    for iou, own, other in sorted(((_iou(a, b), i, j) for (i, a), (j, b) in pairs), reverse=True):
        if own not in partners and other not in partners.values():
            partners[own] = other
            ious.append(iou)
    return ious + [0.0] * abs(len(found) - len(wanted))


def box_scores(answer: str, references: Sequence[str]) -> dict[str, float]:
    """Mean IoU of boxes, paired with the nearest pair first, and the share of the answer's with an
    IoU of a threshold or more; of the nearest reference."""
    found = [each for each in _shapes(answer) if len(each) == 4]
    of_references = (_paired_ious(found, _wanted_shapes(each, {4: "box"})) for each in references)
    best = max(of_references, key=lambda ious: sum(ious) / len(ious))
    shares = {
        f"box_precision_{least}": sum(iou >= least for iou in best) / max(len(found), 1)
        for least in (0.5, 0.7, 0.9)
    }
    return {"box_iou": sum(best) / len(best), **shares}


def points_right(answer: str, references: Sequence[str]) -> bool:
    """Whether the answer's first point, or the middle of its first box, is in a box of a reference,
    or near a point of it."""
    kinds = {4: "box", 2: "point"}
    wanted = [each for text in references for each in _wanted_shapes(text, kinds)]
    if not (found := _shapes(answer)):
        return False
    x, y = (sum(found[0][axis::2]) / len(found[0][axis::2]) for axis in (0, 1))
    return any(
        math.dist(shape, (x, y)) <= _POINT_DISTANCE
        if len(shape) == 2
        else shape[0] <= x <= shape[2] and shape[1] <= y <= shape[3]
        for shape in wanted
    )
