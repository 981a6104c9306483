"""Qwen3-VL, its experts and pi07 under tensor and sequence parallelism, against one device.

Guarantees, on 2 ranks and (heavy) on 4, which share 2 key heads, and of which some have no image or
video. On simulated ranks (`paddle_vl.testing`), which also raise where ranks issue different
collectives:

- losses and every gradient are equal: on batches that mix images, videos and text, with the loss
  weights and the sums of sources, that leave ranks without an image, and of text only; for experts,
  of which every rank has the same tokens; for pi07 and its planner over a row count that the ranks
  do not divide, with different optional inputs, with and without knowledge insulation and
  recomputation; with the tower's work sharded or replicated, frozen or not;
- sampled actions are equal; dropout agrees on ranks with the same rows, and differs on others;
- each image and video is encoded once; all feature levels travel in one collective; a frozen tower
  costs one collective and no gradient; experts need none beside those of a dense MLP.

On real ranks: fresh weights, saved files and values gathered by layout are one device's, and a step
issues the collectives of simulated ranks.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.checkpoint.writing import parameter_array
from paddle_vl.families.pi07.policy import PI07LowLevelPolicy
from paddle_vl.families.vlm.inputs.collate import prepared
from paddle_vl.families.vlm.modeling.call_arguments import called_batch
from paddle_vl.nn.linear import Linear
from paddle_vl.nn.lora import LowRankSettings
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.random_state import seed_split_random
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.parallel.recorder import Collective, record_collectives
from paddle_vl.parallel.tensor import FleetPlacement
from paddle_vl.parallel.topology import initialize
from paddle_vl.testing import (
    assert_equals_single_device,
    one_rank,
    run_ranks,
    sum_partial_gradients,
    tiny_qwen3_vl,
)
from paddle_vl.testing.qwen3_vl import EXPERTS, IMAGE, VIDEO, patches, token_rows
from tests.support.launch import launch, outcome_of, run_checks
from tests.support.pi07_golden import (
    CharacterTokenizer,
    FirstValueActionTokenizer,
    drawn_batch,
    drawn_planner_batch,
    golden_model,
    golden_planner,
    group_statistics,
)
from tests.support.tiny import tiny_config

DENSE = partial(tiny_qwen3_vl, num_attention_heads=4)
# A weight that makes the auxiliary loss as large as the cross entropy.
BALANCED = EXPERTS | {"output_router_logits": True, "router_aux_loss_coef": 1.0}
ROUTED = partial(DENSE, **BALANCED)
# Three samples of 5 steps: neither 2 nor 4 divides the number of rows.
SAMPLES, STEPS = 3, 5
SIZES = (2, pytest.param(4, marks=pytest.mark.heavy))
SPREAD, REPLICATED, ROWS_WHOLE, BOTH_WHOLE = (
    {"sequence_parallel": sp, "vision": vision}
    for sp in (True, False)
    for vision in ("spread", "replicate")
)
ALL, TWO = (SPREAD, REPLICATED, ROWS_WHOLE, BOTH_WHOLE), (SPREAD, BOTH_WHOLE)


def batch(name: str) -> dict[str, Any]:
    pixels, grid = patches([[1, 4, 4], [1, 2, 4], [1, 2, 2]])
    second = [4, ("image", 2), 6, ("image", 1)]
    media: dict[str, Any] = {"pixel_values": pixels, "image_grid_thw": grid}
    if name == "text":
        ids, media = token_rows([1, 2, 3, 4, 5, 6], [5, 6, 7, 8], length=8), {}
    elif name == "one image":
        # Fewer images than ranks.
        ids = token_rows([1, 2, 3, 4], [5, ("image", 1), 6, 7])
        media = {"pixel_values": pixels[-4:], "image_grid_thw": grid[-1:]}
    else:
        first = [1, 9, ("image", 4), 2, 5, 7]
        if name == "mixed":
            first = [1, ("video", 2), 3, ("video", 2), 2, ("image", 4)]
            videos, video_grid = patches([[2, 2, 4]], seed=1)
            media |= {"pixel_values_videos": videos, "video_grid_thw": video_grid}
        ids = token_rows(first, second, [7, 8, 9, 3], length=12)
    labels = np.where(np.isin(ids, (IMAGE, VIDEO, 0)), -100, ids)
    labels[:, 9:] = -100
    fields: Any = {"input_ids": ids, "attention_mask": (ids != 0).astype(np.int64)}
    fields |= {"labels": labels, **media}
    if name == "mixed":
        numbers = np.arange(ids.size).reshape(ids.shape)
        fields |= {"label_sources": numbers % 2, "num_sources": 2}
        fields |= {"loss_weights": (1 + numbers % 3).astype("float32")}
        fields["attention_mask"] = np.ones_like(ids)
        fields = prepared(fields)
    return fields


def of_batch(name: str, model: Any) -> Any:
    output = model(**batch(name))
    # Logits that simulated ranks put together are compared in `test_simulated_ranks`.
    loss = output.loss
    if name == "mixed":
        sums = output.source_sums.detach()
        loss = loss + sums[0] / 7 + sums[1] / 9
    return SimpleNamespace(loss=loss, counts=getattr(model, "tokens_per_expert", dict)())


def frozen(placement: Any) -> Any:
    model = DENSE(placement)
    for parameter in model.visual.parameters():
        parameter.stop_gradient = True
    return model


class Policy(NamedTuple):
    """pi07 or its planner with the weights of golden case 01, and a batch.

    Attributes:
        parts: optional inputs, which every other sample has.
        samples: 1 also means one camera.
        collective: every rank runs every layer, as under stage 3.
    """

    parts: tuple[str, ...] = ("response", "metadata", "subgoal")
    insulated: bool = True
    frozen: bool = False
    recomputed: bool = False
    samples: int = SAMPLES
    is_planner: bool = False
    collective: bool = False

    def build(self, placement: Any = None) -> Any:
        if self.collective and placement is not None:
            placement.ops.layers_are_collective = True
        model = golden_planner(placement) if self.is_planner else golden_model(
            placement, knowledge_insulation=self.insulated, freeze_vision_encoder=self.frozen,
            chunk_size=STEPS, n_action_steps=STEPS,
        )  # fmt: skip
        if self.recomputed:
            recompute_layers([*model.vision_blocks, *model.decoder_layers])
        for block in model.vision_blocks:
            # Softmax ignores a constant on all keys, so its gradient is rounding only.
            block.self_attn.k_proj.bias.stop_gradient = True
        model.train()
        return model

    def batch(self) -> dict[str, Any]:
        rng = np.random.default_rng(3)
        has = dict.fromkeys(self.parts, tuple(range(0, self.samples, 2)))
        shape = {"samples": self.samples, "cameras": 1 if self.samples == 1 else 2}
        if self.is_planner:
            return drawn_planner_batch(rng, has, **shape)
        return drawn_batch(rng, has, steps=STEPS, **shape)

    def step(self, model: Any) -> Any:
        losses = model(self.batch())
        return losses["MSE"] + losses["CE"]


POLICIES = {
    "everything": (Policy(), ALL),
    "nothing": (Policy(()), TWO),
    "not insulated": (Policy(("response",), insulated=False), TWO),
    "frozen": (Policy(("subgoal",), frozen=True), ALL),
    "planner": (Policy(("metadata",), is_planner=True), TWO),
    "planner without metadata": (Policy((), is_planner=True), (SPREAD,)),
    "recomputed": (Policy(recomputed=True), (SPREAD,)),
    "recomputed, not insulated": (Policy(recomputed=True, insulated=False), (ROWS_WHOLE,)),
    "one video": (Policy(("metadata",), samples=1), (SPREAD,)),
    "one video and a goal": (Policy(("subgoal",), samples=1), (SPREAD,)),
    "one video on all": (Policy((), samples=1, collective=True), (SPREAD,)),
    "one video, frozen": (Policy((), samples=1, frozen=True), (SPREAD,)),
}
# Function that builds a model, its step, and placements.
CASES: dict[str, tuple[Callable, Callable, tuple[dict, ...]]] = {
    **{name: (DENSE, partial(of_batch, name), ALL) for name in ("mixed", "one image", "text")},
    "frozen tower": (frozen, partial(of_batch, "one image"), (SPREAD, REPLICATED)),
    "experts": (ROUTED, partial(of_batch, "images"), (SPREAD, ROWS_WHOLE)),
    "experts, text": (ROUTED, partial(of_batch, "text"), (SPREAD, ROWS_WHOLE)),
    **{
        f"pi07, {name}": (policy.build, policy.step, layouts)
        for name, (policy, layouts) in POLICIES.items()
    },
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("case", "layout"), [(case, own) for case, (*_, layouts) in CASES.items() for own in layouts],
    ids=str,
)  # fmt: skip
def test_losses_and_every_gradient_equal_one_device(size, case, layout):
    build, step, _ = CASES[case]
    ranks = assert_equals_single_device(build, step, size, **layout)
    if "experts" in case:
        counts = [
            [count.tolist() for count in output.counts.values()] for output, _ in ranks.results
        ]
        assert counts == [counts[0]] * size
        assert counts[0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sp", [False, True])
def test_sampled_actions_equal_one_device(size, sp):
    policy = Policy()

    def sampled(placement: Any) -> np.ndarray:
        model, given = policy.build(placement), policy.batch()
        model.eval()
        return model.sample_actions(given, given["noise"], num_steps=2).numpy()

    wanted = sampled(None)
    for found in run_ranks(sampled, size, sequence_parallel=sp).results:
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("size", SIZES)
def test_dropout_is_that_of_the_rows_that_a_rank_has(size):
    def dropped(placement: Any) -> list[float]:
        paddle.seed(1)
        seed_split_random([1], placement.ops.mp_group.rank)
        return placement.layers.row_dropout(0.5)(paddle.ones([8, 8])).flatten().tolist()

    first, *others = run_ranks(dropped, size, sequence_parallel=False).results
    assert set(first) == {0.0, 2.0}
    assert others == [first] * len(others)
    own = run_ranks(dropped, size, sequence_parallel=True).results
    assert len({tuple(rows) for rows in own}) == size


def test_dropout_of_adapters_is_the_same_where_the_input_is_the_same():
    def kept(placement: Any) -> dict[str, np.ndarray]:
        paddle.seed(1)
        seed_split_random([1], placement.ops.mp_group.rank)
        layers = {
            "whole rows": placement.layers.column_linear(32, 64),
            "own features": placement.layers.row_linear(64, 32),
            "own images": placement.layers.tower(Linear(32, 32, bias=True)),
        }
        found = {}
        for name, layer in layers.items():
            placement.layers.add_low_rank(layer, LowRankSettings(32, 1.0, dropout=0.5))
            layer.lora.A.set_value(np.eye(32, dtype=np.float32))
            layer.lora.B.set_value(np.eye(32, dtype=np.float32))
            found[name] = layer.lora(paddle.ones([4, 32])).numpy()
        return found

    first, second = run_ranks(kept, 2, sequence_parallel=False).results
    for name, values in first.items():
        assert set(np.unique(values)) == {0.0, 2.0}
        assert (values == second[name]).all() == (name == "whole rows"), name


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vision", ["spread", "replicate"])
def test_every_image_is_encoded_once_and_all_levels_travel_together(size, vision):
    def tower_work(placement: Any) -> tuple[int, list[str], list[str]]:
        model, encoded = DENSE(placement), []
        model.visual.register_forward_pre_hook(lambda layer, given: encoded.append(len(given[0])))
        inputs = batch("images")
        with record_collectives() as recording:
            recording.phase = "forward"
            features = model.encode_visual(called_batch(model.config, placement.ops, **inputs))
            recording.phase = "backward"
            paddle.concat([features.merged, *features.levels]).sum().backward()
        kinds = [[call.kind for call in recording.of(phase)] for phase in ("forward", "backward")]
        return sum(encoded), *kinds

    ranks = run_ranks(tower_work, size, sequence_parallel=True, vision=vision).results
    is_spread = vision == "spread"
    encoded = [work[0] for work in ranks]
    # Images of 16, 8 and 4 patches: the largest gets a rank of its own.
    assert (sum(encoded), max(encoded)) == (28, 16) if is_spread else encoded == [28] * size
    for _, forward, backward in ranks:
        assert (forward, backward) == (["all_gather"] * is_spread, ["all_reduce"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("case", "vision", "wanted"),
    [
        # Two cameras, three samples, three frames and a goal; goals of no sample are left out.
        ("everything", "spread", 24),
        ("everything", "replicate", 24),
        ("nothing", "spread", 18),
        ("one video", "spread", 3),
        ("one video on all", "spread", 3),
    ],
)
def test_every_video_and_goal_is_encoded_once(size, case, vision, wanted):
    policy, _ = POLICIES[case]

    def frames(placement: Any) -> list[int]:
        model, seen = policy.build(placement), []
        tower = model.prefix.video_encoder.tower
        tower.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[0]))
        policy.step(model)
        assert len(seen) <= 1
        return seen

    ranks = run_ranks(frames, size, sequence_parallel=True, vision=vision).results
    found = [sum(seen) for seen in ranks]
    if vision == "replicate":
        assert found == [wanted] * size
    elif policy.collective:
        # A rank without a video encodes one blank frame.
        assert found == [wanted] + [1] * (size - 1)
    else:
        assert sum(found) == wanted
        assert max(found) <= max(-(-wanted // size) + 2, 3)


def collectives_of(step: Callable, build: Callable, placement: Any) -> list[Collective]:
    """All collectives of a step, in order."""
    model = build(placement)
    with record_collectives() as recording:
        recording.phase = "forward"
        loss = step(model)
        recording.phase = "backward"
        getattr(loss, "loss", loss).backward()
        recording.phase = "gradients"
        sum_partial_gradients(model)
    return recording.calls


@pytest.mark.parametrize("sp", [False, True])
def test_a_frozen_tower_costs_one_collective_and_no_gradient(sp):
    policy = POLICIES["frozen"][0]
    run = partial(collectives_of, policy.step, policy.build)
    spread, replicated = (
        run_ranks(run, 2, sequence_parallel=sp, vision=vision).results[0]
        for vision in ("spread", "replicate")
    )

    def of(calls: list[Collective], is_forward: bool) -> list[str]:
        return [call.kind for call in calls if (call.phase == "forward") == is_forward]

    assert sorted(of(spread, True)) == sorted([*of(replicated, True), "all_gather"])
    assert of(spread, False) == of(replicated, False)


@pytest.mark.parametrize("sp", [False, True])
def test_experts_need_no_collective_beside_those_of_a_dense_mlp(sp):
    found = []
    for build in (ROUTED, DENSE):
        run = partial(collectives_of, partial(of_batch, "images"), build)
        calls = run_ranks(run, 2, sequence_parallel=sp).results[0]
        found.append([call.kind for call in calls if call.phase != "gradients"])
    assert found[0] == found[1]
    assert len(found[0]) > 10


def test_ranks_hold_half_of_each_expert_and_the_whole_router():
    wanted = {
        "gate.weight": [16, 6], "experts.gate_up_proj": [6, 16, 8], "experts.down_proj": [6, 4, 16],
    }  # fmt: skip
    with one_rank(rank=1, mp_degree=2) as own:
        layer = ROUTED(own.placement).decoder_layers[0].mlp
        assert {name: list(p.shape) for name, p in layer.named_parameters()} == wanted
        message = "moe_intermediate_size 7 does not divide by the model-parallel degree 2"
        with pytest.raises(ValueError, match=message):
            DENSE(own.placement, **EXPERTS | {"moe_intermediate_size": 7})


def fresh_weights_and_files(folder: str, group: Any, settings: dict[str, Any]) -> list[str]:
    """Keys of tensors that differ from one device's: after a rank draws them, after all ranks save
    them, or after values of a parameter's layout are gathered."""
    config = tiny_config(**settings)
    paddle.seed(7)
    wanted = Qwen3VLForConditionalGeneration.from_config(config).hf_state_dict()
    paddle.seed(7)
    placement = FleetPlacement(group, sequence_parallel=True)
    model = Qwen3VLForConditionalGeneration.from_config(config, placement)
    drawn = model.hf_state_dict()
    model.save_pretrained(f"{folder}/saved", max_shard_bytes=20_000)
    dist.barrier()
    saved = Qwen3VLForConditionalGeneration.from_pretrained(f"{folder}/saved").hf_state_dict()
    doubled = {
        item.key: item.layout.to_stored(
            item.of_full(item.table.full_value(item.parameter, 2 * item.parameter))
        )
        for item in model.stored_parameters()
    }
    return [
        key
        for key, array in wanted.items()
        if not (np.array_equal(drawn[key], array) and np.array_equal(saved[key], array))
        or not np.array_equal(doubled[key], 2 * array)
    ]


