"""Programs of a model that is split over tensor-parallel ranks.

All ranks share the tower's program. Each has a prefill and a decode program with its own heads,
features and vocabulary rows; the logits of both are whole. With sequence parallelism a rank's
prefill keeps a shard of the token rows. A decode step never does: its few rows need not divide.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paddle_vl.export.rank_writing import RanksToExport
from paddle_vl.export.writing import Device, ModelToExport, ProgramToExport, answer_of
from paddle_vl.families.qwen3_vl.model import Qwen3VLForConditionalGeneration as Model
from paddle_vl.families.qwen3_vl.program_examples import (
    prompt_example,
    sizes,
    step_example,
    tower_example,
)
from paddle_vl.families.qwen3_vl.programs import (
    DecodeProgram,
    PrefillProgram,
    TowerProgram,
    num_own_key_heads,
)
from paddle_vl.nn.placement import Placement


class Rank(Protocol):
    """A rank without peers, see `paddle_vl.parallel.traced_rank.TracedRank`."""

    rank: int
    size: int

    def placement(self, sequence_parallel: bool) -> Placement:
        """For the model's constructor, inside `entered`."""
        ...

    def entered(self, device: Device = "cpu") -> AbstractContextManager[None]:
        """Build the rank's model, or trace its programs for a device, inside the block."""
        ...


def ranks_to_export(
    model: Model,
    load: Callable[[Placement], Model],
    make_rank: Callable[[int], Rank],
    mp_degree: int,
    sequence_parallel: bool,
    save_files: Callable[[Path], None],
) -> RanksToExport:
    """The programs of all ranks, with the full model's answers.

    Args:
        model: the full model.
        load: the same weights with a placement.
        make_rank: a rank by its number.
    """
    rng = np.random.default_rng(0)
    length = -(-9 // mp_degree) * mp_degree
    tower = ProgramToExport(TowerProgram(model), "tower", tower_example(model, rng))
    prefill = ProgramToExport(
        PrefillProgram(model), "decoder", prompt_example(model, rng, length), True
    )
    decode = ProgramToExport(DecodeProgram(model), "decoder", step_example(model, rng), True)
    answers = {"prefill": answer_of(prefill), "decode": answer_of(decode)}

    def each() -> Iterator[ModelToExport]:
        for number in range(mp_degree):
            rank = make_rank(number)
            with rank.entered():
                own = load(rank.placement(sequence_parallel))
                stepping = own
                if sequence_parallel:
                    stepping = load(rank.placement(False))
                    _share(own, stepping)
            cut = partial(_own_heads, config=model.config, rank=rank)
            programs = {
                "prefill": ProgramToExport(
                    PrefillProgram(own, mp_degree), "decoder", prefill.example, True,
                    answer=[cut(array) for array in answers["prefill"]],
                ),
                "decode": ProgramToExport(
                    DecodeProgram(stepping, mp_degree), "decoder",
                    {name: cut(array) for name, array in decode.example.items()}, True,
                    answer=answers["decode"],
                ),
            }  # fmt: skip
            yield ModelToExport(
                "qwen3_vl", sizes(model.config), programs, lambda _: None,
                traced=rank.entered, differ_on_gpu=["prefill"] if sequence_parallel else [],
            )  # fmt: skip

    shared = ModelToExport("qwen3_vl", sizes(model.config), {"tower": tower}, save_files)
    return RanksToExport(shared, each, sequence_parallel)


def _own_heads(array: np.ndarray, config: Any, rank: Rank) -> np.ndarray:
    """Keys or values `[B, K, L, H]` of a rank's heads; other arrays as they are."""
    if array.ndim != 4:
        return array
    own = num_own_key_heads(config, rank.size)
    first = rank.rank * config.text_config.num_key_value_heads // rank.size
    return np.ascontiguousarray(array[:, first : first + own])


def _share(own: Model, other: Model) -> None:
    """Give another model of the rank the same parameters, so that both are stored once."""
    parameters: Mapping[str, Any] = dict(own.named_parameters())
    for name, parameter in other.named_parameters():
        parameters[name]._share_buffer_to(parameter)
        parameter.name = parameters[name].name
