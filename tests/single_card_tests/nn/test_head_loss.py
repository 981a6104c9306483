"""The loss of a head in chunks, on rows with a target only, against the loss of all logits."""

from functools import partial

import numpy as np
import paddle
import pytest

from paddle_vl.batch.positions import target_rows
from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.families.vlm.inputs.collate import prepared
from paddle_vl.families.vlm.modeling.call_arguments import called_batch
from paddle_vl.families.vlm.training.objective import empty_batch
from paddle_vl.nn import head_loss, placement
from paddle_vl.nn.head_loss import TargetRows, summed_cross_entropy
from paddle_vl.nn.linear import VocabHead
from paddle_vl.nn.lora import LowRankSettings
from paddle_vl.nn.placement import SingleDevicePlacement
from paddle_vl.nn.transfer import on_device
from paddle_vl.testing import (
    assert_equals_single_device,
    emulated_bfloat16,
    first_difference,
    record_collectives,
    record_host_reads,
    run_ranks,
    tiny_qwen3_vl,
    tiny_qwen3_vl_batch,
)
from paddle_vl.testing.qwen3_vl import EXPERTS
from tests.support.tiny import tiny_model

VOCABULARY = SingleDevicePlacement().ops.vocabulary
ROWS, WIDTH, VOCAB = 29, 16, 50
BATCH = tiny_qwen3_vl_batch()


@pytest.fixture
def largest_logits(monkeypatch):
    """Elements of the largest logits that a cross entropy gets."""
    sizes = [0]
    plain = placement.F.cross_entropy

    def measured(logits, *args, **kwargs):
        sizes[0] = max(sizes[0], logits.size)
        return plain(logits, *args, **kwargs)

    monkeypatch.setattr(placement.F, "cross_entropy", measured)
    return sizes


def made_head(adapter: bool = False, dropout: float = 0.0) -> VocabHead:
    rng = np.random.default_rng(3)
    head = VocabHead(WIDTH, VOCAB)
    if adapter:
        head.add_low_rank(LowRankSettings(3, 1.5, dropout))
    for parameter in head.parameters():
        parameter.set_value(rng.normal(size=parameter.shape).astype("float32") / 4)
    return head


def made_rows():
    rng = np.random.default_rng(5)
    x_TD = paddle.to_tensor(rng.normal(size=[ROWS, WIDTH]).astype("float32"))
    x_TD.stop_gradient = False
    targets_T = rng.integers(0, VOCAB, ROWS)
    targets_T[rng.random(ROWS) < 0.4] = IGNORE_INDEX
    weights_T = rng.random(ROWS).astype("float32")
    return x_TD, targets_T, weights_T


def found_of(head, x_TD, loss) -> dict[str, np.ndarray]:
    (loss / 7).backward()
    tensors = {"x": x_TD} | dict(head.named_parameters())
    found = {
        name: tensor.grad.numpy().copy()
        for name, tensor in tensors.items()
        if tensor.grad is not None
    }
    for tensor in tensors.values():
        tensor.clear_gradient(False)
    return found | {"loss": loss.numpy()}


def by_rows(head, x_TD, targets_T, weights_T=None):
    rows_R, targets_R = map(paddle.to_tensor, target_rows(targets_T))
    weights_R = None if weights_T is None else paddle.to_tensor(weights_T)[rows_R]
    return head_loss.head_loss(head, x_TD, TargetRows(rows_R, targets_R, weights_R), VOCABULARY)


def assert_close(found, wanted, tolerance=2e-6):
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        error = np.abs(found[name] - array).max()
        assert error <= tolerance * np.abs(array).max(), name


