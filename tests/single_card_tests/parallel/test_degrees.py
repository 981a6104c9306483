"""Rules for the parallel degrees of a run: each refuses its case, and no other rule does."""

from typing import Any

import pytest

from paddle_vl.config.families import EncoderShape, ModelShape
from paddle_vl.config.parallel_settings import EncoderConfig
from paddle_vl.parallel.degrees import ParallelDegrees, TopologyPlan, plan_problems

SHAPE = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 64, "intermediate_size": 24,
    "num_hidden_layers": 16,
}  # fmt: skip
AXES = ("dp", "mp", "pp", "sharding", "ep", "cp")
NAMES = {
    "sp": "sequence_parallel", "stage": "sharding_stage", "micro": "num_micro_batches",
    "virtual": "num_virtual_stages",
}  # fmt: skip
COLOCATED: dict[str, Any] = {"pp": 2, "micro": 2, "schedule": "colocated"}
DUALPIPEV: dict[str, Any] = {"pp": 4, "micro": 8, "pp_schedule": "dualpipev"}
ULYSSES: dict[str, Any] = {"cp": 2, "sharding": 2, "cp_attention": "ulysses"}
BALANCED: dict[str, Any] = {"pp": 4, "virtual": 2, "pp_schedule": "balanced_memory"}


def degrees_of(given: dict[str, Any]) -> ParallelDegrees:
    """Degrees by the names of their axes, and other settings by `NAMES` or their own."""
    return ParallelDegrees(
        **{f"{k}_degree" if k in AXES else NAMES.get(k, k): v for k, v in given.items()}
    )


def problems(given: dict[str, Any], shape: dict | None = None, pads: int = 8) -> list[str]:
    """Problems of a run whose world size is the product of its degrees."""
    degrees, model = degrees_of(given), ModelShape(**SHAPE | (shape or {}))
    return plan_problems(TopologyPlan(degrees, degrees.num_processes, model, pads))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"dp": 2, "mp": 2},
        {"mp": 2, "sp": True},
        {"mp": 2, "pp": 2, "micro": 2, "sp": True},
        {"mp": 4},
        {"mp": 8},
        {"sharding": 2, "stage": 3, "mp": 2},
        {"sharding": 2, "stage": 1, "pp": 2, "micro": 3},
        {"pp": 4, "virtual": 2, "micro": 8},
        {"pp": 4, "virtual": 4, "micro": 9},
        {"pp": 3, "virtual": 2, "micro": 6, "pp_schedule": "fthenb"},
        {"pp": 2, "micro": 5, "pp_schedule": "dualpipev"},
        {"pp": 2, "micro": 2, "pp_shapes": "dynamic"},
        {"micro": 4},
        {"dp": 4, "ep": 2, "sharding": 2},
        {"dp": 4, "ep": 8, "sharding": 4},
        {"mp": 4, "sharding": 2, "ep": 2, "sp": True},
        {"mp": 2, "sharding": 4, "cp": 4, "sp": True},
        {"mp": 4, "sharding": 8, "cp": 8},
        ULYSSES | {"mp": 2},
    ],
    ids=str,
)
def test_valid_degrees_pass(given):
    assert problems(given, {"num_experts": 8}) == []


