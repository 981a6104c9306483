"""A training step with a small model, built as `paddle_vl.train.build` builds a run's."""

from pathlib import Path
from typing import Any

import numpy as np
from paddle import Tensor

from paddle_vl.batch.visual_index import own_indices
from paddle_vl.config.families import family_of_run
from paddle_vl.config.load import flatten
from paddle_vl.families.vlm.inputs.collate import VLCollator
from paddle_vl.families.vlm.objective import VLBatchAdapter, VLLoss
from paddle_vl.families.vlm.pipeline import layer_costs
from paddle_vl.families.vlm.recipe import VLRecipe, model_shape
from paddle_vl.families.vlm.settings import VLRun
from paddle_vl.nn.linear import default_dtype
from paddle_vl.parallel.agree import check_settings_agree
from paddle_vl.parallel.ranks import ONE_RANK, FleetRanks
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.parallel.topology import initialize
from paddle_vl.train.freeze import freeze_parameters, trained_names, treated_apart
from paddle_vl.train.layout import Layout, parallel_degrees
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.step import counted, train_step

# Width of a decoder, inner width of an mp rank, and rows of an image.
WIDTH, INNER, IMAGE_ROWS = 16, 8, 4


def family_and_model(config: VLRun) -> tuple[type[VLRecipe], Any]:
    """The family's class, and the configuration of the run's model.

    Raises:
        ValueError: a run that is not simulated, or a model that is neither there nor published.
    """
    recipe: Any = family_of_run(config).recipe_class()
    if not issubclass(recipe, VLRecipe) or config.parallel.schedule != "plain":
        raise ValueError(
            "only runs of vision-language models with parallel.schedule=plain are simulated; "
            "tools/benchmarks/topologies.py counts others on real ranks"
        )
    kind, source = recipe.model_class.config_class, config.model.pretrained or config.model.config
    if isinstance(source, dict):
        return recipe, kind.from_dict(source)
    path = Path(str(source))
    folder = path.parent if path.is_file() else path
    return recipe, kind.from_pretrained(folder) if path.exists() else kind.named(path.name)


def token_rows(config: VLRun) -> int:
    """Of a micro-batch of a data rank, padding included."""
    data = config.data
    length = config.packed_length if data.packing else data.max_length
    multiple = data.pad_to_multiple_of
    return config.train.per_device_train_batch_size * -(-length // multiple) * multiple


def small_config(full: Any, factor: int, mp: int) -> Any:
    """The model with little width: layers, heads and experts of the full one."""
    values = full.to_dict()
    text, vision, width = values["text_config"], values["vision_config"], WIDTH * factor
    text |= {"hidden_size": width, "vocab_size": 64 * mp}
    inner = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    text |= {name: INNER * mp for name in inner if name in text}
    vision |= {"out_hidden_size": width, "hidden_size": 4 * vision["num_heads"]}
    vision |= {"intermediate_size": INNER, "patch_size": 4}
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return type(full).from_dict(values | {name: 60 + number for number, name in enumerate(ids)})


class SmallStep:
    """A run whose model is small.

    Args:
        own: the small model's configuration.
        full: the run's, which decides on the split of layers.
    """

    def __init__(self, config: VLRun, recipe: type[VLRecipe], own: Any, full: Any):
        self.config, self.recipe, self.own = config, recipe, own
        parallel = config.parallel
        self.topology = topology = initialize(
            parallel_degrees(config), parallel.fleet, parallel.timeout_s
        )
        self.ranks = ONE_RANK
        if topology.world_size > 1:
            self.ranks = FleetRanks(topology)
            check_settings_agree(flatten(config.model_dump(mode="json")), topology.describe())
        multiple = config.data.pad_to_multiple_of
        self.layout = Layout(config, topology, model_shape(full), layer_costs(full), multiple)
        self.model, parameters, trained = self.built(own, "float32")
        if config.train.recompute == "full":
            recompute_layers([*self.model.vision_blocks, *self.model.decoder_layers])
        self.store = self.layout.parameter_store(self.model)
        table = self.model.placement.parameter_table
        self.optimizer = Optimizer(parameters, config.train, set(), self.store, table, trained)
        adapter = VLBatchAdapter(own.vision_config)
        self.runner = self.layout.runner(
            self.model, recipe.make_stage, self.ranks, VLLoss(), adapter
        )

    def built(self, config: Any, dtype: str) -> tuple[Any, list[tuple[str, Tensor]], set[str]]:
        """A model without storage, its trained parameters, and the names of all ranks' ones."""
        settings = self.config.model
        with default_dtype(dtype):
            make = self.recipe.model_class.from_config
            model = make(config, self.layout.placement(), materialize=False)
        if settings.lora is not None:
            model.add_lora(settings.lora)
        shapes, names = model.whole_shapes(), model.adapter_names()
        trained = trained_names(shapes, settings.freeze, names, self.recipe.parts)
        model.separate(treated_apart(list(model.hf_named_parameters()), trained.__contains__))
        named = freeze_parameters(list(model.hf_named_parameters()), trained, shapes)
        return model, named, trained

    def take(self, num_rows: int) -> int:
        """Train on micro-batches of that many rows; returns how many numbers ranks agree on."""
        number = self.config.train.gradient_accumulation_steps
        micro_batches = [counted(self.batch(num_rows), self.runner.adapter)] * number
        outcome = train_step(self.runner, self.optimizer, micro_batches, 1e-3, self.ranks)
        # And the stop signal.
        return outcome.totals.num_agreed + 1

    def batch(self, num_rows: int) -> Any:
        """One sample: images of equal size in half of the rows, then targets."""
        vision, ops = self.own.vision_config, self.model.placement.ops
        side = 2 * vision.spatial_merge_size
        images = num_rows // 2 // IMAGE_ROWS
        ids = np.full([num_rows], self.own.image_token_id, np.int64)
        ids[num_rows // 2 :] = 1
        collate = VLCollator(
            pad_token_id=0,
            image_token_id=self.own.image_token_id,
            video_token_id=self.own.video_token_id,
            spatial_merge_size=vision.spatial_merge_size,
            num_parts=ops.row_part.size,
            lists_real_rows=bool(model_shape(self.own).num_experts),
        )
        sample = {
            "input_ids": ids,
            "labels": np.where(ids == 1, ids, -100),
            "pixel_values": np.zeros([images * side**2, vision.patch_dim], np.float32),
            "image_grid_thw": np.array([[1, side, side]] * images, np.int64),
        }
        return own_indices(collate([sample]), ops.row_part, ops.expert_part)
