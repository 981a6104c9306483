"""A tiny PaddleOCR-VL: layouts of its folders, its tie, adapters, operations, and requests side by
side. Its numbers are those of test_golden.py."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file

from paddle_vl import LoRAConfig, PaddleOCRVLForConditionalGeneration
from paddle_vl.batch.positions import in_blocks
from paddle_vl.checkpoint.adapter_files import StoredAdapter
from paddle_vl.config.families import family_of_folder
from paddle_vl.families.paddleocr_vl.checkpoint_map import adapter_key, key_here
from paddle_vl.families.paddleocr_vl.flops import PaddleOCRVLFlops
from paddle_vl.families.paddleocr_vl.settings import PARTS
from paddle_vl.families.vlm.inputs.collate import PreparedCollator, VLCollator
from paddle_vl.families.vlm.training.adapter import merge_adapter
from paddle_vl.generation.sampling import Sampling
from paddle_vl.serving.engine import Engine, EngineSettings, Request
from paddle_vl.testing import (
    Image,
    assert_equals_single_device,
    run_ranks,
    tiny_paddleocr_vl,
    tiny_qwen3_vl_batch,
)
from paddle_vl.testing.paddleocr_vl import tiny_paddleocr_vl_config
from paddle_vl.testing.qwen3_vl import IMAGE, VIDEO
from paddle_vl.train.freeze import freeze_parameters, trained_names, treated_apart
from parity.golden import PaddleOCRFolders
from parity.paddleocr_vl import patches_in_blocks
from tests.support.counted_products import counted_products
from tests.support.tiny import GOLDEN

MODELS = GOLDEN / "paddleocr_vl" / "models"
UNREAD = ("visual.vision_model.embeddings.packing_position_embedding.", "visual.vision_model.head.")
load = PaddleOCRVLForConditionalGeneration.from_pretrained
# Recipes of PaddleFormers adapt these.
TARGETS = [
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("out_proj", "fc1", "fc2", "linear_1", "linear_2"),
]


def batch_of(*samples, seed: int = 0) -> dict[str, np.ndarray]:
    """A batch of the tiny Qwen3-VL, whose patches have twice as many values."""
    batch = tiny_qwen3_vl_batch(*samples, seed=seed)
    pixels = batch.get("pixel_values")
    return batch if pixels is None else batch | {"pixel_values": pixels[:, :48].copy()}


BATCH = batch_of((1, 2, Image(4, 6), 3, 5, 7), (Image(2, 4), 6, Image(2, 2), 5), (7, 8, 9))

# A sample without padding.
PAGE = {
    name: array if "pixel" in name or "grid" in name else array[0]
    for name, array in batch_of((1, Image(4, 6), 3)).items()
}


def tensors_in(folder: Path) -> dict[str, np.ndarray]:
    assert [file.name for file in folder.glob("*safetensors*")] == ["model.safetensors"]
    return load_file(folder / "model.safetensors")


def assert_same(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)


# Folders.


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_what_is_read_is_written_with_all_that_other_programs_need(kind, tmp_path):
    model = load(MODELS / kind)
    assert model.config.tie_word_embeddings == (kind == "tied")
    stored = load_file(MODELS / kind / "model.safetensors")
    model.save_pretrained(tmp_path / "hub")
    assert_same(tensors_in(tmp_path / "hub"), stored)
    model.save_layout = "transformers"
    model.save_pretrained(tmp_path / "transformers")
    found = tensors_in(tmp_path / "transformers")
    read = {key: array for key, array in stored.items() if not key.startswith(UNREAD)}
    if kind == "tied":
        del read["lm_head.weight"]
    assert_same(found, {adapter_key(key): array for key, array in read.items()})
    assert all(key.startswith(("model.visual.", "model.projector.", "model.language_model."))
               for key in found if key != "lm_head.weight")  # fmt: skip
    again = load(tmp_path / "transformers")
    assert again.config.tie_word_embeddings == (kind == "tied")
    assert_same(again.hf_state_dict(), model.hf_state_dict())
    # The table is zeros, and config.json tells that there is no pooling head.
    again.save_pretrained(tmp_path / "again")
    written = tensors_in(tmp_path / "again")
    table = written.pop(f"{UNREAD[0]}weight")
    assert (table.shape, table.any()) == ((32768, model.config.vision_config.hidden_size), False)
    assert_same(written, {k: stored[k] for k in stored if not k.startswith(UNREAD)})
    has_head = [
        family_of_folder(tmp_path / name).model_class().config_class.from_pretrained(
            tmp_path / name
        ).vision_config.vision_use_head
        for name in ("hub", "transformers", "again")
    ]  # fmt: skip
    assert has_head == [True, False, False]


def test_the_tensors_decide_whether_the_head_is_tied(tmp_path):
    folder = Path(shutil.copytree(MODELS / "tied", tmp_path / "model"))
    stored = load_file(folder / "model.safetensors")
    for change, is_tied in (({}, True), ({"lm_head.weight": stored["lm_head.weight"] + 1}, False)):
        save_file(stored | change, folder / "model.safetensors")
        assert load(folder).config.tie_word_embeddings is is_tied
    del stored["lm_head.weight"]
    save_file(stored, folder / "model.safetensors")
    assert load(folder).config.tie_word_embeddings is True


def test_missing_tensors_are_named_by_the_keys_of_the_hub(tmp_path):
    folder = Path(shutil.copytree(MODELS / "untied", tmp_path / "model"))
    stored = load_file(folder / "model.safetensors")
    del stored["mlp_AR.linear_1.bias"]
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"mlp_AR\.linear_1\.bias"):
        load(folder)


# Adapters.


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A model with adapters unlike their start, and its folder."""
    model, folder = load(MODELS / "tied"), tmp_path_factory.mktemp("adapter")
    model.add_lora(LoRAConfig(r=3, lora_alpha=5, target_modules=TARGETS))
    rng = np.random.default_rng(0)
    for key, parameter in model.hf_named_parameters():
        if "lora_B" in key:
            parameter.set_value(rng.normal(0, 0.1, parameter.shape).astype(np.float32))
    model.save_adapter(folder)
    return model, folder


