"""Adapters of the model, and PEFT's files.

With an adapter made by PEFT logits, loss, every gradient and the saved files equal PEFT's; merging,
in memory and from file to file, gives the adapted model's outputs.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file

from paddle_vl import LoRAConfig, Qwen3VLForConditionalGeneration
from paddle_vl.checkpoint.adapter_files import StoredAdapter
from paddle_vl.checkpoint.safetensors_io import (
    TensorToWrite,
    encoded,
    read_checkpoint_headers,
    write_file,
)
from paddle_vl.families.vlm.modeling.config import EMBEDDING_KEY, HEAD_KEY
from paddle_vl.families.vlm.training.adapter import merge_adapter
from paddle_vl.testing.qwen3_vl import patches, token_rows
from tests.support.tiny import GOLDEN, tiny_model

BASE = GOLDEN / "qwen_vl" / "models" / "dense_untied"
PEFT = GOLDEN / "lora" / "adapter"
DORA = GOLDEN / "lora" / "dora"
EXPECTED = {PEFT: GOLDEN / "lora" / "expected.safetensors", DORA: DORA / "expected.safetensors"}
LAYERS = "model.language_model.layers"


def config(*target_modules: str, **settings) -> LoRAConfig:
    return LoRAConfig(target_modules=list(target_modules), **settings)


def adapted(*target_modules: str, **settings) -> Qwen3VLForConditionalGeneration:
    model = tiny_model()
    model.add_lora(config(*target_modules, **settings))
    return model


def untied_model() -> Qwen3VLForConditionalGeneration:
    return Qwen3VLForConditionalGeneration.from_pretrained(BASE)


def randomise(model, seed: int = 0) -> None:
    """Set adapters to random values."""
    rng = np.random.default_rng(seed)
    for name, parameter in model.hf_named_parameters():
        if model.adapter.owns(name):
            noise = rng.normal(scale=0.2, size=parameter.shape).astype(np.float32)
            parameter.set_value(parameter.numpy() + noise)


def logits(model) -> np.ndarray:
    model.eval()
    pixels, grid = patches([[1, 4, 4]]) if model.config.image_token_id == 60 else (None, None)
    ids = token_rows([1, 2, ("image", 4), 3, 4] if pixels is not None else [1, 2, 3, 4, 5])
    return model(input_ids=ids, pixel_values=pixels, image_grid_thw=grid).logits.numpy()


@pytest.fixture(scope="module", params=[PEFT, DORA], ids=["rslora", "dora and patterns"])
def golden(request):
    """A folder of PEFT, the model with its adapter, a batch, and PEFT's results on it."""
    folder = request.param
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, base=BASE)
    model.eval()
    stored = load_file(GOLDEN / "qwen_vl" / "multi_image_right_pad" / "tensors.safetensors")
    skipped = {"in.position_ids", "in.mm_token_type_ids"}
    batch = {k[3:]: v for k, v in stored.items() if k.startswith("in.") and k not in skipped}
    return folder, model, batch, load_file(EXPECTED[folder])


