"""Qwen3-VL from and to files: building, loading and saving, whole or a rank's part of it."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.checkpoint.adapter_files import (
    Adapter,
    base_folder,
    is_adapter,
    is_low_rank,
)
from paddle_vl.checkpoint.reading import (
    MaterializeStep,
    check_keys,
    checkpoint_tensors,
    drawn_values,
    stored_values,
)
from paddle_vl.checkpoint.rules import StoredParameter, place_parameters
from paddle_vl.checkpoint.safetensors_io import FileWriter, StoredTensor, write_file
from paddle_vl.checkpoint.writing import DEFAULT_SHARD_BYTES, parameter_array, save_parameters
from paddle_vl.families.qwen3_vl.adapter import AdaptableModel
from paddle_vl.families.qwen3_vl.checkpoint_map import (
    EMBEDDING_KEY,
    HEAD_KEY,
    checkpoint_rules,
    with_experts_as_here,
)
from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig
from paddle_vl.generation.config import FILE_NAME, GenerationConfig
from paddle_vl.nn.linear import default_dtype, separate
from paddle_vl.nn.master_weights import ParameterStore
from paddle_vl.nn.placement import Placement

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound="PretrainedQwen3VL")


class PretrainedQwen3VL(AdaptableModel):
    """What the model inherits: its configuration, its placement, its adapters, and its files.

    Attributes:
        generation_config: how it generates unless told otherwise; None for the defaults.
    """

    def __init__(self, config: Qwen3VLConfig, placement: Placement):
        super().__init__()
        self.config, self.placement = config, placement
        self.generation_config: GenerationConfig | None = None
        self.name_or_path: str | None = None
        self.adapter: Adapter | None = None

    @classmethod
    def from_config(
        cls: type[Model],
        config: Qwen3VLConfig,
        placement: Placement | None = None,
        materialize: bool = True,
    ) -> Model:
        """A model with fresh weights, drawn from Paddle's global random state.

        A rank that holds parts gets its parts of what a single device with the same seed draws.

        Args:
            materialize: draw them now; otherwise `materialize` does.
        """
        with paddle.LazyGuard():
            model = cls(config, placement)

        def drawn() -> list[MaterializeStep]:
            splits = model.placement.splits_parameters
            whole = _of_base(model._whole()) if splits else None
            return drawn_values(_of_base(model), whole)

        model.materialize_later(drawn)
        if materialize:
            model.materialize_all()
        return model

    @classmethod
    def from_pretrained(
        cls: type[Model],
        path: str | Path,
        dtype: str = "float32",
        placement: Placement | None = None,
        base: str | Path | None = None,
        materialize: bool = True,
    ) -> Model:
        """Load a model folder in HF's layout, or adapters and the model that they belong to.

        One tensor is read at a time.

        Args:
            base: the model to load adapters beside, instead of the one that their files name.
            materialize: read the weights now; otherwise `materialize` does, and only keys and
                shapes are compared here.

        Raises:
            ValueError: keys are missing, unexpected or misshapen, all named at once; a base for a
                folder that holds a whole model.
            RuntimeError: files are missing or damaged.
        """
        path = Path(path)
        if is_adapter(path):
            model = cls.from_pretrained(
                base_folder(path, base), dtype, placement, materialize=False
            )
            model.load_adapter(path)
            if materialize:
                model.materialize_all()
            return model
        if base is not None:
            raise ValueError(f"{path} is a whole model, not an adapter of {base}: leave --base out")
        config = Qwen3VLConfig.from_pretrained(path)
        generation_config = None
        if (path / FILE_NAME).is_file():
            generation_config = GenerationConfig.from_pretrained(path)
        stored = with_experts_as_here(checkpoint_tensors(path), config)
        if not config.tie_flags_agree:
            config = config.with_tie(HEAD_KEY not in stored)
            logger.info(
                "%s: the tie_word_embeddings flags disagree or one is missing; "
                "%s is %s, so the head is %s",
                path / "config.json",
                HEAD_KEY,
                "absent" if config.tie_word_embeddings else "present",
                "tied" if config.tie_word_embeddings else "not tied",
            )
        owner = _owner(path, config, stored)
        with default_dtype(dtype), paddle.LazyGuard():
            model = cls(config, placement)
        ignored = {HEAD_KEY} if config.tie_word_embeddings else set()
        check_keys(path, stored, model._whole().stored_parameters(), ignored, owner)

        model.materialize_later(lambda: stored_values(_of_base(model), stored))
        if materialize:
            model.materialize_all()
        model.generation_config = generation_config
        model.name_or_path = str(path.resolve())
        return model

    def save_pretrained(
        self,
        path: str | Path,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        write: FileWriter = write_file,
        store: ParameterStore | None = None,
    ) -> None:
        """Write the weights under HF's key names, `config.json` (hub dialect), and
        `generation_config.json` if the model has one.

        Args:
            write: takes the files of weights.
            store: of the model in training, see `paddle_vl.checkpoint.writing`.

        Raises:
            ValueError: the model has adapters, which these files have no place for.
        """
        if self.adapter is not None:
            raise ValueError(
                "the model has adapters: save_adapter() writes them, merge_lora() makes them a "
                "part of the weights to save"
            )
        path = Path(path)
        ranks = self.placement.checkpoint_ranks
        path.mkdir(parents=True, exist_ok=True)
        if ranks.is_first:
            self.config.save_pretrained(path)
            if self.generation_config is not None:
                self.generation_config.save_pretrained(path)
        save_parameters(path, self.stored_parameters(), max_shard_bytes, ranks, write, store)

    def stored_parameters(self) -> list[StoredParameter]:
        """All that this rank stores of its parameters, with checkpoint keys and layouts.

        A parameter stands there once, a fused one once for each of its linears.
        """
        rules = checkpoint_rules(self.config)
        return place_parameters(self.named_parameters(), rules, self.placement.parameter_table)

    def hf_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of this rank under its HF key, a fused one under those of its linears."""
        return ((item.key, item.parameter) for item in self.stored_parameters())

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters of the whole model, whatever this rank has, by HF key."""
        return {item.key: item.stored_shape for item in self._whole().stored_parameters()}

    def hf_state_dict(self) -> dict[str, np.ndarray]:
        """All weights as arrays under their HF keys, in HF's layout."""
        return {item.key: parameter_array(item) for item in self.stored_parameters()}

    def separate(self, weights: Iterable[Tensor]) -> None:
        """Give the linears of some fused weights a weight each, see `paddle_vl.nn.linear`."""
        separate(self, weights, self.placement.layers.separate_projections)

    def _whole(self: Model) -> Model:
        """The model that this one is a part of, its parameters without storage; or itself."""
        if not self.placement.splits_parameters:
            return self
        with paddle.LazyGuard():
            whole = type(self)(self.config)
            if self.adapter is not None:
                whole._attach(self.adapter)
        return whole


def _of_base(model: PretrainedQwen3VL) -> list[StoredParameter]:
    """All but what adapters have added, which get their values otherwise."""
    return [item for item in model.stored_parameters() if not is_low_rank(item.key)]


def _owner(path: Path, config: Qwen3VLConfig, stored: dict[str, StoredTensor]) -> str:
    """What the weights have to fit, for messages.

    Raises:
        ValueError: there is a head of its own where the configuration says that there is none.
    """
    head, embedding = stored.get(HEAD_KEY), stored.get(EMBEDDING_KEY)
    ties = config.tie_word_embeddings
    if ties and head is not None and embedding is not None and not head.has_values_of(embedding):
        raise ValueError(
            f"{path / 'config.json'}: tie_word_embeddings is true, but {head.file.name} has a "
            f"{HEAD_KEY} that differs from {EMBEDDING_KEY}: set it to false to use that head, or "
            "take the tensor out"
        )
    if not ties and head is None:
        return "the model of its config.json, whose tie_word_embeddings is false"
    return "the model of its config.json"
