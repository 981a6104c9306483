"""The captioner as a family; see `paddle_vl.families.vlm.recipe.VLRecipe`."""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from paddle_vl.families.flops import FlopCounter, Operations
from paddle_vl.families.vlm.recipe import VLRecipe
from paddle_vl.families.vlm.settings import VLRun
from tests.support.captioner.model import Captioner, CaptionerConfig


class CaptionerRun(VLRun):
    """All settings of a captioner run, those of every vision-language run."""

    family: ClassVar[str] = "captioner"
    has_colocated: ClassVar[bool] = False


class CaptionerFlops(FlopCounter):
    """FLOPs of the decoder's linears and the head, without the tower and attention scores."""

    def __init__(self, config: CaptionerConfig, trained: Collection[str], ranks: Mapping[str, int]):
        self._operations, text = Operations(trained), config.text_config
        width, inner = text.hidden_size, text.intermediate_size
        linears = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), width)
        linears |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), inner)
        carries = True
        for i in range(text.num_hidden_layers):
            layer = self._operations.at("rows", f"model.language_model.layers.{i}")
            for name, columns in linears.items():
                carries |= layer.linear(name, width, columns, carries)
        self._operations.at("rows").linear("lm_head", width, text.vocab_size, carries)

    def units(self, batch: Mapping[str, Any]) -> dict[str, int]:
        return {"rows": int(batch["attention_mask"].sum())}

    def operations(self, batch: Mapping[str, Any]) -> Operations:
        return self._operations


class CaptionerRecipe(VLRecipe):
    """A run that trains a captioner."""

    model_class = Captioner
    counter_class = CaptionerFlops