@pytest.mark.parametrize("rows_per_chunk", [100, 7, 1])
@pytest.mark.parametrize("has_weights", [False, True], ids=["plain", "factors"])
@pytest.mark.parametrize("case", ["whole", "adapter", "frozen"])
def test_loss_and_gradients_are_those_of_all_logits(case, has_weights, rows_per_chunk, monkeypatch):
    head = made_head(adapter=case == "adapter")
    head.weight.stop_gradient = case != "whole"
    x_TD, targets_T, weights_T = made_rows()
    weights_T = weights_T if has_weights else None
    of_all = summed_cross_entropy(
        head(x_TD),
        paddle.to_tensor(targets_T),
        None if weights_T is None else paddle.to_tensor(weights_T),
    )
    wanted = found_of(head, x_TD, of_all)
    assert set(wanted) - {"x", "loss"} == {"whole": {"weight"}, "frozen": set()}.get(
        case, {"lora.A", "lora.B"}
    )
    monkeypatch.setattr(head_loss, "CHUNK_LOGITS", rows_per_chunk * VOCAB)
    assert_close(found_of(head, x_TD, by_rows(head, x_TD, targets_T, weights_T)), wanted)


def test_gradients_of_bfloat16_weights_are_summed_in_float32(monkeypatch):
    """The same row in 1,024 chunks. Summed in bfloat16, the gradient would stop growing at 256
    times that of one row."""

    def predict(rows, parameters):
        # Paddle multiplies no bfloat16 matrices on a CPU.
        x, weight = (value.astype("float32") for value in (*rows, *parameters))
        return paddle.matmul(x, weight, transpose_y=True)

    def head(x_RD, reduced):
        return reduced(predict, [x_RD], [weight])

    weight = made_head().weight.astype("bfloat16").detach()
    weight.stop_gradient = False
    x_RD = paddle.ones([1024, WIDTH], dtype="bfloat16")
    targets = TargetRows(paddle.arange(1024), paddle.zeros([1024], dtype="int64"))
    gradients = []
    for rows_per_chunk in (1024, 1):
        monkeypatch.setattr(head_loss, "CHUNK_LOGITS", rows_per_chunk * VOCAB)
        head_loss.head_loss(head, x_RD, targets, VOCABULARY).backward()
        gradients.append({"weight": weight.grad.astype("float32").numpy()})
        weight.clear_gradient(False)
    assert_close(*gradients, tolerance=2**-7)


def test_gradients_in_bfloat16_have_no_common_error(monkeypatch):
    """Each is rounded by itself; bfloat16 is emulated."""
    monkeypatch.setattr(head_loss, "CHUNK_LOGITS", 5 * VOCAB)
    found = []
    for dtype in ("float32", "bfloat16"):
        with emulated_bfloat16():
            head, (x_TD, targets_T, _) = made_head().to(dtype=dtype), made_rows()
            x_TD = x_TD.astype(dtype).detach()
            x_TD.stop_gradient = False
            (by_rows(head, x_TD, targets_T) / 7).backward()
            tensors = {"x": x_TD, "weight": head.weight}
            assert {str(t.grad.dtype) for t in tensors.values()} == {f"paddle.{dtype}"}
            found.append({n: t.grad.astype("float32").numpy() for n, t in tensors.items()})
    wide, narrow = found
    for name, array in wide.items():
        assert np.abs(narrow[name] - array).max() < 0.03 * np.abs(array).max()
        assert abs((narrow[name] * array).sum() / (array**2).sum() - 1) < 8e-4, name


def test_logits_exist_for_a_chunk_at_a_time(largest_logits, monkeypatch):
    head, (x_TD, targets_T, _) = made_head(), made_rows()
    loss = by_rows(head, x_TD, targets_T)
    assert largest_logits == [(targets_T != IGNORE_INDEX).sum() * VOCAB]
    monkeypatch.setattr(head_loss, "CHUNK_LOGITS", 5 * VOCAB)
    largest_logits[0] = 0
    for context in (paddle.enable_grad, paddle.no_grad):
        with context():
            np.testing.assert_allclose(
                by_rows(head, x_TD, targets_T).numpy(), loss.numpy(), rtol=1e-6
            )
        assert 0 < largest_logits[0] <= 5 * VOCAB


