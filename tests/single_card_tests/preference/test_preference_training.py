"""Preference training on one device: TRL's values, padded and packed, its runs, and what is
refused."""

import json
import math
from pathlib import Path
from typing import cast

import numpy as np
import paddle
import pytest
import yaml

from paddle_vl.cli.main import main
from paddle_vl.config.load import load_run_config
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.vlm.inputs.collate import VLCollator, prepared
from paddle_vl.families.vlm.inputs.preference import PreferenceBatch, PreferenceCollator
from paddle_vl.families.vlm.preference.objective import PreferenceLoss
from paddle_vl.families.vlm.preference.settings import PreferenceConfig
from paddle_vl.families.vlm.settings import VLRun
from paddle_vl.nn import head_loss
from paddle_vl.nn.objective import weighted_loss
from paddle_vl.train.build import run_family
from parity import preference as parity
from tests.single_card_tests.train.tiny_run import write_records
from tests.support.finished_runs import arrays_of, lasting_metrics
from tests.support.preference_runs import base_settings, write_preference_run
from tests.support.tiny import GOLDEN
from tests.support.topology_runs import continue_run, train

FOLDERS = parity.FOLDERS([GOLDEN / "preference"])
LORA = "model.lora={r: 2, target_modules: [all-linear], modules_to_save: [mergers]}"
SAVES = ("train.save_steps=2", "train.gradient_accumulation_steps=2")


@pytest.mark.parametrize("case", FOLDERS.cases, ids=lambda case: case.name)
def test_everything_equals_trl(case):
    for report in parity.run_cases(FOLDERS, [case], 1.0, "float32"):
        assert report.passed, report.failure_lines()


def test_terms_are_means_over_the_whole_step():
    stored = json.loads((GOLDEN / "preference" / "accumulation.json").read_text())
    loss = PreferenceLoss(parity.settings_of("sigmoid").model_copy(update={"rpo_alpha": 1.0}))
    of_batches = stored["micro_batches"]
    sums = {"preference_loss": "sigmoid_sum", "sft_loss": "nll_sum"}
    counts = {"preference_loss": "pairs", "sft_loss": "chosen_tokens"}

    def total(key: str) -> float:
        return sum(each[key] for each in of_batches)

    means = [total(sums[n]) / total(counts[n]) if n in sums else 0.0 for n in loss.terms]
    assert weighted_loss(means, loss) == pytest.approx(stored["per_pair_and_per_token"], rel=1e-6)
    divisors = dict(zip(loss.terms, loss.divisors, strict=True))
    assert divisors["preference_loss"] == "num_compared"
    assert divisors["sft_loss"] == "num_chosen_tokens"


def test_an_answer_alone_in_its_micro_batch_gives_no_baseline():
    """TRL 1.16's KTOTrainer takes z0 from answers of other rows, and refuses batches of one, whose
    z0 would be their own reward."""
    loss = PreferenceLoss(PreferenceConfig(loss_type=["kto"]))
    collator = PreferenceCollator(VLCollator(0, 1, 2), True, False, True)
    row = {"input_ids": np.array([5, 6]), "labels": np.array([-100, 6])}
    samples = [{**row, "is_chosen": np.asarray(True)}] * 2
    pair, single, none = (
        prepared(collator([own]), None, ["num_with_other"], PreferenceBatch)
        for own in (samples, samples[:1], [])
    )
    assert [each.counts for each in (pair, single, none)] == [(2,), (0,), (0,)]
    own = [paddle.to_tensor(values) for values in ([3.0, 4.0], [9.0], [0.0, 0.0])]
    reference = [paddle.zeros_like(values) for values in own] * 2

    def baselines(summed):
        found = loss.compared([pair, single, none], reference, own, summed)
        return [float(each.kto_baseline) for each in found]

    assert baselines(None) == [3.5, 0, 0]
    assert baselines(lambda total: total) == [3.5] * 3


def test_shared_images_are_encoded_once():
    case = FOLDERS.case("shared_image")
    model = parity.loaded(FOLDERS, case)
    batch = parity.batch_of(model, case, parity.settings_of("sigmoid"))
    stored = case.tensors["in.pixel_values"]
    np.testing.assert_array_equal(batch["pixel_values"], stored)
    tokens = int((batch["input_ids"] == model.config.image_token_id).sum())
    assert tokens == len(batch["visual_gather_indices"]) == 2 * len(stored) // 4


