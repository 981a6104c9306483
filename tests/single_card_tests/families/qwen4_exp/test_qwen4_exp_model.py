"""Qwen4-Exp as a model, and as a run that is simulated."""

from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.testing import record_host_reads, tiny_qwen4_exp
from scale.families import sized_family
from simulate_scale import load

CONFIGS = Path(__file__).parents[4] / "configs"


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_the_padding_of_a_batch_is_read_once_for_all_layers(is_recomputed):
    kinds = [f"{kind}_attention" for kind in ("linear", "full", "full")]
    model = tiny_qwen4_exp(layer_types=kinds, ple_layer_ids=[1])
    if is_recomputed:
        recompute_layers(model.language_model.layers)
    mask_BL = np.arange(12) >= np.array([[0], [3]])
    ids_BL = paddle.to_tensor(np.where(mask_BL, np.arange(10, 22), 0))
    with record_host_reads() as reads:
        output = model(ids_BL, paddle.to_tensor(mask_BL.astype(np.int64)), labels=ids_BL)
        output.loss.backward()
    assert len([place for place in reads if "block_samples.py" in place]) == 1


def test_a_run_is_simulated_of_the_size_that_its_missing_folder_is_called():
    config = load(str(CONFIGS / "qwen4_exp" / "lora_8_gpus.yaml"), [])
    family = sized_family(config, 1)
    text = family.model_config.text_config
    assert (text.num_hidden_layers, text.hc_count, text.hidden_size) == (48, 4, 16)
    assert family.widenings[3] == 2560 // 16
    of_pages = load(str(CONFIGS / "paddleocr_vl" / "one_node_8_gpus.yaml"), [])
    assert sized_family(of_pages, 1).widenings[3] == 1024 // 16
