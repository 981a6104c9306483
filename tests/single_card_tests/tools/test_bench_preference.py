"""The benchmark of preference training compares steps on the same tokens.

Guarantees: a pair has the two rows of fine-tuning and their image once; TRL's rows are the same
tokens, with those that the image stands for; every side of the table can be built.
"""

import json

import numpy as np
import pytest

import preference
import references
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.train.build import build_trainer


@pytest.fixture(scope="module")
def work(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    (folder / "data").mkdir()
    (folder / "data" / "processor").symlink_to(digits / "processor")
    preference.prepare(str(folder))
    return folder


def batch_of(side, work):
    trainer = build_trainer(preference.run_config(side, str(work)), writes=False)
    batch = next(trainer.data)
    trainer.feed.close()
    return batch


def targets_of(batch):
    """What each token row predicts; -100 for nothing."""
    targets_T = np.full(batch["input_ids"].size, -100)
    rows_N, targets_N = batch["target_rows"]
    targets_T[rows_N] = targets_N
    return targets_T.reshape(batch["input_ids"].shape)


@pytest.mark.parametrize("side", [*preference.SIDES][1:])
def test_a_pair_has_the_rows_of_fine_tuning_and_their_image_once(side, work):
    tuning, pair = batch_of(preference.TUNING, work), batch_of(side, work)
    assert pair["input_ids"].shape == (2, 511)
    assert pair["attention_mask"].all()
    for of in (lambda batch: batch["input_ids"], targets_of):
        own, wanted = (np.sort(of(each), axis=0) for each in (pair, tuning))
        np.testing.assert_array_equal(own, wanted)
    assert 2 * len(pair["pixel_values"]) == len(tuning["pixel_values"]) == 2048
    assert ("reference_log_probs" in pair) == ("advance" in side)


def test_trl_has_the_same_tokens(work):
    (row,) = references.rows(work / "data" / "preference.jsonl")
    processor = VLProcessor.from_pretrained(work / "base")
    pads = "<|image_pad|>" * 256
    texts = [row["prompt"].replace("<|image_pad|>", pads) + row[key]
             for key in ("chosen", "rejected")]  # fmt: skip
    ids = [processor.tokenizer.backend.encode(text, add_special_tokens=False).ids for text in texts]
    assert ids == batch_of(preference.PREFERENCE, work)["input_ids"].tolist()
    assert row["images"] == [str(work / "data" / json.loads(
        (work / "data" / "sft.jsonl").read_text().splitlines()[0])["images"][0])]  # fmt: skip
