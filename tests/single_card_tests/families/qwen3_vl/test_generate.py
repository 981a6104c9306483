"""Generation with a key-value cache."""

import json
from functools import partial

import numpy as np
import paddle
import pytest

from paddle_vl import GenerationConfig, Qwen3VLForConditionalGeneration
from paddle_vl.nn.placement import SingleDevicePlacement, StageLayers
from paddle_vl.testing.qwen3_5 import tiny_qwen3_5
from paddle_vl.testing.qwen3_vl import EXPERTS, IMAGE, patches, token_rows
from tests.single_card_tests.families.qwen3_vl.chat_builders import tiny_processor
from tests.support.tiny import tiny_config, tiny_model

GRIDS = [[1, 4, 4], [1, 2, 4]]


def padded_rows() -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Two prompts with an image each: alone, and as a left-padded batch with its mask."""
    rows = [token_rows([1, 9, ("image", 4), 2, 5, 7]), token_rows([4, ("image", 2), 6])]
    length = rows[0].shape[1]
    ids, mask = np.zeros((2, length), np.int64), np.zeros((2, length), np.int64)
    for b, row in enumerate(rows):
        ids[b, length - row.shape[1] :], mask[b, length - row.shape[1] :] = row, 1
    return rows, ids, mask


def greedy_without_cache(model, ids, pixels, grid, steps):
    for _ in range(steps):
        with paddle.no_grad():
            logits = model(input_ids=ids, pixel_values=pixels, image_grid_thw=grid).logits
        ids = np.concatenate([ids, logits[:, -1].argmax(axis=-1).numpy()[:, None]], axis=1)
    return ids[:, -steps:]


def test_cached_decoding_equals_a_full_forward_each_step():
    model, (pixels, grid) = tiny_model(), patches(GRIDS)
    ids = token_rows([1, ("image", 4), 2, ("image", 2), 3])
    found = model.generate(
        input_ids=ids, pixel_values=pixels, image_grid_thw=grid, max_new_tokens=6
    )
    assert found.tolist() == greedy_without_cache(model, ids, pixels, grid, 6).tolist()


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "seed": 3}])
def test_a_left_padded_row_answers_as_it_does_alone(settings):
    model, (pixels, grid) = tiny_model(), patches(GRIDS)
    rows, ids, mask = padded_rows()
    settings |= {"max_new_tokens": 5, "repetition_penalty": 1.5}
    together = model.generate(
        input_ids=ids, attention_mask=mask, pixel_values=pixels, image_grid_thw=grid, **settings
    )
    pixel_parts = (pixels[:16], pixels[16:])
    for b, row in enumerate(rows):
        # A row's draws depend on its number, so the second row must be the second here too.
        alone = model.generate(
            input_ids=np.repeat(row, 2, axis=0),
            pixel_values=np.concatenate([pixel_parts[b]] * 2),
            image_grid_thw=np.repeat(grid[b : b + 1], 2, axis=0),
            **settings,
        )
        assert together[b].tolist() == alone[b].tolist()


def test_a_long_answer_takes_its_rotary_tables_in_parts(monkeypatch):
    model, ids = tiny_model(), token_rows([1, 2, 3], [7, 8, 9])
    wanted = model.generate(input_ids=ids, max_new_tokens=9).tolist()
    monkeypatch.setattr("paddle_vl.families.vlm.answering.generate._CachedDecoder.TABLE_STEPS", 3)
    assert model.generate(input_ids=ids, max_new_tokens=9).tolist() == wanted


def test_rows_end_at_any_stop_token_and_are_filled_with_the_pad_token():
    model, ids = tiny_model(), token_rows([1, 2, 3], [7, 8, 9])
    free = model.generate(input_ids=ids, max_new_tokens=6)
    # Both rows end early, each at its own token.
    stops = [int(free[0, 1]), int(free[1, 3])]
    ends = [min(i for i, token in enumerate(row) if token in stops) for row in free.tolist()]
    found = model.generate(
        input_ids=ids, max_new_tokens=6, eos_token_id=[50, *stops], pad_token_id=33
    )
    assert found.shape[1] == max(ends) + 1 < 6
    for row, wanted, end in zip(found, free, ends, strict=True):
        assert row[: end + 1].tolist() == wanted[: end + 1].tolist()
        assert set(row[end + 1 :].tolist()) <= {33}
    unpadded = model.generate(input_ids=ids, max_new_tokens=6, eos_token_id=[50, *stops])
    assert set(unpadded[found == 33].tolist()) <= {50}
    held = model.generate(input_ids=ids, max_new_tokens=6, eos_token_id=stops, min_new_tokens=6)
    assert held.shape[1] == 6
    assert not np.isin(held, stops).any()


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("build", [tiny_model, partial(tiny_model, **EXPERTS), tiny_qwen3_5])
def test_kept_caches_give_the_scores_of_whole_prompts(build, chunk):
    model, (pixels, grid), kept, rows = build(), patches([*GRIDS, GRIDS[0]]), [], []
    for layer in (model.decoder_layers[0], model.visual):
        layer.register_forward_pre_hook(lambda _, x: rows.append(x[0].shape[0]))

    def check(parts, patches_of, grids, num_rows):
        ids, found = np.concatenate(parts, axis=1), []
        given = {"pixel_values": pixels[patches_of], "image_grid_thw": grid[grids]}
        given |= {"max_new_tokens": 3, "prefill_chunk_size": chunk}
        rows.clear()
        tokens = model.generate(ids, on_logits=found.append, kept=kept, **given)
        # Two of the answer's tokens run; the last is in no cache.
        assert sum(rows) == num_rows + 2
        model.generate(ids, on_logits=found.append, **given)
        # Logits up to 2: a state that is passed on adds its sums in another order than a whole one.
        atol = 1e-6 if build is not tiny_qwen3_5 else 2e-6
        np.testing.assert_allclose(found[:3], found[3:], rtol=1e-4, atol=atol)
        return np.concatenate([ids, tokens], axis=1)

    ask, more, word = token_rows([1, ("image", 4), 2]), token_rows([5, ("image", 2), 3]), [[7]]
    length, (one, two, other) = ask.shape[1], (slice(16), slice(24), slice(24, 40))
    said = check([ask], one, slice(1), length + 16)
    said = check([said, more], two, slice(2), 1 + more.shape[1] + 8)
    check([said, word], two, slice(2), 2)
    # Nothing is new; an image is another; the beginning differs.
    said = check([ask], one, slice(1), length + 16)
    said = check([said, word], other, slice(2, 3), length + 4 + 16)
    check([word, said], other, slice(2, 3), length + 8 + 16)
    # An answer that is broken off leaves nothing.
    next(model.stream(ask, None, pixels[one], grid[:1], kept=kept))
    assert kept == []


def test_kept_caches_are_not_for_padded_prompts():
    model, kept, found = tiny_model(), [], []
    prompt, mask = np.array([[0, 0, 5, 6], [3, 4, 5, 6]]), np.array([[0, 0, 1, 1], [1, 1, 1, 1]])
    tokens = model.generate(prompt, mask, max_new_tokens=3, kept=kept)
    prompt = np.concatenate([prompt, tokens, [[7], [8]]], axis=1)
    mask = np.concatenate([mask, np.ones((2, 4), dtype=mask.dtype)], axis=1)
    for caches in (kept, None):
        model.generate(prompt, mask, max_new_tokens=3, on_logits=found.append, kept=caches)
    np.testing.assert_allclose(found[:3], found[3:], rtol=1e-4, atol=1e-6)


def test_a_step_reads_the_chosen_ids_only(monkeypatch):
    model, reads, plain = tiny_model(), [], paddle.Tensor.numpy

    def counted(self, *arguments):
        reads.append(list(self.shape))
        return plain(self, *arguments)

    def refuse(*_):
        raise AssertionError("host read")

    steps = model.stream(
        input_ids=token_rows([1, 2, 3], [4, 5, 6]), max_new_tokens=4, do_sample=True, top_p=0.9,
        repetition_penalty=1.2, min_new_tokens=2, eos_token_id=[50],
    )  # fmt: skip
    next(steps)
    monkeypatch.setattr(paddle.Tensor, "numpy", counted)
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(paddle.Tensor, name, refuse)
    # Its size is known only after a read.
    monkeypatch.setattr(paddle, "nonzero", refuse)
    next(steps)
    assert reads == [[2]]


def test_a_seed_fixes_what_is_drawn_and_rows_draw_for_themselves():
    model, settings = tiny_model(), {"max_new_tokens": 8, "do_sample": True, "temperature": 2.0}
    ids = token_rows([1, 2, 3], [1, 2, 3], [7, 8, 9])
    found = model.generate(input_ids=ids, seed=5, **settings)
    paddle.seed(123)
    assert model.generate(input_ids=ids, seed=5, **settings).tolist() == found.tolist()
    assert model.generate(input_ids=ids[:2], seed=5, **settings).tolist() == found[:2].tolist()
    assert found[0].tolist() != found[1].tolist()
    others = [model.generate(input_ids=ids, seed=seed, **settings) for seed in (6, None, None)]
    assert len({str(tokens.tolist()) for tokens in [found, *others]}) == 4


def test_padding_is_no_token_to_repeat():
    model, row = tiny_model(), token_rows([1, 2, 3])
    first = int(model.generate(input_ids=row, max_new_tokens=1)[0, 0])
    padded = np.concatenate([np.full((1, 2), first), row], axis=1)
    settings = {"max_new_tokens": 1, "repetition_penalty": 1e9}
    mask = np.array([[0, 0, 1, 1, 1]])
    assert model.generate(padded, mask, **settings).tolist() == [[first]]
    assert model.generate(padded, **settings).tolist() != [[first]]


def test_a_chosen_placeholder_is_an_ordinary_token(monkeypatch):
    model, ids = tiny_model(), token_rows([1, 2])
    with paddle.no_grad():
        model.lm_head.weight.set_value(paddle.zeros_like(model.lm_head.weight))
    held = {"eos_token_id": [i for i in range(64) if i != IMAGE], "min_new_tokens": 3}
    assert model.generate(input_ids=ids, max_new_tokens=3, **held).tolist() == [[IMAGE] * 3]


def test_settings_of_the_call_come_before_the_given_ones_and_those_before_the_models():
    model, ids = tiny_model(), token_rows([1, 2])
    assert model.generate(input_ids=ids).shape == (1, 128)
    model.generation_config = GenerationConfig(max_new_tokens=4)
    given = GenerationConfig(max_new_tokens=3)
    assert model.generate(input_ids=ids).shape == (1, 4)
    assert model.generate(input_ids=ids, generation_config=given).shape == (1, 3)
    assert model.generate(ids, generation_config=given, max_new_tokens=2).shape == (1, 2)


def test_answers_end_where_the_folders_processor_says_if_no_settings_do(tmp_path):
    processor, (pixels, grid) = tiny_processor(), patches(GRIDS[:1])
    # Its greedy answer has <|endoftext|> as eighth token.
    model = tiny_model(vocab_size=320)
    batch = {"input_ids": token_rows([1, ("image", 4), 5, 6, 7, 8, 9]), "pixel_values": pixels}
    batch |= {"image_grid_thw": grid, "max_new_tokens": 20}
    assert model.generate(**batch).shape == (1, 20)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path)
    found = loaded.generate(**batch)
    assert found.shape == (1, 8)
    assert found[0, -1] == processor.pad_token_id
    # Settings without end tokens get them, and they are saved with the model.
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.0, "top_k": 7}')
    loaded = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.generate(**batch).shape == (1, 8)
    loaded.save_pretrained(tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "generation_config.json").read_text()) == {
        "top_k": 7, "eos_token_id": processor.eos_token_ids,
        "pad_token_id": processor.pad_token_id,
    }  # fmt: skip


def test_logits_of_the_last_columns_are_those_of_all():
    model, ids = tiny_model(), token_rows([1, 2, 3], [7, 8, 9])
    with paddle.no_grad():
        whole, last = model(input_ids=ids).logits, model(input_ids=ids, logits_to_keep=2).logits
    np.testing.assert_allclose(last.numpy(), whole[:, 1:].numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="logits_to_keep is 2 but labels are given"):
        model(input_ids=ids, labels=ids, logits_to_keep=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"do_sample": True, "temperature": 0.0}, "temperature is 0.0"),
        ({"eos_token_id": [3, 64]}, "eos_token_id 64 lies outside the model's vocabulary of 64"),
        ({"pad_token_id": 99}, "pad_token_id 99 lies outside"),
        ({"prefill_chunk_size": 0}, "prefill_chunk_size is 0; it must be at least 1"),
        ({"temprature": 1.0}, "temprature is not a generation setting; did you mean temperature"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(settings, message):
    model = tiny_model()
    model.decoder_layers[0].register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=message):
        model.stream(input_ids=token_rows([1]), **settings)


def test_a_prompt_padded_on_the_right_is_refused():
    mask = np.array([[1, 1], [1, 0]])
    with pytest.raises(ValueError, match=r"prompts \[1\] are padded on the right.*left"):
        tiny_model().stream(input_ids=token_rows([1, 2], [3]), attention_mask=mask)


def test_a_part_of_a_model_does_not_generate():
    placement = SingleDevicePlacement(StageLayers(layers=frozenset({0, 1}), head=False))
    model = Qwen3VLForConditionalGeneration(tiny_config(), placement)
    with pytest.raises(ValueError, match="split over ranks.*single process"):
        model.generate(input_ids=token_rows([1]))