def test_dropout_is_drawn_alike_for_any_number_of_chunks(monkeypatch):
    head, (x_TD, targets_T, _) = made_head(adapter=True, dropout=0.5), made_rows()
    head.train()
    found = []
    for rows_per_chunk in (100, 3):
        monkeypatch.setattr(head_loss, "CHUNK_LOGITS", rows_per_chunk * VOCAB)
        paddle.seed(11)
        found.append(found_of(head, x_TD, by_rows(head, x_TD, targets_T)))
    assert_close(*found)
    head.eval()
    assert abs(by_rows(head, x_TD, targets_T) - float(found[0]["loss"])) > 1e-3


def test_a_batch_without_targets_has_zero_loss_and_zero_gradients():
    model = tiny_model()
    output = model(on_device(prepared(empty_batch(6))))
    output.loss.backward()
    assert output.loss.item() == 0.0
    gradients = [p.grad for p in model.language_model.parameters()] + [model.lm_head.weight.grad]
    assert all(gradient is not None and not gradient.numpy().any() for gradient in gradients)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, EXPERTS | {"output_router_logits": True}],
    ids=["dense", "tied", "experts"],
)
@pytest.mark.parametrize("has_weights", [False, True], ids=["plain", "factors"])
def test_a_model_has_the_gradients_of_its_labels(changes, has_weights, monkeypatch):
    batch = dict(BATCH)
    if has_weights:
        rng = np.random.default_rng(1)
        batch["loss_weights"] = rng.random(batch["labels"].shape).astype("float32")
    found = []
    for given in (batch, prepared(batch)):
        model = tiny_qwen3_vl(SingleDevicePlacement(), **changes)
        vocab = model.config.text_config.vocab_size
        monkeypatch.setattr(head_loss, "CHUNK_LOGITS", 4 * vocab)
        output = model(**given)
        output.loss.backward()
        assert (output.logits is None) == ("target_rows" in given)
        gradients = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
        found.append(
            gradients | {"loss": output.loss.numpy(), "n": np.array(int(output.num_target_tokens))}
        )
    assert_close(found[1], found[0], 1e-5)


def step(model):
    return model(**prepared(BATCH))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, EXPERTS], ids=["dense", "tied", "experts"]
)
def test_chunks_on_several_ranks_equal_a_single_device(changes, sequence_parallel, monkeypatch):
    vocab = tiny_qwen3_vl(SingleDevicePlacement()).config.text_config.vocab_size
    # Two rows of a rank with a quarter of the vocabulary, and one row of a single device.
    monkeypatch.setattr(head_loss, "CHUNK_LOGITS", vocab // 2)
    build = partial(tiny_qwen3_vl, **changes)
    assert_equals_single_device(build, step, 4, sequence_parallel=sequence_parallel)


def test_ranks_issue_the_same_collectives_for_the_same_rows(monkeypatch):
    """One maximum, one sum of exponentials and one target's logit per chunk, in the forward pass;
    the backward pass has none of its own."""

    def on_rank(placement):
        with record_collectives() as recording:
            step(tiny_qwen3_vl(placement)).loss.backward()
        return recording.calls

    vocab = tiny_qwen3_vl(SingleDevicePlacement()).config.text_config.vocab_size
    numbers = []
    for rows_per_chunk in (100, 4):
        monkeypatch.setattr(head_loss, "CHUNK_LOGITS", rows_per_chunk * vocab // 2)
        calls = run_ranks(on_rank, 2).results
        assert first_difference(calls) is None
        numbers.append(len(calls[0]))
    num_targets = prepared(BATCH)["target_rows"].shape[1]
    assert numbers[1] - numbers[0] == 3 * (-(-num_targets // 4) - 1) > 0


def test_the_rows_are_known_without_reading_the_device():
    model = tiny_model()
    batch = dict(BATCH)
    batch["position_ids"], _ = model.position_ids(
        *(batch[name] for name in ("input_ids", "attention_mask", "image_grid_thw")),
        batch["video_grid_thw"],
    )
    batch["has_left_padding"] = False
    there = called_batch(model.config, model.placement.ops, **prepared(batch))
    with record_host_reads() as reads:
        model(there).loss.backward()
    assert [place for place in reads if "nn/attention_masks.py" not in place] == []
