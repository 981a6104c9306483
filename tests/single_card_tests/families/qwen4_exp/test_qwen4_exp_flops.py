"""Operations of Qwen4-Exp: those of the matrix products, of what a query attends to and scores."""

import numpy as np
import pytest

from paddle_vl import Qwen4ExpConfig
from paddle_vl.batch.schema import VLBatch
from paddle_vl.families.qwen4_exp.flops import Qwen4ExpFlops
from paddle_vl.families.vlm.training.pipeline import layer_costs
from paddle_vl.testing import tiny_qwen4_exp_config


def test_operations_are_those_of_the_matrix_products():
    """By hand, per token of a text without padding; the head and attention's pairs apart."""
    counter, batch = Qwen4ExpFlops(tiny_qwen4_exp_config()), VLBatch(lengths=(5,))
    rule = 8 * (64 * (2 * 4 + (4 + 6) // 2 + 6) + 3 * 4 * 6)
    delta = 16 * (2 * 16 + 48 + 48 + 2 * 8) + 48 * 16
    attention, indexer = 16 * (2 * 128 + 2 * 32) + 128 * 16, 16 * (2 + 1) * 8
    experts = 3 * 16 * (2 * 8 + 16) + 16 * (6 + 1)
    reader = 2 * 32 * 4
    ngrams = 16 * (32 + 16)
    operations = counter.operations(batch)
    layers, _, _ = layer_costs(counter.config)
    both = 2 * (reader + 32 * 2) + experts
    assert layers == [delta + rule + ngrams + both, attention + indexer + both, layers[0]]
    assert operations.forward["tokens"] == 2 * sum(layers)
    assert operations.forward["predictions"] == 2 * (reader + 16 * 64)
    assert (operations.forward["token_pairs"], operations.forward["block_pairs"]) == (512, 2 * 16)
    # Of two gradients each, but for the indexer, which has none, and the first input.
    of_weights = operations.forward["tokens"] - 2 * indexer
    assert operations.backward["tokens"] == 2 * of_weights
    assert operations.backward["block_pairs"] == 0


@pytest.mark.parametrize("length", [1, 5, 6, 7, 12])
def test_a_query_attends_to_what_it_chose_and_scores_where_it_chooses(length):
    """2 blocks of 2 and the unfinished one: of up to 5 tokens all, without scores."""
    counter, batch = Qwen4ExpFlops(tiny_qwen4_exp_config()), VLBatch(lengths=(length,))
    seen = np.arange(1, length + 1)
    attended = [n if n <= 5 else 4 + n % 2 for n in seen]
    scored = [n // 2 if n > 5 else 0 for n in seen]
    units = counter.units(batch)
    assert (units["token_pairs"], units["block_pairs"]) == (sum(attended), sum(scored))
    # Samples are counted one by one.
    two = counter.units(VLBatch(lengths=(length, 6)))
    assert two["block_pairs"] == sum(scored) + 3


def test_the_published_size_has_the_published_operations():
    """In millions, per token: of a reader with its writer, of n-grams, and of a whole layer."""
    config = Qwen4ExpConfig.named("qwen3.8-flash-next")
    layers, _, _ = layer_costs(config)
    readers, moe = 2 * 13.2, 98.3 + 9.8 + 2.6
    wanted = {0: 115.9 + 7.9, 1: 115.9 + 7.9 + 65.5, 3: 99.6 + 3.3}
    for layer, mixer in wanted.items():
        assert 2 * layers[layer] / 1e6 == pytest.approx(mixer + readers + moe, rel=0.002)


def test_frozen_tables_take_the_gradients_of_their_projections_inputs():
    config, batch = tiny_qwen4_exp_config(), VLBatch(lengths=(3,))
    key = "model.language_model.layers.0.ple.key_proj.weight"
    table = "model.language_model.layers.0.ple.ple_embedding.ngram_embedding.weight"
    one = Qwen4ExpFlops(config, {key}).operations(batch).backward["tokens"]
    both = Qwen4ExpFlops(config, {key, table}).operations(batch).backward["tokens"]
    # Inputs of the key's projection and of the value's.
    assert both - one == 2 * 16 * (32 + 16)
