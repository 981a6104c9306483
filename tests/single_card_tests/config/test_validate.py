"""Rules across settings.

Guarantees: each rule refuses its combination and names the values; a valid configuration passes all
rules.
"""

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


def make(**changes: object) -> VLRun:
    """A valid configuration with `section__name` values changed."""
    values = {
        "model": {"pretrained": "m"},
        "data": {"train": ["t.jsonl"]},
        "train": {"output_dir": "out", "max_steps": 10},
    }
    for name, value in changes.items():
        section, _, leaf = name.partition("__")
        values.setdefault(section, {})[leaf] = value
    return VLRun.model_validate(values)


@pytest.fixture
def existing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "t.jsonl").write_text("{}\n")
    return tmp_path


def test_a_family_without_token_counts_has_no_length_in_tokens():
    values = {
        "model": {"config": "none"},
        "data": {"train": ["t.jsonl"], "processor": "none"},
        "train": {"output_dir": "out", "max_tokens": 9},
    }
    problems = rule_problems(PI07Run.model_validate(values))
    assert any(
        "train.max_tokens is 9 but" in text and "counts no tokens" in text for text in problems
    )


def test_a_family_whose_rows_cannot_be_cut_refuses_slices():
    values = {
        "model": {"config": "none"},
        "data": {"train": ["t.jsonl"], "processor": "none"},
        "train": {"output_dir": "out", "max_steps": 9},
        "parallel": {"sharding_degree": 2, "cp_degree": 2},
    }
    problems = rule_problems(PI07Run.model_validate(values))
    assert any("parallel.cp_degree is 2, but pi07 cannot cut its rows" in text for text in problems)


def test_valid_configuration_passes(existing):
    assert rule_problems(make()) == []
    assert launch_problems(make(), CPU) == []


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model__config": "c.json"}, "both are set of model.pretrained and model.config"),
        ({"model__pretrained": None}, "neither is set of model.pretrained and model.config"),
        ({"train__num_train_epochs": 1.0}, "train.max_steps and train.num_train_epochs are set"),
        ({"train__max_tokens": 5}, "train.max_steps and train.max_tokens are set"),
        ({"train__max_steps": None}, "set one of train.max_steps, train.num_train_epochs and"),
        (
            {**OF_TOKENS, "train__warmup_steps": 3},
            "train.warmup_steps is 3 but the learning rate of a run of train.max_tokens follows",
        ),
        (
            {**OF_TOKENS, "train__lr_scheduler_type": "cosine_decay_with_warmup"},
            "cosine_decay_with_warmup counts steps, and train.max_tokens is set",
        ),
        (
            {"train__warmup_steps": 1, "train__warmup_ratio": 0.1},
            "train.warmup_steps 1 and train.warmup_ratio 0.1 are both set",
        ),
        (
            {"train__warmup_ratio": 0.1, "train__lr_scheduler_type": "cosine_decay_with_warmup"},
            "train.warmup_ratio is 0.1 but train.lr_scheduler_type is cosine_decay_with_warmup",
        ),
        (
            {"train__lr_scheduler_type": "warmup_stable_decay"},
            "warmup_stable_decay but train.decay_ratio is not set",
        ),
        ({**STABLE, "train__warmup_ratio": 0.7}, "are 1.2 of the run"),
        ({**STABLE, "train__warmup_steps": 6}, "exceed train.max_steps 10: lower one of them"),
        (
            {"train__decay_type": "linear"},
            "train.decay_type is linear but train.lr_scheduler_type is cosine",
        ),
        ({"data__train": []}, "data.train lists no file"),
        ({"train__eval_steps": 5}, "train.eval_steps is 5 but data.eval lists no file"),
        (
            {"data__train": [{"path": "a.jsonl", "metrics": ["anls"]}]},
            "metrics is set but no answers to these rows are scored",
        ),
        ({"data__min_pixels": 9, "data__max_pixels": 4}, "data.min_pixels 9 exceeds"),
        (
            {"data__video_min_frames": 9, "data__video_max_frames": 4},
            "data.video_min_frames 9 exceeds data.video_max_frames 4",
        ),
        (
            {"parallel__pp_token_rows": 64},
            "parallel.pp_token_rows is 64 but parallel.pp_degree is 1, so it has no effect: set",
        ),
        (
            {
                "parallel__pp_visual_rows": 0,
                "parallel__pp_degree": 2,
                "parallel__pp_shapes": "dynamic",
            },
            "parallel.pp_visual_rows is 0 but parallel.pp_shapes is dynamic",
        ),
        ({"data__packing_length": 4096}, "data.packing_length is 4096 but data.packing is false"),
        (
            {"data__packing": True, "data__packing_length": 2047},
            "data.packing_length 2047 is below data.max_length 2048",
        ),
        (
            {"data__packing": True, "data__padding_side": "left"},
            "data.padding_side is left but packed rows are padded on the right",
        ),
        (
            {**SLICED, "data__padding_side": "left"},
            "data.padding_side is left with parallel.cp_degree 2: slices are cut for padding that",
        ),
        (
            {**SLICED, "train__objective": "preference"},
            "train.objective is preference with parallel.cp_degree 2: log-probabilities of an",
        ),
        (
            {"model__pretrained": None, "model__config": {}},
            "data.processor is not set and there is no model.pretrained",
        ),
        (
            {"parallel__fleet": {"mp_configs": {"mp_async_allreduce": True}}},
            'parallel.fleet.mp_configs is {"mp_async_allreduce": true} but parallel.mp_degree is 1',
        ),
        (
            SHARDED | {"parallel__fleet": {"sharding_configs": {"comm_overlap": True}}},
            'parallel.fleet.sharding_configs is {"comm_overlap": true} but parallel.sharding_stage',
        ),
        (
            {"parallel__expert_capacity_factor": 1.5},
            "parallel.expert_capacity_factor is 1.5 but parallel.ep_degree is 1",
        ),
        (
            {"parallel__ep_degree": 2, "parallel__expert_capacity_factor": 2.5},
            "parallel.expert_capacity_factor is 2.5 but parallel.ep_degree is 2: buffers of 2",
        ),
        (
            {"parallel__reshard_after_forward": False},
            "parallel.reshard_after_forward is false but parallel.sharding_degree is 1",
        ),
        (
            SHARDED | {"parallel__sharding_gather_overlap": True},
            "parallel.sharding_gather_overlap is true but parallel.sharding_stage is 2",
        ),
        (
            SHARDED | {"parallel__reduce_once_per_step": True},
            "parallel.reduce_once_per_step is true but train.gradient_accumulation_steps is 1",
        ),
        (
            SHARDED | HALF | {"model__compute_dtype": "float32"},
            "parallel.reduce_dtype is bfloat16 but model.compute_dtype is float32",
        ),
    ],
)
def test_rule_fires(changes, part):
    assert any(part in problem for problem in rule_problems(make(**changes)))


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ({"train": []}, "neither is set of data.train and data.synthetic_samples"),
        ({"synthetic_samples": 8}, "both are set of data.train and data.synthetic_samples"),
        ({"groups": {"u.jsonl": "g"}}, "differ in t.jsonl, u.jsonl: give every file its group"),
    ],
)
def test_rule_of_a_policy_fires(data, part):
    values = {"model": {"pretrained": "m"}, "train": {"output_dir": "out", "max_steps": 10}}
    config = PI07Run.model_validate({**values, "data": {"train": ["t.jsonl"]} | data})
    assert any(part in problem for problem in rule_problems(config))


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
