"""The rules that the degrees of a run must satisfy.

A rule is a function that yields a message for each problem of a `Plan`. Rules need neither a device
nor other ranks: `plan_problems` runs before anything is built.
"""

from collections.abc import Iterator

from paddle_vl.parallel.colocated import rules as colocated
from paddle_vl.parallel.degrees import AXES, Plan

Problems = Iterator[str]


def plan_problems(plan: Plan) -> list[str]:
    """All problems of a plan, the same on every rank."""
    return [problem for rule in RULES for problem in rule(plan)]


def degrees_match_world_size(plan: Plan) -> Problems:
    degrees = plan.degrees
    if degrees.num_processes != plan.num_processes:
        arithmetic = " x ".join(f"{axis}_degree {degrees.degree(axis)}" for axis in AXES)
        yield (
            f"parallel: {arithmetic} = {degrees.num_processes}, but the run has "
            f"{plan.num_processes} rank{'s' if plan.num_processes > 1 else ''}: the product "
            "must equal it"
        )


def sequence_parallel_has_mp_ranks(plan: Plan) -> Problems:
    if plan.degrees.sequence_parallel and plan.degrees.mp_degree == 1:
        yield (
            "parallel.sequence_parallel is true but parallel.mp_degree is 1: it shards token rows "
            "over the mp ranks; set mp_degree to 2 or more, or sequence_parallel to false"
        )


def sharding_stage_has_ranks(plan: Plan) -> Problems:
    degrees = plan.degrees
    if degrees.sharding_stage > 1 and degrees.sharding_degree == 1:
        yield (
            f"parallel.sharding_stage is {degrees.sharding_stage} but parallel.sharding_degree is "
            "1, so there are no ranks to shard over: set sharding_degree to 2 or more, or remove "
            "sharding_stage"
        )


def sharding_stage_suits_pipeline(plan: Plan) -> Problems:
    degrees = plan.degrees
    if degrees.sharding_stage > 1 and degrees.pp_degree > 1:
        yield (
            f"parallel.sharding_stage {degrees.sharding_stage} with parallel.pp_degree "
            f"{degrees.pp_degree}: a pipeline keeps full gradients over its micro-batches and "
            "full parameters between them; set sharding_stage=1, or pp_degree=1"
        )


def micro_batches_fill_pipeline(plan: Plan) -> Problems:
    degrees = plan.degrees
    stages, micro_batches = degrees.pp_degree, degrees.num_micro_batches
    if stages == 1:
        return
    is_plain_1f1b = degrees.pp_schedule == "1f1b" and degrees.num_virtual_stages == 1
    if degrees.schedule == "colocated" and is_plain_1f1b:
        # Stages that wait for the pipeline have work in the encoder.
        return
    if micro_batches < stages:
        yield (
            f"train.gradient_accumulation_steps {micro_batches} is less than parallel.pp_degree "
            f"{stages}: the micro-batches fill the stages of the pipeline, and some stage would "
            f"always be idle; set train.gradient_accumulation_steps to {stages} or more"
        )


def virtual_stages_have_pipeline(plan: Plan) -> Problems:
    degrees = plan.degrees
    if degrees.num_virtual_stages > 1 and degrees.pp_degree < 3:
        yield (
            f"parallel.num_virtual_stages is {degrees.num_virtual_stages} but parallel.pp_degree "
            f"is {degrees.pp_degree}: virtual stages need a pipeline of 3 ranks or more; set "
            "pp_degree to 3 or more, or num_virtual_stages to 1"
        )


def schedule_has_virtual_stages(plan: Plan) -> Problems:
    degrees = plan.degrees
    schedule, virtual = degrees.pp_schedule, degrees.num_virtual_stages
    if schedule in ("fthenb", "balanced_memory") and virtual == 1:
        yield (
            f"parallel.pp_schedule is {schedule} but parallel.num_virtual_stages is 1: it is a "
            "schedule of virtual stages; set num_virtual_stages to 2 or more, or pp_schedule to "
            "1f1b"
        )
    if schedule == "dualpipev" and degrees.pp_degree == 1:
        yield (
            "parallel.pp_schedule is dualpipev but parallel.pp_degree is 1: set pp_degree to 2 or "
            "more, or remove pp_schedule"
        )
    if schedule == "dualpipev" and virtual > 1:
        yield (
            f"parallel.pp_schedule is dualpipev and parallel.num_virtual_stages is {virtual}: it "
            "always has two model chunks on each rank; set num_virtual_stages to 1"
        )


