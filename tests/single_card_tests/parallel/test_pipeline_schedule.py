"""The order of work and messages in a pipeline.

Guarantees: one virtual stage is 1F1B, with its bubble and its micro-batches in flight; virtual
stages shorten the bubble; every work runs once and after what it needs; sends that wait for their
receiver never lock up, for any numbers; both ends of a pair see one order of messages; layers are
split so that the costliest part is the least possible, and the others are even.
"""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_vl.parallel.pipeline.schedule import BACKWARD_TIME, FORWARD_TIME, Work, plan, play
from paddle_vl.parallel.pipeline.split import split_layers

SIZES = {
    "stages": st.integers(2, 6),
    "virtual": st.integers(1, 4),
    "micro_batches": st.integers(1, 13),
    "forward_only": st.booleans(),
}
UNIT = FORWARD_TIME + BACKWARD_TIME


def run_with_waiting_sends(plans: list) -> list[Work]:
    """Play plans whose sends wait for the receiver; returns the work in the order it was done."""
    at, done = [0] * len(plans), []
    while any(at[rank] < len(plans[rank]) for rank in range(len(plans))):
        moved = False
        for rank, operations in enumerate(plans):
            if at[rank] == len(operations):
                continue
            now = operations[at[rank]]
            if now.kind in ("forward", "backward"):
                done.append(Work(now.kind, now.part, now.micro_batch))
                at[rank] += 1
                moved = True
            elif now.kind == "send":
                there = (
                    plans[now.peer][at[now.peer]] if at[now.peer] < len(plans[now.peer]) else None
                )
                if there == now._replace(kind="receive", peer=rank):
                    at[rank] += 1
                    at[now.peer] += 1
                    moved = True
        assert moved, f"all wait: {[p[i] for p, i in zip(plans, at, strict=True) if i < len(p)]}"
    return done


@settings(deadline=None)
@given(**SIZES)
def test_all_work_is_done_once_and_after_what_it_needs(
    stages, virtual, micro_batches, forward_only
):
    done = run_with_waiting_sends(plan(stages, virtual, micro_batches, forward_only))
    parts = stages * virtual
    kinds = ["forward"] if forward_only else ["forward", "backward"]
    wanted = {Work(k, p, m) for k in kinds for p in range(parts) for m in range(micro_batches)}
    assert len(done) == len(wanted)
    assert set(done) == wanted
    place = {work: i for i, work in enumerate(done)}
    for of, part, micro_batch in wanted:
        if of == "forward" and part > 0:
            needs = [Work("forward", part - 1, micro_batch)]
        elif of == "backward":
            needs = [Work("forward", part, micro_batch)]
            needs += [Work("backward", part + 1, micro_batch)] if part + 1 < parts else []
        else:
            needs = []
        assert all(place[need] < place[of, part, micro_batch] for need in needs)


@settings(deadline=None)
@given(**SIZES)
def test_both_ends_of_a_pair_see_the_same_messages_in_one_order(
    stages, virtual, micro_batches, forward_only
):
    plans = plan(stages, virtual, micro_batches, forward_only)
    for one, other in combinations(range(stages), 2):
        messages = [
            [(op.of, op.part, op.micro_batch, rank if op.kind == "send" else op.peer)
             for op in plans[rank] if op.kind in ("send", "receive") and op.peer == peer]
            for rank, peer in ((one, other), (other, one))
        ]  # fmt: skip
        assert messages[0] == messages[1]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (4, 4), (3, 7)])
def test_one_virtual_stage_is_1f1b(stages, micro_batches):
    played = play(stages, 1, micro_batches)
    assert played.length == (micro_batches + stages - 1) * UNIT
    assert played.most_in_flight == [min(stages - s, micro_batches) for s in range(stages)]
    own = [op for op in plan(stages, 1, micro_batches)[0] if op.kind in ("forward", "backward")]
    steady = [op.kind for op in own[stages - 1 : 2 * micro_batches - stages + 1]]
    assert steady == ["forward", "backward"] * (len(steady) // 2)


@pytest.mark.parametrize(("stages", "virtual"), [(4, 2), (4, 3), (2, 2)])
def test_virtual_stages_shorten_the_bubble(stages, virtual):
    """The bubble stays as many units; with virtual stages a unit is a part of a stage's layers."""
    micro_batches = 2 * stages
    played = play(stages, virtual, micro_batches)
    assert played.length == (micro_batches * virtual + stages - 1) * UNIT


@given(
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    parts=st.integers(1, 5),
    before=st.integers(0, 9),
    after=st.integers(0, 9),
)
def test_split_by_cost_is_the_best_there_is(costs, parts, before, after):
    if parts > len(costs):
        with pytest.raises(ValueError, match=f"{len(costs)} layers cannot fill {parts} parts"):
            split_layers(costs, parts, before, after)
        return

    def costliest(bounds: list[int]) -> int:
        sums = [sum(costs[a:b]) for a, b in pairwise(bounds)]
        sums[0] += before
        sums[-1] += after
        return max(sums)

    found = split_layers(costs, parts, before, after)
    assert [layer for part in found for layer in part] == list(range(len(costs)))
    assert all(len(part) > 0 for part in found)
    least = min(
        costliest([0, *cuts, len(costs)]) for cuts in combinations(range(1, len(costs)), parts - 1)
    )
    assert costliest([part.start for part in found] + [len(costs)]) == least


def test_equal_layers_are_split_evenly_and_the_first_parts_are_the_shorter():
    assert split_layers([1] * 10, 4) == [range(0, 2), range(2, 4), range(4, 7), range(7, 10)]


def test_parts_that_are_not_the_costliest_are_even():
    found = split_layers([1.0] * 34, 4, before=16.0)
    assert [len(part) for part in found] == [1, 11, 11, 11]
