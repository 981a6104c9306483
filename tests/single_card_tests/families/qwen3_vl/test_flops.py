"""FLOPs of a Qwen3-VL, counted from its configuration, equal the matrix products of the model
exactly; of published sizes they are the published numbers."""

import pytest

from paddle_vl import Qwen3VLConfig
from paddle_vl.batch.schema import VLBatch
from paddle_vl.config.schema import LoRAConfig
from paddle_vl.families.vlm.inputs.collate import (
    PackedCollator,
    PreparedCollator,
    VLCollator,
    prepared,
)
from paddle_vl.families.vlm.modeling.flops import VLFlops
from paddle_vl.families.vlm.settings import PARTS
from paddle_vl.families.vlm.training.objective import with_unused_image
from paddle_vl.testing.qwen3_vl import EXPERTS, IMAGE, VIDEO
from paddle_vl.train.freeze import freeze_parameters, trained_names, treated_apart
from tests.single_card_tests.families.vlm.test_packed_models import sample
from tests.support.counted_products import counted_products
from tests.support.tiny import tiny_config, tiny_model

# Kernels whose products can be counted.
pytestmark = pytest.mark.usefixtures("uncompiled")

COLLATOR = VLCollator(0, IMAGE, VIDEO)
COMPLETE = PreparedCollator(COLLATOR, None)


BOTH = sample(
    [1, ("image", 2), 2, ("video", 1), 3, ("video", 1), 4, ("image", 6)],
    [[1, 2, 4], [1, 4, 6]],
    [[2, 2, 2]],
)
TEXT = sample([5, 6, 7, 8])
TEXT_AS_LONG = sample(list(range(2, 16)))
LONG_TEXT = sample(list(range(1, 60)) * 3)
VIDEO_ALONE = sample([8, ("video", 6), 9, ("video", 6), 10], [], [[2, 4, 6]])
BATCHES = {
    "images, video, text": COMPLETE([BOTH, TEXT_AS_LONG]),
    "video": COMPLETE([VIDEO_ALONE]),
    "text over several blocks of queries": COMPLETE([LONG_TEXT]),
    "packed": prepared(PackedCollator(COLLATOR)([[BOTH, TEXT], [VIDEO_ALONE, sample([1, 2, 3])]])),
}
FROZEN = {
    "nothing": [],
    "tower": ["vision"],
    "tower and mergers": ["vision", "mergers"],
    "decoder": ["language"],
    "all but the last level's merger": ["vision", "language", "*visual.merger.*", "*_list.0.*"],
    "a layer in between": ["model.language_model.layers.1.*", "model.visual.blocks.1.*"],
    "first layers": ["vision", "mergers", "*embed_tokens*", "model.language_model.layers.[01].*"],
    "all but biases": ["language", "mergers", "*.weight", "*norm*"],
    "all but the queries of a layer": [
        "vision", "mergers", "lm_head.*", "*embed_tokens*", "model.language_model.norm.*",
        "model.language_model.layers.[02].*", "*norm*", "*mlp*", "*[kvo]_proj*",
    ],
}  # fmt: skip


def counts_of(model, batch, monkeypatch) -> tuple[int, int]:
    with counted_products(monkeypatch) as counts:
        loss = model(**batch).loss
        if not loss.stop_gradient:
            loss.backward()
    model.clear_gradients()
    return counts.forward, counts.forward + counts.backward


def freeze(model, trained) -> None:
    model.separate(treated_apart(list(model.hf_named_parameters()), trained.__contains__))
    freeze_parameters(list(model.hf_named_parameters()), trained)


def frozen(model, patterns: list[str]) -> VLFlops:
    """Freeze the patterns' parameters as a run does; return the counter of that run."""
    shapes = model.whole_shapes()
    trained = trained_names(shapes, patterns, model.adapter_names(), PARTS)
    freeze(model, trained)
    adapter = model.adapter
    ranks = {} if adapter is None else dict.fromkeys(adapter.targets, adapter.config.r)
    return VLFlops(model.config, trained, ranks)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(
    "text",
    [{}, EXPERTS, {"num_attention_heads": 2, "num_key_value_heads": 2}],
    ids=["dense", "experts", "narrow heads"],
)
def test_operations_are_those_of_the_products_that_the_model_runs(text, batch, monkeypatch):
    model = tiny_model(**text)
    counter = VLFlops(model.config)
    assert (counter.forward(batch), counter(batch)) == counts_of(model, batch, monkeypatch)


