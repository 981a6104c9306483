"""The three phases of the colocated schedule against one process, in float64, on a small model.

Guarantees, with more, as many and fewer encoder lanes than data lanes, for micro-batches fewer
than, equal to and more than the stages, virtual stages, ranks with other token rows, missing items,
frozen parts and offloaded rows:

- every gradient, the norm and every parameter after three SGD steps are within 1e-10 of one
  process, although the counts differ from step to step; every trained parameter moves;
- each item is encoded once in the world (once per rank of its encoder lane);
- the bridge sends what theory says: rows once to the data lane that uses them, and each gradient
  once to the rank that needs it where that is one rank;
- a frozen encoder encodes the next step's items at the end of a step, once, and the next step is
  the same;
- an evaluation between steps gives the same sums and leaves nothing behind;
- the errors that such a schedule may have are seen: the encoder's gradients summed before phase 3,
  divisors that are not the global count, rows under sequence parallelism without their sum.
"""

from functools import partial

import numpy as np
import paddle
import pytest

from paddle_vl.parallel.recorder import record_collectives
from paddle_vl.parallel.region_ops import assign_items
from tests.multi_card_tests.colocated_toy import (
    Case,
    Ranks,
    Reference,
    sgd,
    total_weight,
    world_batches,
)
from tests.support.launch import launch, outcome_of, run_checks

# `test_colocated` compares real models with one device by default.
pytestmark = pytest.mark.heavy
PP2_DP2, PP4 = {"pp_degree": 2, "dp_degree": 2}, {"pp_degree": 4}
PP2_MP2 = {"pp_degree": 2, "mp_degree": 2}
VIRTUAL = PP4 | {"num_virtual_stages": 2}
CASES = {
    "fan-in": Case(PP2_DP2),
    "fan-in, few micro-batches, some without items": Case(PP2_DP2, 1, 1, "some"),
    "equal, a lane without items": Case(PP2_DP2, 2, 5, "lane"),
    "equal, part of the encoder frozen": Case(PP2_DP2, 2, 2, frozen=("encoder up",)),
    "fan-out": Case(PP2_DP2, 4, 3),
    "fan-out, one item in the world": Case(PP2_DP2, 4, 2, "one item"),
    "fan-out, a lane without items, offloaded": Case(PP2_DP2, 4, 3, "lane", offloads=True),
    "pp4, fewer micro-batches than stages": Case(PP4, 1, 2),
    "pp4, more micro-batches than stages, a step without items": Case(PP4, 2, 5, "step"),
    "pp4, encoder over all ranks": Case(PP4, 4, 4, "some"),
    "interleaved, offloaded": Case(VIRTUAL, 1, 8, "some", offloads=True),
    "fthenb": Case(VIRTUAL | {"pp_schedule": "fthenb"}, 2, 4),
    "dualpipev": Case(PP2_DP2 | {"pp_schedule": "dualpipev"}, 1, 4),
    "other rows on mp ranks, fan-in": Case(PP2_MP2, 1, 3, "some", splits_rows=True),
    "other rows on mp ranks, encoder over all ranks": Case(PP2_MP2, 4, 2, splits_rows=True),
    "frozen encoder": Case(PP2_DP2, frozen=("encoder",)),
    "frozen encoder and first stage": Case(PP2_DP2, 4, frozen=("encoder", 0)),
    "frozen first stage": Case(PP2_DP2, frozen=(0,)),
    "frozen language model": Case(PP2_DP2, 2, frozen=(0, 1)),
}
TOLERANCE, FLOAT32 = 1e-10, 1e-6