def test_every_linear_is_adapted_under_the_names_of_transformers_modules(adapted):
    model, folder = adapted
    text, vision = model.config.text_config, model.config.vision_config
    assert len(model.adapter.sizes) == 7 * text.num_hidden_layers + 6 * vision.depth + 2
    prefixes = tuple(f"base_model.model.model.{m}." for m in ("visual", "projector"))
    prefixes += ("base_model.model.model.language_model.layers.",)
    written = load_file(folder / "adapter_model.safetensors")
    assert len(written) == 2 * len(model.adapter.sizes)
    assert all(key.startswith(prefixes) for key in written)
    assert StoredAdapter.read(folder, key_here).sizes == model.adapter.sizes


def test_adapters_are_read_and_merged_into_a_folder_of_the_hub(adapted, tmp_path):
    model, folder = adapted
    case = PaddleOCRFolders([GOLDEN / "paddleocr_vl"]).case("tied_one_image").inputs()
    wanted = model(**case).logits.numpy()
    np.testing.assert_array_equal(load(folder)(**case).logits.numpy(), wanted)
    assert merge_adapter(type(model), folder, tmp_path / "out") == MODELS / "tied"
    merged, stored = tensors_in(tmp_path / "out"), load_file(MODELS / "tied/model.safetensors")
    assert merged.keys() == stored.keys()
    assert_same(*({k: a[k] for k in a if k.startswith(UNREAD)} for a in (merged, stored)))
    found = load(tmp_path / "out")
    assert found.config.tie_word_embeddings
    np.testing.assert_allclose(found(**case).logits.numpy(), wanted, rtol=0, atol=2e-5)


# Inputs.


def test_patches_in_raster_order_are_those_in_blocks():
    model, grid = tiny_paddleocr_vl(), BATCH["image_grid_thw"]
    raster = np.empty_like(BATCH["pixel_values"])
    raster[in_blocks(grid, 2)] = BATCH["pixel_values"]
    raster = raster.reshape([-1, 3, 4, 4])
    wanted = model(**BATCH).logits.numpy()
    for pixels in (raster, paddle.to_tensor(raster)):
        found = model(**BATCH | {"pixel_values": pixels}).logits.numpy()
        np.testing.assert_array_equal(found, wanted)
    with pytest.raises(ValueError, match=r"vision item 0 has grid \[1, 8, 3\]: frames must be"):
        in_blocks(np.array([[1, 8, 3]]), 2)


def test_the_padding_token_is_read_and_not_trained():
    model = tiny_paddleocr_vl()
    batch = batch_of((1, 0, 3, 0, 5))
    model(**batch).loss.backward()
    embedding = model.language_model.embedding.embed_tokens.weight
    assert not embedding.grad[0].numpy().any()
    assert embedding.grad[3].numpy().any()
    before = model(**batch).loss.item()
    embedding.set_value(embedding.numpy() + np.float32(1) * (np.arange(64) == 0)[:, None])
    assert model(**batch).loss.item() != before


