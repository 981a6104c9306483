"""The step benchmark trains what the references train, and the harness of all benchmarks.

Guarantees: pi07's parameters and tokens are those of OpenTau; Qwen3-VL's batch has the
shapes that references.py gives to HF transformers; a function runs in a process of its own, whose
failure is told; ratios are those of each round; tables are put in the right place of a markdown
file.
"""

import pytest
import yaml

import harness
import step
from paddle_vl.families.pi07.flow import as_tensors
from paddle_vl.families.pi07.prefix import presence_of

# What references.py builds. This package leaves out the unused head of OpenTau's expert: 8 tokens
# of width 128.
OPENTAU_PARAMETERS, UNUSED_HEAD = 12_824_736, 8 * 128
OPENTAU_TOKENS = 478


def test_pi07_is_the_model_of_its_reference(tmp_path):
    harness.make_data("pi07", tmp_path / "data")
    trainer = step.build("pi07", [], tmp_path)
    model, batch = trainer.runner.model, next(trainer.data)
    parameters = sum(parameter.size for parameter in model.parameters())
    assert parameters + UNUSED_HEAD == OPENTAU_PARAMETERS
    assert len(batch["state"]) == 2
    model.eval()
    prefix = model.prefix(as_tensors(batch), presence_of(batch))
    assert prefix.embs.shape[1] == OPENTAU_TOKENS
    trainer.feed.close()


def test_qwen3_vl_has_the_shapes_of_its_reference(digits, tmp_path):
    settings = yaml.safe_load(step.CONFIGS["qwen3_vl"].read_text(encoding="utf-8"))
    (tmp_path / "data").symlink_to(digits)
    trainer = step.build("qwen3_vl", [], tmp_path)
    batch = next(trainer.data)
    size = settings["train"]["per_device_train_batch_size"]
    assert batch["input_ids"].shape == (size, settings["data"]["max_length"])
    assert batch["attention_mask"].all()
    assert batch["image_grid_thw"].tolist() == [[1, 32, 32]] * size
    trainer.feed.close()


def test_a_function_runs_in_a_process_of_its_own(tmp_path):
    (found,) = harness.launch(harness.peak_mib, tmp_path / "run")
    # This one has loaded Paddle.
    assert 0 < found < harness.peak_mib() / 2
    with pytest.raises(RuntimeError, match="no median for empty data"):
        harness.launch(harness.median, tmp_path / "run", rounds=[], side="a")


def test_ratios_are_those_of_each_round():
    rounds = harness.in_rounds(["a", "b"], 3, lambda side: {"s": {"step": ord(side)}})
    assert [list(one) for one in rounds] == [["a", "b"], ["b", "a"], ["a", "b"]]
    rounds = [{"a": {"s": 1.0}, "b": {"s": n}} for n in (2.0, 4.0, 10.0)]
    assert harness.ratio(rounds, "b", "a", "s") == "4.00 (3.00 to 7.00)"
    assert harness.median(rounds, "b", "s") == 4.0


def test_a_table_replaces_the_text_between_its_markers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- benchmark x -->\nold\n<!-- end of benchmark x -->\nb\n")
    table = harness.Table("x", ["", "ms"], [["step", "1"]], "A note.")
    harness.write_section(page, "x", table.markdown())
    assert page.read_text() == (
        "a\n<!-- benchmark x -->\n|  | ms |\n| --- | ---: |\n| step | 1 |\n\nA note.\n"
        "<!-- end of benchmark x -->\nb\n"
    )
    with pytest.raises(ValueError, match="needs the markers <!-- benchmark y -->"):
        harness.write_section(page, "y", "")


def test_where_a_figure_comes_from_has_command_date_and_machine(monkeypatch):
    monkeypatch.setattr(
        "sys.argv", [str(harness.ROOT / "tools/benchmarks/step.py"), "--against", "/home/me/python",
                     "--write-doc", "README.md"]
    )  # fmt: skip
    said = harness.provenance(torch="2.0")
    assert said.startswith("*`python tools/benchmarks/step.py --against python`, 20")
    assert "cores; python 3" in said
    assert "paddlepaddle" in said
    assert said.endswith("torch 2.0.*")
