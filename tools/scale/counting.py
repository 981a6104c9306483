"""What one rank of a large run sends in a step, counted by running the step with small widths.

The run's own code builds topology, layout, parameters, optimizer and runner, and takes one step,
with all layers, ranks, experts and micro-batches of the run, but few token rows of little width,
on a rank whose peers are not there (`scale.phantom`). Its calls are those of the run. Their bytes
are scaled:

- a call that carries parameters or gradients is known to be theirs: the sum over the parameters,
  padded as its sender pads them, has to give the recorded bytes, and with the shapes of the full
  model, built without storage, it gives the bytes of the run;
- every other call is recorded in two steps, the second with twice the rows and three times the
  width, so the ratio of its bytes says whether they grow with rows, width, both or neither. A call
  that grows in another way is refused.

Half of the token rows are visual, in images of equal size, and the others are targets.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from paddle import Tensor
from paddle.distributed.fleet.utils import hybrid_parallel_util
from paddle.distributed.fleet.utils.tensor_fusion_helper import FusedCommBuffer

from paddle_vl.config.families import family_of_run
from paddle_vl.config.load import flatten
from paddle_vl.families.vlm.inputs.collate import VLCollator
from paddle_vl.families.vlm.objective import VLBatchAdapter, VLLoss
from paddle_vl.families.vlm.pipeline import layer_costs
from paddle_vl.families.vlm.recipe import VLRecipe, model_shape
from paddle_vl.families.vlm.settings import VLRun
from paddle_vl.nn.linear import default_dtype
from paddle_vl.parallel import collectives
from paddle_vl.parallel.agree import check_settings_agree
from paddle_vl.parallel.collectives import BUCKET_ELEMENTS
from paddle_vl.parallel.ranks import ONE_RANK, FleetRanks
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.parallel.recorder import Collective
from paddle_vl.parallel.sharding.buckets import Bucket
from paddle_vl.parallel.topology import initialize
from paddle_vl.train.build import needed_memory
from paddle_vl.train.freeze import freeze_parameters, trained_names, treated_apart
from paddle_vl.train.layout import Layout, parallel_degrees
from paddle_vl.train.memory_needed import NeededMemory
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.step import counted, train_step
from scale.phantom import PhantomGroup, become_rank

# Width and inner widths of the smallest decoder; rows of each image, of each mp rank.
WIDTH, INNER, IMAGE_ROWS = 16, 8, 4
# Factors on rows and width of the two steps.
STEPS = ((1, 1), (2, 3))
# Bytes to which fleet aligns a parameter's slices.
FLEET_ALIGNMENT = 256
_FUSED = "fused_allreduce_gradients_with_group"


@dataclass(frozen=True)
class Call:
    """A collective or message of a step.

    Attributes:
        kind: what it carries, such as `gradients`.
        operation, ranks: see `paddle_vl.parallel.recorder.Collective`.
        num_bytes: that this rank contributes, or receives by a recv.
        pieces: calls that this one stands for: full parameters take more buckets.
    """

    kind: str
    operation: str
    ranks: tuple[int, ...]
    num_bytes: int
    pieces: int = 1

    @property
    def sent(self) -> float:
        """Bytes that leave the rank: over a ring, or directly."""
        others = len(self.ranks) - 1
        part = others / (others + 1)
        shares = {"all_gather": others, "recv": 0, "send": 1, "all_reduce": 2 * part}
        return self.num_bytes * shares.get(self.operation, part)


class Simulated(NamedTuple):
    """One rank of a run.

    Attributes:
        calls: of a step, in order.
        memory: what the rank holds, without activations.
        group_sizes: ranks of every group that it is in.
        start_calls: collectives before the first step.
        agreed: numbers that all ranks exchange before a step.
    """

    rank: int
    calls: list[Call]
    memory: NeededMemory
    group_sizes: list[int]
    start_calls: int
    agreed: int


def family_and_model(config: VLRun) -> tuple[type[VLRecipe], Any]:
    """The family's class, and the configuration of the run's model.

    Raises:
        ValueError: a run that is not simulated, or a model that cannot be read.
    """
    recipe: Any = family_of_run(config).recipe_class()
    if not issubclass(recipe, VLRecipe) or config.parallel.schedule != "plain":
        raise ValueError(
            "runs of vision-language models under parallel.schedule=plain are simulated; count "
            "others with tools/benchmarks/topologies.py"
        )
    kind, source = recipe.model_class.config_class, config.model.config
    if config.model.pretrained is not None:
        return recipe, kind.from_pretrained(config.model.pretrained)
    if isinstance(source, dict):
        return recipe, kind.from_dict(source)
    assert source is not None, "refused when the settings were read"
    is_file = Path(source).is_file()
    return recipe, kind.from_pretrained(Path(source).parent) if is_file else kind.named(source)


def small_config(full: Any, factor: int, mp: int) -> Any:
    """The model with little width: layers, heads and experts of the full one."""
    values = full.to_dict()
    text, vision, width = values["text_config"], values["vision_config"], WIDTH * factor
    text |= {"hidden_size": width, "vocab_size": 64 * mp}
    inner = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    text |= {name: INNER * mp for name in inner if name in text}
    vision |= {"out_hidden_size": width, "hidden_size": 4 * vision["num_heads"]}
    vision |= {"intermediate_size": INNER, "patch_size": 4}
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return type(full).from_dict(values | {name: 60 + number for number, name in enumerate(ids)})


def small_batch(config: Any, num_rows: int, placement: Any) -> Any:
    """A micro-batch of one sample, half of whose rows are those of images."""
    vision = config.vision_config
    per_image = IMAGE_ROWS * vision.spatial_merge_size**2
    images, side = num_rows // 2 // IMAGE_ROWS, round(per_image**0.5)
    ids = np.full([num_rows], config.image_token_id, np.int64)
    ids[num_rows // 2 :] = 1
    sample = {
        "input_ids": ids,
        "labels": np.where(ids == 1, ids, -100),
        "pixel_values": np.zeros([images * per_image, vision.patch_dim], np.float32),
        "image_grid_thw": np.array([[1, side, side]] * images, np.int64),
    }
    collate = VLCollator(
        0,
        config.image_token_id,
        config.video_token_id,
        vision.spatial_merge_size,
        part=placement.ops.row_part,
        lists_real_rows=bool(model_shape(config).num_experts),
        expert_part=placement.ops.expert_part,
    )
    return collate([sample])


class SmallStep:
    """A step of a run with a small model, built as `paddle_vl.train.build` does.

    Args:
        own: the small model's configuration.
        full: the run's.
    """

    def __init__(self, config: VLRun, recipe: type[VLRecipe], own: Any, full: Any):
        self.config, self.recipe, self.full = config, recipe, full
        parallel, degrees = config.parallel, parallel_degrees(config)
        topology = self.topology = initialize(degrees, parallel.fleet, parallel.timeout_s)
        self.ranks = FleetRanks(topology) if topology.world_size > 1 else ONE_RANK
        if topology.world_size > 1:
            settings = flatten(config.model_dump(mode="json"))
            check_settings_agree(settings, topology.describe())
        multiple = config.data.pad_to_multiple_of
        self.layout = Layout(config, topology, model_shape(full), layer_costs(full), multiple)
        self.own = own
        self.model, parameters, trained = self.built(own, "float32")
        if config.train.recompute == "full":
            recompute_layers([*self.model.vision_blocks, *self.model.decoder_layers])
        self.store = self.layout.parameter_store(self.model)
        table = self.model.placement.parameter_table
        self.optimizer = Optimizer(parameters, config.train, set(), self.store, table, trained)
        adapter = VLBatchAdapter(own.vision_config)
        make_stage = recipe.make_stage
        self.runner = self.layout.runner(self.model, make_stage, self.ranks, VLLoss(), adapter)

    def built(self, config: Any, dtype: str) -> tuple[Any, list[tuple[str, Tensor]], set[str]]:
        """A model without storage; its trained parameters, and the names of all ranks' ones."""
        settings = self.config.model
        with default_dtype(dtype):
            make = self.recipe.model_class.from_config
            model = make(config, self.layout.placement(), materialize=False)
        if settings.lora is not None:
            model.add_lora(settings.lora)
        shapes, names = model.whole_shapes(), model.adapter_names()
        trained = trained_names(shapes, settings.freeze, names, self.recipe.parts)
        model.separate(treated_apart(list(model.hf_named_parameters()), trained.__contains__))
        named = freeze_parameters(list(model.hf_named_parameters()), trained, shapes)
        return model, named, trained

    def take(self, num_rows: int) -> int:
        """Train on micro-batches of that many rows; returns how many numbers ranks agree on."""
        batch = small_batch(self.own, num_rows, self.model.placement)
        number = self.config.train.gradient_accumulation_steps
        batches = [counted(batch, self.runner.adapter)] * number
        outcome = train_step(self.runner, self.optimizer, batches, 1e-3, self.ranks)
        return outcome.totals.num_agreed + 1


