"""The families of runs without data and weights, with the run's model or a small one.

A small model has the layers and experts of the run's, and little width. Its batches consist of
*units*, which have the same shapes: half of a unit's token rows are visual for a vision-language
model, in images of equal size, and the others are targets; a unit of pi07 is a sample with the
optional parts that `data.fields` names, by default all.
"""

from dataclasses import replace
from fractions import Fraction
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl.batch.row_slices import own_indices
from paddle_vl.batch.schema import VLBatch
from paddle_vl.config.families import family_of_run
from paddle_vl.families.base import BuiltModel
from paddle_vl.families.pi07.prefix import presence_of
from paddle_vl.families.pi07.recipe import PI07Recipe
from paddle_vl.families.policy.demonstrations.sample import NO_DROPS
from paddle_vl.families.policy.tokenizers import PromptTokenizer
from paddle_vl.families.vlm.inputs.collate import VLCollator, prepared
from paddle_vl.families.vlm.recipe import VLRecipe, model_shape
from paddle_vl.families.vlm.training.objective import sliced
from paddle_vl.nn.linear import default_dtype

# Of small models: width of a vision-language decoder, inner width of an mp rank, rows of an image,
# patches along a side of a 4 x 4 patch; width of a table of n-grams, which nothing else has.
WIDTH, INNER, IMAGE_ROWS, PATCH, TABLE = 16, 8, 4, 4, 2


def sized_family(config: Any, factor: int = 0) -> Any:
    """The family of a run.

    Args:
        factor: of a small model's widths; 0 for the model of the run.

    Raises:
        ValueError: a run that is not simulated, or a model that is neither there nor published.
    """
    recipe = family_of_run(config).recipe_class()
    for base, sized in ((VLRecipe, SizedVL), (PI07Recipe, SizedPI07)):
        if issubclass(recipe, base):
            return type(recipe.__name__, (sized, recipe), {})(config, factor)
    raise ValueError(f"runs of {recipe.__name__} are not simulated")


