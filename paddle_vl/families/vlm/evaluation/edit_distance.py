"""Edit distances: of sequences, such as letters or words, and of ordered trees, such as tables.

Both are exact: rapidfuzz gives the same numbers for sequences, and apted for trees, in twice the
time.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby


def edit_distance(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """How many entries must be put in, left out or replaced to make one sequence of the other."""
    if len(one) > len(other):
        one, other = other, one
    return [len(one), *_distances(one, other, is_part=False)][-1] if one else len(other)


def near_ends(part: str, text: str, most: int) -> list[int]:
    """Where pieces of a text end from which a part, not empty, differs by so many edits; of ends
    side by side the nearest alone."""
    near = [
        (end, distance)
        for end, distance in enumerate(_distances(part, text, is_part=True), start=1)
        if distance <= most
    ]
    runs = groupby(enumerate(near), key=lambda each: each[1][0] - each[0])
    return [min((d, end) for _, (end, d) in run)[1] for _, run in runs]


def _distances(one: Sequence[Hashable], other: Sequence[Hashable], is_part: bool) -> Iterator[int]:
    """The distance from the first sequence, after each entry of the other one.

    Args:
        is_part: of the nearest piece that ends there, not of all from the beginning.

    Source: Myers 1999 with Hyyro's counting, a column of the table of distances as the bits of two
    integers.
    """
    places: dict[Hashable, int] = {}
    for place, entry in enumerate(one):
        places[entry] = places.get(entry, 0) | 1 << place
    all_bits, last = (1 << len(one)) - 1, 1 << (len(one) - 1)
    # Bits of the places where the column rises and falls by 1.
    rises, falls, distance = all_bits, 0, len(one)
    for entry in other:
        equal = places.get(entry, 0)
        is_kept = (((equal & rises) + rises) ^ rises) | equal | falls
        to_right, to_left = falls | ~(is_kept | rises) & all_bits, rises & is_kept
        distance += bool(to_right & last) - bool(to_left & last)
        yield distance
        to_right, to_left = (to_right << 1 | (not is_part)) & all_bits, to_left << 1 & all_bits
        rises, falls = to_left | ~(is_kept | to_right) & all_bits, to_right & is_kept


@dataclass(frozen=True)
class Tree:
    """A node with a label, and the trees below it in their order."""

    label: Hashable
    below: Sequence["Tree"] = ()


class _Listed:
    """The nodes of a tree, each after those below it."""

    def __init__(self, tree: Tree):
        self.labels: list[Hashable] = []
        # Of each node the first one that is below it, or itself.
        self.firsts: list[int] = []
        self._list(tree)
        # Those whose trees are no beginning of another's, by their first node.
        self.roots = sorted({first: node for node, first in enumerate(self.firsts)}.values())

    def _list(self, tree: Tree) -> int:
        firsts = [self._list(each) for each in tree.below]
        self.firsts.append(firsts[0] if firsts else len(self.labels))
        self.labels.append(tree.label)
        return self.firsts[-1]


def tree_edit_distance(
    one: Tree, other: Tree, exchange: Callable[[Hashable, Hashable], float]
) -> float:
    """What it costs to make one ordered tree of the other.

    A node that is put in or left out costs 1; trees below it move up.

    Args:
        exchange: what it costs to give a node another label, 0 to 2.

    Source: Zhang and Shasha 1989.
    """
    a, b = _Listed(one), _Listed(other)
    costs = [[exchange(x, y) for y in b.labels] for x in a.labels]
    trees = [[0.0] * len(b.labels) for _ in a.labels]
    for i in a.roots:
        for j in b.roots:
            _fill(trees, costs, a.firsts, b.firsts, i, j)
    return trees[-1][-1]


def _fill(
    trees: list[list[float]],
    costs: Sequence[Sequence[float]],
    a: Sequence[int],
    b: Sequence[int],
    i: int,
    j: int,
) -> None:
    """The distances of all trees that begin where those of nodes i and j begin."""
    first_a, first_b = a[i], b[j]
    above = [float(column) for column in range(j - first_b + 2)]
    rows = [above]
    for x in range(first_a, i + 1):
        row = [above[0] + 1]
        found, is_whole = trees[x], a[x] == first_a
        before = rows[a[x] - first_a]
        for column, y in enumerate(range(first_b, j + 1), start=1):
            least = min(above[column], row[-1]) + 1
            if is_whole and b[y] == first_b:
                least = min(least, above[column - 1] + costs[x][y])
                found[y] = least
            else:
                least = min(least, before[b[y] - first_b] + found[y])
            row.append(least)
        rows.append(row)
        above = row