def errors_of_steps(case: Case) -> dict:
    ranks = Ranks.of(case)
    reference = Reference(len(ranks.model.chunks), case)
    before = {name: p.numpy() for name, p in reference.model.named_parameters()}
    errors: dict[str, list[float]] = {}
    lanes = ranks.topology.data_size
    for step in range(3):
        data = world_batches(step, lanes, case)
        ranks.runner.encoder.num_encoded = 0
        loss, expected = ranks.backward(data), reference.backward(data)
        encoded = ranks.ranks.gathered(ranks.runner.encoder.num_encoded)
        items = sum(len(batch["rows"]) for lane in data for batch in lane)
        assert sum(encoded) == items * case.encoder_mp
        gradients = reference.gradients()
        norm = float(np.sqrt(sum((g**2).sum() for g in gradients.values())))
        found = {
            "loss": abs(loss - expected) / expected,
            "norm": abs(ranks.norm() - norm) / norm,
            "gradients": ranks.error(gradients, of_gradients=True),
        }
        if items:
            trained = {n for n, p in reference.model.named_parameters() if not p.stop_gradient}
            assert gradients.keys() == trained
            assert all(g.any() for g in gradients.values())
        sgd(ranks.own_parameters().values(), ranks.norm())
        sgd(reference.model.parameters(), norm)
        found["parameters"] = ranks.error(values_of(reference), of_gradients=False)
        found["evaluation"] = evaluation_error(ranks, data)
        for what, error in found.items():
            errors.setdefault(what, []).append(error)
    for name, parameter in reference.model.named_parameters():
        assert parameter.stop_gradient or (parameter.numpy() != before[name]).any(), name
    return {"errors": errors, "class": type(ranks.runner.engine).__name__}


def evaluation_error(ranks: Ranks, data: list[list[dict]]) -> float:
    sums = ranks.runner.loss_sums(ranks.batches(data))
    if not (ranks.ranks.counts_losses or ranks.case.splits_rows):
        sums = paddle.zeros_like(sums)
    assert all(p.grad is None for p in ranks.model.parameters())
    found = ranks.ranks.sum_over_all(sums).item()
    reference = Reference(len(ranks.model.chunks), ranks.case)
    full = {}
    for name, parameter in ranks.model.named_parameters():
        full[name] = ranks.table.full_value(parameter) if name in ranks.names else None
    stages = ranks.ranks.gathered(
        {name: value.tolist() for name, value in full.items() if value is not None}
    )
    for name, parameter in reference.model.named_parameters():
        parameter.set_value(np.array(next(of[name] for of in stages if name in of)))
    with paddle.no_grad():
        expected = sum(loss_of(reference, batch) for lane in data for batch in lane)
    return abs(found - expected) / max(abs(expected), 1.0)


def loss_of(reference: Reference, batch: dict) -> float:
    sections, rows = {}, None
    if batch["rows"]:
        out = reference.model.tower(paddle.to_tensor(batch["pixels"]))
        sections = dict(enumerate(paddle.split(out, 3, axis=1)))
    for chunk in reference.model.chunks:
        rows = chunk({**batch, "sections": sections}, rows)
    return rows.item()


def values_of(reference: Reference) -> dict[str, np.ndarray]:
    return {name: p.numpy() for name, p in reference.model.named_parameters()}


def error_of_a_step(
    case: Case, breaks=lambda ranks: None, count_of_own_lane: bool = False
) -> float:
    """Largest relative error of a gradient after a step of a changed schedule."""
    ranks = Ranks.of(case)
    reference = Reference(len(ranks.model.chunks), case)
    data = world_batches(0, ranks.topology.data_size, case)
    breaks(ranks)
    lane = ranks.topology.encoder.role.place.lane
    total = total_weight([data[lane]] if count_of_own_lane else data)
    ranks.runner.accumulate_gradients(ranks.batches(data), [total])
    ranks.ranks.sum_gradients(ranks.trained())
    reference.backward(data)
    return ranks.error(reference.gradients(), of_gradients=True)


def summed_before_phase_3() -> float:
    def breaks(ranks):
        phase_3 = ranks.runner._backward
        encoder = [t for t in ranks.trained() if t[1].is_encoder]

        def after_the_sums(*arguments):
            for parameter, _ in encoder:
                parameter.grad = paddle.zeros_like(parameter)
            ranks.ranks.sum_gradients(encoder)
            phase_3(*arguments)

        ranks.runner._backward = after_the_sums
        total = ranks.ranks.sum_gradients
        ranks.ranks.sum_gradients = lambda tensors: total(
            [t for t in tensors if not t[1].is_encoder] if len(tensors) > len(encoder) else tensors
        )

    return error_of_a_step(Case(PP2_DP2), breaks)


def divided_by_a_lanes_count() -> float:
    # Losses are divided on the last stage, by the global count, which all stages know.
    return error_of_a_step(Case(PP2_DP2), count_of_own_lane=True)


def rows_without_their_sum() -> float:
    def breaks(ranks):
        ranks.runner.bridge.gradient_group = ranks.topology.pp_group

    return error_of_a_step(Case(PP2_MP2, splits_rows=True), breaks)