def test_no_logits_of_all_rows_are_made(monkeypatch):
    case = FOLDERS.case("shared_image")
    model = parity.loaded(FOLDERS, case)
    settings = parity.settings_of("sigmoid")
    runner = parity.runner_of(model, settings, None)
    batch = parity.batch_of(model, case, settings)
    wanted = runner.values([batch], lambda output: output.log_probs)[0].numpy()
    most: list[int] = []
    logits = model.lm_head._logits
    monkeypatch.setattr(
        model.lm_head,
        "_logits",
        lambda rows, parameters: most.append(rows[0].shape[0]) or logits(rows, parameters),
    )
    monkeypatch.setattr(head_loss, "CHUNK_LOGITS", 4 * model.config.text_config.vocab_size)
    runner.accumulate_gradients([batch], [2] * len(runner.loss.terms))
    found = runner.values([batch], lambda output: output.log_probs)[0].numpy()
    assert max(most) <= 4
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_preference_run(tmp_path_factory.mktemp("run"), 12)


@pytest.mark.parametrize("use_dora", ["false", "true"])
def test_the_first_loss_is_ln_2_with_adapters_and_resuming_is_exact(run_file, tmp_path, use_dora):
    settings = [*base_settings(run_file), LORA, f"model.lora.use_dora={use_dora}", *SAVES]
    train(run_file, tmp_path / "whole", settings)
    continue_run(run_file, tmp_path / "whole", tmp_path / "resumed", settings)
    first = lasting_metrics(tmp_path / "whole")[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/margins"] == first["rewards/accuracies"] == 0
    files = [tmp_path / run / "checkpoint-4" for run in ("whole", "resumed")]
    names = ["adapter_model.safetensors", "optimizer.safetensors"]
    assert all((files[0] / n).read_bytes() == (files[1] / n).read_bytes() for n in names)


def test_a_resume_with_another_reference_is_refused(run_file, tmp_path):
    other = write_preference_run(tmp_path / "other", 12)
    settings = [*base_settings(run_file), *SAVES]
    train(run_file, tmp_path / "out", settings)
    file = run_file.with_name("base") / "model.safetensors"
    kept = file.read_bytes()
    manifest = file.with_name("manifest.json")
    kept_manifest = manifest.read_bytes() if manifest.is_file() else None
    try:
        for each in (file, manifest):
            if (source := other.with_name("base") / each.name).is_file():
                each.write_bytes(source.read_bytes())
        with pytest.raises(ValueError, match="the reference's weights have the checksum"):
            continue_run(run_file, tmp_path / "out", tmp_path / "again", settings)
    finally:
        file.write_bytes(kept)
        if kept_manifest is not None:
            manifest.write_bytes(kept_manifest)


def test_precomputed_values_give_the_same_run_and_are_refused_for_others(run_file, tmp_path):
    settings = [*base_settings(run_file), *SAVES, "data.max_length=64"]
    arguments = ["precompute-reference", str(run_file), *settings]
    assert main([*arguments, f"data.eval=[{run_file.with_name('train.jsonl')}#3]"]) == 1
    assert main(arguments) == 0
    written = run_file.with_name("train.jsonl.reference.npz")
    stored = [*settings, "preference.precompute_ref_log_probs=true"]
    for name, own in (("computed", settings), ("stored", stored)):
        train(run_file, tmp_path / name, own)
    for one, other in zip(*(lasting_metrics(tmp_path / n) for n in ("computed", "stored")),
                          strict=True):  # fmt: skip
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-6)
    found, wanted = (arrays_of(tmp_path / n / "checkpoint-4") for n in ("stored", "computed"))
    assert all(np.allclose(found[key], wanted[key], atol=1e-5) for key in wanted)
    data = run_family(load_run_config(str(run_file), stored)).train_data
    data.reference[0] = np.nan
    with pytest.raises(BadSampleError, match="was bad when the reference's"):
        data[0]
    with pytest.raises(ValueError, match="settings that make samples of it changed since"):
        run_family(load_run_config(str(run_file), [*stored, "data.max_length=60"]))
    with pytest.raises(ValueError, match=r"preference\.ld_alpha changed since"):
        run_family(load_run_config(str(run_file), [*stored, "preference.ld_alpha=0.5"]))
    other = write_preference_run(tmp_path / "other", 12).with_name("base")
    with pytest.raises(ValueError, match="the reference's weights changed since"):
        train(run_file, tmp_path / "other", [*stored, f"preference.ref_model={other}"])
    written.write_bytes(written.read_bytes()[:100])
    with pytest.raises(RuntimeError, match="is damaged"):
        run_family(load_run_config(str(run_file), stored))
    written.unlink()
    with pytest.raises(RuntimeError, match="run paddle-vl precompute-reference"):
        run_family(load_run_config(str(run_file), stored))