def test_logits_loss_and_gradients_equal_pefts(golden):
    _, model, batch, expected = golden
    output = model(**batch)
    real = batch["attention_mask"].astype(bool)
    found = output.logits.numpy()
    # Of DoRA the logits of every 16th token are recorded.
    found = found[..., :: found.shape[-1] // expected["logits"].shape[-1]]
    np.testing.assert_allclose(found[real], expected["logits"][real], atol=3e-5)
    assert output.loss.item() == pytest.approx(expected["loss"].item(), abs=5e-6)
    output.loss.backward()
    gradients = {name[5:]: value for name, value in expected.items() if name.startswith("grad.")}
    trained = {name: p for name, p in model.hf_named_parameters() if not p.stop_gradient}
    assert trained.keys() == gradients.keys()
    for name, parameter in trained.items():
        found = parameter.grad.numpy()
        found = found.T if found.ndim == 2 else found
        error = np.abs(found - gradients[name]).max()
        assert error <= 2e-5 * np.abs(gradients[name]).max(), name
        parameter.clear_gradient(False)


def test_saved_files_are_pefts(golden, tmp_path):
    folder, model, *_ = golden
    model.save_adapter(tmp_path)
    expected = load_file(folder / "adapter_model.safetensors")
    # PEFT adds the head's own weight.
    expected.pop("base_model.model.lm_head.base_layer.weight", None)
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)
    theirs = json.loads((folder / "adapter_config.json").read_text())
    ours = json.loads((tmp_path / "adapter_config.json").read_text())
    for name in ("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "use_dora", "bias"):
        assert ours[name] == theirs[name], name
    assert ours["base_model_name_or_path"] == str(BASE.resolve())
    modules = {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in expected}
    assert set(ours["target_modules"]) == modules - {""}
    assert ours["modules_to_save"] == (["model.visual.merger"] if folder == PEFT else None)
    # In PEFT patterns may match many modules; of several the first counts.
    sizes = StoredAdapter.read(tmp_path).sizes
    assert sizes == StoredAdapter.read(folder).sizes
    if folder == DORA:
        found = {tuple(size) for size in sizes.values()}
        assert found == {(2, 5), (3, 5), (4, 5), (2, 7), (3, 7), (3, 9)}


@pytest.mark.parametrize("use_dora", [False, True])
def test_fresh_adapters_change_nothing_and_all_else_is_frozen(use_dora):
    model = tiny_model()
    before = logits(model)
    model.add_lora(config("all-linear", modules_to_save=["mergers"], use_dora=use_dora))
    # Not bit for bit: adapted projections are separate products, which may round otherwise.
    np.testing.assert_allclose(logits(model), before, rtol=0, atol=1e-6)
    for name, parameter in model.hf_named_parameters():
        if ".lora_B." in name:
            assert not parameter.numpy().any(), name
        is_adapter = ".lora_" in name or "merger" in name
        assert parameter.stop_gradient != is_adapter, name


@pytest.mark.parametrize(
    ("patterns", "excluded", "expected"),
    [
        (["q_proj"], [], {f"{LAYERS}.{i}.self_attn.q_proj" for i in range(3)}),
        (["self_attn.[qk]_proj"], ["layers.[12].*"],
         {f"{LAYERS}.0.self_attn.q_proj", f"{LAYERS}.0.self_attn.k_proj"}),
        ([f"{LAYERS}.*.mlp.down_proj"], [f"{LAYERS}.1.*"],
         {f"{LAYERS}.0.mlp.down_proj", f"{LAYERS}.2.mlp.down_proj"}),
        (["proj"], [], {f"model.visual.blocks.{i}.attn.proj" for i in range(2)}),
    ],
)  # fmt: skip
def test_patterns_fit_names_and_their_ends(patterns, excluded, expected):
    model = adapted(*patterns, exclude_modules=excluded)
    assert set(model.adapter.targets) == expected
    names = {name for name, p in model.hf_named_parameters() if not p.stop_gradient}
    assert names == {f"{name}.lora_{factor}.weight" for name in expected for factor in "AB"}


def test_all_linear_is_every_linear_but_the_head():
    model = untied_model()
    shapes = model.whole_shapes()
    model.add_lora(config("all-linear"))
    matrices = {name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2}
    others = {"lm_head", "model.language_model.embed_tokens", "model.visual.pos_embed"}
    assert set(model.adapter.targets) == matrices - others
    model.merge_lora()
    model.add_lora(config("all-linear", "lm_head"))
    assert "lm_head" in model.adapter.targets


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["q_porj"]},
         r"target_modules: the pattern 'q_porj' fits none of \d+ modules; .* \S+\.q_proj"),
        ({"target_modules": "q", "exclude_modules": ["z"]}, "target_modules: the pattern 'q'"),
        ({"target_modules": "q_proj", "exclude_modules": ["zz"]}, "exclude_modules: the pattern"),
        ({"target_modules": "q_proj", "exclude_modules": ["q_proj"]}, "leaves no linear to adapt"),
        ({"target_modules": "q_proj", "modules_to_save": ["mergres"]}, "modules_to_save: the patt"),
        ({"target_modules": "patch_embed*"}, "fits none"),
        ({"target_modules": "q_proj", "modules_to_save": ["language"]}, "leaves no linear"),
    ],
)  # fmt: skip
def test_patterns_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        tiny_model().add_lora(LoRAConfig(**settings))