# Biases, which no published model has.


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_biases_of_the_decoder_are_those_of_one_device(sequence_parallel):
    # Two ranks have a key head each; under sequence parallelism they divide 24 token rows.
    build = partial(tiny_paddleocr_vl, use_bias=True)
    keys = build().whole_shapes()
    assert sum(key.startswith("model.") and key.endswith(".bias") for key in keys) == 3 * 7
    assert_equals_single_device(
        build, lambda model: model(**BATCH), 2, sequence_parallel=sequence_parallel
    )


def test_a_bias_that_ranks_would_share_is_refused():
    with pytest.raises(ValueError, match="fewer key heads than model-parallel ranks"):
        run_ranks(partial(tiny_paddleocr_vl, use_bias=True), 4)


# Operations.


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    "patterns",
    [[], ["vision"], ["vision", "mergers"], ["language"], ["language", "mergers", "*out_proj*"],
     ["visual.vision_model.encoder.layers.1.*", "model.layers.1.*"]],
)  # fmt: skip
@pytest.mark.parametrize("targets", [None, "all-linear"])
def test_operations_are_those_of_the_products_that_the_model_runs(patterns, targets, monkeypatch):
    model = tiny_paddleocr_vl()
    if targets is not None:
        model.add_lora(LoRAConfig(r=3, target_modules=targets))
        model.materialize_all()
    batch = PreparedCollator(VLCollator(0, IMAGE, VIDEO), None)([PAGE, PAGE])
    trained = trained_names(model.whole_shapes(), patterns, model.adapter_names(), PARTS)
    model.separate(treated_apart(list(model.hf_named_parameters()), trained.__contains__))
    freeze_parameters(list(model.hf_named_parameters()), trained)
    ranks = {} if model.adapter is None else dict.fromkeys(model.adapter.targets, 3)
    counter = PaddleOCRVLFlops(model.config, trained, ranks)
    with counted_products(monkeypatch) as counts:
        loss = model(**batch).loss
        if not loss.stop_gradient:
            loss.backward()
    assert counter.forward(batch) == counts.forward
    assert counter(batch) == counts.forward + counts.backward


# Requests.


def test_answers_side_by_side_are_those_of_each_request_alone():
    model = tiny_paddleocr_vl()
    model.eval()
    engine = Engine(model, EngineSettings(max_num_seqs=3, kv_cache_tokens=160, block_size=4))
    engine.start()
    requests, wanted = [], []
    for number, items in enumerate([(1, Image(4, 6), 3), (5, 6, 7), (Image(2, 2), 6, 7)]):
        batch = batch_of(items, seed=number)
        ids = batch["input_ids"][:, : int(batch["attention_mask"].sum())]
        visual = {name: batch[name] for name in ("pixel_values", "image_grid_thw") if name in batch}
        requests.append(Request(ids[0], Sampling(6, temperature=0.0), visual))
        wanted.append(model.generate(ids, **visual, max_new_tokens=6)[0].tolist())
    handles = [engine.submit(request) for request in requests]
    assert [[event.token_id for event in handle] for handle in handles] == wanted
    engine.close()


def test_a_request_has_its_own_adapter(adapted):
    model, folder = adapted
    base, case = load(MODELS / "tied"), PaddleOCRFolders([GOLDEN / "paddleocr_vl"]).case("gen_tied")
    given, grid = case.inputs(), case.inputs()["image_grid_thw"]
    pixels = given["pixel_values"].reshape([len(given["pixel_values"]), -1])
    visual = {"pixel_values": pixels[in_blocks(grid, 2)], "image_grid_thw": grid}
    settings = EngineSettings(max_num_seqs=2, kv_cache_tokens=256, block_size=4)
    engine = Engine(load(MODELS / "tied"), settings, {"pages": folder})
    engine.start()
    ids, sampling = given["input_ids"], Sampling(6, temperature=0.0)
    handles = [engine.submit(Request(ids[0], sampling, visual, a)) for a in (None, "pages")]
    found = [[event.token_id for event in handle] for handle in handles]
    engine.close()
    assert found == [
        each.generate(ids, **visual, max_new_tokens=6)[0].tolist() for each in (base, model)
    ]
    assert found[0] != found[1]


def test_patches_of_cases_are_in_blocks_of_the_models_merge_size():
    config = tiny_paddleocr_vl_config()
    vision = replace(config.vision_config, spatial_merge_size=3)
    model = SimpleNamespace(config=replace(config, vision_config=vision))
    inputs = {"pixel_values": np.arange(27.0)[:, None], "image_grid_thw": np.array([[1, 3, 9]])}
    found = patches_in_blocks(model, inputs)["pixel_values"].ravel()
    assert found[:9].tolist() == [0, 1, 2, 9, 10, 11, 18, 19, 20]
