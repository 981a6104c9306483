"""Rules across settings: each refuses its combination and names the values."""

from typing import Any

import pytest

from paddle_vl.config.validate import launch_problems, rule_problems
from paddle_vl.families.pi07.settings import PI07Run
from paddle_vl.families.vlm.settings import VLRun

CPU = "cpu"
SHARDED = {"parallel__sharding_degree": 2, "parallel__sharding_stage": 2}
SLICED = {"parallel__sharding_degree": 2, "parallel__cp_degree": 2}
ONCE = {"parallel__reduce_once_per_step": True, "train__gradient_accumulation_steps": 2}
HALF = {"parallel__reduce_dtype": "bfloat16", "model__compute_dtype": "bfloat16"}

OF_TOKENS = {"train__max_steps": None, "train__max_tokens": 9}
STABLE = {"train__lr_scheduler_type": "warmup_stable_decay", "train__decay_ratio": 0.5}
ROWS_OF_200 = {
    "data__packing": True, "data__packing_length": 200, "data__max_vision_tokens_per_row": 20,
}  # fmt: skip


def make(run: Any = VLRun, **changes: object) -> Any:
    """A valid configuration with `section__name` values changed."""
    values = {
        "model": {"pretrained": "m"},
        "data": {"train": ["t.jsonl"]},
        "train": {"output_dir": "out", "max_steps": 10},
    }
    for name, value in changes.items():
        section, _, leaf = name.partition("__")
        values.setdefault(section, {})[leaf] = value
    return run.model_validate(values)


@pytest.fixture
def existing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "t.jsonl").write_text("{}\n")
    return tmp_path


def test_valid_configuration_passes(existing):
    assert rule_problems(make()) == []
    assert launch_problems(make(), CPU) == []


PP_DYNAMIC = {"parallel__pp_degree": 2, "parallel__pp_shapes": "dynamic"}
OPENTAU = {"train__lr_scheduler_type": "cosine_decay_with_warmup"}
PACKED = {"data__packing": True}
OVERLAP = {"parallel__fleet": {"sharding_configs": {"comm_overlap": True}}}
ASYNC = {"parallel__fleet": {"mp_configs": {"mp_async_allreduce": True}}}
SCORED = {"data__train": [{"path": "a.jsonl", "metrics": ["anls"]}]}
SPARSE = {"parallel__expert_capacity_factor": 1.5}
REFUSED = [
    ({"model__config": "c.json"}, "both are set of model.pretrained and model.config"),
    ({"model__pretrained": None}, "neither is set of model.pretrained and model.config"),
    ({"train__num_train_epochs": 1.0}, "train.max_steps and train.num_train_epochs are set"),
    ({"train__max_tokens": 5}, "train.max_steps and train.max_tokens are set"),
    ({"train__max_steps": None}, "set one of train.max_steps, train.num_train_epochs and"),
    (OF_TOKENS | {"train__warmup_steps": 3}, "train.warmup_steps is 3 but the learning rate of"),
    (OF_TOKENS | OPENTAU, "counts steps, and train.max_tokens is set"),
    ({"train__warmup_steps": 1, "train__warmup_ratio": 0.1}, "train.warmup_ratio 0.1 are both set"),
    (OPENTAU | {"train__warmup_ratio": 0.1}, "train.warmup_ratio is 0.1 but train.lr_scheduler_"),
    (STABLE | {"train__decay_ratio": None}, "but train.decay_ratio is not set"),
    (STABLE | {"train__warmup_ratio": 0.7}, "are 1.2 of the run"),
    (STABLE | {"train__warmup_steps": 6}, "exceed train.max_steps 10: lower one of them"),
    ({"train__decay_type": "linear"}, "linear but train.lr_scheduler_type is cosine"),
    ({"data__train": []}, "data.train lists no file"),
    ({"train__eval_steps": 5}, "train.eval_steps is 5 but data.eval lists no file"),
    (SCORED, "metrics is set but no answers to these rows are scored"),
    ({"data__min_pixels": 9, "data__max_pixels": 4}, "data.min_pixels 9 exceeds"),
    ({"data__video_min_frames": 9, "data__video_max_frames": 4}, "exceeds data.video_max_frames"),
    ({"parallel__pp_token_rows": 64}, "pp_token_rows is 64 but parallel.pp_degree is 1"),
    (PP_DYNAMIC | {"parallel__pp_visual_rows": 0}, "0 but parallel.pp_shapes is dynamic"),
    ({"data__packing_length": 4096}, "data.packing_length is 4096 but data.packing is false"),
    (PACKED | {"data__packing_length": 2047}, "2047 is below data.max_length 2048"),
    (PACKED | {"data__padding_side": "left"}, "but packed rows are padded on the right"),
    (SLICED | {"data__padding_side": "left"}, "slices are cut for padding that"),
    (SLICED | {"train__objective": "preference"}, "train.objective is preference with parallel.cp"),
    ({"model__pretrained": None, "model__config": {}}, "data.processor is not set and there is no"),
    (ASYNC, 'is {"mp_async_allreduce": true} but parallel.mp_degree is 1'),
    (SHARDED | OVERLAP, 'is {"comm_overlap": true} but parallel.sharding_stage'),
    (SPARSE, "parallel.expert_capacity_factor is 1.5 but parallel.ep_degree is 1"),
    (
        {"parallel__ep_degree": 2, "parallel__expert_capacity_factor": 2.5},
        "is 2.5 but parallel.ep_degree is 2: buffers of 2",
    ),
    ({"parallel__reshard_after_forward": False}, "is false but parallel.sharding_degree is 1"),
    (SHARDED | {"parallel__sharding_gather_overlap": True}, "true but parallel.sharding_stage is"),
    (SHARDED | {"parallel__reduce_once_per_step": True}, "but train.gradient_accumulation_steps"),
    (SHARDED | HALF | {"model__compute_dtype": "float32"}, "but model.compute_dtype is float32"),
]


