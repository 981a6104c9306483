"""A checkpoint that takes the place of another one of its step.

Guarantee: whenever the process ends, the next start finds the old one or the new one, complete.
"""

from pathlib import Path

import pytest

from paddle_vl.train.checkpoint import finish_replacements, remove_partial_folders
from paddle_vl.train.saving.verify import examine
from tests.single_card_tests.train.saved import save_checkpoint


@pytest.mark.parametrize("number", range(3))
def test_a_kill_while_one_is_replaced_costs_nothing(tmp_path, monkeypatch, number):
    """A process that ends at any rename of the replacement."""
    older = save_checkpoint(tmp_path, 2)
    (older / "old").write_text("x")
    plain, renamed = Path.rename, []

    def rename(path, target):
        if Path(target).parent == tmp_path:
            if len(renamed) == number:
                raise KeyboardInterrupt
            renamed.append(target)
        return plain(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(RuntimeError, match="checkpoint-2 could not be written"):
            save_checkpoint(tmp_path, 2)
    assert len(renamed) == number
    finish_replacements(tmp_path)
    remove_partial_folders(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    assert not examine(older).reasons
    assert (older / "old").exists() == (number == 0)