class Tokenizer(CharacterTokenizer):
    def save_pretrained(self, folder: Path) -> None:
        """Nothing to save."""


class ActionTokenizer(FirstValueActionTokenizer):
    def save_pretrained(self, folder: Path) -> None:
        """Nothing to save."""


def fresh_policy_and_files(folder: str, group: Any) -> list[str]:
    """Names of tensors that differ from one device's after a rank draws, all save or each loads."""
    config = Policy().build().config.changed(per_group_projection=True, dataset_names=["a", "b"])
    parts = (Tokenizer(), ActionTokenizer(), group_statistics())
    placement = FleetPlacement(group, sequence_parallel=True)
    paddle.seed(7)
    whole = PI07LowLevelPolicy.from_config(config, *parts)
    paddle.seed(7)
    policy = PI07LowLevelPolicy.from_config(config, *parts, placement=placement)
    assert policy.model.whole_shapes() == whole.model.whole_shapes()
    policy.save_pretrained(f"{folder}/parts")
    whole.save_pretrained(f"{folder}/whole{group.rank}")
    dist.barrier()
    again = PI07LowLevelPolicy.from_pretrained(
        f"{folder}/parts", tokenizer=parts[0], action_tokenizer=parts[1], placement=placement
    )
    stored = [read_checkpoint_headers(Path(folder) / n) for n in ("parts", f"whole{group.rank}")]
    assert list(stored[0]) == list(stored[1])
    wrong = [n for n, t in stored[0].items() if (t.read() != stored[1][n].read()).any()]
    wanted = {item.key: parameter_array(item) for item in whole.model.stored_parameters()}
    for model in (policy.model, again.model):
        for item in model.stored_parameters():
            if (parameter_array(item) != wanted[item.key]).any():
                wrong.append(item.key)
    return wrong


