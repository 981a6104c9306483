"""Old import paths, which work for one release.

Guarantees: a module and a class under their old path are the new ones, with a warning that names
the new path; a path that never was is still an error.
"""

import sys
from importlib import import_module

import pytest

from paddle_vl.families.pi07.prefix import GroupedProjection
from paddle_vl.families.policy import normalize
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.layers import VLSelfAttention
from paddle_vl.families.vlm.pipeline import VLStage


@pytest.mark.parametrize(
    ("path", "name", "wanted"),
    [
        ("paddle_vl.families.qwen3_vl.inputs.processor", "Qwen3VLProcessor", VLProcessor),
        ("paddle_vl.families.qwen3_vl.pipeline", "Qwen3VLStage", VLStage),
        ("paddle_vl.families.qwen3_vl.decoder", "SelfAttention", VLSelfAttention),
        ("paddle_vl.families.pi07.inputs.normalize", "Normalizer", normalize.Normalizer),
        ("paddle_vl.families.pi07.layers", "GroupedProjection", GroupedProjection),
    ],
)
def test_an_old_path_leads_to_the_new_one_with_a_warning(path, name, wanted, monkeypatch):
    monkeypatch.delitem(sys.modules, path, raising=False)
    with pytest.warns(DeprecationWarning, match=rf"{path} is now paddle_vl\.families\.\w+\."):
        module = import_module(path)
    assert getattr(module, name) is wanted


def test_a_path_that_never_was_is_an_error():
    with pytest.raises(ModuleNotFoundError):
        import_module("paddle_vl.families.qwen3_vl.nothing")
