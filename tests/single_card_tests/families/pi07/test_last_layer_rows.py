"""The rows of the prefix behind the last layer.

Guarantees: in training the last layer's attention output and MLP run for the rows that the token
loss reads and no others; losses and every gradient are those of all rows.
"""

import numpy as np
import pytest

from tests.single_card_tests.families.pi07.test_flow_matching import (
    losses_and_gradients,
    make_batch,
    make_model,
)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_last_layer_runs_for_the_rows_that_the_token_loss_reads(implementation):
    model, batch, rows = make_model(), make_batch(), []
    model.decoder.attention_implementation = implementation
    last = model.decoder.layers[-1].backbone_layer.mlp
    hook = last.register_forward_post_hook(lambda *call: rows.append(call[2].shape[0]))
    found = losses_and_gradients(model, batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "training_view", model.prefix_view)
        wanted = losses_and_gradients(model, batch)
    hook.remove()
    length = batch["lang_tokens"].shape[0] * model.config.discrete_action_max_length
    assert rows[0] == length < rows[1]
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
    assert found[1].keys() == wanted[1].keys()
    atol = 1e-6 * max(np.abs(gradient).max() for gradient in wanted[1].values())
    for name, gradient in wanted[1].items():
        np.testing.assert_allclose(found[1][name], gradient, atol=atol, err_msg=name)
