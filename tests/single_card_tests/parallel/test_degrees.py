"""Rules for the parallel degrees of a run.

Guarantees: each rule refuses its case with both numbers in the message, and no other rule does; all
problems are reported together; valid degrees pass; numbers below 1 are refused first.
"""

import pytest

from paddle_vl.config.families import ModelShape
from paddle_vl.parallel.degrees import ParallelDegrees, TopologyPlan, plan_problems

SHAPE = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 64, "intermediate_size": 24,
    "num_hidden_layers": 16,
}  # fmt: skip


def problems(shape: dict | None = None, pad_to_multiple_of: int = 8, **degrees) -> list[str]:
    """Problems of a run whose world size is the product of its degrees."""
    chosen = ParallelDegrees(**degrees)
    model = ModelShape(**SHAPE | (shape or {}))
    return plan_problems(TopologyPlan(chosen, chosen.num_processes, model, pad_to_multiple_of))


@pytest.mark.parametrize(
    "degrees",
    [
        {},
        {"dp_degree": 2, "mp_degree": 2},
        {"mp_degree": 2, "sequence_parallel": True},
        {"mp_degree": 2, "pp_degree": 2, "num_micro_batches": 2, "sequence_parallel": True},
        {"sharding_degree": 2, "sharding_stage": 3, "mp_degree": 2},
        {"sharding_degree": 2, "sharding_stage": 1, "pp_degree": 2, "num_micro_batches": 3},
        {"pp_degree": 4, "num_virtual_stages": 2, "num_micro_batches": 8},
        {"pp_degree": 4, "num_virtual_stages": 4, "num_micro_batches": 9},
        {"pp_degree": 3, "num_virtual_stages": 2, "num_micro_batches": 6, "pp_schedule": "fthenb"},
        {"pp_degree": 2, "num_micro_batches": 5, "pp_schedule": "dualpipev"},
        {"pp_degree": 2, "num_micro_batches": 2, "pp_shapes": "dynamic"},
        {"num_micro_batches": 4},
        {"dp_degree": 4, "ep_degree": 2, "sharding_degree": 2},
        {"dp_degree": 4, "ep_degree": 8, "sharding_degree": 4},
        {"mp_degree": 4, "sharding_degree": 2, "ep_degree": 2, "sequence_parallel": True},
        {"mp_degree": 2, "sharding_degree": 4, "cp_degree": 4, "sequence_parallel": True},
        {"mp_degree": 4, "sharding_degree": 8, "cp_degree": 8},
        {"mp_degree": 2, "sharding_degree": 2, "cp_degree": 2, "cp_attention": "ulysses"},
    ],
)
def test_valid_degrees_pass(degrees):
    assert problems({"num_experts": 8}, **degrees) == []


