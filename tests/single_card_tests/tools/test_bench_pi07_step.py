"""The benchmark of pi07 measures the model that the reference was measured on.

Guarantees: parameters and lengths are those that the configuration's file gives for the reference.
"""

import json

import bench_pi07_step
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching
from paddle_vl.families.pi07.policy_model import as_tensors
from paddle_vl.families.pi07.prefix_layout import presence_of

# The expert's head, which nothing uses and this package leaves out: 8 tokens of width 128.
UNUSED_HEAD = 8 * 128


def test_model_and_lengths_are_those_of_the_reference():
    described = json.loads(bench_pi07_step.CONFIG.read_text(encoding="utf-8"))
    settings = described["config"]
    reference = described["reference_on_this_kind_of_machine"]["headline_T1_sdpa"]
    config = bench_pi07_step.build_config(settings)
    model = PI07LowLevelFlowMatching(config, bench_pi07_step.LABEL_IDS)
    parameters = sum(parameter.size for parameter in model.parameters())
    assert parameters + UNUSED_HEAD == reference["n_params"]
    batch = bench_pi07_step.build_batch(settings)
    model.eval()
    prefix = model.prefix(as_tensors(batch), presence_of(batch))
    assert prefix.embs.shape[1] == reference["prefix_len"]
    assert config.chunk_size == reference["suffix_len"]
    assert config.dropout == settings["dropout"]
