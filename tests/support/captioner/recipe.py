"""The captioner as a family; see `paddle_vl.families.base.Family`."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from paddle import Tensor

from paddle_vl.config.families import ModelShape, model_values
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.data.worker_pool import Collator
from paddle_vl.families.base import (
    BuiltModel,
    Evaluation,
    EvaluationOptions,
    Family,
    SyntheticData,
    losses_report,
)
from paddle_vl.families.flops import FlopCounter, Operations
from paddle_vl.families.qwen3_vl.inputs.tokenizer import TextTokenizer
from paddle_vl.nn.objective import BatchAdapter, Loss
from paddle_vl.nn.placement import Placement
from tests.support.captioner.inputs import (
    END,
    CaptionBatch,
    CaptionCollator,
    CaptionDataset,
    write_captions,
)
from tests.support.captioner.model import Captioner, CaptionerConfig, CaptionerStage
from tests.support.captioner.settings import PARTS, CaptionerRun


class CaptionLoss(Loss):
    """Mean cross entropy over the captions' tokens."""

    terms: Mapping[str, float] = {"caption": 1.0}
    reported_counts: Mapping[str, str] = {"caption": "caption_tokens"}

    def check_counts(self, totals: Sequence[int], num_batches: int) -> None:
        if totals[0] == 0:
            raise ValueError("the captions of this step are empty")

    def share(
        self, output: Tensor, totals: Sequence[int], num_batches: int
    ) -> tuple[Tensor, Tensor]:
        loss = output / totals[0]
        return loss, loss.detach().reshape([1])

    def sums(self, output: Tensor) -> Tensor:
        return output.reshape([1])


class CaptionBatchAdapter(BatchAdapter[CaptionBatch]):
    """Batches of `CaptionCollator`; the model has no optional branches."""

    def counts(self, batch: CaptionBatch) -> list[int]:
        return [batch["num_target_tokens"]]

    def num_samples(self, batch: CaptionBatch) -> int:
        return len(batch["input_ids"])

    def num_tokens(self, batch: CaptionBatch) -> int:
        return batch["num_target_tokens"]

    def lengths(self, batch: CaptionBatch) -> list[int]:
        return (batch["labels"] != -100).sum(axis=1).tolist()

    def idle_batch(self, model: Captioner) -> CaptionBatch:
        config = model.config
        return {
            "input_ids": np.zeros([1, 2], dtype=np.int64),
            "labels": np.full([1, 2], -100),
            "features": np.zeros([1, config.num_regions, config.num_features], dtype=np.float32),
            "num_target_tokens": 0,
        }


class CaptionerFlops(FlopCounter):
    """FLOPs of the decoder's linears and the head, without attention scores."""

    def __init__(self, config: CaptionerConfig, trained: Collection[str]):
        self._operations = Operations(trained)
        width, inner = config.hidden_size, config.intermediate_size
        carries = self._operations.trains("captioner.embed_tokens.weight")
        for i in range(config.num_hidden_layers):
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                carries |= self._operations.linear(
                    "rows", f"captioner.layers.{i}.{name}", width, width, carries
                )
            for name in ("gate_proj", "up_proj", "down_proj"):
                carries |= self._operations.linear(
                    "rows", f"captioner.layers.{i}.{name}", width, inner, carries
                )
        self._operations.linear("rows", "captioner.head", width, config.vocab_size, carries)

    def units(self, batch: Mapping[str, Any]) -> dict[str, int]:
        regions = batch["features"].shape[0] * batch["features"].shape[1]
        return {"rows": regions + batch["num_target_tokens"]}

    def operations(self, batch: Mapping[str, Any]) -> Operations:
        return self._operations


class CaptionerRecipe(Family):
    """A run that trains a captioner."""

    parts: Mapping[str, Sequence[str]] = PARTS
    make_stage = CaptionerStage
    sample_kind = "captions"

    def __init__(self, config: CaptionerRun, checkpoint: Path | None):
        self.config = config
        pretrained = config.model.pretrained
        self.folder = checkpoint or (None if pretrained is None else Path(pretrained))
        self.tokenizer = TextTokenizer.from_file(config.data.processor or pretrained)
        self.model_config = CaptionerConfig.from_dict(
            model_values(config.model.config if self.folder is None else self.folder)
        )
        self.train_data = self._dataset(config.data.train)
        self.eval_data = self._dataset(config.data.eval) if config.data.eval else None
        self.loss = CaptionLoss()
        model = self.model_config
        self.shape = ModelShape(
            model.num_attention_heads,
            model.num_key_value_heads,
            model.vocab_size,
            model.intermediate_size,
            model.num_hidden_layers,
        )
        self.costs = [1.0] * model.num_hidden_layers, 0.1, 0.5

    def build_model(self, placement: Placement) -> BuiltModel:
        dtype = self.config.model.compute_dtype
        if self.folder is None:
            model = Captioner.from_config(self.model_config, dtype, placement)
        else:
            model = Captioner.from_pretrained(self.folder, dtype, placement)
        return BuiltModel(
            model,
            CaptionBatchAdapter(),
            CaptionCollator(self.tokenizer.token_id(END)),
            model.save_pretrained,
            self.tokenizer.save,
        )

    def named_parameters(self, model: Captioner) -> list[tuple[str, Tensor]]:
        return [(item.key, item.parameter) for item in model.stored_parameters()]

    def full_shapes(self, model: Captioner) -> dict[str, tuple[int, ...]]:
        return model.whole_shapes()

    def flop_counter(self, model: Captioner, trained: Collection[str]) -> FlopCounter:
        return CaptionerFlops(model.config, trained)

    @classmethod
    def evaluation(cls, folder: Path, options: EvaluationOptions) -> Evaluation:
        options.refuse_answer_options(f"{folder} is a captioner")
        model = Captioner.from_pretrained(folder)
        model.materialize_all()
        tokenizer = TextTokenizer.from_file(folder)
        config = model.config
        shape = config.num_regions, config.num_features
        samples = CaptionDataset(options.files, tokenizer, shape)
        collator = CaptionCollator(tokenizer.token_id(END))
        loader = _every_sample_once(samples, collator, options.batch_size)
        return Evaluation(model, CaptionLoss(), CaptionBatchAdapter(), loader, losses_report)

    @classmethod
    def with_synthetic_data(cls, config: CaptionerRun, data: SyntheticData) -> CaptionerRun:
        model = CaptionerConfig.from_dict(model_values(config.model.config))
        file = data.folder / "captions.jsonl"
        write_captions(file, data.num_samples, (model.num_regions, model.num_features))
        values = config.model_dump()
        values["data"]["train"] = [str(file)]
        return type(config).model_validate(values)

    def _dataset(self, files: Sequence[str]) -> CaptionDataset:
        model = self.model_config
        shape = model.num_regions, model.num_features
        return CaptionDataset(files, self.tokenizer, shape, self.config.data.on_bad_sample)


def _every_sample_once(
    samples: CaptionDataset, collator: Collator, batch_size: int, **settings: int
) -> PrefetchLoader:
    return PrefetchLoader(
        samples, collator, batch_size, shuffle=False, drop_last=False, num_epochs=1, **settings
    )
