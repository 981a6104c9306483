"""PaddleFleet's embedding and text layers with visual indices, on one card.

Run against stand-ins for PaddleFleet of today and of 0.3, which are in
tests/support/paddlefleet_standin, on Paddle's own `PipelineLayer` and specs: equal to the published
layers, which search the mask in every level, and to a loop over tokens. Where PaddleFleet itself
can be imported, which needs a GPU, the tests run on it as well, except those that use a mock group
or look into a stand-in."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle.distributed import ParallelEnv
from paddle.distributed.fleet.meta_parallel import build_spec_layer

from paddle_vl.batch.visual_index import RowPart, compute_visual_indices
from paddle_vl.integrations import paddlefleet as integration
from paddle_vl.integrations.paddlefleet import (
    DEEPSTACK_KEYS,
    indexed_text_layer,
    install,
    switch_on,
)
from paddle_vl.testing import record_host_reads
from tests.support import paddlefleet_cases as cases
from tests.support.paddlefleet_standin import VERSIONS, stand_in

ROOT = Path(__file__).parents[3]


ITSELF = ["PaddleFleet"] if importlib.util.find_spec("paddlefleet") else []
# Of tests of what a parent can do only if merging is a method of its own.
merges = pytest.mark.parametrize("package", ["today", *ITSELF], indirect=True)


@pytest.fixture(scope="module", autouse=True, params=[*VERSIONS, *ITSELF])
def package(request):
    if request.param in ITSELF:
        yield request.param
        return
    with stand_in(request.param), pytest.MonkeyPatch.context() as patch:
        if not paddle.is_compiled_with_cuda():
            # `PipelineLayer` asks for the number of the card.
            patch.setattr(ParallelEnv, "_device_id", 0, raising=False)
        yield request.param


@pytest.mark.skipif(not ITSELF, reason="paddlefleet cannot be imported: its wheel needs a GPU")
@pytest.mark.parametrize("package", ["PaddleFleet"], indirect=True)
def test_the_tests_of_this_file_run_on_paddlefleet_itself():
    assert not cases.is_stand_in()


@pytest.fixture
def _stand_in_only(package):
    if package == "PaddleFleet":
        pytest.skip("looks into the stand-in")


def set_group(rank: int, size: int) -> None:
    """A mock group: the forward pass of a rank needs no collective."""
    group = SimpleNamespace(rank=rank, nranks=size, world_size=size)
    importlib.import_module("paddlefleet.parallel_state").set_tensor_model_parallel_group(group)


def base_layer() -> type:
    return importlib.import_module("paddlefleet.transformer.transformer_layer").TransformerLayer


def assert_same_entries(found: dict, expected: dict) -> None:
    """Equal to the bit, besides entries that only this embedding has."""
    added = ("visual_update_indices", "visual_gather_indices")
    assert [key for key in found if key not in added] == list(expected)
    for key, value in expected.items():
        pair = [one if isinstance(one, list) else [one] for one in (found[key], value)]
        for one, other in zip(*pair, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy(), err_msg=key)
            assert one.dtype == other.dtype, key


@pytest.fixture
def _mock_group(_stand_in_only):
    """For tests that set groups."""
    yield
    importlib.import_module("paddlefleet.parallel_state").set_tensor_model_parallel_group(None)


@pytest.mark.parametrize("name", cases.BATCHES)
@pytest.mark.parametrize("recompute", [None, "full"])
def test_hidden_states_and_gradients_equal_the_literal_ones(name, recompute):
    config = cases.config(recompute_granularity=recompute)
    hidden, gradients = cases.run(cases.build(config, indexed=True), cases.batch(name))
    expected, expected_gradients = cases.literal(config, name)
    np.testing.assert_array_equal(hidden, expected)
    cases.assert_same(gradients, expected_gradients)


@pytest.mark.usefixtures("_mock_group")
@merges
@pytest.mark.parametrize("name", cases.ONE_KIND)
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_output_of_the_merge_equals_the_published_one_to_the_bit(name, depth, size):
    """The published merge with its wide masks is the reference, on every rank."""
    config = cases.config(sequence_parallel=size > 1, num_nextn_predict_layers=depth)
    for rank in range(size):
        set_group(rank, size)
        outputs = [
            cases.build(config, indexed).run_function[0](
                dict(cases.batch(name, depth == 0, num_more=depth).dict_args)
            )
            for indexed in (True, False)
        ]
        assert_same_entries(*outputs)
        hidden = outputs[0]["hidden_states"]
        assert all(
            one.is_contiguous() for one in (hidden, *outputs[0].get("deepstack_visual_emb", []))
        )


@merges
@pytest.mark.parametrize("name", ["videos", "images and videos", "one sample"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("separate", [False, True], ids=["one entry", "separate"])
def test_multi_token_prediction_sees_the_images_of_every_depth(name, depth, separate):
    config = cases.config(
        num_nextn_predict_layers=depth, separate_mtp_input=separate, specific_layer=base_layer()
    )
    runs = []
    for indexed in (True, False):
        made = cases.batch(name, has_levels=False, num_more=depth)
        model = cases.build(config, indexed)
        if not indexed and name == "images and videos":
            # The published merge fails on both kinds: a loop over tokens in its place.
            model.run_function[0]._merge_multimodal = lambda *_, made=made, model=model: (
                cases.placed(model.run_function[0], made),
                None,
                None,
            )
        runs.append(cases.run(model, made))
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    for key, gradient in runs[0][1].items():
        np.testing.assert_array_equal(gradient, runs[1][1][key], err_msg=key)
    assert np.abs(runs[0][1][next(iter(made.leaves))]).min() > 0


@pytest.mark.usefixtures("_stand_in_only")
@pytest.mark.parametrize("name", ["images", "images and videos"])
def test_a_level_that_is_not_contiguous_is_handed_on_contiguous(name, request):
    """NCCL sends the memory of an entry as it lies."""
    kept = paddle.get_flags("FLAGS_use_stride_kernel")
    paddle.set_flags({"FLAGS_use_stride_kernel": True})
    request.addfinalizer(lambda: paddle.set_flags(kept))
    made = cases.batch(name)
    for key in ("deepstack_image_embeds", "deepstack_video_embeds"):
        levels = made.dict_args[key] or []
        made.dict_args[key] = [level.T.contiguous().T for level in levels] or None
    assert not made.dict_args["deepstack_image_embeds"][0].is_contiguous()
    outputs = cases.build(cases.config(), indexed=True).run_function[0](dict(made.dict_args))
    for entry in outputs.values():
        entries = entry if isinstance(entry, list) else [entry]
        assert all(one.is_contiguous() for one in entries)


def test_images_and_videos_together_crash_in_the_published_gpt_embedding():
    """If this fails, the stand-in or PaddleFleet handles both; the page then says too much."""
    with pytest.raises(ValueError, match="ReshapeOp"):
        cases.build(cases.config(), False)(dict(cases.batch("images and videos").dict_args))


@pytest.mark.usefixtures("_mock_group")
@pytest.mark.parametrize("name", cases.BATCHES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_rows_of_every_sequence_parallel_rank_are_parts_of_the_whole(name, size):
    expected, _ = cases.literal(cases.config(), name)
    config = cases.config(sequence_parallel=True)
    parts = []
    for rank in range(size):
        set_group(rank, size)
        parts.append(cases.build(config, indexed=True)(dict(cases.batch(name).dict_args)).numpy())
    # Not bit for bit: a matrix product may round a row by its place among the rows.
    found, atol = np.concatenate(parts).transpose(1, 0, 2), 1e-6 * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


@pytest.mark.usefixtures("_mock_group")
@pytest.mark.parametrize("name", ["images and videos", "a sample without", "all in one slice"])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (3, 4)])
def test_the_embedding_adds_the_index_lists_of_the_batch_slices(name, rank, size):
    set_group(rank, size)
    embedding = cases.build(cases.config(sequence_parallel=True), indexed=True).run_function[0]
    made = cases.batch(name)
    outputs = embedding(dict(made.dict_args))
    ids = made.dict_args["input_ids"].numpy()
    expected = compute_visual_indices(
        ids == cases.IMAGE,
        ids == cases.VIDEO,
        nonzero=np.flatnonzero,
        part=RowPart(rank, size),
        layout="batch_slices",
    )
    np.testing.assert_array_equal(outputs["visual_update_indices"].numpy(), expected.update)
    np.testing.assert_array_equal(outputs["visual_gather_indices"].numpy(), expected.gather)
    np.testing.assert_array_equal(outputs["visual_pos_masks"].numpy(), ids >= cases.IMAGE)
    assert [level.shape for level in outputs["deepstack_visual_emb"]] == [
        [(ids >= cases.IMAGE).sum(), cases.WIDTH]
    ] * cases.LEVELS


@pytest.mark.parametrize(
    ("name", "searches"), [("images", 1), ("videos", 1), ("images and videos", 2), ("text", 0)]
)
def test_a_step_reads_nothing_on_the_host_and_searches_once_per_kind(name, searches, monkeypatch):
    found = []
    nonzero = paddle.nonzero
    monkeypatch.setattr(paddle, "nonzero", lambda *args: found.append(args) or nonzero(*args))
    model, made = cases.build(cases.config(), indexed=True), cases.batch(name)
    with record_host_reads() as reads:
        cases.weighted_sum(model(dict(made.dict_args))).backward()
    assert reads == []
    assert len(found) == searches


def test_levels_keep_their_places_until_the_last_is_added():
    embedding, *layers, _ = cases.build(cases.config(), indexed=True).run_function
    outputs = embedding(dict(cases.batch("images").dict_args))
    levels = outputs["deepstack_visual_emb"]
    for number, layer in enumerate(layers):
        outputs = layer(outputs)
        assert None not in outputs.values()
        if number + 1 < cases.LEVELS:
            for one, other in zip(outputs["deepstack_visual_emb"], levels, strict=True):
                np.testing.assert_array_equal(one.numpy(), other.numpy())
            # A pipeline stage has no gradient to send for a level that was added before it.
            added = [level.stop_gradient for level in outputs["deepstack_visual_emb"]]
            assert added == [True] * (number + 1) + [False] * (cases.LEVELS - number - 1)
        else:
            assert not set(DEEPSTACK_KEYS) & set(outputs)


@pytest.mark.usefixtures("_stand_in_only")
def test_head_empty_layers_do_not_shift_the_levels():
    shifted = cases.config(num_empty_layers_add_in_head=2)
    hidden = cases.build(shifted, indexed=True)(dict(cases.batch("images").dict_args))
    model = cases.build(cases.config(), indexed=True)
    for one, other in zip(model.run_function[1:5], range(4), strict=True):
        # The stand-in draws a layer's weight from its number.
        one.mlp.weight.set_value(cases.build(shifted, False).run_function[3 + other].mlp.weight)
    expected = model(dict(cases.batch("images").dict_args))
    np.testing.assert_array_equal(hidden.numpy(), expected.numpy())


def test_install_replaces_the_classes_and_nothing_else():
    spec = cases.make_spec(cases.config())
    published = [layer.layer for layer in spec.sublayers_spec.transformer_layers]
    options = [dict(layer.extra_kwargs) for layer in spec.sublayers_spec.transformer_layers]
    assert install(spec) is spec
    embedding = spec.sublayers_spec.embedding.layer
    assert embedding is integration.IndexedGPTEmbedding
    base = importlib.import_module("paddlefleet.models.gpt.gpt_embedding").GPTEmbedding
    assert issubclass(embedding, base)
    assert embedding.__init__ is base.__init__
    layers = [layer.layer for layer in spec.sublayers_spec.transformer_layers]
    assert all(map(issubclass, layers, published))
    assert {layer.__name__ for layer in layers} == {"IndexedQwen3VLTextTransformerLayer"}
    assert [layer.extra_kwargs for layer in spec.sublayers_spec.transformer_layers] == options
    install(spec)
    assert [layer.layer for layer in spec.sublayers_spec.transformer_layers] == layers


@pytest.mark.usefixtures("_stand_in_only")
def test_the_lines_of_the_page_switch_it_on(package, monkeypatch):
    page = (ROOT / "docs" / "paddlefleet.md").read_text(encoding="utf-8")
    names = ["paddlefleet.gpt_builders"]
    if package == "today":
        names.append("paddlefleet.transformers.qwen3_5.modeling_fleet")
    for module in map(importlib.import_module, names):
        monkeypatch.setattr(module, "get_gpt_spec", module.get_gpt_spec)
    exec(page.split("```python\n")[1].split("```")[0], {})
    assert switch_on() == names
    builders = importlib.import_module(names[0])
    embedding, *layers, _ = builders.gpt_builder(cases.config(), num_stages=1).run_function
    assert type(embedding).__mro__[2].__name__ == "GPTEmbedding"
    assert type(embedding).__name__ == "IndexedGPTEmbedding"
    assert {type(layer).__name__ for layer in layers} == {"IndexedQwen3VLTextTransformerLayer"}
    if package == "today":
        config = cases.config(specific_layer=base_layer(), num_nextn_predict_layers=1)
        qwen3_5 = importlib.import_module(names[1])
        model = qwen3_5.build_qwen3_5_model(config, num_stages=1)
        assert type(model.run_function[0]).__name__ == "IndexedGPTEmbedding"
        assert type(model.run_function[1]) is base_layer()


@pytest.mark.usefixtures("_stand_in_only")
def test_layers_without_a_deepstack_step_and_text_models_stay_as_they_are():
    spec = install(cases.make_spec(cases.config(specific_layer=base_layer())))
    assert {layer.layer for layer in spec.sublayers_spec.transformer_layers} == {base_layer()}
    assert spec.sublayers_spec.embedding.layer.__name__ == "IndexedGPTEmbedding"
    text = cases.config(specific_layer=base_layer(), multimodal_embedding=False)
    spec = install(cases.make_spec(text))
    assert spec.sublayers_spec.embedding.layer.__name__ == "GPTEmbedding"


@pytest.mark.usefixtures("_stand_in_only")
def test_install_refuses_layers_whose_level_is_uncertain_or_never_added():
    spec = cases.make_spec(cases.config(num_empty_layers_add_in_head=1))
    for number, layer in enumerate(spec.sublayers_spec.transformer_layers):
        layer.extra_kwargs["layer_number"] = number
    with pytest.raises(ValueError, match="layer 0 has layer_number 0, .*head=1 it should be 1"):
        install(spec)
    overlapped = type("TransformerLayerWithOverlap", (cases.text_layer(),), {})
    spec = cases.make_spec(cases.config(specific_layer=overlapped))
    with pytest.raises(ValueError, match="forward_backward_overlap_scheduler to False"):
        install(spec)
    assert spec.sublayers_spec.embedding.layer.__name__ == "GPTEmbedding"


def test_the_text_layer_can_be_chosen_by_the_configuration():
    published = cases.config().specific_layer
    config = cases.config(specific_layer=indexed_text_layer(published))
    layers = cases.make_spec(config).sublayers_spec.transformer_layers
    assert {layer.layer for layer in layers} == {indexed_text_layer(published)}
    with pytest.raises(ValueError, match="without visual_update_indices.*install"):
        build_spec_layer(cases.make_spec(config), num_stages=1)(
            dict(cases.batch("images").dict_args)
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_embeds": [4, 64]}, r"has 4 rows but .* \[5, 5, 5\]"),
        ({"image_embeds": [4, 64], "deepstack_image_embeds": None}, "5 image .* but 4 image"),
        ({"deepstack_image_embeds": [[5, 64], [3, 64]]}, r"5 rows but .* \[5, 3\]"),
        ({"image_embeds": None}, "deepstack_image_embeds has 3 levels but image_embeds is missing"),
        ({"input_ids": None}, "image_embeds without input_ids"),
        ({"video_embeds": [1, 64]}, "images have 3 deepstack levels and videos 0"),
        (
            {"video_embeds": [1, 64], "deepstack_video_embeds": [[1, 64]] * 3},
            "0 video placeholder tokens in input_ids but 1 video",
        ),
    ],
)
def test_embeddings_that_do_not_fit_are_refused(change, message):
    def tensors(shape):
        if not isinstance(shape, list):
            return shape
        return paddle.zeros(shape) if isinstance(shape[0], int) else [*map(paddle.zeros, shape)]

    dict_args = cases.batch("images").dict_args | {k: tensors(v) for k, v in change.items()}
    with pytest.raises(ValueError, match=message):
        cases.build(cases.config(), indexed=True)(dict_args)


@pytest.mark.usefixtures("_mock_group")
def test_settings_that_do_not_fit_are_refused():
    made = cases.batch("images")
    model = cases.build(cases.config(), indexed=True)
    model.run_function[0].config.multimodal_embedding = False
    with pytest.raises(ValueError, match="image_embeds with multimodal_embedding=False"):
        model(dict(made.dict_args))
    set_group(1, 2)
    short = {"input_ids": made.dict_args["input_ids"][:, 1:]}
    with pytest.raises((ValueError, AssertionError), match="divide"):
        cases.build(cases.config(sequence_parallel=True), True)(dict(made.dict_args) | short)


@pytest.mark.usefixtures("_stand_in_only")
@pytest.mark.parametrize("by_key", [False, True], ids=["argument", "key"])
def test_a_given_decoder_input_does_what_it_does_in_the_parent(by_key):
    """Whoever gives rows has the images in them, as Qwen3.5 of PaddleFormers 1.2.0."""
    rows, outputs = paddle.ones([2, 8, cases.WIDTH]), []
    for indexed in (False, True):
        dict_args = dict(cases.batch("images").dict_args)
        if by_key:
            dict_args |= {"decoder_input": rows, "input_ids": None}
        embedding = cases.build(cases.config(), indexed).run_function[0]
        outputs.append(embedding(dict_args, *([] if by_key else [rows])))
    assert_same_entries(*outputs)
    assert (outputs[1]["hidden_states"] == 1).all()


def test_without_paddlefleet_the_classes_name_the_remedy(monkeypatch):
    """The module itself was imported at the top of this file, without any `paddlefleet`."""
    monkeypatch.setitem(sys.modules, "paddlefleet.models.gpt.gpt_embedding", None)
    with pytest.raises(ImportError, match="needs PaddleFleet, .*install the paddlefleet wheel"):
        integration.IndexedGPTEmbedding  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'Indexed'"):
        integration.Indexed  # noqa: B018