# Degrees, what differs in the shape of the model, and a part of the message.
REFUSED = [
    ({"sp": True}, {}, "parallel.sequence_parallel is true but parallel.mp_degree is 1"),
    ({"stage": 2}, {}, "sharding_stage is 2 but parallel.sharding_degree is 1"),
    ({"cp": 2}, {}, "cp_degree is 2 but parallel.sharding_degree is 1"),
    ({"cp": 4, "sharding": 6}, {}, "does not divide parallel.sharding_degree 6 (6 = 1 x 4 + 2)"),
    ({"cp": 2, "sharding": 2, **COLOCATED}, {}, "its bridge sends a data lane all rows"),
    ({"cp": 2, "sharding": 2}, {"linear_num_key_heads": 2}, "layers with a recurrent state"),
    (ULYSSES | {"mp": 4}, {"num_attention_heads": 12}, "has 3 query and 1 key heads"),
    ({"cp": 16, "sharding": 16}, {}, "set data.pad_to_multiple_of=16"),
    (
        {"cp": 8, "sharding": 8, "mp": 2, "sp": True}, {},
        "parallel.cp_degree 8 x mp_degree 2 (sequence_parallel) = 16",
    ),
    ({"stage": 2, "sharding": 2, "pp": 4, "micro": 4}, {}, "a pipeline keeps full gradients"),
    ({"pp": 4, "micro": 3}, {}, "set train.gradient_accumulation_steps to 4 or more"),
    ({"virtual": 4, "pp": 2, "micro": 4}, {}, "num_virtual_stages is 4 but parallel.pp_degree is"),
    ({"pp_schedule": "fthenb", "pp": 4, "micro": 4}, {}, "it is a schedule of virtual stages"),
    (DUALPIPEV | {"pp": 1}, {}, "pp_schedule is dualpipev but parallel.pp_degree is 1"),
    (DUALPIPEV | {"virtual": 2}, {}, "set parallel.pp_schedule=1f1b, or remove it"),
    (DUALPIPEV | {"micro": 7}, {}, "dualpipev has that many micro-batches in flight"),
    (DUALPIPEV, {"num_hidden_layers": 7}, "4 x 2 model chunks of dualpipev = 8"),
    ({"virtual": 2, "pp": 4, "micro": 7}, {}, "interleaved 1f1b has that many micro-batches"),
    (BALANCED | {"micro": 6}, {}, "6 is no multiple of parallel.pp_degree 4"),
    (
        {"pp_shapes": "dynamic", "virtual": 2, "pp": 4, "micro": 8}, {},
        "set parallel.num_virtual_stages=1",
    ),
    ({"pp": 4, "micro": 8, "virtual": 3}, {"num_hidden_layers": 11}, "4 x num_virtual_stages 3 ="),
    ({"dp": 3, "ep": 2}, {"num_experts": 8}, "is 1 times a divisor of dp_degree"),
    ({"mp": 2, "ep": 2}, {"num_experts": 8}, "set parallel.sequence_parallel=true"),
    ({"dp": 4, "ep": 4}, {"num_experts": 6}, "num_experts 6 does not divide by parallel.ep_degree"),
    ({"dp": 2, "ep": 2}, {}, "the model has no experts: set ep_degree=1"),
    ({"mp": 4}, {"num_attention_heads": 6}, "num_attention_heads 6 does not divide by"),
    ({"mp": 2}, {"num_key_value_heads": 3}, "num_key_value_heads 3 and parallel.mp_degree 2"),
    ({"mp": 4}, {"vocab_size": 259}, "pad the vocabulary to 260"),
    ({"mp": 8}, {"intermediate_size": 20}, "intermediate_size 20 does not divide"),
    ({"mp": 4}, {"moe_intermediate_size": 6}, "moe_intermediate_size 6 does not divide"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "shape", "part"), REFUSED, ids=[part for *_, part in REFUSED])
def test_a_rule_refuses_with_its_arithmetic(given, shape, part):
    (problem,) = problems(given, shape)
    assert part in problem


def test_a_message_has_both_numbers_the_reason_and_the_remedy():
    assert problems({"cp": 4, "sharding": 6}) == [
        "parallel.cp_degree 4 does not divide parallel.sharding_degree 6 (6 = 1 x 4 + 2): the "
        "ranks that share the rows of a sample are neighbours along the sharding axis; set "
        "sharding_degree to a multiple of 4"
    ]


@pytest.mark.parametrize(("num_processes", "found"), [(1, "1 rank:"), (8, "8 ranks:")])
def test_degrees_must_multiply_to_the_world_size(num_processes, found):
    assert plan_problems(TopologyPlan(degrees_of({"dp": 2, "mp": 3}), num_processes)) == [
        "parallel: dp_degree 2 x mp_degree 3 x pp_degree 1 x sharding_degree 1 = 6, but the run "
        f"has {found} the product must equal it"
    ]


