"""Rules that the colocated schedule's settings must satisfy, see `parallel.plan_rules`."""

from collections.abc import Iterator

from paddle_vl.parallel.degrees import Plan

Problems = Iterator[str]


def colocated_has_pipeline(plan: Plan) -> Problems:
    degrees = plan.degrees
    if degrees.schedule == "colocated" and degrees.pp_degree == 1:
        yield (
            "parallel.schedule is colocated but parallel.pp_degree is 1: it separates the encoder "
            "from the stages of a pipeline; set pp_degree to 2 or more, or schedule to plain"
        )


def encoder_has_dp_and_mp_only(plan: Plan) -> Problems:
    """The encoder has neither a pipeline nor context parallelism."""
    degrees = plan.degrees
    if degrees.schedule != "colocated":
        return
    encoder = degrees.encoder
    if encoder.pp_degree > 1:
        yield (
            f"parallel.encoder.pp_degree is {encoder.pp_degree}: the encoder runs without a "
            "pipeline, on all ranks at once; set it to 1, and divide the encoder by "
            "parallel.encoder.mp_degree"
        )
    if encoder.cp_degree > 1:
        yield (
            f"parallel.encoder.cp_degree is {encoder.cp_degree}: a context-parallel encoder is not "
            "supported, an image is one sequence of its own; set it to 1, and divide the encoder "
            "by parallel.encoder.mp_degree"
        )


def encoder_covers_ranks(plan: Plan) -> Problems:
    degrees = plan.degrees
    if degrees.schedule != "colocated":
        return
    dp, mp, world = degrees.encoder.dp_degree, degrees.encoder.mp_degree, degrees.num_processes
    if world % mp:
        yield (
            f"parallel.encoder.mp_degree {mp} does not divide the {world} ranks of the run: "
            "encoder lanes have equally many ranks and leave none out; choose a divisor"
        )
    elif dp is not None and dp * mp != world:
        yield (
            f"parallel.encoder: dp_degree {dp} x mp_degree {mp} = {dp * mp}, but the run has "
            f"{world} ranks, and every rank takes part in the encoder: set dp_degree={world // mp} "
            "or leave it out"
        )


def lanes_divide(plan: Plan) -> Problems:
    degrees = plan.degrees
    world, mp = degrees.num_processes, degrees.encoder.mp_degree
    if degrees.schedule != "colocated" or world % mp:
        return
    lanes, data = world // mp, degrees.dp_degree * degrees.sharding_degree
    if lanes % data and data % lanes:
        yield (
            f"{lanes} encoder lanes ({world} ranks / parallel.encoder.mp_degree {mp}) and {data} "
            f"data lanes (parallel.dp_degree {degrees.dp_degree} x sharding_degree "
            f"{degrees.sharding_degree}): one number must divide the other, so that the items of a "
            "data lane go to whole encoder lanes; change encoder.mp_degree"
        )


def encoder_sharding_has_lanes(plan: Plan) -> Problems:
    degrees = plan.degrees
    if degrees.schedule != "colocated" or not degrees.encoder.sharding_stage:
        return
    if degrees.num_processes == degrees.encoder.mp_degree:
        yield (
            f"parallel.encoder.sharding_stage is {degrees.encoder.sharding_stage} but there is one "
            f"encoder lane of {degrees.encoder.mp_degree} ranks: its optimizer state is sharded "
            "over lanes; set sharding_stage to 0, or lower encoder.mp_degree"
        )


def encoder_widths_divide(plan: Plan) -> Problems:
    degrees = plan.degrees
    if degrees.schedule != "colocated" or plan.encoder is None:
        return
    mp = degrees.encoder.mp_degree
    for name, width in plan.encoder.widths.items():
        if width % mp:
            yield (
                f"{name} {width} does not divide by parallel.encoder.mp_degree {mp} "
                f"({width} = {width // mp} x {mp} + {width % mp}): choose an encoder.mp_degree "
                f"that divides {width}"
            )


def experts_are_not_sharded(plan: Plan) -> Problems:
    degrees = plan.degrees
    if degrees.schedule == "colocated" and degrees.ep_degree > 1:
        yield (
            f"parallel.schedule is colocated with parallel.ep_degree {degrees.ep_degree}: expert "
            "parallelism is not supported by this schedule yet; set ep_degree=1, or schedule=plain"
        )


RULES = (
    colocated_has_pipeline,
    encoder_has_dp_and_mp_only,
    encoder_covers_ranks,
    lanes_divide,
    encoder_sharding_has_lanes,
    encoder_widths_divide,
    experts_are_not_sharded,
)