def test_answers_are_cut_and_prompts_are_not(run_file):
    def sample(max_length: int):
        settings = [*base_settings(run_file), f"data.max_length={max_length}"]
        return run_family(load_run_config(str(run_file), settings)).train_data[1]

    whole = sample(128)
    prompt = int(np.argmax(whole["chosen.labels"] != -100))
    cut = sample(prompt + 1)
    assert [len(cut[f"{side}.input_ids"]) for side in ("chosen", "rejected")] == [prompt + 1] * 2
    with pytest.raises(BadSampleError, match="leaves no room for the answer"):
        sample(prompt)


def test_pairs_without_a_difference_in_tokens_are_refused(run_file):
    file = run_file.with_name("cut.jsonl")
    text = {"prompt": "?", "chosen": "red green", "rejected": "red blue"}
    of_images = json.loads(run_file.with_name("train.jsonl").read_text().splitlines()[3])
    del of_images["rejected_response"]
    write_records(file, [text, of_images])

    def pair(max_length: int, number: int = 0):
        settings = [*base_settings(run_file), f"data.train=[{file}]"]
        settings += [f"data.max_length={max_length}"]
        return run_family(load_run_config(str(run_file), settings)).train_data[number]

    whole = pair(128)
    differ = np.flatnonzero(whole["chosen.input_ids"] != whole["rejected.input_ids"])[0]
    assert len(pair(differ + 1)["chosen.input_ids"]) == differ + 1
    with pytest.raises(BadSampleError, match=f"same tokens up to data.max_length {differ}"):
        pair(differ)
    # The same answer to other images.
    sample = pair(128, 1)
    np.testing.assert_array_equal(sample["chosen.input_ids"], sample["rejected.input_ids"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.objective=sft", "preference.beta=0.2"], "train.objective is sft"),
        (["preference.loss_type=[orpo, hinge]"], "mixes orpo with losses of another kind"),
        (["preference.loss_type=[kto, sft]"], "of single answers"),
        (["preference.loss_weights=[1, 2]"], "2 weights for 1 losses"),
        (["preference.loss_type=[exo_pair]"], "label_smoothing is 0"),
        (["data.mask_history=true"], "data.mask_history is True"),
        ([LORA, "model.lora.lora_dropout=0.1"], "log-probabilities differ"),
        ([LORA, "preference.ref_model=elsewhere"], "would have to be equal in both"),
        (["preference.loss_type=[simpo]", "preference.ref_model=a"], "has no reference"),
        (["preference.loss_type=[kto]", "train.per_device_train_batch_size=1"], "to 2 or more"),
        (["preference.loss_type=[kto]", "train.per_device_eval_batch_size=1"], "to 2 or more"),
        (["preference.loss_type=[kto]", "preference.ld_alpha=0.5"], "does not read"),
        (["preference.loss_type=[ipo]", "preference.label_smoothing=0.1"], "does not read"),
        (["preference.f_alpha_divergence_coef=0.3"], "so it has no effect"),
        (["preference.pref_beta=0.2", "preference.beta=0.1"], "are the same setting"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(run_file, settings, message):
    with pytest.raises(ValueError, match=message):
        load_run_config(str(run_file), [*base_settings(run_file), *settings])


def test_names_of_other_packages_mean_the_same(tmp_path, run_file):
    values = yaml.safe_load(run_file.read_text())
    values["preference"] = {"pref_beta": 0.3, "pref_ftx": 0.5, "loss_type": "ipo"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    config = load_run_config(str(tmp_path / "run.yaml"), base_settings(run_file))
    preference = cast(VLRun, config).preference
    assert (preference.beta, preference.rpo_alpha, preference.loss_type) == (0.3, 0.5, ["ipo"])