@pytest.mark.parametrize(("changes", "part"), REFUSED)
def test_rule_fires(changes, part):
    assert any(part in problem for problem in rule_problems(make(**changes)))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"data__train": []}, "neither is set of data.train and data.synthetic_samples"),
        ({"data__synthetic_samples": 8}, "both are set of data.train and data.synthetic_samples"),
        ({"data__groups": {"u.jsonl": "g"}}, "differ in t.jsonl, u.jsonl: give every file its"),
        (OF_TOKENS, "counts no tokens"),
        (SLICED, "parallel.cp_degree is 2, but pi07 cannot cut its rows"),
    ],
)
def test_rule_of_a_policy_fires(changes, part):
    assert any(part in problem for problem in rule_problems(make(PI07Run, **changes)))


@pytest.mark.parametrize(
    ("changes", "tokens", "visual"),
    [
        ({"pp_token_rows": 50}, 50, 50),
        ({"pp_token_rows": 50, "pp_visual_rows": 7}, 50, 7),
        ({"data__pad_to_multiple_of": 8, "pp_visual_rows": 0}, 3 * 104, 0),
        (ROWS_OF_200 | {"pp_visual_rows": 9}, 3 * 200, 9),
        (ROWS_OF_200 | {"pp_token_rows": 500}, 500, 3 * 20),
        (ROWS_OF_200, None, None),
    ],
)
def test_bounds_of_the_data_complete_what_a_pipeline_reserves(changes, tokens, visual):
    given = {k if "__" in k else f"parallel__{k}": v for k, v in changes.items()}
    base = {"parallel__pp_degree": 2, "train__per_device_train_batch_size": 3}
    config = make(**base, **{"data__max_length": 100} | given)
    assert config.reserved_rows == (None if tokens is None else (tokens, visual))
    assert make(PI07Run).reserved_rows is None


@pytest.mark.parametrize(
    "changes",
    [
        ONCE | HALF,
        HALF | {"parallel__sharding_stage": 3, "parallel__reshard_after_forward": False},
    ],
)
def test_sharding_settings_pass_where_they_have_an_effect(changes):
    assert rule_problems(make(**SHARDED | changes)) == []


def test_bfloat16_is_refused_on_the_cpu_only(existing):
    config = make(model__compute_dtype="bfloat16")
    (problem,) = launch_problems(config, CPU)
    assert "no bfloat16 kernels" in problem
    assert launch_problems(config, "gpu:0") == []


def test_absent_files_are_all_named(existing):
    config = make(data__train=["t.jsonl", "u.jsonl"], data__eval=["e.jsonl"], data__processor="p")
    found = "\n".join(launch_problems(config, CPU))
    for part in ("data.train[1]: no file u.jsonl", "data.eval[0]: no file", "data.processor: no"):
        assert part in found
    assert "data.train[0]" not in found


@pytest.mark.parametrize("name", ["checkpoint-4", "metrics.jsonl", "final"])
def test_new_run_refuses_a_used_output_folder(existing, name):
    (existing / "out").mkdir()
    assert launch_problems(make(), CPU) == []
    (existing / "out" / name).mkdir()
    (problem,) = launch_problems(make(), CPU)
    assert f"already holds a run ({name})" in problem
    assert launch_problems(make(train__resume_from_checkpoint="auto"), CPU) == []
