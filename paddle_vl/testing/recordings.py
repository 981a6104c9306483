"""Comparison of the collectives that ranks recorded."""

from collections.abc import Sequence

from paddle_vl.parallel.recorder import Collective


def first_difference(calls_of_ranks: Sequence[Sequence[Collective]]) -> str | None:
    """The first difference between the ranks' recordings; None if there is none.

    Compares kind, dtype, shape and phase of every collective with those on the group's first rank,
    and dtype and shape of every message with those on the other rank.

    Args:
        calls_of_ranks: of all ranks, by global rank.

    Raises:
        ValueError: a call involves a rank without a recording.
    """
    channels = dict.fromkeys(_channel(call) for calls in calls_of_ranks for call in calls)
    last = max((rank for _, ranks in channels for rank in ranks), default=-1)
    if last >= len(calls_of_ranks):
        raise ValueError(
            f"rank {last} takes part in the calls, but there are recordings of "
            f"{len(calls_of_ranks)} ranks: give those of all ranks"
        )
    for channel in channels:
        is_message, ranks = channel
        first, *others = dict.fromkeys(ranks)
        own = [[call for call in calls if _channel(call) == channel] for calls in calls_of_ranks]
        for other in others:
            pairs = zip(own[first], own[other], strict=False)
            same = [
                one.agreed == two.agreed and (is_message or one.phase == two.phase)
                for one, two in pairs
            ]
            position = same.index(False) if False in same else len(same)
            if position < max(len(own[first]), len(own[other])):
                what = "message" if is_message else "collective"
                return (
                    f"{what} {position + 1} of ranks {list(ranks)}: "
                    f"rank {first} {_at(own[first], position)}, "
                    f"rank {other} {_at(own[other], position)}"
                )
    return None


def _at(calls: Sequence[Collective], position: int) -> str:
    if position < len(calls):
        return calls[position].describe()
    return f"nothing, its last {calls[-1].describe()}" if calls else "nothing at all"


def _channel(call: Collective) -> tuple[bool, tuple[int, ...]]:
    """Key of the calls whose order must be the same on all of their ranks: the collectives of a
    group, or the messages from one rank to another."""
    return call.is_message, call.ranks