def test_token_rows_of_every_batch_divide_under_sequence_parallel():
    assert problems({"mp": 4}, pads=6) == []
    (problem,) = problems({"mp": 4, "sp": True}, pads=6)
    assert "data.pad_to_multiple_of 6 does not divide by parallel.mp_degree 4" in problem


def test_all_problems_are_found_at_once():
    degrees = degrees_of({"mp": 5, "sp": True, "stage": 3, "pp": 2, "virtual": 9})
    found = plan_problems(TopologyPlan(degrees, 4, ModelShape(**SHAPE), pad_to_multiple_of=1))
    subjects = [
        "sharding_degree is 1", "num_virtual_stages is 9", "5 x pp_degree 2", "sharding_stage 3",
        "gradient_accumulation_steps 1", "num_hidden_layers is 16",
        "num_attention_heads 8", "num_key_value_heads 2", "vocab_size 64", "intermediate_size 24",
        "pad_to_multiple_of 1",
    ]  # fmt: skip
    for problem, subject in zip(found, subjects, strict=True):
        assert subject in problem


def colocated_problems(encoder: dict, given: dict[str, Any]) -> list[str]:
    degrees = degrees_of(COLOCATED | given | {"encoder": EncoderConfig(**encoder)})
    shape = EncoderShape({"vision_config.num_heads": 48})
    return plan_problems(TopologyPlan(degrees, degrees.num_processes, encoder=shape))


@pytest.mark.parametrize(
    ("encoder", "given"),
    [
        ({}, {}),
        ({"dp_degree": 2}, {}),
        ({"mp_degree": 2}, {"micro": 1}),
        ({"dp_degree": 8}, {"dp": 2, "mp": 2}),
        ({"dp_degree": 1, "mp_degree": 8}, {"dp": 2, "mp": 2}),
        ({"mp_degree": 4, "sharding_stage": 1}, {"sharding": 4}),
        ({}, {"pp": 4, "virtual": 2, "micro": 8}),
        ({}, {"pp": 4, "micro": 1}),
    ],
    ids=str,
)
def test_colocated_layouts_that_can_run_pass(encoder, given):
    assert colocated_problems(encoder, given) == []


@pytest.mark.parametrize(
    ("encoder", "given", "part"),
    [
        ({}, {"pp": 1}, "parallel.schedule is colocated but parallel.pp_degree is 1"),
        ({"dp_degree": 2}, {"dp": 2}, "dp_degree 2 x mp_degree 1 = 2, but the run has 4 ranks"),
        ({"mp_degree": 3}, {}, "parallel.encoder.mp_degree 3 does not divide the 2 ranks"),
        ({"mp_degree": 2}, {"dp": 2, "pp": 3}, "one number must divide the other"),
        ({"mp_degree": 2, "sharding_stage": 1}, {}, "there is one encoder lane of 2 ranks"),
        ({"mp_degree": 32}, {"pp": 32}, "vision_config.num_heads 48 does not divide by"),
        ({}, {"dp": 2, "ep": 2}, "parallel.ep_degree 2: expert parallelism is not"),
        ({}, {"pp": 4, "virtual": 2, "micro": 3}, "3 is less than parallel.pp_degree 4"),
    ],
)
def test_a_rule_of_the_colocated_schedule_refuses(encoder, given, part):
    (problem,) = colocated_problems(encoder, given)
    assert part in problem


@pytest.mark.parametrize("degree", ["pp_degree", "cp_degree"])
def test_other_degrees_of_the_encoder_are_refused(degree):
    with pytest.raises(ValueError, match=f"{degree}(.|\n)*1"):
        EncoderConfig(**{degree: 2})


def test_numbers_out_of_range_are_refused_together():
    with pytest.raises(ValueError, match="2 validation errors") as refusal:
        degrees_of({"mp": 0, "stage": 4})
    assert "mp_degree\n  Input should be greater than or equal to 1" in str(refusal.value)
    assert "sharding_stage\n  Input should be 1, 2 or 3" in str(refusal.value)
