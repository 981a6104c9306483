"""Full training runs on several ranks that equal the same run on one device, as a table: a row for
each family and topology, which the tests beside this file launch once on real processes.

Loss, gradient norm, evaluations, every other metric that does not count ranks, answers, and every
parameter and moment after the last step are those of one device. With `then` a second run continues
the checkpoint of step 2: under the same topology with the same bits, under another, or from one
device's checkpoint, with the numbers of one device. `tests/routes` has the rows of users' commands;
here are mixes of axes, options, and samples that are hard to divide.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import paddle.distributed as dist
import pytest
from safetensors.numpy import load_file

import tests.support.captioner  # noqa: F401 - registers the family, in each rank too
from paddle_vl.checkpoint.manifest import Manifest
from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.train.checkpoint import STATE_FILE
from tests.multi_card_tests import written_runs as written
from tests.support.captioner.run import write_captioner_run
from tests.support.finished_runs import (
    arrays_of,
    assert_close,
    assert_near,
    assert_one_file_of_weights,
    assert_same_answers,
    lasting_metrics,
)
from tests.support.launch import launch
from tests.support.preference_runs import write_preference_run
from tests.support.rollout_runs import GIVEN, given_rollouts, write_rollout_run
from tests.support.sampled_runs import SAMPLED, write_sampled_run
from tests.support.tolerance import TOPOLOGY
from tests.support.topology_runs import (
    CP,
    DAMPED,
    HIDDEN,
    PP,
    SHARDING,
    SP,
    STAGE_3,
    ULYSSES,
    continue_run,
    num_data_parts,
    train,
    write_mixed_run,
)

ITSELF, ONE_DEVICE = "itself", "one device"


@dataclass(frozen=True)
class Family:
    """A run on one device, and how near to it runs on several ranks are.

    Attributes:
        write: writes it into a folder; returns its file.
        settings: further ones; `$RUN` is that folder.
        samples, micro_batches: of a micro-batch over all data ranks, and of a step.
        by_rank: data ranks divide the micro-batches of a step, not the samples of each.
        tolerance: of metrics, relative and absolute.
        arrays: compares parameters and moments.
        left_out: how metrics begin that depend on the ranks.
        shows: metrics that are not always zero.
        checks: more about a run and that of one device.
        patch: name and value of a constant, in all processes.
        like: ranks and topology that stand for one device, as dropout draws by topology.
    """

    write: Callable[[Path], Path]
    settings: tuple[str, ...] = ()
    samples: int = 4
    micro_batches: int = 2
    by_rank: bool = False
    tolerance: tuple[float, float] = (TOPOLOGY, 1e-12)
    arrays: Callable[[dict, dict], None] = assert_close
    left_out: tuple[str, ...] = ()
    shows: tuple[str, ...] = ()
    checks: tuple[Callable[[Path, Path], None], ...] = ()
    patch: tuple[str, Any] | None = None
    like: tuple[int, Sequence[str]] = (1, ())

    def on(self, folder: Path | str, topology: Sequence[str] = ()) -> list[str]:
        """Settings of a topology, which may change the batches too."""
        parts = num_data_parts(topology)
        samples, number = self.samples, self.micro_batches
        samples, number = (samples, number // parts) if self.by_rank else (samples // parts, number)
        batches = (
            f"train.per_device_train_batch_size={samples}",
            f"train.gradient_accumulation_steps={number}",
        )
        own = [one.replace("$RUN", str(folder)) for one in self.settings]
        return [*own, *batches, *topology]

    def patched(self) -> Any:
        return mock.patch(*self.patch) if self.patch else nullcontext()


class Row(NamedTuple):
    """A family on several ranks.

    Attributes:
        then: what continues a checkpoint of step 2: `ITSELF`, another topology, or this topology
            that of `ONE_DEVICE`.
    """

    family: str
    ranks: int
    name: str
    topology: Sequence[str]
    then: Sequence[str] | str = ""
    is_heavy: bool = True

    def named(self) -> str:
        return f"{self.family}: {self.name}"


# What a row has besides.


def best_is_that_of_one_device(several: Path, one: Path) -> None:
    best, same = (
        json.loads((run / "checkpoint-4" / STATE_FILE).read_text())["best"]
        for run in (several, one)
    )
    assert best == same
    assert [Manifest.read(run / "final").step for run in (several, one)] == [best["step"]] * 2


def guard_is_that_of_one_device(several: Path, one: Path) -> None:
    guard, same = (
        json.loads((run / "checkpoint-4" / STATE_FILE).read_text())["guard"]
        for run in (several, one)
    )
    assert guard == same
    assert guard["before"] != guard["last"]
    assert [Manifest.read(run / "final").step for run in (several, one)] == [4, 4]


def answers_differ(several: Path, one: Path) -> None:
    assert len({*assert_same_answers(several, one)}) > 1


def every_rank_writes_a_part(several: Path, one: Path) -> None:
    file = Manifest.read(several / "checkpoint-2").files["model.safetensors"]
    assert len(file.pieces) == 4
    assert max(piece.length for piece in file.pieces) < file.size / 2


def rows_are_full(several: Path, one: Path) -> None:
    for line in (*lasting_metrics(several), *lasting_metrics(one)):
        assert 0.5 < line.get("packing_efficiency", 1) <= 1


def what_no_forward_reads_is_kept(several: Path, one: Path) -> None:
    found = load_file(several / "final" / "model.safetensors")
    np.testing.assert_array_equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert found["visual.vision_model.head.probe"].all()
    assert "vision_use_head" not in (several / "final" / "config.json").read_text()


def every_factor_was_trained(several: Path, one: Path) -> None:
    for key, array in load_file(one / "final" / "adapter_model.safetensors").items():
        assert array.any() or not key.endswith("lora_B.weight"), key


def policy_is_one_file(several: Path, one: Path) -> None:
    assert_one_file_of_weights(several / "final", one / "final")


def the_tower_moves(several: Path, one: Path) -> None:
    first, last = (arrays_of(one / f"checkpoint-{step}") for step in (2, 4))
    # A softmax ignores the biases of keys.
    of_tower = [key for key in first if written.TOWER in key and "k_proj.bias" not in key]
    assert of_tower
    assert [key for key in of_tower if np.array_equal(first[key], last[key])] == []


def assert_same_weights(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """To the bit, without moments."""
    assert_same_bits(*({k: a for k, a in of.items() if "/" not in k} for of in (found, wanted)))


def assert_same_bits(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)


MP2, DP2 = ("parallel.mp_degree=2", *SP), ("parallel.dp_degree=2",)
PP3 = ("parallel.pp_degree=3", "parallel.num_virtual_stages=2")
PP4, VIRTUAL = ("parallel.pp_degree=4",), "parallel.num_virtual_stages=2"
EP2, EP4 = "parallel.ep_degree=2", "parallel.ep_degree=4"
SHARDING_4, STAGE_2 = "parallel.sharding_degree=4", "parallel.sharding_stage=2"
FOLDED = (*MP2, *SHARDING)
CP4 = (SHARDING_4, "parallel.cp_degree=4", "data.pad_to_multiple_of=4")
FTHENB, DUALPIPEV, BALANCED = (
    f"parallel.pp_schedule={name}" for name in ("fthenb", "dualpipev", "balanced_memory")
)
COLOCATED, STATE = "parallel.schedule=colocated", "parallel.encoder.sharding_stage=1"
ENCODER_2, ENCODER_4 = (f"parallel.encoder.mp_degree={degree}" for degree in (2, 4))
OFFLOAD = "parallel.encoder.offload_rows=true"
FULL, ATTENTION = "train.recompute=full", "train.recompute=attention"
BY_COST = "parallel.pp_split=cost"
OVERLAPS = (
    "parallel.fleet.sharding_configs={comm_overlap: true}", "parallel.sharding_gather_overlap=true",
)  # fmt: skip
FUSED = "parallel.fleet.sharding_configs={comm_overlap: true, enable_fuse_optimizer_states: true}"
# As on GPUs.
BATCHED = "parallel.fleet.pp_configs={use_batch_p2p_comm: true}"
# The same samples in twice as many micro-batches of a step of four, and in half as many.
HALVES = ("train.gradient_accumulation_steps=8", "train.per_device_train_batch_size=2")
TWICE = ("train.gradient_accumulation_steps=2", "train.per_device_train_batch_size=8")

SAVED = ("train.save_steps=2", *DAMPED)
EVALUATED = (
    *(*SAVED, "data.eval=[$RUN/test.jsonl]"),
    *("train.eval_steps=2", "train.per_device_eval_batch_size=1", "train.eval={max_new_tokens: 5}"),
)
BEST = "train.best={metric: exact_match, mode: min, load_at_end: true}"
# The first one falls, the second one writes final/ after every evaluation.
GUARDED = (
    "data.eval=[{path: $RUN/test.jsonl, name: text, metrics: [cer, exact_match]}]",
    "train.guard=[{metric: cer, max_drop: 0.0, action: warn}, "
    "{metric: exact_match, max_drop: 1.0}]",
)
# Two to five samples per row, the longest with 80 tokens; an epoch is one step.
PACKED = ("data.packing=true", "data.packing_length=192", "data.max_vision_tokens_per_row=20")
BASE = ("model.config=null", "model.pretrained=$RUN/base")
DORA = (
    *BASE,
    "model.lora={r: 2, lora_alpha: 6, target_modules: [all-linear, lm_head]}",
    "model.lora.modules_to_save=[mergers, model.language_model.norm]",
    "train.part_learning_rates={vision: 0.02, mergers: 0.005}",
    *("model.lora.use_dora=true", "train.layer_decay={vision: 0.9, language: 0.8}"),
    *("train.unfreeze=[{at: 2, patterns: [language]}]", *SAVED),
)
PAIRS = (
    *("train.objective=preference", "model.config=null", "model.pretrained=$RUN/base"),
    *(*SAVED, "data.eval=[$RUN/test.jsonl, $RUN/train.jsonl]"),
    *("train.eval_steps=2", "train.per_device_eval_batch_size=2"),
)
MPO = "preference.loss_type=[sigmoid, bco_pair, sft]"
ALL_LINEAR_DORA = "model.lora={r: 2, target_modules: [all-linear], use_dora: true}"
# Answers that are given, with old log-probabilities, those of a sampler and a reference.
GIVEN_ANSWERS = (
    *("train.objective=grpo", "model.config=null", "model.pretrained=$RUN/base", *SAVED),
    *("grpo.num_generations=2", "grpo.max_completion_length=8", "grpo.temperature=0.8"),
    *("grpo.beta=0.04", "grpo.importance_sampling_mode=token_truncate", "train.learning_rate=0.05"),
    "grpo.entropy_coef=0.01",
)
LORA = "model.lora={r: 2, target_modules: [all-linear], modules_to_save: [mergers], use_dora: true}"
KTO = (
    *("preference.loss_type=[kto]", "train.learning_rate=0.05"),
    *("data.train=[$RUN/rated.jsonl]", "data.eval=[$RUN/rated.jsonl]"),
)
TOWER_LORA = (
    "model={pretrained: $RUN/base, lora: {r: 2, use_dora: true, "
    "target_modules: [q_proj, 'model.visual.blocks.*', 'model.visual.merger.*']}}"
)
DROPS = (
    "data.drops={subgoal_drop_prob: 0.7, response_drop_prob: 0.5, metadata_drop_all_prob: 0.5, "
    "history_state_drop_prob: 0.3}"
)
# With an odd number of samples one of two data ranks has none left while the other evaluates.
ACTED = (
    *(*SAVED, "data.eval=[$RUN/few.jsonl]"),
    *("train.eval_steps=2", "train.per_device_eval_batch_size=1", "train.ema={decay: 0.9}"),
)
ARM = (*ACTED, DROPS, "data.action_groups={gripper: [2, 3]}")
# A sample's loss depends on the optional inputs of the other samples in its batch: under
# `all_reduce` these are all samples of a global micro-batch, otherwise the rank's own.
AGREED = "parallel.branch_sync=all_reduce"
ADAPTERS = (
    *("model.config=null", "model.pretrained=$RUN/base", "model.lora=openpi", "train.ema=null"),
)
PLANS = f"model.config={json.dumps(written.PLANNER_OF_FOUR)}"
NO_ACTIONS = "data.action_errors=false"


def _mixed_of(model: dict[str, Any]) -> Callable[[Path], Path]:
    return functools.partial(write_mixed_run, num_samples=24, model=model)


def _pairs_of(model: dict[str, Any]) -> Callable[[Path], Path]:
    return functools.partial(write_preference_run, num_samples=16, model=model)


_mixed = Family(
    _mixed_of(written.MODEL), (*EVALUATED, BEST),
    micro_batches=4, checks=(best_is_that_of_one_device, answers_differ),
)  # fmt: skip
_guarded = replace(_mixed, settings=(*EVALUATED, *GUARDED), checks=(guard_is_that_of_one_device,))
_experts = replace(
    _mixed, write=_mixed_of(written.EXPERTS),
    checks=(best_is_that_of_one_device, assert_same_answers),
)  # fmt: skip
_packed = replace(
    _mixed, settings=(*EVALUATED, BEST, *PACKED, "data.max_length=96"), micro_batches=2,
    # Every rank pads its rows to its own longest row.
    left_out=("packing_efficiency",), checks=(rows_are_full,),
)  # fmt: skip
_qwen3_5 = Family(
    _mixed_of(written.MODEL_3_5), EVALUATED,
    tolerance=(1e-6, 1e-12), arrays=assert_near,
)  # fmt: skip
_qwen4 = replace(_qwen3_5, write=_mixed_of(written.QWEN4))
_ocr = Family(_mixed_of(written.MODEL_OCR), EVALUATED, micro_batches=4)
# Rewards are differences of sums of some tens of nats, which float32 rounds to 4e-6.
_pairs = Family(
    _pairs_of(written.TINY), (*PAIRS, MPO), tolerance=(1e-6, 4e-6),
    arrays=assert_near, left_out=("sequence_length", "packing_efficiency"),
)  # fmt: skip
_kto = replace(
    _pairs, settings=(*PAIRS, *KTO),
    samples=2, micro_batches=4, by_rank=True, shows=("kl",),
)  # fmt: skip


def _rollouts_of(model: dict[str, Any], *settings: str) -> Family:
    """Of the answers of a micro-batch, the extremes depend on which they are."""
    return Family(
        functools.partial(write_rollout_run, model=model), (*GIVEN_ANSWERS, *settings),
        tolerance=(1e-6, 4e-6), arrays=assert_near,
        left_out=(
            *("clip_ratio/low_min", "clip_ratio/high_max", "sampling/sampling_logp_difference/max"),
            *(f"sampling/importance_sampling_ratio/{end}" for end in ("min", "max")),
        ),
        shows=("kl", "entropy", "clip_ratio/region_mean"), patch=(GIVEN, given_rollouts),
    )  # fmt: skip


_sampled = replace(
    _rollouts_of(written.TINY), patch=None,
    write=functools.partial(write_sampled_run, model=written.TINY),
    settings=(*SAMPLED, *SAVED),
    left_out=("clip_ratio/low_min", "clip_ratio/high_max", "sampling/"), shows=("kl", "reward"),
)  # fmt: skip
_towers = Family(written.colocated, EVALUATED, micro_batches=4)
_arm = Family(written.policy, (*ARM, AGREED), checks=(policy_is_one_file,))
_pipelined = replace(_arm, settings=(*ARM, AGREED, NO_ACTIONS), samples=1, micro_batches=6)
_cameras = Family(
    written.policy_with_cameras,
    (*ACTED, NO_ACTIONS, AGREED),
    checks=(policy_is_one_file, the_tower_moves),
)
FAMILIES: dict[str, Family] = {
    # Samples of different lengths with two images, one and none.
    "mixed": _mixed,
    "frozen language": replace(
        _mixed, settings=(*_mixed.settings, "model.freeze=['model.language_model.*']")
    ),
    "experts": _experts,
    # The balance loss is a mean over micro-batches.
    "experts, balanced": Family(
        _mixed_of(written.BALANCED), (*SAVED, "train.max_steps=2"),
        samples=1, micro_batches=4, by_rank=True, left_out=("tokens_per_expert",),
    ),
    "guarded": _guarded,
    "packed": _packed,
    "packed, more heads": replace(_packed, write=_mixed_of(written.HEADS)),
    "qwen3.5": _qwen3_5,
    "qwen3.5 experts": replace(_qwen3_5, write=_mixed_of(written.EXPERTS_3_5)),
    "qwen4-exp": _qwen4,
    "qwen4-exp, lora": replace(
        _qwen4, write=written.qwen4_base,
        # Equal lengths, since moments of factors are small sums of large terms. The gradient of the
        # keys of n-grams passes the root of a gate, which amplifies rounding.
        settings=(
            *(*EVALUATED, *BASE, "data.pad_to_multiple_of=64"),
            "model.lora={r: 2, target_modules: ['model.language_model.*_proj*'], "
            "exclude_modules: ['*.ple.key_proj']}",
        ),
        checks=(every_factor_was_trained,),
    ),
    "qwen4-exp, frozen tables": replace(
        _qwen4, settings=(*EVALUATED, "model.freeze=['*.ngram_embedding.*']")
    ),
    "paddleocr-vl": _ocr,
    "paddleocr-vl, tied": replace(
        _ocr, write=written.document_base, settings=(*EVALUATED, *BASE),
        checks=(what_no_forward_reads_is_kept,),
    ),
    "paddleocr-vl, dora": replace(
        _ocr, write=written.document_base, settings=(*EVALUATED, *BASE, ALL_LINEAR_DORA),
        checks=(every_factor_was_trained,),
    ),
    "paddleocr-vl, pairs": replace(_pairs, write=_pairs_of(written.MODEL_OCR)),
    "paddleocr-vl packed": replace(
        _ocr, settings=(*EVALUATED, *PACKED, "data.max_length=96"), micro_batches=2,
        left_out=("packing_efficiency",), checks=(rows_are_full,),
    ),
    # Of a base model whose head is untied; the language model is frozen at first.
    "dora": Family(written.untied, DORA, checks=(every_factor_was_trained,)),
    # Pairs with shared images, images of their own and none; the reference is computed in the run.
    "pairs": _pairs,
    "pairs, dora": replace(_pairs, settings=(*PAIRS, LORA)),
    # The balance loss is a mean over micro-batches, which are the same in a pipeline.
    "pairs, experts": replace(_pairs, settings=PAIRS, write=_pairs_of(written.FEW_EXPERTS)),
    "pairs, four layers": replace(
        _pairs, settings=PAIRS, samples=1, micro_batches=4,
        write=_pairs_of(written.FOUR_LAYERS),
    ),
    "rated": _kto,
    # Answers are exchanged within micro-batches, which data ranks divide in another way: with equal
    # answers that does not matter. An evaluation has a baseline for each batch.
    "rated, same answers": replace(
        _kto, write=written.rated_alike, left_out=(*_kto.left_out, "eval_")
    ),
    # Sums over tokens, means and products over answers, which slices and stages have parts of.
    "rollouts": _rollouts_of(written.TINY),
    "rollouts, answers' ratios": _rollouts_of(
        written.TINY, "grpo.loss_type=grpo", "grpo.importance_sampling_level=sequence",
        "grpo.off_policy_mask_threshold=0.1", "grpo.importance_sampling_mode=sequence_mask",
    ),
    "rollouts, later tokens": _rollouts_of(
        written.TINY, "grpo.loss_type=fipo", "grpo.importance_sampling_level=sequence_token",
    ),
    "rollouts, groups": replace(
        _rollouts_of(
            written.TINY, "grpo.loss_type=real", "grpo.entropy_coef=0.0",
            "grpo.importance_sampling_mode=null",
        ),
        shows=("kl", "entropy"),
    ),
    # Answers that the run samples, learned in four updates each.
    "sampled": _sampled,
    # Ranks have unequal shares of what is kept.
    "sampled, filtered": replace(
        _sampled, settings=(*_sampled.settings, "grpo.dynamic_sample=true"),
    ),
    "sampled, experts": replace(
        _sampled, write=functools.partial(write_sampled_run, model=written.FEW_EXPERTS)
    ),
    "rollouts, lora": _rollouts_of(written.TINY, "grpo.loss_type=dr_grpo", LORA),
    # The balance loss is a mean over micro-batches, which are the same in a pipeline.
    "rollouts, experts": _rollouts_of(written.FEW_EXPERTS),
    # Weighted sources; lanes of a checkpoint continue after it.
    "corpus": Family(
        written.weighted_corpus,
        ("train.save_steps=2", "data.packing_length=96", "train.learning_rate=0.001"),
        samples=2, left_out=("packing_efficiency",), shows=("loss/texts", "loss/captions"),
        patch=("paddle_vl.data.corpus.loader.PHASES", 2),
    ),
    "captioner": Family(write_captioner_run, DAMPED, tolerance=(1e-6, 1e-12), arrays=assert_near),
    # Eight layers, and a tower that eight ranks divide.
    "towers": _towers,
    "towers, frozen": replace(_towers, settings=(*EVALUATED, "model.freeze=[vision, mergers]")),
    "towers, frozen part": replace(
        _towers, settings=(*EVALUATED, "model.freeze=['model.visual.blocks.0.*']")
    ),
    "towers, frozen language": replace(
        _towers, settings=(*EVALUATED, "model.freeze=['model.language_model.*']")
    ),
    "towers, one image": replace(_towers, write=written.one_image),
    "towers, adapters": replace(_towers, settings=(*EVALUATED, TOWER_LORA)),
    # Demonstrations with every kind of drop.
    "policy": replace(_arm, shows=("eval_action_mae/gripper",)),
    "policy, own parts": replace(_arm, settings=ARM, samples=1, micro_batches=8, by_rank=True),
    "policy, adapters": replace(_arm, settings=(*ARM, AGREED, *ADAPTERS), checks=()),
    "policy, six layers": replace(_pipelined, write=written.open_policy),
    # The prefix is not trained, so its rows need no gradient in the later stages.
    "policy, flow alone": replace(
        _pipelined, write=written.frozen_policy,
        settings=(*_pipelined.settings, "train.loss_weighting={CE: 0.0}"),
    ),
    "planner": replace(
        _arm, settings=(*ARM, AGREED, NO_ACTIONS, PLANS), samples=2, micro_batches=4
    ),
    # Missing cameras, dropped goals and pasts; a tower that matters at once.
    "cameras": _cameras,
    "cameras, frozen part": replace(
        _cameras, checks=(),
        settings=(*_cameras.settings, "model.freeze=['*vision_model.encoder.layers.0.*']"),
    ),
    "cameras, planner": replace(_cameras, write=written.planner_with_cameras, checks=()),
    # The seed alone decides, not the launch or the schedule.
    "policy, dropout": replace(
        _arm, write=written.dropping_policy, like=(4, [*PP, *MP2[:2], FULL]),
    ),
    "cameras, dropout": replace(_cameras, write=written.dropping_cameras, like=(2, PP)),
    # Weights of the folder and those that are drawn, which a rate of zero leaves as they are.
    "from Gemma": Family(
        written.from_gemma, arrays=assert_same_weights,
        settings=("train.max_steps=1", "train.learning_rate=0.0", "train.warmup_steps=0"),
    ),
}  # fmt: skip


def _rows(
    family: str, then: Sequence[str] | str = "", heavy: bool = True, **topologies: tuple
) -> Iterator[Row]:
    for name, (ranks, *topology) in topologies.items():
        yield Row(family, ranks, name.replace("_", " "), topology, then, heavy)


ROLLOUTS = [
    *_rows("rollouts", "", False, mp2=(2, *MP2), sharding2_stage_3=(2, *SHARDING, STAGE_3)),
    *_rows(
        "rollouts", ITSELF,
        dp2=(2, *DP2), pp2=(2, *PP), sharding2=(2, *SHARDING),
        sharding2_stage_2=(2, *SHARDING, STAGE_2),
    ),
    *_rows("sampled", ITSELF, False, dp2=(2, *DP2)),
    *_rows("sampled", "", False, mp2=(2, *MP2)),
    *_rows(
        "sampled", ITSELF,
        pp2=(2, *PP), cp2=(2, *CP), sharding2_stage_3=(2, *SHARDING, STAGE_3),
        dp2_mp2=(4, *DP2, *MP2),
    ),
    *_rows("sampled, filtered", dp2=(2, *DP2)),
    *_rows("sampled, experts", mp2_ep2=(2, *MP2, EP2)),
    *_rows("rollouts, answers' ratios", "", False, cp2=(2, *CP)),
    *_rows("rollouts, answers' ratios", dp2_mp2=(4, *DP2, *MP2), pp2=(2, *PP)),
    *_rows("rollouts, later tokens", dp2=(2, *DP2)),
    *_rows("rollouts, groups", cp2=(2, *CP)),
    *_rows("rollouts, lora", "", False, pp2=(2, *PP)),
    *_rows(
        "rollouts, lora",
        dp2=(2, *DP2), mp2=(2, *MP2), sharding2_stage_3=(2, *SHARDING, STAGE_3),
    ),
    *_rows("rollouts, experts", pp2=(2, *PP), mp2_ep2=(2, *MP2, EP2)),
]  # fmt: skip
CONVERSATIONS = [
    Row("mixed", 4, "mp2 pp2", [*MP2, *PP], [*DP2, *SHARDING, STAGE_3]),
    *_rows(
        "mixed", ITSELF,
        mp2_pp2_dualpipev=(4, *MP2, *PP, DUALPIPEV),
        pp4_interleaved=(4, *PP4, VIRTUAL, *HALVES),
        pp4_fthenb_reserved=(4, *PP4, VIRTUAL, FTHENB, "parallel.pp_visual_rows=64"),
        pp4_balanced_memory=(4, *PP4, VIRTUAL, BALANCED),
        sharding2_pp2_overlap=(4, *SHARDING, *PP, FUSED, OVERLAPS[1], FULL),
        dp2_sharding2_stage_3_kept=(
            4, *DP2, *SHARDING, STAGE_3, "parallel.reshard_after_forward=false",
        ),
        cp2_of_sharding4_stage_3=(4, SHARDING_4, *CP[1:], STAGE_3, "train.recompute=mlp"),
        dp2_mp2_pp2_batched=(8, *DP2, *MP2, *PP, BATCHED),
    ),
    # The head, and so the answers, are on the last stage.
    *_rows("guarded", "", False, pp2=(2, *PP)),
    *_rows("guarded", ITSELF, mp2_sharding2_stage_3=(4, *MP2, *SHARDING, STAGE_3)),
    # Ranks with nothing to train keep in step: a stage, or sharding units.
    *_rows("frozen language", pp2=(2, *PP), sharding2_stage_3=(2, *SHARDING, STAGE_3)),
    *_rows(
        "experts", ITSELF,
        # Experts over mp ranks, sharded over two ranks; reductions and gathers overlap, as on GPUs.
        mp2_sharding2_ep2_stage_1=(4, *MP2, *SHARDING, EP2, *OVERLAPS),
        cp2_mp2_ep4=(4, *MP2, *CP[:-1], EP4, "data.pad_to_multiple_of=4"),
        sharding4_ep2_stage_3=(4, SHARDING_4, EP2, STAGE_3, FULL),
        sharding2_ep2_pp2=(4, *SHARDING, EP2, *PP, FULL, *OVERLAPS),
    ),
    # Every way in which experts fold over dp, sharding and mp.
    *_rows(
        "experts, balanced", "", False,
        sharding4_ep2=(4, SHARDING_4, EP2), mp2_sharding2_ep4_stage_3=(4, *FOLDED, EP4, STAGE_3),
    ),
    *_rows(
        "experts, balanced",
        sharding4_ep2_stage_2=(4, SHARDING_4, EP2, STAGE_2),
        sharding4_ep2_stage_3=(4, SHARDING_4, EP2, STAGE_3),
        sharding4_ep4=(4, SHARDING_4, EP4),
        sharding4_ep4_stage_3=(4, SHARDING_4, EP4, STAGE_3),
        mp2_sharding2_ep2=(4, *FOLDED, EP2),
        mp2_sharding2_ep2_stage_2=(4, *FOLDED, EP2, STAGE_2),
        mp2_sharding2_ep2_stage_3=(4, *FOLDED, EP2, STAGE_3),
        mp2_sharding2_ep4=(4, *FOLDED, EP4),
        mp2_sharding2_ep4_stage_2=(4, *FOLDED, EP4, STAGE_2),
        dp2_sharding2_ep2=(4, *DP2, *SHARDING, EP2),
        dp2_sharding2_ep2_stage_3=(4, *DP2, *SHARDING, EP2, STAGE_3),
        dp2_sharding2_ep4=(4, *DP2, *SHARDING, EP4),
        dp2_sharding2_ep4_stage_2=(4, *DP2, *SHARDING, EP4, STAGE_2),
        dp2_mp2_ep2=(4, *DP2, *MP2, EP2), dp2_mp2_ep4=(4, *DP2, *MP2, EP4),
        dp4_ep2=(4, "parallel.dp_degree=4", EP2),
        mp4_ep2=(4, "parallel.mp_degree=4", SP[0], "data.pad_to_multiple_of=4", EP2),
    ),
    # Experts lie elsewhere.
    Row("experts", 4, "sharding4 ep4", [SHARDING_4, EP4, STAGE_3], [*MP2, *SHARDING, EP2]),
    *_rows("packed", ITSELF, cp4_stage_2=(4, *CP4, STAGE_2)),
    Row("packed", 4, "cp2 mp2", [*CP, *MP2[:1], "parallel.vision=replicate"], [*CP4]),
    # With heads that slices divide, by their exchange, and by gathers behind attention.
    *_rows(
        "packed, more heads", ITSELF,
        cp4_ulysses=(4, *CP4, ULYSSES), cp2_pp2_hidden=(4, *CP, HIDDEN, *PP, ATTENTION),
    ),
    *_rows("qwen3.5", ITSELF, False, mp2=(2, *MP2, ATTENTION)),
    *_rows(
        "qwen3.5", ITSELF,
        mp2_pp2=(4, *MP2, *PP, BY_COST), sharding2_mp2_stage_3=(4, *MP2, *SHARDING, STAGE_3),
    ),
    *_rows("qwen3.5 experts", ITSELF, dp2_ep2_mp2=(4, *DP2, EP2, *MP2)),
    # Tables of n-grams over mp ranks, sharding ranks and both; streams between stages.
    *_rows("qwen4-exp", ITSELF, False, mp2=(2, *MP2, FULL)),
    *_rows("qwen4-exp", "", False, pp2=(2, *PP), sharding2_stage_3=(2, *SHARDING, STAGE_3)),
    *_rows(
        "qwen4-exp", ITSELF,
        mp2_alone=(2, *MP2[:1]), dp2=(2, *DP2),
        sharding2=(2, *SHARDING), sharding2_stage_2=(2, *SHARDING, STAGE_2, FULL),
        mp2_pp2=(4, *MP2, *PP, BY_COST), mp2_sharding2=(4, *MP2, *SHARDING, *OVERLAPS),
        mp2_sharding2_stage_3=(4, *MP2, *SHARDING, STAGE_3, FULL),
        mp2_ep2=(2, *MP2, EP2), dp2_ep2_mp2=(4, *DP2, EP2, *MP2), dp2_ep2=(2, *DP2, EP2),
        sharding2_ep2_pp2=(4, *SHARDING, EP2, *PP, FULL),
        pp2_dp2_encoder_mp2=(4, *PP, *DP2, COLOCATED, ENCODER_2),
        pp2_sharding2_colocated=(4, *PP, *SHARDING, COLOCATED, STATE),
    ),
    Row("qwen4-exp", 4, "sharding4", [SHARDING_4, STAGE_3], [*MP2, *SHARDING]),
    *_rows("qwen4-exp", ONE_DEVICE, mp2_sharding2_stage_2=(4, *MP2, *SHARDING, STAGE_2)),
    *_rows(
        "qwen4-exp, lora", ITSELF,
        mp2=(2, *MP2), pp2=(2, *PP), sharding2_stage_3=(2, *SHARDING, STAGE_3),
    ),
    *_rows(
        "qwen4-exp, frozen tables",
        mp2=(2, *MP2), sharding2=(2, *SHARDING), sharding2_stage_3=(2, *SHARDING, STAGE_3),
    ),
    *_rows("paddleocr-vl", ITSELF, False, mp2=(2, *MP2)),
    *_rows(
        "paddleocr-vl", ITSELF,
        pp2=(2, *PP), sharding2=(2, *SHARDING), sharding2_stage_2=(2, *SHARDING, STAGE_2),
        sharding2_stage_3=(2, *SHARDING, STAGE_3),
        pp2_dp2_encoder_mp4=(4, *PP, *DP2, COLOCATED, ENCODER_4),
    ),
    *_rows(
        "paddleocr-vl, tied", ITSELF,
        pp2=(2, *PP), mp2_sharding2_stage_3=(4, *MP2, *SHARDING, STAGE_3),
        pp2_mp2_encoder_mp2=(4, *PP, *MP2, COLOCATED, ENCODER_2),
    ),
    *_rows(
        "paddleocr-vl, dora", ITSELF,
        mp2=(2, *MP2), pp2_encoder_mp4=(4, *PP, *DP2, COLOCATED, ENCODER_4),
    ),
    *_rows("paddleocr-vl, pairs", mp2_pp2=(4, *MP2, *PP)),
    *_rows("paddleocr-vl packed", cp2=(2, *CP), mp2_pp2=(4, *MP2, *PP)),
    *_rows(
        "dora", ITSELF, pp2=(2, *PP),
        mp2=(
            2, *MP2, "train.recompute=mlp",
            "parallel.fleet.mp_configs={sp_async_reduce_scatter: true}",
        ),
    ),
    *_rows("pairs", "", False, dp2=(2, *DP2)),
    *_rows("pairs", ITSELF, mp2_pp2=(4, *MP2, *PP)),
    *_rows("pairs", colocated_dp2=(4, *PP, *DP2, COLOCATED)),
    *_rows("pairs, dora", sharding2_stage_3=(2, *SHARDING, STAGE_3)),
    *_rows("pairs, experts", pp2=(2, *PP)),
    *_rows("pairs, four layers", pp2_dualpipev=(2, *PP, DUALPIPEV)),
    *_rows("rated", pp2=(2, *PP)),
    # Every rank encodes images of both data lanes.
    *_rows("rated, same answers", divided_tower=(4, *PP, *DP2, COLOCATED, ENCODER_4)),
    *_rows("corpus", ONE_DEVICE, False, sharding2_stage_3=(2, *SHARDING, STAGE_3)),
    *_rows(
        "captioner", ITSELF, False,
        mp2=(2, *MP2), sharding2_stage_3=(2, *SHARDING, STAGE_3, FULL), pp2=(2, *PP, BY_COST),
    ),
]  # fmt: skip
# With more, as many and fewer encoder lanes than data lanes.
TOWERS = [
    *_rows("towers", ONE_DEVICE, pp2_dp2=(4, *PP, *DP2, COLOCATED)),
    *_rows(
        "towers", ITSELF,
        pp2_dp2_encoder_mp4=(4, *PP, *DP2, COLOCATED, ENCODER_4, OFFLOAD, FULL),
        pp2_mp2_encoder_mp2=(4, *PP, *MP2, COLOCATED, ENCODER_2, STATE),
        pp2_sharding2=(4, *PP, *SHARDING, COLOCATED, STATE),
        pp4_interleaved=(4, *PP4, VIRTUAL, *HALVES, COLOCATED),
        pp2_mp2_dp2_encoder_mp4=(8, *PP, *MP2, *DP2, COLOCATED, ENCODER_4),
    ),
    *_rows(
        "towers",
        pp4_fthenb_encoder_mp2=(4, *PP4, VIRTUAL, FTHENB, COLOCATED, ENCODER_2),
        pp2_dp2_dualpipev=(4, *PP, *DP2, DUALPIPEV, COLOCATED),
        # Fewer micro-batches than stages.
        pp4_encoder_mp4=(4, *PP4, *TWICE, COLOCATED, ENCODER_4),
    ),
    # It encodes a step ahead, with evaluations between the steps.
    *_rows("towers, frozen", "", False, pp2=(2, *PP, COLOCATED)),
    *_rows("towers, frozen", pp2_dp2_encoder_mp4=(4, *PP, *DP2, COLOCATED, ENCODER_4)),
    *_rows("towers, frozen part", pp2_dp2_encoder_mp2=(4, *PP, *DP2, COLOCATED, ENCODER_2)),
    *_rows("towers, frozen language", pp2_dp2_encoder_mp2=(4, *PP, *DP2, COLOCATED, ENCODER_2)),
    *_rows(
        "towers, one image",
        pp2_dp2=(4, *PP, *DP2, COLOCATED),
        pp2_dp2_encoder_mp4=(4, *PP, *DP2, COLOCATED, ENCODER_4, OFFLOAD),
    ),
    *_rows("towers, adapters", pp2_encoder_mp2=(2, *PP, COLOCATED, ENCODER_2)),
]  # fmt: skip
POLICIES = [
    *_rows("policy", "", False, dp2=(2, *DP2)),
    *_rows(
        "policy", ITSELF,
        sharding2_mp2=(4, *SHARDING, STAGE_3, *MP2[:2]), pp2_mp2=(4, *PP, *MP2[:2], ATTENTION),
        pp2_sharding2=(4, *PP, *SHARDING),
    ),
    *_rows(
        "policy, own parts",
        sharding2_mp2=(4, *SHARDING, STAGE_3, *MP2[:2]), pp2_mp2=(4, *PP, *MP2[:2], ATTENTION),
        pp2_sharding2=(4, *PP, *SHARDING),
    ),
    *_rows("policy, adapters", pp2_mp2=(4, *PP, *MP2[:2], ATTENTION)),
    *_rows("policy, six layers", pp3=(3, *PP3, FULL), pp2_dualpipev=(2, *PP, DUALPIPEV)),
    *_rows("policy, flow alone", pp4=(4, *PP4)),
    # Both ends are on one rank, which shares the token table.
    *_rows("planner", pp2_dualpipev=(2, *PP, DUALPIPEV)),
    *_rows("cameras", ITSELF, False, pp2=(2, *PP, COLOCATED, STATE, OFFLOAD, FULL)),
    *_rows("cameras", ONE_DEVICE, pp2_dp2=(4, *PP, *DP2, COLOCATED, ENCODER_4)),
    *_rows(
        "cameras", ITSELF,
        mp2=(4, *PP, *MP2[:2], COLOCATED),
        sharding2=(4, *PP, *SHARDING, COLOCATED, ENCODER_2, STATE),
    ),
    *_rows("cameras, frozen part", pp2_encoder_mp2=(2, *PP, COLOCATED, ENCODER_2)),
    *_rows("policy, dropout", ITSELF, pp2_mp2=(4, *PP, *MP2[:2], FULL)),
    *_rows("cameras, dropout", pp2=(2, *PP, COLOCATED)),
    *_rows("cameras, planner", pp2=(2, *PP, COLOCATED)),
    *_rows(
        "from Gemma", "", False,
        sharding2_stage_3=(2, *SHARDING, STAGE_3), mp2=(2, *MP2[:1]), pp2=(2, *PP),
    ),
]  # fmt: skip


def rows(table: Sequence[Row]) -> Any:
    """A test of these rows."""
    marked = [pytest.param(row, marks=[pytest.mark.heavy] * row.is_heavy) for row in table]
    return pytest.mark.parametrize("row", marked, ids=[row.named() for row in table])


def run_row(row: Row, run_file: str, one: str, output: str) -> None:
    """On every rank: a run, and what continues it."""
    family, folder = FAMILIES[row.family], Path(run_file).parent
    topology = row.topology if isinstance(row.then, str) else row.then
    with family.patched():
        train(run_file, f"{output}/run", family.on(folder, row.topology))
        if row.then:
            dist.barrier()
            begun = one if row.then == ONE_DEVICE else f"{output}/run"
            continue_run(run_file, begun, f"{output}/again", family.on(folder, topology))


def stored(checkpoint: Path) -> dict[str, np.ndarray]:
    """Parameters, or adapters and what is trained in full; and moments."""
    file = checkpoint / "adapter_model.safetensors"
    if not file.is_file():
        return arrays_of(checkpoint)
    headers = read_checkpoint_headers(checkpoint, "optimizer")
    return {name: tensor.read() for name, tensor in headers.items()} | load_file(file)


def assert_equals(family: Family, found: Path, wanted: Path, lacking: str, first: int = 0) -> None:
    """Assert that the lines from a step on, and the last checkpoint, are equal."""
    lines = lasting_metrics(found)
    theirs = [line for line in lasting_metrics(wanted) if line["step"] >= first]
    out = (*family.left_out, lacking)
    rel, least = family.tolerance
    for ours, line in zip(lines, theirs, strict=True):
        line = {key: value for key, value in line.items() if not key.startswith(out)}
        assert line.keys() == {key for key in ours if not key.startswith(out)}
        for key, value in line.items():
            assert ours[key] == pytest.approx(value, rel=rel, abs=least), (line["step"], key)
    checkpoint = f"checkpoint-{lines[-1]['step']}"
    family.arrays(stored(found / checkpoint), stored(wanted / checkpoint))


def assert_same_end(family: Family, found: Path, wanted: Path) -> None:
    """Assert that `final/` has the same files of weights, whatever the ranks, and answers."""
    names = sorted(file.name for file in (wanted / "final").glob("*model*"))
    assert sorted(file.name for file in (found / "final").glob("*model*")) == names
    for name in names:
        if name.endswith(".safetensors"):
            family.arrays(*(load_file(run / "final" / name) for run in (found, wanted)))
    for name in ("final/adapter_config.json", "predictions.jsonl"):
        if (wanted / name).exists():
            assert (found / name).read_text() == (wanted / name).read_text()


def taking(tmp_path_factory) -> Callable[[Row], None]:
    """Launches a row and compares it with one device, which runs once."""

    @functools.cache
    def run_file(write: Callable[[Path], Path]) -> Path:
        return write(tmp_path_factory.mktemp("run"))

    @functools.cache
    def one_device(name: str) -> Path:
        ranks, topology = FAMILIES[name].like
        output = tmp_path_factory.mktemp("one")
        arguments = (Row(name, ranks, "one", topology), str(run_file(FAMILIES[name].write)))
        if ranks > 1:
            launch(run_row, ranks, arguments=(*arguments, "", str(output)), timeout=600)
        else:
            run_row(*arguments, "", str(output))
        return output / "run"

    def taken(row: Row) -> None:
        family, one = FAMILIES[row.family], one_device(row.family)
        output = tmp_path_factory.mktemp("several")
        arguments = (row, str(run_file(family.write)), str(one), str(output))
        launch(run_row, row.ranks, arguments=arguments, timeout=600)
        # Stages of a pipeline sample no actions.
        lacking = "eval_action_" if any("pp_degree" in one for one in row.topology) else "-"
        assert_equals(family, output / "run", one, lacking)
        assert_same_end(family, output / "run", one)
        if row.then == ITSELF:
            again, whole = (stored(output / name / "checkpoint-4") for name in ("again", "run"))
            assert_same_bits(again, whole)
        elif row.then:
            assert_equals(family, output / "again", one, lacking, first=3)
        for name in family.shows:
            assert any(line.get(name) for line in lasting_metrics(one)), name
        for check in family.checks:
            check(output / "run", one)
        if row.named() == "mixed: mp2 pp2":
            every_rank_writes_a_part(output / "run", one)

    return taken