REAL = [
    (case, sp)
    for case in ("mixed", "one image", "text", "experts", "pi07, everything", "pi07, planner")
    for sp in (False, True)
]


def worker(folder: str, size: int) -> dict:
    group = initialize(ParallelDegrees(mp_degree=size)).mp_group
    checks: dict[str, Any] = {
        "dense files": partial(fresh_weights_and_files, f"{folder}/dense", group, {}),
        "files of experts": partial(fresh_weights_and_files, f"{folder}/moe", group, BALANCED),
        "files of a policy": partial(fresh_policy_and_files, folder, group),
    }
    for case, sp in REAL:
        build, step, _ = CASES[case]
        placed = partial(FleetPlacement, group, sp)
        checks[f"{case} {sp}"] = lambda build=build, step=step, placed=placed: collectives_of(
            step, build, placed()
        )
    return run_checks(checks)


@pytest.fixture(scope="module", params=SIZES)
def outcomes(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("files"))
    return launch(worker, request.param, arguments=(folder, request.param), timeout=300)


@pytest.mark.parametrize("what", ["dense files", "files of experts", "files of a policy"])
def test_fresh_weights_and_saved_files_are_those_of_one_device(outcomes, what):
    assert outcome_of(outcomes, what) == [[]] * len(outcomes)


@pytest.mark.parametrize(("case", "sp"), REAL)
def test_simulated_ranks_issue_the_collectives_of_real_ones(outcomes, case, sp):
    build, step, _ = CASES[case]
    run = partial(collectives_of, step, build)
    simulated = run_ranks(run, len(outcomes), sequence_parallel=sp).results
    assert simulated == outcome_of(outcomes, f"{case} {sp}")
    assert len(simulated[0]) > 10
