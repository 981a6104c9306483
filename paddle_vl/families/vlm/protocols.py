"""What shared code asks of a family's checkpoint map and model."""

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from paddle import Tensor

    from paddle_vl.checkpoint.rules import Rule, StoredParameter
    from paddle_vl.checkpoint.safetensors_io import StoredTensor


# HF's keys of the output head and of the token embedding.
HEAD_KEY = "lm_head.weight"
EMBEDDING_KEY = "model.language_model.embed_tokens.weight"


class CheckpointMap(Protocol):
    """A family's module of checkpoint rules."""

    def checkpoint_rules(self, config: Any) -> "tuple[Rule, ...]":
        """Rules from parameter names to HF keys and layouts, special cases first."""
        ...

    def tensors_as_here(
        self, stored: "dict[str, StoredTensor]", config: Any
    ) -> "dict[str, StoredTensor]":
        """A checkpoint's tensors in the shapes of this package."""
        ...


class AdaptedModel(Protocol):
    """What adapters ask of a model, see `paddle_vl.families.vlm.pretrained.PretrainedVLModel`."""

    checkpoint_map: ClassVar[CheckpointMap]
    config: Any
    placement: Any
    lm_head: Any
    adapter: Any
    name_or_path: str | None
    generation_config: Any

    def whole(self) -> "AdaptedModel": ...
    def stored_parameters(self) -> "list[StoredParameter]": ...
    def hf_named_parameters(self) -> "Iterator[tuple[str, Tensor]]": ...
    def sublayers(self) -> list[Any]: ...
    def separate(self, weights: "Iterable[Tensor]") -> None: ...
    def materialize_too(self, steps: Any) -> None: ...
