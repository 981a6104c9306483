"""Loading, saving and adapting a model, in full or as one rank's shards and stage.

Methods import the modules for files and adapters themselves, to keep the model's imports few.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import paddle
from paddle import nn

from paddle_vl.checkpoint.reading import Materializable, MaterializeStep
from paddle_vl.checkpoint.rules import StoredParameter, place_parameters
from paddle_vl.families.hf_interface import AdaptableModel, SizedModel, loads_like_hf
from paddle_vl.families.vlm.modeling.config import HEAD_KEY, VLConfig
from paddle_vl.nn.linear import default_dtype
from paddle_vl.nn.placement import Placement, SingleDevicePlacement

if TYPE_CHECKING:
    from paddle_vl.checkpoint.safetensors_io import FileWriter, StoredTensor, TensorToWrite
    from paddle_vl.generation.config import GenerationConfig
    from paddle_vl.nn.master_weights import ParameterStore

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound="PretrainedVLModel")


class PretrainedVLModel(SizedModel, AdaptableModel, Materializable, nn.Layer):
    """Base of a model: its configuration, placement, adapters and files.

    Attributes:
        config_class: of the family.
        model_type: of its models without experts, for `VLProcessor`; None for that of a folder.
        checkpoint_map: the family's module of checkpoint rules: `checkpoint_rules(config)`, from
            parameter names to HF keys and layouts, special cases first, and
            `tensors_as_here(stored, config)`, a checkpoint's tensors in the shapes of this package.
            Tensors whose keys begin with its `KEPT`, if it has one, are no parameters: they are
            written again as they are in the file. Parameters whose keys end with one of its
            `PRECISE` stay float32 in a half-precision model if their file has float32. A family
            whose folders differ from that has `folder_of(config, tensors, layout)`, the
            configuration and the tensors that are written. One with whole numbers in its files has
            `with_constants(config, stored)`, the configuration with them, which the tensors lose,
            and `constant_keys(config)`. One that reads keys of several layouts
            has `key_here(key)`, and `adapter_key(key)`, the key in files of adapters.
        save_layout: of the folders that are written, where a family has several.
        generation_config: settings of generation; None for the defaults.
        kept: such tensors, in the files that they come from.
    """

    config_class: ClassVar[type[VLConfig]]
    model_type: ClassVar[str | None] = None
    checkpoint_map: ClassVar[Any]
    save_layout: str = "hub"
    peft_task = "CAUSAL_LM"

    def __init__(self, config: Any, placement: Placement | None = None):
        super().__init__()
        self.config = config
        self.placement: Placement = placement or SingleDevicePlacement()
        # Layers that the model sets; None on pipeline stages without them.
        self.visual: Any = None
        self.lm_head: Any = None
        if config.tie_word_embeddings:
            self.tied_embedding = config.embedding_key.removesuffix(".weight")
        self.generation_config: GenerationConfig | None = None
        self.kept: list[TensorToWrite] = []

    @classmethod
    def from_config(
        cls: type[Model],
        config: Any,
        placement: Placement | None = None,
        materialize: bool = True,
    ) -> Model:
        """A model with fresh weights, drawn from Paddle's global random state.

        A rank gets its shards of what a single device draws with the same seed.

        Args:
            materialize: draw the weights now; False leaves that to `materialize()`.
        """
        from paddle_vl.checkpoint.reading import drawn_values

        with paddle.LazyGuard():
            model = cls(config, placement)

        def drawn() -> list[MaterializeStep]:
            splits = model.placement.splits_parameters
            whole = model.whole().base_parameters() if splits else None
            return drawn_values(model.base_parameters(), whole)

        model.materialize_later(drawn)
        if materialize:
            model.materialize_all()
        return model

    @classmethod
    @loads_like_hf
    def from_pretrained(
        cls: type[Model],
        path: str | Path,
        dtype: Any = "float32",
        placement: Placement | None = None,
        base: str | Path | None = None,
        materialize: bool = True,
    ) -> Model:
        """Load a model folder in HF's layout, or adapters in PEFT's format with their base model.

        Tensors are read one at a time.

        Args:
            path: folder of the model or of the adapters.
            dtype: of the parameters; "auto" for that of the files. `PRECISE` ones stay float32.
            base: base model to use instead of the one that the adapters name.
            materialize: read the weights now; False checks keys and shapes only, and leaves reading
                to `materialize()`.

        Other arguments of HF are honoured where they mean the same, see `loads_like_hf`.

        Raises:
            ValueError: keys are missing, unexpected or misshapen, all named at once; `base` is
                given for a full model; or an argument of HF means something else.
            RuntimeError: files are missing or damaged.
        """
        from paddle_vl.checkpoint.adapter_files import base_folder, is_adapter
        from paddle_vl.checkpoint.reading import (
            check_keys,
            checkpoint_tensors,
            chosen_dtype,
            stored_values,
        )
        from paddle_vl.families.vlm.inputs.processor import generation_settings

        path = Path(path)
        if is_adapter(path):
            base = base_folder(path, base)
            model = cls.from_pretrained(base, dtype, placement, materialize=False)
            model.load_adapter(path)
            model.generation_config = generation_settings(path, base)
            if materialize:
                model.materialize_all()
            return model
        if base is not None:
            raise ValueError(f"{path} is a full model, not an adapter of {base}: leave --base out")
        config = cls.config_class.from_pretrained(path)
        generation_config = generation_settings(path)
        stored = cls.checkpoint_map.tensors_as_here(checkpoint_tensors(path), config)
        flags_agree, config = config.tie_flags_agree, config.tied_by(stored)
        if (with_constants := getattr(cls.checkpoint_map, "with_constants", None)) is not None:
            config = with_constants(config, stored)
        if not flags_agree:
            logger.info(
                "%s: the tie_word_embeddings flags disagree or one is missing; "
                "%s is %s, so the head is %s",
                path / "config.json",
                HEAD_KEY,
                "absent" if config.tie_word_embeddings else "present",
                "tied" if config.tie_word_embeddings else "not tied",
            )
        prefix = getattr(cls.checkpoint_map, "KEPT", None)
        names = [key for key in stored if prefix and key.startswith(prefix)]
        kept = {key: stored.pop(key) for key in names}
        head, embedding = stored.get(HEAD_KEY), stored.get(config.embedding_key)
        is_tied, owner = config.tie_word_embeddings, "the model of its config.json"
        if is_tied and head and embedding and not head.has_values_of(embedding):
            raise ValueError(
                f"{path / 'config.json'}: tie_word_embeddings is true, but {head.file.name} has a "
                f"{HEAD_KEY} that differs from {config.embedding_key}: set it to false to use that "
                "head, or remove the tensor"
            )
        if not is_tied and head is None:
            owner += ", whose tie_word_embeddings is false"
        endings = getattr(cls.checkpoint_map, "PRECISE", ())
        precise = {key: tensor for key, tensor in stored.items() if key.endswith(endings)}
        others = {key: tensor for key, tensor in stored.items() if key not in precise}
        dtype = chosen_dtype(dtype, others)
        is_wide = any(tensor.dtype == "F32" for tensor in precise.values())
        with default_dtype(dtype, "float32" if is_wide else dtype), paddle.LazyGuard():
            model = cls(config, placement)
        ignored = {HEAD_KEY} if is_tied else set()
        check_keys(path, stored, model.whole().stored_parameters(), ignored, owner)

        model.materialize_later(lambda: stored_values(model.base_parameters(), stored))
        if materialize:
            model.materialize_all()
        model.generation_config = generation_config
        model.name_or_path = str(path.resolve())
        if model.placement.stage_layers.embedding:
            model.kept = [tensor.copied(key) for key, tensor in kept.items()]
        return model

    def save_pretrained(
        self,
        path: str | Path,
        max_shard_bytes: int | None = None,
        write: "FileWriter | None" = None,
        store: "ParameterStore | None" = None,
    ) -> None:
        """Write weights, `config.json` and, if the model has one, `generation_config.json` in HF's
        layout. All checkpoint ranks call it together.

        Args:
            max_shard_bytes: largest size of a file; None for the default.
            write: function that writes the files of weights; None writes them directly.
            store: parameter store of a model in training, see `paddle_vl.checkpoint.writing`.

        Raises:
            ValueError: the model has adapters, which these files cannot hold.
        """
        from paddle_vl.checkpoint.safetensors_io import write_file
        from paddle_vl.checkpoint.writing import (
            DEFAULT_SHARD_BYTES,
            parameters_to_write,
            write_tensors,
        )

        if self.adapter is not None:
            raise ValueError(
                "the model has adapters: save_adapter() writes them, merge_lora() merges them into "
                "the weights first"
            )
        path = Path(path)
        max_shard_bytes, write = max_shard_bytes or DEFAULT_SHARD_BYTES, write or write_file
        ranks = self.placement.checkpoint_ranks
        path.mkdir(parents=True, exist_ok=True)
        own, config = self.stored_parameters(), self.config
        tensors = [*parameters_to_write(own, store=store), *self.kept]
        if (folder_of := getattr(self.checkpoint_map, "folder_of", None)) is not None:
            config, tensors = folder_of(config, tensors, self.save_layout)
        if ranks.is_first:
            # By this key FastDeploy tells HF's layout from Paddle's. Other families may refuse it.
            dtype = {"torch_dtype": str(own[0].parameter.dtype).removeprefix("paddle.")}
            more = dtype if "architectures" in config.to_dict() else {}
            config.save_pretrained(path, **more)
            if self.generation_config is not None:
                self.generation_config.save_pretrained(path)
        write_tensors(path, "model", tensors, max_shard_bytes, ranks, write)

    def save_adapter(
        self,
        path: str | Path,
        write: "FileWriter | None" = None,
        store: "ParameterStore | None" = None,
        others: "Iterable[TensorToWrite]" = (),
    ) -> None:
        super().save_adapter(path, write, store, others)
        if self.placement.checkpoint_ranks.is_first and self.generation_config is not None:
            self.generation_config.save_pretrained(path)

    @property
    def adapter_parts(self) -> Mapping[str, Sequence[str]]:
        from paddle_vl.families.vlm.settings import PARTS

        return PARTS

    def tensors_as_here(self, tensors: "dict[str, StoredTensor]") -> "dict[str, StoredTensor]":
        return self.checkpoint_map.tensors_as_here(tensors, self.config)

    def key_here(self, key: str) -> str:
        return getattr(self.checkpoint_map, "key_here", str)(key)

    def adapter_key(self, key: str) -> str:
        return getattr(self.checkpoint_map, "adapter_key", str)(key)

    def stored_parameters(self) -> list[StoredParameter]:
        """This rank's parameters with checkpoint keys and layouts, fused ones once per linear."""
        rules = self.checkpoint_map.checkpoint_rules(self.config)
        return place_parameters(self.named_parameters(), rules, self.placement.parameter_table)

    def hf_state_dict(self) -> dict[str, np.ndarray]:
        """All weights as arrays under their HF keys, in HF's layout."""
        from paddle_vl.checkpoint.writing import parameter_array

        return {item.key: parameter_array(item) for item in self.stored_parameters()}

    def whole(self: Model) -> Model:
        """The full model without storage; the model itself if it is not split over ranks."""
        if not self.placement.splits_parameters:
            return self
        with paddle.LazyGuard():
            return type(self)(self.config).with_adapter_of(self)