@pytest.mark.parametrize("patterns", FROZEN.values(), ids=FROZEN)
@pytest.mark.parametrize("text", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("name", ["images, video, text", "text over several blocks of queries"])
def test_what_is_frozen_has_the_backward_that_its_place_asks_for(name, text, patterns, monkeypatch):
    model, batch = tiny_model(**text), BATCHES[name]
    counter = frozen(model, patterns)
    assert (counter.forward(batch), counter(batch)) == counts_of(model, batch, monkeypatch)


@pytest.mark.parametrize("targets", ["all-linear", ["*.q_proj"], ["model.visual.*.linear_fc2"]])
def test_adapters_on_a_frozen_base_have_gradients_of_inputs_alone(targets, monkeypatch):
    model, batch = tiny_model(**EXPERTS), BATCHES["images, video, text"]
    model.add_lora(LoRAConfig(r=3, target_modules=targets))
    model.materialize_all()
    counter = frozen(model, [])
    assert (counter.forward(batch), counter(batch)) == counts_of(model, batch, monkeypatch)


def test_a_tied_head_is_trained_as_the_embedding_is(monkeypatch):
    model = tiny_model()
    tied = type(model).from_config(model.config.with_tie(True))
    batch = BATCHES["images, video, text"]
    for patterns in ([], ["*embed_tokens*"]):
        counter = frozen(tied, patterns)
        assert (counter.forward(batch), counter(batch)) == counts_of(tied, batch, monkeypatch)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_no_work(side):
    counter = VLFlops(tiny_config())
    items = [dict(item, labels=item["labels"].copy()) for item in (BOTH, TEXT, LONG_TEXT)]
    for item in items:
        # In a row padded on the left, padding would predict it.
        item["labels"][0] = -100
    alone = [counter(COMPLETE([item])) for item in items]
    padded = VLCollator(0, IMAGE, VIDEO, padding_side=side, pad_to_multiple_of=64)
    assert counter(prepared(padded(items))) == sum(alone)
    if side == "right":
        rows = [items[1::-1], items[2:], []]
        assert counter(prepared(PackedCollator(padded)(rows))) == sum(alone)


def test_rows_that_no_token_takes_are_no_work():
    config = tiny_config()
    counter, batch = VLFlops(config), BATCHES["text over several blocks of queries"]
    assert counter(with_unused_image(batch, config.vision_config)) == counter(batch)


@pytest.mark.parametrize(
    ("size", "billions"),
    [("qwen3-vl-4b", 3.6), ("qwen3-vl-8b", 6.95), ("qwen3-vl-32b", 31.2)],
)
def test_a_long_text_takes_six_operations_per_weight_and_the_published_attention(size, billions):
    config = Qwen3VLConfig.named(size)
    text, length, samples = config.text_config, 32768, 4
    batch = VLBatch(lengths=(length,) * samples, num_target_tokens=samples * length)
    # PaLM, appendix B: 12 L H Q T per token for all pairs, of which half are visible.
    attention = 12 * text.num_hidden_layers * text.num_attention_heads * text.head_dim * length
    per_token = VLFlops(config)(batch) / (samples * length)
    weights = (per_token - attention * (length + 1) / length / 2) / 6
    # Qwen3's model cards state the number of parameters without table and head.
    head = text.vocab_size * text.hidden_size
    assert (weights - head) / 1e9 == pytest.approx(billions, abs=0.05)


@pytest.mark.parametrize(
    ("size", "billions"), [("qwen3-vl-30b-a3b", 3.3), ("qwen3-vl-235b-a22b", 22.2)]
)
def test_experts_count_by_what_sees_a_token(size, billions):
    config = Qwen3VLConfig.named(size)
    text = config.text_config
    batch = VLBatch(lengths=(1,), num_target_tokens=1)
    attention = 4 * text.num_hidden_layers * text.num_attention_heads * text.head_dim
    table = text.vocab_size * text.hidden_size
    active = (VLFlops(config).forward(batch) - attention) / 2 + table
    # Activated parameters of Qwen3's model cards.
    assert active / 1e9 == pytest.approx(billions, abs=0.06)
