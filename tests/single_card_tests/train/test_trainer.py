"""Complete runs of a tiny model, of steps, epochs and tokens. Interrupted ones are in
`test_continued_runs`, kinds that resume in `test_resumed_runs`.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl import Qwen3VLConfig
from paddle_vl.config.load import load_run_config
from paddle_vl.config.validate import launch_problems
from paddle_vl.families.vlm.folders.processor_fit import model_config
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.train.checkpoint import model_folder
from tests.single_card_tests.train.batches import count_calls
from tests.single_card_tests.train.whole_runs import assert_same_run, build, metrics_of
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


def test_epochs_and_frozen_parts_from_the_configuration(run_file, tmp_path):
    """12 samples in steps of 2 x 2: one and a half epochs are 4.5 steps, so 5."""
    trainer = build(
        run_file, tmp_path, "train.max_steps=null", "train.num_train_epochs=1.5",
        "data.padding_side=left", "data.pad_to_multiple_of=32", "logging.device_peak_tflops=0.05",
        'model.freeze=["model.visual.*"]', "train.recompute=full",
    )  # fmt: skip
    assert trainer.num_steps == 5
    batch = next(trainer.data)
    assert batch["input_ids"].shape[1] % 32 == 0
    assert batch["has_left_padding"]
    before = trainer.runner.model.hf_state_dict()
    trainer.run()
    for name, value in trainer.runner.model.hf_state_dict().items():
        assert (value == before[name]).all() == name.startswith("model.visual."), name
    # A peak that is set gives a utilisation.
    assert all(0 < line["mfu"] < 1 for line in run_metrics(tmp_path))


def test_training_can_start_from_a_pretrained_folder(whole_run, run_file, tmp_path):
    start = load_file(whole_run / "final" / "model.safetensors")
    trainer = build(
        run_file, tmp_path, "model.config=null", f"model.pretrained={whole_run / 'final'}",
        "data.processor=null", "data.max_pixels=64",
    )  # fmt: skip
    for name, value in trainer.runner.model.hf_state_dict().items():
        np.testing.assert_array_equal(value, start[name], err_msg=name)
    assert next(trainer.data)["image_grid_thw"].tolist() == [[1, 2, 2]] * 2


@pytest.mark.parametrize(
    ("steps", "wanted"), [(2, [False, True, True, False]), (50, [False, True, True, True])]
)
def test_profiled_steps_leave_a_trace_of_these_steps(run_file, tmp_path, steps, wanted):
    """Also where the run ends first."""
    trainer = build(run_file, tmp_path, f"train.profile={{start: 2, steps: {steps}}}")
    recorded, plain = [], trainer.train_one_step

    def train_one_step():
        recorded.append(trainer.trace._profiler is not None)
        return plain()

    trainer.train_one_step = train_one_step
    trainer.run()
    assert recorded == wanted
    (file,) = (tmp_path / "profile").glob("rank0*.json")
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert any("matmul" in str(name) for name in names)


CONSTANT = ("train.lr_scheduler_type=constant", "train.warmup_steps=0", "train.save_steps=2")


@pytest.fixture(scope="module")
def in_steps(run_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps") / "out"
    build(run_file, folder, *CONSTANT).run()
    return folder


def of_tokens(number: int, schedule=CONSTANT) -> list[str]:
    return ["train.max_steps=null", f"train.max_tokens={number}", *schedule]


def test_the_step_that_reaches_the_tokens_is_the_last(run_file, in_steps, tmp_path):
    tokens = [line["tokens"] for line in metrics_of(in_steps)]
    assert len(tokens) == 4
    assert tokens == sorted(tokens)
    for name, number in (("fewer", tokens[2] + 1), ("exact", tokens[3])):
        build(run_file, tmp_path / name, *of_tokens(number)).run()
        assert_same_run(in_steps, tmp_path / name)
    early = build(run_file, tmp_path / "early", *of_tokens(tokens[2]))
    early.run()
    assert early.step == 3


def test_its_rate_follows_the_tokens(run_file, in_steps, tmp_path):
    tokens = [0, *(line["tokens"] for line in metrics_of(in_steps))]
    schedule = ("train.warmup_steps=0", "train.lr_scheduler_type=warmup_stable_decay",
                "train.decay_ratio=1", "train.decay_type=linear")  # fmt: skip
    build(run_file, tmp_path / "out", *of_tokens(tokens[4], schedule)).run()
    rates = [line["learning_rate"] for line in metrics_of(tmp_path / "out")]
    assert rates == pytest.approx([0.01 * (1 - seen / tokens[4]) for seen in tokens[:4]])


def test_a_resumed_run_ends_with_the_same_bytes(run_file, in_steps, tmp_path):
    tokens = metrics_of(in_steps)[3]["tokens"]
    folder = tmp_path / "out"
    build(run_file, folder, *of_tokens(metrics_of(in_steps)[1]["tokens"])).run()
    longer = build(run_file, folder, *of_tokens(tokens), "train.resume_from_checkpoint=auto")
    assert (longer.step, longer.tokens) == (2, metrics_of(in_steps)[1]["tokens"])
    longer.run()
    assert_same_run(in_steps, folder)


def test_a_checkpoint_that_does_not_know_its_tokens_is_refused(run_file, tmp_path):
    folder = tmp_path / "out"
    build(run_file, folder, *CONSTANT, "train.max_steps=2", "train.verify_checkpoint=false").run()
    file = folder / "checkpoint-2" / "trainer_state.json"
    state = json.loads(file.read_text())
    del state["tokens"]
    # As many bytes as the manifest says.
    file.write_text(json.dumps(state).ljust(file.stat().st_size))
    resume = ("train.resume_from_checkpoint=auto", "train.verify_checkpoint=false")
    with pytest.raises(ValueError, match="does not say how many tokens it has trained on"):
        build(run_file, folder, *of_tokens(10**6), *resume)
    assert build(run_file, folder, *CONSTANT, *resume).tokens == 0


def test_a_published_size_is_named_in_place_of_a_file(run_file):
    processor = VLProcessor.from_pretrained(load_run_config(run_file, []).data.processor)
    found = model_config(Qwen3VLConfig, "Qwen3-VL-2B-Instruct", processor)
    assert found == Qwen3VLConfig.named("qwen3-vl-2b")


@pytest.mark.parametrize(("source", "is_absent"), [("none.json", True), ("qwen3-vl-2b", False)])
def test_an_absent_file_is_found_before_the_launch(run_file, source, is_absent):
    problems = launch_problems(load_run_config(run_file, [f"model.config={source}"]), "cpu")
    assert any("model.config: no file" in problem for problem in problems) == is_absent


@pytest.mark.parametrize(
    ("settings", "times"),
    [("full", (2, 2)), ("mlp", (2, 2)), ("mlp train.recompute_num_layers=1", (1, 2))],
)
def test_recompute_setting_runs_layers_again(run_file, tmp_path, settings, times):
    trainer = build(
        run_file, tmp_path, *f"train.recompute={settings}".split(), "train.max_steps=1",
        "train.gradient_accumulation_steps=1",
    )  # fmt: skip
    model = trainer.runner.model
    layers = (model.decoder_layers[1].mlp.down_proj, model.vision_blocks[0].mlp.linear_fc1)
    calls = [count_calls(layer) for layer in layers]
    trainer.run()
    assert tuple(map(len, calls)) == times
