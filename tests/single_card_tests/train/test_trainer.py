"""Complete runs of a tiny model.

Guarantees: the output folder has the documented files; settings take effect. Interrupted runs are
in `test_continued_runs`.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl.config.load import load_run_config
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.train.checkpoint import model_folder
from tests.single_card_tests.train.whole_runs import build, metrics_of
from tests.support.finished_runs import metrics_of as run_metrics


def test_output_folder_holds_what_the_help_says(whole_run):
    assert sorted(path.name for path in whole_run.iterdir()) == [
        "checkpoint-2", "checkpoint-4", "config.yaml", "final", "loss.png", "metrics.jsonl",
        "run.json",
    ]  # fmt: skip
    final = {path.name for path in (whole_run / "final").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= final
    assert "optimizer.safetensors" not in final
    # Chats with the model end where its processor says, from Python and in HF too.
    for folder in ("final", "checkpoint-2"):
        settings = json.loads((whole_run / folder / "generation_config.json").read_text())
        processor = VLProcessor.from_pretrained(whole_run / folder)
        assert settings["eos_token_id"] == processor.eos_token_ids
        assert settings["pad_token_id"] == processor.pad_token_id
    assert model_folder(whole_run) == whole_run / "final"
    assert load_run_config(whole_run / "config.yaml").train.max_steps == 4


def test_metrics_have_every_quantity(whole_run):
    lines = [json.loads(line) for line in (whole_run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.0, 0.01, 0.0075, 0.0025])
    assert set(lines[1]) == {
        "step", "epoch", "loss", "learning_rate", "grad_norm", "samples_per_second",
        "tokens_per_second", "step_seconds", "step_seconds_max", "data_wait_seconds", "memory_gb",
        "sequence_length_min", "sequence_length_mean", "sequence_length_max",
        *(f"tokens_per_step_{name}" for name in ("sum", "mean", "min", "max")),
        *(f"rank_sequence_length_{name}" for name in ("sum", "mean", "min", "max")),
        "tokens", "target_tokens", "skipped_updates", "skipped_samples", "eval_loss",
    }  # fmt: skip
    assert "eval_loss" not in lines[0]
    assert lines[3]["epoch"] == pytest.approx(4 * 4 / 12, abs=1e-4)
    assert lines[3]["eval_loss"] < lines[1]["eval_loss"]
    assert all(line["tokens_per_second"] > 0 for line in lines)


def test_another_seed_gives_another_run(whole_run, run_file, tmp_path):
    build(run_file, tmp_path, "train.seed=6", "train.max_steps=1").run()
    assert metrics_of(tmp_path)[0]["loss"] != metrics_of(whole_run)[0]["loss"]


@pytest.mark.parametrize(
    ("settings", "times"),
    [("full", (2, 2)), ("mlp", (2, 2)), ("mlp train.recompute_num_layers=1", (1, 2))],
)
def test_recompute_setting_runs_layers_again(run_file, tmp_path, settings, times):
    trainer = build(
        run_file, tmp_path, *f"train.recompute={settings}".split(), "train.max_steps=1",
        "train.gradient_accumulation_steps=1",
    )  # fmt: skip
    counted = []
    for layer in (
        trainer.runner.model.decoder_layers[1].mlp.down_proj,
        trainer.runner.model.vision_blocks[0].mlp.linear_fc1,
    ):
        layer.register_forward_pre_hook(lambda *_: counted.append(1))
    trainer.run()
    assert len(counted) == sum(times)


def test_batch_settings_reach_the_batches(run_file, tmp_path):
    trainer = build(
        run_file, tmp_path, "data.padding_side=left", "data.pad_to_multiple_of=32",
        "train.per_device_train_batch_size=6",
    )  # fmt: skip
    batch = next(trainer.data)
    assert batch["input_ids"].shape[0] == 6
    assert batch["input_ids"].shape[1] % 32 == 0
    assert batch["has_left_padding"]


def test_skipped_samples_are_counted(run_file, tmp_path):
    """One broken line among good ones: an error by default, counted with skip."""
    data = tmp_path / "data.jsonl"
    lines = run_file.with_name("train.jsonl").read_text().splitlines()
    folder = run_file.parent
    lines = [line.replace("images/", f"{folder}/images/") for line in lines]
    data.write_text("\n".join([*lines[:5], '{"messages": ', *lines[5:]]) + "\n")
    settings = [f"data.train=[{data}]", "train.max_steps=1"]
    with pytest.raises(ValueError, match=r"data\.jsonl:6: broken JSON"):
        build(run_file, tmp_path / "out", *settings)
    build(run_file, tmp_path / "out", *settings, "data.on_bad_sample=skip").run()
    assert metrics_of(tmp_path / "out")[0]["skipped_samples"] == 1


def test_epochs_and_frozen_parts_from_the_configuration(run_file, tmp_path):
    """12 samples in steps of 2 x 2: one and a half epochs are 4.5 steps, so 5."""
    trainer = build(
        run_file, tmp_path, "train.max_steps=null", "train.num_train_epochs=1.5",
        'model.freeze=["model.visual.*"]', "train.recompute=full",
    )  # fmt: skip
    assert trainer.num_steps == 5
    before = trainer.runner.model.hf_state_dict()
    trainer.run()
    for name, value in trainer.runner.model.hf_state_dict().items():
        assert (value == before[name]).all() == name.startswith("model.visual."), name


def test_model_that_does_not_fit_its_processor_is_refused(run_file, tmp_path):
    with pytest.raises(ValueError, match="do not fit") as caught:
        build(
            run_file, tmp_path,
            "model.config.image_token_id=7", "model.config.vision_config.patch_size=8",
        )  # fmt: skip
    for part in (
        "image_token_id is 7 in the model and 278 in the tokenizer",
        "vision_config.patch_size is 8 in the model and 4 in the image processor",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="model.config: text_config.vocab_size is 270 but the"):
        build(run_file, tmp_path, "model.config.text_config.vocab_size=270")


def test_training_can_start_from_a_pretrained_folder(whole_run, run_file, tmp_path):
    start = load_file(whole_run / "final" / "model.safetensors")
    trainer = build(
        run_file, tmp_path, "model.config=null", f"model.pretrained={whole_run / 'final'}",
        "data.processor=null", "data.max_pixels=64",
    )  # fmt: skip
    for name, value in trainer.runner.model.hf_state_dict().items():
        np.testing.assert_array_equal(value, start[name], err_msg=name)
    assert next(trainer.data)["image_grid_thw"].tolist() == [[1, 2, 2]] * 2


def test_profiled_steps_leave_a_trace_of_these_steps(run_file, tmp_path):
    trainer = build(run_file, tmp_path, "train.profile={start: 2, steps: 2}")
    recorded, plain = [], trainer.train_one_step

    def train_one_step():
        recorded.append(trainer.trace._profiler is not None)
        return plain()

    trainer.train_one_step = train_one_step
    trainer.run()
    assert recorded == [False, True, True, False]
    (file,) = (tmp_path / "profile").glob("rank0*.json")
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert any("matmul" in str(name) for name in names)


def test_a_run_that_ends_while_it_is_profiled_leaves_the_trace(run_file, tmp_path):
    build(run_file, tmp_path, "train.profile={start: 3, steps: 50}").run()
    assert list((tmp_path / "profile").glob("rank0*.json"))


def test_a_peak_that_is_set_gives_a_utilisation(run_file, tmp_path):
    build(run_file, tmp_path, "logging.device_peak_tflops=0.05", "train.max_steps=2").run()
    for line in run_metrics(tmp_path):
        assert 0 < line["mfu"] < 1


def test_limits_that_contradict_the_processors_are_named(run_file, tmp_path):
    with pytest.raises(ValueError, match=r"processor with data\.max_pixels 1: min_pixels 64 and"):
        build(run_file, tmp_path, "data.max_pixels=1")