def micro_batches_suit_schedule(plan: Plan) -> Problems:
    degrees = plan.degrees
    stages, micro_batches = degrees.pp_degree, degrees.num_micro_batches
    schedule, interleaves = degrees.pp_schedule, degrees.num_virtual_stages > 1
    if stages == 1 or micro_batches < stages:
        return
    setting = f"train.gradient_accumulation_steps {micro_batches}"
    pipeline = f"parallel.pp_degree {stages}"
    if schedule == "dualpipev" and micro_batches < 2 * stages:
        yield (
            f"{setting} is less than twice {pipeline}: dualpipev has that many micro-batches in "
            f"flight; set train.gradient_accumulation_steps to {2 * stages} or more"
        )
    if schedule == "1f1b" and interleaves and micro_batches < 2 * stages:
        yield (
            f"{setting} is less than twice {pipeline}: interleaved 1f1b has that many "
            "micro-batches in flight; set train.gradient_accumulation_steps to "
            f"{2 * stages} or more, or "
            f"parallel.pp_schedule to fthenb with {stages} of them"
        )
    if schedule in ("fthenb", "balanced_memory") and micro_batches % stages:
        more = -(-micro_batches // stages) * stages
        yield (
            f"{setting} is no multiple of {pipeline}: {schedule} runs the micro-batches in groups "
            f"of pp_degree; set train.gradient_accumulation_steps to {more}"
        )


def shapes_suit_schedule(plan: Plan) -> Problems:
    degrees = plan.degrees
    if degrees.pp_shapes == "static":
        return
    if degrees.pp_schedule != "1f1b" or degrees.num_virtual_stages > 1:
        yield (
            f"parallel.pp_shapes is {degrees.pp_shapes} with parallel.pp_schedule "
            f"{degrees.pp_schedule} and num_virtual_stages {degrees.num_virtual_stages}: only 1f1b "
            "without virtual stages takes messages of changing size; set pp_shapes to static, "
            "which pads the smaller micro-batches of a step"
        )


def layers_fill_stages(plan: Plan) -> Problems:
    if plan.model is None:
        return
    degrees, layers = plan.degrees, plan.model.num_hidden_layers
    if degrees.pp_schedule == "dualpipev":
        each, what = 2, "2 model chunks of dualpipev"
    else:
        each, what = degrees.num_virtual_stages, f"num_virtual_stages {degrees.num_virtual_stages}"
    chunks = degrees.pp_degree * each
    if layers < chunks:
        yield (
            f"num_hidden_layers is {layers} but parallel.pp_degree {degrees.pp_degree} x "
            f"{what} = {chunks}: every stage needs a layer; lower one of them"
        )


def query_heads_divide(plan: Plan) -> Problems:
    if plan.model is not None:
        yield from _indivisible("num_attention_heads", plan.model.num_attention_heads, plan)


def kv_heads_divide(plan: Plan) -> Problems:
    if plan.model is None:
        return
    heads, mp = plan.model.num_key_value_heads, plan.degrees.mp_degree
    if heads % mp and mp % heads:
        yield (
            f"num_key_value_heads {heads} and parallel.mp_degree {mp}: one must divide the other, "
            "so that a rank has entire kv heads or ranks share one evenly; choose an "
            f"mp_degree that divides {heads} or is a multiple of it"
        )


def vocabulary_divides(plan: Plan) -> Problems:
    if plan.model is not None:
        vocab_size, mp = plan.model.vocab_size, plan.degrees.mp_degree
        remedy = f"pad the vocabulary to {-(-vocab_size // mp) * mp}"
        yield from _indivisible("vocab_size", vocab_size, plan, remedy)


def mlp_width_divides(plan: Plan) -> Problems:
    if plan.model is not None:
        yield from _indivisible("intermediate_size", plan.model.intermediate_size, plan)


def expert_width_divides(plan: Plan) -> Problems:
    if plan.model is not None:
        yield from _indivisible("moe_intermediate_size", plan.model.moe_intermediate_size, plan)


def experts_divide(plan: Plan) -> Problems:
    ep, dp = plan.degrees.ep_degree, plan.degrees.dp_degree
    if ep == 1:
        return
    if dp % ep:
        yield (
            f"parallel.ep_degree {ep} does not divide parallel.dp_degree {dp}: experts are sharded "
            f"over ranks of the dp axis; choose a dp_degree that is a multiple of {ep}"
        )
    if plan.model is not None and plan.model.num_experts == 0:
        yield f"parallel.ep_degree is {ep} but the model has no experts: set ep_degree=1"
    elif plan.model is not None and plan.model.num_experts % ep:
        experts = plan.model.num_experts
        yield (
            f"num_experts {experts} does not divide by parallel.ep_degree {ep} "
            f"({experts} = {experts // ep} x {ep} + {experts % ep}): choose an ep_degree that "
            f"divides {experts}"
        )


def token_rows_divide(plan: Plan) -> Problems:
    multiple, mp = plan.pad_to_multiple_of, plan.degrees.mp_degree
    if multiple is not None and plan.degrees.sequence_parallel and multiple % mp:
        # The length itself must divide: the last evaluation batch has any number of samples.
        yield (
            f"data.pad_to_multiple_of {multiple} does not divide by parallel.mp_degree {mp}: "
            "sequence_parallel shards the token rows (samples x padded length) of every batch over "
            f"{mp} ranks, also of a batch of one sample; set data.pad_to_multiple_of={mp}"
        )


def _indivisible(name: str, value: int, plan: Plan, remedy: str | None = None) -> Problems:
    mp = plan.degrees.mp_degree
    if value % mp:
        choose = f"choose an mp_degree that divides {value}"
        yield (
            f"{name} {value} does not divide by parallel.mp_degree {mp} "
            f"({value} = {value // mp} x {mp} + {value % mp}): "
            + (f"{remedy}, or {choose}" if remedy else choose)
        )


RULES = (
    degrees_match_world_size,
    sequence_parallel_has_mp_ranks,
    sharding_stage_has_ranks,
    sharding_stage_suits_pipeline,
    micro_batches_fill_pipeline,
    virtual_stages_have_pipeline,
    schedule_has_virtual_stages,
    micro_batches_suit_schedule,
    shapes_suit_schedule,
    layers_fill_stages,
    query_heads_divide,
    kv_heads_divide,
    vocabulary_divides,
    mlp_width_divides,
    expert_width_divides,
    experts_divide,
    token_rows_divide,
    *colocated.RULES,
)