class SizedVL(VLRecipe):
    """A run of a vision-language model.

    Attributes:
        unit_rows: token rows of a unit.
        units: of a micro-batch of the run.
        widenings: of the run's rows against the small model's, by how much wider these are with
            `factor` 3: those of the decoder, and those within the tower.
        tower_width: of the rows that leave the tower.
        looked_up: rows of a table that a rank asks for in a micro-batch of the run, if all are
            different, and their width; 0 without tables.
    """

    def __init__(self, config: Any, factor: int):
        if config.compares_answers:
            raise ValueError(
                "runs that compare answers are not simulated, since their passes of the reference "
                "are not: simulate the same run without model.preference"
            )
        self.config, self.checkpoint, data = config, None, config.data
        parallel = config.parallel
        self.pad_to_multiple_of = multiple = data.pad_to_multiple_of
        full = self.model_config = self._full()
        self._describe()
        if factor:
            self.model_config = self._small(full, factor)
        # Each lane of the encoder has equally many images.
        lanes = parallel.pp_degree * parallel.mp_degree // parallel.encoder.mp_degree
        lanes = max(lanes, 1) if parallel.schedule == "colocated" else 1
        images, text = 1, full.text_config
        if has_tables := bool(getattr(text, "table_rows", ())):
            # A rank has all rows that the next one's convolution sees.
            reach = (text.ple_conv_kernel_size - 1) * text.ngram_size
            images = -(-reach // (2 * IMAGE_ROWS))
        self.unit_rows = 2 * images * IMAGE_ROWS * parallel.mp_degree * parallel.cp_degree * lanes
        length = config.packed_length if data.packing else data.max_length
        rows = config.train.per_device_train_batch_size * -(-length // multiple) * multiple
        self.units, own = Fraction(rows, self.unit_rows), self.model_config
        parts = (full.text_config, own.text_config), (full.vision_config, own.vision_config)
        decoder, tower = (Fraction(run.hidden_size, small.hidden_size) for run, small in parts)
        self.widenings = {3: decoder, 5: tower}
        self.looked_up = (0, 0)
        if has_tables:
            self.looked_up = rows // parallel.mp_degree * text.ngram_heads, text.ngram_width
        levels = len(own.vision_config.deepstack_visual_indexes)
        self.tower_width = (1 + levels) * own.text_config.hidden_size

    def _full(self) -> Any:
        kind, model = self.model_class.config_class, self.config.model
        if isinstance(source := model.pretrained or model.config, dict):
            return kind.from_dict(source)
        path = Path(str(source))
        folder = path.parent if path.is_file() else path
        return kind.from_pretrained(folder) if path.exists() else kind.named(path.name)

    def _small(self, full: Any, factor: int) -> Any:
        mp, width = self.config.parallel.mp_degree, WIDTH * factor
        text: dict[str, Any] = {"hidden_size": width, "vocab_size": 64 * mp}
        # Where slices exchange heads, a rank gets two query heads and one key head of each kind.
        slices = self.config.parallel.cp_degree
        by_heads = self.config.parallel.cp_attention == "ulysses"
        heads, keys = (2 * slices, slices) if by_heads else (1, 1)
        text |= {"num_attention_heads": heads * mp, "num_key_value_heads": keys * mp}
        if getattr(full.text_config, "table_rows", ()):
            # Rows that ranks divide.
            parallel = self.config.parallel
            ranks = max(parallel.sharding_degree * mp, parallel.ep_degree)
            text |= {"ngram_vocab_size_base": 20, "make_ngram_vocab_size_divisible_by": ranks}
            text |= {"ple_embed_dim": TABLE * full.text_config.ngram_heads, "eos_token_id": 2}
        heads = mp * self.config.parallel.encoder.mp_degree
        inner = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
        text |= {name: INNER * mp for name in inner if getattr(full.text_config, name, 0)}
        of_tower = 4 * heads * (2 * factor - 1)
        vision = {"out_hidden_size": width, "num_heads": heads, "hidden_size": of_tower}
        vision |= {"intermediate_size": INNER * heads, "patch_size": PATCH}
        ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        return replace(
            full,
            text_config=replace(full.text_config, **text),
            vision_config=replace(full.vision_config, **vision),
            **{name: 60 + i for i, name in enumerate(ids)},
        )

    def build_model(self, placement: Any) -> BuiltModel:
        with default_dtype(self.config.model.compute_dtype):
            make = self.model_class.from_config
            model = make(self.model_config, placement, materialize=False)
        if self.config.model.lora is not None:
            model.add_lora(self.config.model.lora)
        adapter, nothing = self.adapter_class(), lambda *_: None
        return BuiltModel(model, adapter, nothing, nothing)

    def batch(self, built: BuiltModel, units: int) -> VLBatch:
        """One sample: images, then targets; for slices an image and targets in turn."""
        config, ops, rows = self.model_config, built.model.placement.ops, units * self.unit_rows
        side = 2 * config.vision_config.spatial_merge_size
        images = rows // 2 // IMAGE_ROWS
        ids = np.full([rows], config.image_token_id, np.int64)
        ids[rows // 2 :] = 1
        collate = VLCollator(
            pad_token_id=0,
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            spatial_merge_size=config.vision_config.spatial_merge_size,
            num_parts=ops.row_part.size,
            lists_real_rows=bool(model_shape(config).num_experts),
        )
        if ops.context.size > 1:
            ids = ids.reshape(2, -1, IMAGE_ROWS).swapaxes(0, 1).reshape(-1)
        labels = np.where(ids == 1, ids, -100)
        if ops.context.size > 1:
            # Every other one, so that slices have equally many.
            labels[::2] = -100
        sample = {
            "input_ids": ids,
            "labels": labels,
            "pixel_values": np.zeros([images * side**2, config.vision_config.patch_dim], "float32"),
            "image_grid_thw": np.array([[1, side, side]] * images, np.int64),
        }
        batch: Any = prepared(collate([sample]), config.vision_config)
        if (context := ops.context).size > 1:
            batch = sliced(batch, context)
        return own_indices(batch, ops.row_part, ops.expert_part)


class SizedPI07(PI07Recipe):
    """A run of pi07's policy or planner, with its tokenizers, on synthetic demonstrations.
    Attributes: see `SizedVL`; `unit_rows` are those of the last batch."""

    def __init__(self, config: Any, factor: int):
        self._factor, source = factor, config.data.processor or config.model.pretrained
        if source is None:
            raise ValueError(
                "pi07's labels take as many rows as its tokenizers say: set data.processor to "
                "their folder, or to the one that tools/make_demonstrations.py makes"
            )
        data = {"train": [], "eval": [], "synthetic_samples": 1, "dataset_mixture": None}
        data |= {"drops": NO_DROPS, "groups": {}, "statistics": None, "processor": source}
        update = {"data": config.data.model_copy(update=data)}
        super().__init__(config.model_copy(update=update), None)
        # The weights are fresh ones.
        self.folder, self.is_new = None, True
        self.units = Fraction(config.train.per_device_train_batch_size)

    def _open(self, config: Any, checkpoint: Path | None) -> None:
        super()._open(config, checkpoint)
        wide = self._text_config.hidden_size
        if self._factor:
            self.model_config = self._small()
        self.widenings = {3: Fraction(wide, self._text_config.hidden_size)}
        self.looked_up = (0, 0)
        self.tower_width = self.model_config.vlm_config.gemma3_config.vision_config.hidden_size

    @property
    def _text_config(self) -> Any:
        return self.model_config.vlm_config.gemma3_config.text_config

    def _small(self) -> Any:
        """Rows have widths in the proportions of the run's."""
        values, parallel = self.model_config.to_dict(), self.config.parallel
        vlm = values["vlm_config"]
        gemma, expert = vlm["gemma3_config"], vlm["gemma_expert_config"]
        text, vision = gemma["text_config"], gemma["vision_config"]
        part = gcd(*(each["hidden_size"] for each in (text, vision, expert)))
        mp, heads = parallel.mp_degree, parallel.encoder.mp_degree
        for each in (text, vision, expert):
            each["hidden_size"] = each["hidden_size"] // part * 2 * heads * self._factor
        for each in (text, expert):
            each |= {"num_attention_heads": mp, "num_key_value_heads": mp, "head_dim": 2}
            each |= {"intermediate_size": INNER * mp}
        highest_id = PromptTokenizer.from_pretrained(str(self.config.data.processor)).highest_id
        text["vocab_size"] = (highest_id // mp + 1) * mp
        side = vision["image_size"] // vision["patch_size"] * PATCH
        vision |= {"num_attention_heads": heads, "intermediate_size": INNER * heads}
        vision |= {"patch_size": PATCH, "image_size": side}
        values["resize_imgs_with_padding"] = [side, side]
        if "proj_width" in values:
            values["proj_width"] = expert["adarms_cond_dim"] = expert["hidden_size"]
        return type(self.model_config).from_dict(values)

    def batch(self, built: BuiltModel, units: int) -> Any:
        batch: Any = built.collator([self.train_data[0]] * units)
        self.unit_rows = built.model.tokens.length(batch, presence_of(batch))
        return batch