def test_a_tied_head_is_neither_adapted_nor_trained_whole():
    """PEFT would change only one of the two uses of the weight."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(BASE.with_name("dense_tied"))
    with pytest.raises(ValueError, match="'lm_head' fits none"):
        model.add_lora(config("lm_head"))
    for modules in (["language"], ["embed_tokens"]):
        with pytest.raises(ValueError, match="tied to the head"):
            model.add_lora(config("qkv", modules_to_save=modules))


@pytest.mark.parametrize(
    ("saved", "keeps_ties", "own_head"),
    [
        # As PEFT 0.21.2 writes them for modules_to_save of a tied base (transformers 5.24): one
        # module alone gets a copy, and with ensure_weight_tying both are stored, equal.
        ({"embed_tokens": 1.0}, False, True),
        ({"lm_head": 2.0}, False, True),
        ({"embed_tokens": 1.0, "lm_head": 2.0}, False, True),
        ({"embed_tokens": 1.0, "lm_head": 1.0}, True, False),
    ],
    ids=str,
)
def test_merging_onto_a_tied_base_has_the_head_of_peft(tmp_path, saved, keeps_ties, own_head):
    base, folder = BASE.with_name("dense_tied"), tmp_path / "adapter"
    model = Qwen3VLForConditionalGeneration.from_pretrained(base)
    model.add_lora(config("q_proj"))
    model.save_adapter(folder)
    weights = load_file(base / "model.safetensors")
    embedding, paths = weights[EMBEDDING_KEY], {"embed_tokens": EMBEDDING_KEY, "lm_head": HEAD_KEY}
    trained = {paths[name]: embedding + value for name, value in saved.items()}
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors |= {f"base_model.model.{key}": array for key, array in trained.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    file = folder / "adapter_config.json"
    settings = {"modules_to_save": list(saved), "ensure_weight_tying": keeps_ties}
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    how = "as one" if keeps_ties else "apart"
    with pytest.raises(ValueError, match=rf"which its base ties, {how}.*: make .* paddle-vl merge"):
        Qwen3VLForConditionalGeneration.from_pretrained(folder, base=base)

    merge_adapter(Qwen3VLForConditionalGeneration, folder, tmp_path / "merged", base)
    merged = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "merged")
    assert merged.config.tie_word_embeddings != own_head
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert (HEAD_KEY in found) == own_head
    wanted = {EMBEDDING_KEY: embedding, HEAD_KEY: embedding} | trained
    for key in found.keys() & wanted.keys():
        np.testing.assert_array_equal(found[key], wanted[key], err_msg=key)


@pytest.mark.parametrize("use_dora", [False, True])
def test_merging_keeps_the_outputs(use_dora):
    settings = {"r": 3, "lora_alpha": 2, "modules_to_save": ["mergers"], "use_dora": use_dora}
    model = adapted("all-linear", **settings)
    base = logits(model)
    randomise(model)
    expected = logits(model)
    assert np.abs(expected - base).max() > 1e-2
    model.merge_lora()
    assert model.adapter is None
    assert not any("lora" in name for name, _ in model.named_parameters())
    np.testing.assert_allclose(logits(model), expected, atol=2e-5)


def test_merging_files_equals_merging_in_memory(golden, tmp_path):
    folder = golden[0]
    merge_adapter(Qwen3VLForConditionalGeneration, folder, tmp_path / "merged", BASE)
    merged = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "merged")
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, base=BASE)
    model.merge_lora()
    expected = model.hf_state_dict()
    for name, array in merged.hf_state_dict().items():
        np.testing.assert_allclose(array, expected[name], atol=1e-6, err_msg=name)


def test_merging_keeps_the_bases_dtype_and_what_has_no_adapter(tmp_path):
    base = tmp_path / "base"
    shutil.copytree(BASE, base)
    stored = read_checkpoint_headers(base)
    rounded = {key: encoded(tensor.read(), "BF16") for key, tensor in stored.items()}
    write_bfloat16(base / "model.safetensors", rounded)
    merge_adapter(Qwen3VLForConditionalGeneration, PEFT, tmp_path / "merged", base)
    adapter, tensors = StoredAdapter.read(PEFT), read_checkpoint_headers(tmp_path / "merged")
    key = f"{LAYERS}.0.self_attn.k_proj.weight"
    assert {tensor.dtype for tensor in tensors.values()} == {"BF16"}
    np.testing.assert_array_equal(encoded(tensors[key].read(), "BF16"), rounded[key])
    key = f"{LAYERS}.0.self_attn.q_proj"
    a, b = (adapter.tensors[f"{key}.lora_{factor}.weight"].read() for factor in "AB")
    whole = read_checkpoint_headers(base)[f"{key}.weight"].read() + b @ a * 5 / np.sqrt(3)
    found = tensors[f"{key}.weight"].read()
    np.testing.assert_allclose(found, whole, rtol=2**-8, atol=1e-30)


def write_bfloat16(file: Path, arrays: dict[str, np.ndarray]) -> None:
    tensors = [TensorToWrite(k, a.shape, "BF16", lambda a=a: a) for k, a in arrays.items()]
    write_file(file, tensors)


def test_bfloat16_rounds_to_even_and_keeps_what_is_not_a_number():
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -np.inf, np.nan, 1e-40], np.float32)
    widened = (encoded(values, "BF16").astype(np.uint32) << 16).view(np.float32)
    expected = np.array([1.0, 1.0, 1 + 2**-6, -np.inf, np.nan, widened[5]], np.float32)
    np.testing.assert_array_equal(widened, expected)


def test_adapters_have_the_bases_dtype_and_keep_it_on_disk(tmp_path):
    """The optimizer has the float32 master weights, as for any weight."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(BASE, dtype="bfloat16")
    model.add_lora(config("all-linear", r=2))
    assert {parameter.dtype for _, parameter in model.hf_named_parameters()} == {paddle.bfloat16}
    model.save_adapter(tmp_path)
    stored = StoredAdapter.read(tmp_path).tensors
    assert {tensor.dtype for tensor in stored.values()} == {"BF16"}
    other = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path, dtype="bfloat16", base=BASE)
    expected = model.hf_state_dict()
    for name, array in other.hf_state_dict().items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def test_what_does_not_belong_to_the_model_is_refused(tmp_path):
    model, folder = adapted("q_proj"), tmp_path / "q"
    model.save_adapter(folder)
    tiny_model(hidden_size=32).save_pretrained(tmp_path / "wide")
    merge = partial(merge_adapter, Qwen3VLForConditionalGeneration, folder, tmp_path / "out")
    for call, message in (
        (lambda: model.add_lora(config("v_proj")), "already"),
        (lambda: model.save_pretrained(tmp_path), "save_adapter"),
        (
            lambda: adapted("v_proj").load_adapter(folder),
            r"differ in .*0\.self_attn\.q_proj, .*v_pr",
        ),
        (lambda: tiny_model(hidden_size=32).load_adapter(folder), r"misshapen: .*file \[8, 16\]"),
        (
            lambda: tiny_model(num_hidden_layers=2).load_adapter(folder),
            "q_proj, which are not line",
        ),
        (lambda: tiny_model().merge_lora(), "no adapters"),
        (lambda: merge(tmp_path / "wide"), r"base: 0 .*\.q_proj\S+ \[8, 16\], not \[8, 32\]"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_base_is_found_or_asked_for(tmp_path):
    load = Qwen3VLForConditionalGeneration.from_pretrained
    adapted("q_proj").save_adapter(tmp_path / "nameless")
    with pytest.raises(RuntimeError, match=r"no base_model_name_or_path.*--base"):
        load(tmp_path / "nameless")
    base = tmp_path / "base"
    tiny_model().save_pretrained(base)
    model = load(base)
    model.add_lora(config("q_proj"))
    randomise(model)
    model.save_adapter(tmp_path / "adapter")
    np.testing.assert_array_equal(logits(load(tmp_path / "adapter")), logits(model))
    base.rename(tmp_path / "moved")
    with pytest.raises(RuntimeError, match=r"is not a model folder.*--base|--base"):
        load(tmp_path / "adapter")
    load(tmp_path / "adapter", base=tmp_path / "moved")
    with pytest.raises(ValueError, match="is a full model"):
        load(tmp_path / "moved", base=tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"use_dora": True}, r"missing: .*q_proj\.lora_magnitude_vector"),
        ({"use_qalora": True}, "use_qalora True is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"alpha_pattern": {"q_proj": -3}}, "alpha_pattern: q_proj is -3"),
        ({"rank_pattern": {"(": 3}}, "a pattern is no expression"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        # PEFT 0.21.2 takes the adapter's start out of the base for these.
        *(
            ({"init_lora_weights": start}, f"init_lora_weights is .{start}., whose start changed")
            for start in ("pissa", "pissa_niter_4", "PiSSA", "olora", "corda", "loftq", "lora_ga")
        ),
    ],
)
def test_settings_of_peft_that_mean_something_else_are_refused(tmp_path, changed, message):
    shutil.copytree(PEFT, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(ValueError, match=message):
        untied_model().load_adapter(tmp_path / "adapter")


EMBEDDING = "base_model.model.model.language_model.embed_tokens.lora_embedding_A"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: {"other.weight": np.zeros([1], np.float32)}, r"holds other\.weight"),
        (lambda a: {k: v for k, v in a.items() if "lm_head.lora_B" not in k},
         r"1 missing: lm_head\.lora_B\.weight"),
        (lambda _: {EMBEDDING: np.zeros([1, 1], np.float32)}, "of an embedding are not supported"),
    ],
)  # fmt: skip
def test_files_that_are_not_an_adapter_are_refused(tmp_path, change, message):
    shutil.copytree(PEFT, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(ValueError, match=message):
        untied_model().load_adapter(tmp_path / "adapter")
    file.unlink()
    with pytest.raises(RuntimeError, match=r"adapter_model\.safetensors"):
        untied_model().load_adapter(tmp_path / "adapter")