class Recorder:
    """Names and sizes the calls of a rank.

    Attributes:
        calls: with the bytes of the run where parameters determine them, else with those of the
            small step.
        is_sized: by call whether they did.
    """

    def __init__(self, config: VLRun):
        self.calls: list[Call] = []
        self.is_sized: list[bool] = []
        self._value_bytes = 2 if config.model.compute_dtype == "bfloat16" else 4
        self._reduced_bytes = 2 if config.parallel.reduce_dtype == "bfloat16" else 4
        self._step: SmallStep | None = None
        self._full: dict[int, int] = {}
        self._owner: Callable[[Collective, PhantomGroup], tuple[list[Tensor], Any]] | None = None

    def observe(self, call: Collective, group: PhantomGroup) -> None:
        size, pieces = call.num_bytes, 1
        if self._owner is not None:
            size, pieces = self._of_parameters(call, group)
        self.calls.append(Call(self._kind(call, group), call.kind, call.ranks, size, pieces))
        self.is_sized.append(self._owner is not None)

    @contextmanager
    def of(self, step: SmallStep, full: Any) -> Iterator[None]:
        """Record a step anew, with its parameters known.

        Args:
            full: the run's model, without storage.
        """
        self.calls, self.is_sized, self._step = [], [], step
        table, topology = step.model.placement.parameter_table, step.topology
        for parameter, whole in zip(step.model.parameters(), full.parameters(), strict=True):
            self._full[id(parameter)] = size = prod(whole.shape)
            if not parameter.stop_gradient and (own := step.store.shard_of(parameter)) is not None:
                is_expert = table[parameter].is_expert
                group = topology.expert_sharding_group if is_expert else topology.sharding_group
                if own is not parameter:
                    self._full[id(own)] = -(-size // group.nranks)
        with ExitStack() as stack:
            for owner, name, parameters_of in (
                (Bucket, "start_all_gather", _of_bucket),
                (Bucket, "start_reduction", _of_bucket),
                (FusedCommBuffer, "_comm_grads", _of_buffer),
                (FusedCommBuffer, "sync_params", _of_buffer),
                (hybrid_parallel_util, _FUSED, _of_list),
                (collectives, _FUSED, _of_list),
            ):
                made = self._owned(getattr(owner, name), parameters_of)
                stack.enter_context(mock.patch.object(owner, name, made))
            yield

    def _owned(self, function: Callable, owner: Callable) -> Callable:
        def owned(first: Any, *args: Any, **kwargs: Any) -> Any:
            self._owner = owner(first)
            try:
                return function(first, *args, **kwargs)
            finally:
                self._owner = None

        return owned

    def _of_parameters(self, call: Collective, group: PhantomGroup) -> tuple[int, int]:
        """Bytes of the run, and the number of its calls."""
        assert self._owner is not None
        parameters, padded = self._owner(call, group)
        gathers, ranks = call.kind == "all_gather", group.size()

        def elements(sizes: Iterable[int], value_bytes: int) -> list[int]:
            return [padded(size, ranks, value_bytes) // (ranks if gathers else 1) for size in sizes]

        found = 4 * sum(elements((prod(p.shape) for p in parameters), 4))
        if found != call.num_bytes:
            raise ValueError(
                f"{call.describe()} has {call.num_bytes} bytes, and its {len(parameters)} "
                f"parameters have {found}: this tool does not know how they are padded"
            )
        full = elements((self._full[id(p)] for p in parameters), self._value_bytes)
        width = self._value_bytes if gathers else 4
        if padded is _for_shards and not gathers:
            width = self._reduced_bytes
        return width * sum(full), _pieces(full, BUCKET_ELEMENTS // (ranks if gathers else 1))

    def _kind(self, call: Collective, group: PhantomGroup) -> str:
        if self._owner is not None:
            return "parameters" if call.kind == "all_gather" else "gradients"
        if call.is_message:
            return "pipeline"
        if self._step is None:
            return "start"
        if group is self._step.topology.ep_group.process_group:
            return "experts"
        if group is not self._step.topology.mp_group.process_group:
            return "all ranks"
        config = self._step.own
        levels = 1 + len(config.vision_config.deepstack_visual_indexes)
        is_visual = call.shape[-1:] == (levels * config.text_config.hidden_size,)
        return "tower" if is_visual else "tensor parallel"


def simulated(config: VLRun, rank: int) -> Simulated:
    """Be that rank of the run, in a process of its own.

    Raises:
        ValueError: a run that is not simulated, or a call that does not scale.
    """
    recorder = Recorder(config)
    sizes = become_rank(rank, parallel_degrees(config).num_processes, recorder.observe)
    recipe, full = family_and_model(config)
    value_bytes = 2 if config.model.compute_dtype == "bfloat16" else 4
    parallel = {"reduce_dtype": "float32", "pp_token_rows": None, "pp_visual_rows": None}
    small = config.model_copy(
        update={
            "model": config.model.model_copy(update={"compute_dtype": "float32"}),
            "parallel": config.parallel.model_copy(update=parallel),
        }
    )
    mp = config.parallel.mp_degree
    num_rows = 2 * IMAGE_ROWS * mp
    found, start_calls, agreed, memory = [], 0, 0, NeededMemory(0, 0, 0, 0)
    for rows, width in STEPS:
        num_groups = len(sizes)
        recorder.calls, recorder.is_sized = [], []
        step = SmallStep(small, recipe, small_config(full, width, mp), full)
        start_calls, groups = len(recorder.calls), sizes[num_groups:]
        whole, *_ = step.built(full, config.model.compute_dtype)
        memory = needed_memory(config, step.topology, whole)
        with recorder.of(step, whole):
            agreed = step.take(rows * num_rows)
        found.append((recorder.calls, recorder.is_sized))
    (calls, is_sized), (grown, _) = found
    growth = {
        1: Fraction(1),
        STEPS[1][0]: Fraction(token_rows(config), num_rows),
        STEPS[1][1]: (by_width := Fraction(full.text_config.hidden_size * value_bytes, WIDTH * 4)),
        prod(STEPS[1]): by_width * Fraction(token_rows(config), num_rows),
    }
    of_run = []
    for call, larger, knows in zip(calls, grown, is_sized, strict=True):
        factor = growth.get(larger.num_bytes / (call.num_bytes or 1)) if call.num_bytes else 1
        if knows:
            factor = 1
        if factor is None:
            raise ValueError(f"{call} grows to {larger.num_bytes} bytes: this tool cannot scale it")
        of_run.append(replace(call, num_bytes=round(factor * call.num_bytes)))
    return Simulated(rank, of_run, memory, groups, start_calls, agreed)


def token_rows(config: VLRun) -> int:
    """Of a micro-batch of a data rank, padding included."""
    data = config.data
    length = config.packed_length if data.packing else data.max_length
    multiple = data.pad_to_multiple_of
    return config.train.per_device_train_batch_size * -(-length // multiple) * multiple


def longest_chain(by_stage: Sequence[Simulated], ranks_per_stage: int) -> int:
    """Calls of a step that follow one another: a rank's own, and messages between stages.

    Args:
        by_stage: a rank of each pipeline stage, stage by stage.
        ranks_per_stage: of one pipeline.
    """
    sent: dict[tuple[int, int], list[int]] = {}
    left = [list(each.calls) for each in by_stage]
    depth, received = [0] * len(left), dict[tuple[int, int], int]()
    while any(left):
        moved = False
        for stage, calls in enumerate(left):
            while calls:
                call, before = calls[0], depth[stage]
                if call.operation in ("send", "recv"):
                    way = (call.ranks[0] // ranks_per_stage, call.ranks[1] // ranks_per_stage)
                if call.operation == "recv":
                    number = received.get(way, 0)
                    if number == len(sent.get(way, [])):
                        break
                    before = max(before, sent[way][number] - 1)
                    received[way] = number + 1
                depth[stage] = before + call.pieces
                if call.operation == "send":
                    sent.setdefault(way, []).append(depth[stage])
                calls.pop(0)
                moved = True
        assert moved, "every message that is received is sent"
    return max(depth)


def _of_bucket(bucket: Bucket) -> Callable:
    def members(call: Collective, group: PhantomGroup) -> tuple[list[Tensor], Any]:
        entries = bucket.entries if call.kind == "all_gather" else bucket.trained
        own = [entry.parameter for entry in entries if entry.group.process_group is group]
        return own, _for_shards

    return members


def _for_shards(size: int, ranks: int, value_bytes: int) -> int:
    return -(-size // ranks) * ranks


def _of_buffer(buffer: Any) -> Callable:
    def padded(size: int, ranks: int, value_bytes: int) -> int:
        step = FLEET_ALIGNMENT // value_bytes * ranks
        return -(-size // step) * step

    return lambda call, group: (list(buffer.params), padded)


def _of_list(tensors: Sequence[Tensor]) -> Callable:
    return lambda call, group: (list(tensors), _as_is)


def _as_is(size: int, ranks: int, value_bytes: int) -> int:
    return size


def _pieces(sizes: Iterable[int], limit: int) -> int:
    """Buckets of at most `limit` elements, or one larger parameter."""
    pieces, filled = 1, 0
    for size in sizes:
        if filled and filled + size > limit:
            pieces, filled = pieces + 1, 0
        filled += size
    return pieces
