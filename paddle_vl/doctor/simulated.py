"""Tensor parallelism of both families with simulated ranks on one device; see docs/testing.md."""

from collections.abc import Callable
from functools import partial
from typing import Any

from paddle import Tensor, nn

from paddle_vl.doctor.check import Check, Machine, Result, ok, wrong
from paddle_vl.doctor.precision import uses_tf32
from paddle_vl.testing import (
    assert_equals_single_device,
    tiny_pi07,
    tiny_pi07_batch,
    tiny_qwen3_vl,
    tiny_qwen3_vl_batch,
)
from paddle_vl.testing.qwen3_vl import EXPERTS

Build = Callable[..., nn.Layer]
Step = Callable[[Any], Any]


def checks(machine: Machine) -> list[Check]:
    return [
        Check(
            "simulated.qwen3_vl",
            "a tiny Qwen3-VL over simulated ranks equals one device",
            partial(_equal, _qwen_cases),
            limit_s=120.0,
        ),
        Check(
            "simulated.pi07",
            "a tiny pi07 policy over simulated ranks equals one device",
            partial(_equal, _pi07_cases),
            limit_s=120.0,
            is_quick=False,
        ),
    ]


def _qwen_cases() -> dict[str, tuple[Build, Step]]:
    batch = tiny_qwen3_vl_batch()

    def step(model: Any) -> Any:
        return model(**batch)

    return {"dense": (tiny_qwen3_vl, step), "experts": (partial(tiny_qwen3_vl, **EXPERTS), step)}


def _pi07_cases() -> dict[str, tuple[Build, Step]]:
    batch = tiny_pi07_batch()

    def step(model: Any) -> Tensor:
        losses = model(batch)
        return losses["MSE"] + losses["CE"]

    return {"policy": (tiny_pi07, step)}


def _equal(cases: Callable[[], dict[str, tuple[Build, Step]]], machine: Machine) -> Result:
    degrees = (2,) if machine.is_quick else (2, 4)
    # TF32 rounds products of other shapes differently; a GPU adds in another order.
    tolerance = 5e-3 if uses_tf32() else 1e-5 if machine.device == "cpu" else 1e-4
    table = []
    for name, (build, step) in cases().items():
        for degree in degrees:
            for rows in (False, True):
                row = {"model": name, "mp_degree": degree, "sequence_parallel": rows}
                try:
                    ranks = assert_equals_single_device(
                        build, step, degree, sequence_parallel=rows, tolerance=tolerance
                    )
                except AssertionError as error:
                    return wrong(
                        str(error)[:400],
                        "tensor parallelism computes other numbers here than one device: run "
                        "kernels and attention.backends to see which operation does",
                        table=[*table, row | {"differs": str(error)}],
                    )
                table.append(row | {"collectives": len(ranks.collectives[0])})
    return ok(f"{len(table)} cases equal one device within {tolerance:g}", table=table)