@pytest.mark.parametrize(
    ("degrees", "shape", "message"),
    [
        (
            {"sequence_parallel": True}, {},
            "parallel.sequence_parallel is true but parallel.mp_degree is 1, so it has no effect: "
            "set parallel.mp_degree=2, or remove it",
        ),
        (
            {"sharding_stage": 2}, {},
            "parallel.sharding_stage is 2 but parallel.sharding_degree is 1, so it has no effect: "
            "set parallel.sharding_degree=2, or remove it",
        ),
        (
            {"cp_degree": 2}, {},
            "parallel.cp_degree is 2 but parallel.sharding_degree is 1, so it has no effect: set "
            "parallel.sharding_degree=2, or remove it",
        ),
        (
            {"cp_degree": 4, "sharding_degree": 6}, {},
            "parallel.cp_degree 4 does not divide parallel.sharding_degree 6 (6 = 1 x 4 + 2): the "
            "ranks that share the rows of a sample are neighbours along the sharding axis; set "
            "sharding_degree to a multiple of 4",
        ),
        (
            {"cp_degree": 2, "sharding_degree": 2, "pp_degree": 2, "schedule": "colocated",
             "num_micro_batches": 2}, {},
            "parallel.schedule is colocated with parallel.cp_degree 2: its bridge sends a data "
            "lane all rows of its items, and knows no slices of them; set cp_degree=1 (and "
            "mp_degree with sequence_parallel for long samples), or schedule=plain",
        ),
        (
            {"cp_degree": 2, "sharding_degree": 2}, {"linear_num_key_heads": 2},
            "parallel.cp_degree is 2 but the model has layers with a recurrent state (gated delta "
            "rule), which passes through all tokens of a sample in order: ranks would have to hand "
            "it on, slice by slice; set cp_degree=1, and mp_degree with sequence_parallel for long "
            "samples",
        ),
        (
            {"cp_degree": 2, "sharding_degree": 2, "mp_degree": 4, "cp_attention": "ulysses"},
            {"num_attention_heads": 12},
            "parallel.cp_attention is ulysses with parallel.cp_degree 2, but of mp_degree 4 a rank "
            "has 3 query and 1 key heads, which are divided over the 2 ranks: cp_degree must "
            "divide the query heads, and divide the key heads or be a multiple of them; choose "
            "such a cp_degree, or cp_attention=gather",
        ),
        (
            {"cp_degree": 16, "sharding_degree": 16}, {},
            "data.pad_to_multiple_of 8 does not divide by parallel.cp_degree 16 = 16: every batch "
            "is cut into that many slices of equally many token rows; set "
            "data.pad_to_multiple_of=16",
        ),
        (
            {"cp_degree": 8, "sharding_degree": 8, "mp_degree": 2, "sequence_parallel": True}, {},
            "data.pad_to_multiple_of 8 does not divide by parallel.cp_degree 8 x mp_degree 2 "
            "(sequence_parallel) = 16: every batch is cut into that many slices of equally many "
            "token rows; set data.pad_to_multiple_of=16",
        ),
        (
            {"sharding_stage": 2, "sharding_degree": 2, "pp_degree": 4, "num_micro_batches": 4}, {},
            "parallel.sharding_stage 2 with parallel.pp_degree 4: a pipeline keeps full gradients "
            "over its micro-batches and full parameters between them; set sharding_stage=1, or "
            "pp_degree=1",
        ),
        (
            {"pp_degree": 4, "num_micro_batches": 3}, {},
            "train.gradient_accumulation_steps 3 is less than parallel.pp_degree 4: the "
            "micro-batches fill the stages of the pipeline, and some stage would always be idle; "
            "set train.gradient_accumulation_steps to 4 or more",
        ),
        (
            {"num_virtual_stages": 4, "pp_degree": 2, "num_micro_batches": 4}, {},
            "parallel.num_virtual_stages is 4 but parallel.pp_degree is 2, so it has no effect: "
            "set parallel.pp_degree=3, or remove it",
        ),
        (
            {"pp_schedule": "fthenb", "pp_degree": 4, "num_micro_batches": 4}, {},
            "parallel.pp_schedule is fthenb but parallel.num_virtual_stages is 1: it is a schedule "
            "of virtual stages; set num_virtual_stages to 2 or more, or pp_schedule to 1f1b",
        ),
        (
            {"pp_schedule": "dualpipev", "num_micro_batches": 4}, {},
            "parallel.pp_schedule is dualpipev but parallel.pp_degree is 1, so it has no effect: "
            "set parallel.pp_degree=2, or remove it",
        ),
        (
            {
                "pp_schedule": "dualpipev", "num_micro_batches": 8, "pp_degree": 4,
                "num_virtual_stages": 2,
            }, {},
            "parallel.num_virtual_stages is 2 but parallel.pp_schedule is dualpipev, so it has no "
            "effect: set parallel.pp_schedule=1f1b, or remove it",
        ),
        (
            {"pp_schedule": "dualpipev", "pp_degree": 4, "num_micro_batches": 7}, {},
            "train.gradient_accumulation_steps 7 is less than twice parallel.pp_degree 4: "
            "dualpipev has that many micro-batches in flight; set "
            "train.gradient_accumulation_steps to 8 or more",
        ),
        (
            {"pp_schedule": "dualpipev", "pp_degree": 4, "num_micro_batches": 8},
            {"num_hidden_layers": 7},
            "num_hidden_layers is 7 but parallel.pp_degree 4 x 2 model chunks of dualpipev = 8: "
            "every stage needs a layer; lower one of them",
        ),
        (
            {"num_virtual_stages": 2, "pp_degree": 4, "num_micro_batches": 7}, {},
            "train.gradient_accumulation_steps 7 is less than twice parallel.pp_degree 4: "
            "interleaved 1f1b has that many micro-batches in flight; set "
            "train.gradient_accumulation_steps to 8 or more, or parallel.pp_schedule to fthenb "
            "with 4 of them",
        ),
        (
            {
                "pp_schedule": "balanced_memory", "num_virtual_stages": 2, "pp_degree": 4,
                "num_micro_batches": 6,
            }, {},
            "train.gradient_accumulation_steps 6 is no multiple of parallel.pp_degree 4: "
            "balanced_memory runs the micro-batches in groups of pp_degree; set "
            "train.gradient_accumulation_steps to 8",
        ),
        (
            {
                "pp_shapes": "dynamic", "num_virtual_stages": 2, "pp_degree": 4,
                "num_micro_batches": 8,
            }, {},
            "parallel.pp_shapes is dynamic but parallel.num_virtual_stages is 2, so it has no "
            "effect: set parallel.num_virtual_stages=1, or remove it",
        ),
        (
            {"pp_degree": 4, "num_micro_batches": 8, "num_virtual_stages": 3},
            {"num_hidden_layers": 11},
            "num_hidden_layers is 11 but parallel.pp_degree 4 x num_virtual_stages 3 = 12: every "
            "stage needs a layer; lower one of them",
        ),
        (
            {"dp_degree": 3, "ep_degree": 2}, {"num_experts": 8},
            "parallel.ep_degree 2 with sharding_degree 1 x mp_degree 1 = 1 and dp_degree 3: "
            "experts are divided over neighbouring ranks of sharding x mp, and of dp beyond; "
            "choose an ep_degree that divides 1, or is 1 times a divisor of dp_degree",
        ),
        (
            {"mp_degree": 2, "ep_degree": 2}, {"num_experts": 8},
            "parallel.ep_degree 2 with parallel.mp_degree 2: an expert is on one rank, and "
            "model-parallel ranks send it different token rows: set "
            "parallel.sequence_parallel=true (and data.pad_to_multiple_of), or ep_degree=1, which "
            "divides every expert over the mp ranks",
        ),
        (
            {"dp_degree": 4, "ep_degree": 4}, {"num_experts": 6},
            "num_experts 6 does not divide by parallel.ep_degree 4 (6 = 1 x 4 + 2): choose an "
            "ep_degree that divides 6",
        ),
        (
            {"dp_degree": 2, "ep_degree": 2}, {},
            "parallel.ep_degree is 2 but the model has no experts: set ep_degree=1",
        ),
        (
            {"mp_degree": 4}, {"num_attention_heads": 6},
            "num_attention_heads 6 does not divide by parallel.mp_degree 4 (6 = 1 x 4 + 2): choose "
            "an mp_degree that divides 6",
        ),
        (
            {"mp_degree": 2}, {"num_key_value_heads": 3},
            "num_key_value_heads 3 and parallel.mp_degree 2: one must divide the other, so that "
            "a rank has entire kv heads or ranks share one evenly; choose an mp_degree "
            "that divides 3 or is a multiple of it",
        ),
        (
            {"mp_degree": 4}, {"vocab_size": 259},
            "vocab_size 259 does not divide by parallel.mp_degree 4 (259 = 64 x 4 + 3): pad the "
            "vocabulary to 260, or choose an mp_degree that divides 259",
        ),
        (
            {"mp_degree": 8}, {"intermediate_size": 20},
            "intermediate_size 20 does not divide by parallel.mp_degree 8 (20 = 2 x 8 + 4): choose "
            "an mp_degree that divides 20",
        ),
        (
            {"mp_degree": 4}, {"moe_intermediate_size": 6},
            "moe_intermediate_size 6 does not divide by parallel.mp_degree 4 (6 = 1 x 4 + 2): "
            "choose an mp_degree that divides 6",
        ),
    ],
)  # fmt: skip
def test_a_rule_refuses_with_its_arithmetic(degrees, shape, message):
    assert problems(shape, **degrees) == [message]