def bytes_of_a_step(encoder_mp: int) -> dict:
    """Bridge collectives of a step, and their theoretical bytes."""
    case = Case(PP2_DP2, encoder_mp, 3)
    ranks = Ranks.of(case)
    data = world_batches(0, ranks.topology.data_size, case)
    with record_collectives() as recording:
        ranks.runner.accumulate_gradients(ranks.batches(data), [total_weight(data)])
    width = sum(ranks.runner.encoder.section_widths)
    calls = [
        (call.kind, call.num_bytes)
        for call in recording.calls
        if not call.is_message and call.shape[-1:] == (width,)
    ]
    rows = [sum(sum(batch["rows"]) for batch in lane) for lane in data]
    own, row = rows[ranks.topology.data_rank], 8 * width
    if encoder_mp > 1:
        wanted = [("all_reduce", own * row)]
        if encoder_mp == 4:
            wanted.append(("all_gather", max(rows) * row))
        return {"calls": calls, "wanted": wanted}
    counts = [count for batch in data[ranks.topology.data_rank] for count in batch["rows"]]
    shares = assign_items(np.array(counts), 2)
    longest = max(sum(counts[item] for item in share) for share in shares)
    # Padded to the longest share.
    wanted = [("all_gather", longest * row), ("reduce_scatter", 2 * longest * row)]
    return {"calls": calls, "wanted": wanted}


def read_ahead() -> float:
    """Error of a step whose items were encoded in the step before, after an evaluation."""
    case = Case(PP2_DP2, frozen=("encoder",))
    ranks = Ranks.of(case)
    reference, runner = Reference(len(ranks.model.chunks), case), ranks.runner
    data = [world_batches(step, ranks.topology.data_size, case) for step in range(2)]
    batches = [ranks.batches(of_step) for of_step in data]
    left = [batches[1], []]
    runner.upcoming = lambda: left.pop(0)
    runner.accumulate_gradients(batches[0], [total_weight(data[0])])
    for parameter in ranks.model.parameters():
        parameter.clear_gradient(False)
    runner.loss_sums(batches[0])
    runner.encoder.num_encoded = 0
    # The trainer adds entries to the batches.
    later = [{**batch, "needed": 1} for batch in batches[1]]
    runner.accumulate_gradients(later, [total_weight(data[1])])
    assert runner.encoder.num_encoded == 0
    assert not left
    ranks.ranks.sum_gradients(ranks.trained())
    reference.backward(data[1])
    return ranks.error(reference.gradients(), of_gradients=True)


BROKEN = (summed_before_phase_3, divided_by_a_lanes_count, rows_without_their_sum)
ENCODER_MP = (1, 2, 4)


def worker() -> dict:
    paddle.set_default_dtype("float64")
    checks: dict = {name: partial(errors_of_steps, case) for name, case in CASES.items()}
    checks |= {check.__name__: check for check in (*BROKEN, read_ahead)}
    checks |= {f"bytes {mp}": partial(bytes_of_a_step, mp) for mp in ENCODER_MP}
    return run_checks(checks)


@pytest.fixture(scope="module")
def outcomes():
    return launch(worker, 4, timeout=600)


@pytest.mark.parametrize("name", CASES)
def test_gradients_norm_and_parameters_equal_one_process(outcomes, name):
    for found in outcome_of(outcomes, name):
        for what, errors in found["errors"].items():
            # The reported loss and evaluation sums are float32.
            most = FLOAT32 if what in ("loss", "evaluation") else TOLERANCE
            assert max(errors) < most, (what, errors)
        virtual = CASES[name].degrees.get("num_virtual_stages") == 2
        assert ("Interleave" in found["class"]) == virtual


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_schedule_is_seen(outcomes, broken):
    assert min(outcome_of(outcomes, broken.__name__)) > 1e-2


@pytest.mark.parametrize("encoder_mp", ENCODER_MP)
def test_the_bridge_sends_what_theory_says(outcomes, encoder_mp):
    for found in outcome_of(outcomes, f"bytes {encoder_mp}"):
        assert found["calls"] == found["wanted"]


def test_the_next_steps_items_are_encoded_ahead(outcomes):
    assert max(outcome_of(outcomes, "read_ahead")) < TOLERANCE