@pytest.mark.parametrize(("num_processes", "found"), [(1, "1 rank:"), (8, "8 ranks:")])
def test_degrees_must_multiply_to_the_world_size(num_processes, found):
    degrees = ParallelDegrees(dp_degree=2, mp_degree=3)
    assert plan_problems(TopologyPlan(degrees, num_processes)) == [
        "parallel: dp_degree 2 x mp_degree 3 x pp_degree 1 x sharding_degree 1 = 6, but the run "
        f"has {found} the product must equal it"
    ]


@pytest.mark.parametrize("mp_degree", [1, 2, 4, 8])
def test_kv_heads_may_be_split_or_repeated(mp_degree):
    assert problems({"num_key_value_heads": 4}, mp_degree=mp_degree) == []


def test_token_rows_of_every_batch_divide_under_sequence_parallel():
    degrees = {"mp_degree": 4, "pad_to_multiple_of": 6}
    assert problems(**degrees) == []
    assert problems(**degrees, sequence_parallel=True) == [
        "data.pad_to_multiple_of 6 does not divide by parallel.mp_degree 4: sequence_parallel "
        "shards the token rows (samples x padded length) of every batch over 4 ranks, also of a "
        "batch of one sample; set data.pad_to_multiple_of=4"
    ]


def test_all_problems_are_found_at_once():
    degrees = ParallelDegrees(
        mp_degree=5, sequence_parallel=True, sharding_stage=3, pp_degree=2, num_virtual_stages=9
    )
    found = plan_problems(TopologyPlan(degrees, 4, ModelShape(**SHAPE), pad_to_multiple_of=1))
    subjects = [
        "sharding_degree is 1", "num_virtual_stages is 9", "5 x pp_degree 2", "sharding_stage 3",
        "gradient_accumulation_steps 1", "num_hidden_layers is 16",
        "num_attention_heads 8", "num_key_value_heads 2", "vocab_size 64", "intermediate_size 24",
        "pad_to_multiple_of 1",
    ]  # fmt: skip
    assert len(found) == len(subjects)
    for problem, subject in zip(found, subjects, strict=True):
        assert subject in problem


def test_numbers_out_of_range_are_refused_together():
    with pytest.raises(ValueError, match="2 validation errors") as refusal:
        ParallelDegrees(mp_degree=0, sharding_stage=4)
    assert "mp_degree\n  Input should be greater than or equal to 1" in str(refusal.value)
    assert "sharding_stage\n  Input should be 1, 2 or 3" in str(refusal.value)
