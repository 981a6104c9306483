"""The values of a reference: of its weights, or its log-probabilities computed in advance.

A file of log-probabilities lies beside the data that it is of, with checksums of both: a run
refuses it when the data, the settings that make samples of them, or the weights are others.
"""

import hashlib
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.checkpoint.adapter_files import MAGNITUDE_KEY, is_low_rank
from paddle_vl.checkpoint.manifest import file_sum, listed_weights
from paddle_vl.checkpoint.reading import check_keys, checkpoint_tensors, stored_value
from paddle_vl.checkpoint.rules import by_parameter
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.base import BuiltModel
from paddle_vl.families.vlm.inputs.dataset import ConversationData
from paddle_vl.files.text_file import replacing
from paddle_vl.nn.transfer import on_device

logger = logging.getLogger(__name__)
COMMAND = "paddle-vl precompute-reference"


def values_in(folder: Path, model: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The value of each trained parameter of a model in a folder of full weights; of an adapter,
    which the weights there have not, zeros, and as DoRA's magnitudes the norms of these weights.

    Raises:
        ValueError: the weights do not fit the model.
    """
    stored = model.checkpoint_map.tensors_as_here(checkpoint_tensors(folder), model.config)
    trained = [
        items
        for items in by_parameter(model.stored_parameters())
        if not items[0].parameter.stop_gradient
    ]
    wanted = {item.key for items in trained for item in items if not is_low_rank(item.key)}
    shapes = [item for item in model.whole().stored_parameters() if item.key in wanted]
    extra = set(stored) - wanted
    check_keys(folder, stored, shapes, extra, "the model that it is the reference of")
    for items in trained:
        parameter, key = items[0].parameter, items[0].key
        if key.endswith(MAGNITUDE_KEY):
            # As `LowRank.norms` of the weight in the model's dtype, to the bit.
            array = stored[key.removesuffix(MAGNITUDE_KEY) + ".weight"].read()
            weight = paddle.to_tensor(array.astype(np.float32).T).astype(parameter.dtype)
            squares = weight.astype("float32").square()
            norms = items[0].from_stored(squares.sum(axis=0).sqrt().numpy())
            yield parameter, paddle.to_tensor(norms).astype(parameter.dtype)
        elif is_low_rank(key):
            yield parameter, paddle.zeros(parameter.shape, dtype=parameter.dtype)
        else:
            yield parameter, stored_value(items, stored)


def weights_checksum(folder: Path) -> str:
    """A checksum of the weights in a model folder, from its manifest or from the files."""
    sums = listed_weights(folder)
    if not sums:
        sums = {file.name: file_sum(file) for file in sorted(folder.glob("*.safetensors"))}
    text = json.dumps(
        sorted(
            (name, f"FileSum(size={each.size}, checksum={each.checksum!r})")
            for name, each in sums.items()
        )
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@paddle.no_grad()
def log_probs_of(
    data: ConversationData, built: BuiltModel, loss: Any, collator: Any, batch_size: int
) -> np.ndarray:
    """Log-probabilities of the answers of each sample, `[N, 2]`, or `[N, 1]` of rated ones; NaN of
    samples that are skipped since they are bad.

    Args:
        built: a model on one device.
        loss: a `PreferenceLoss`.
        collator: a `PreferenceCollator` whose batches are prepared.
    """
    num_answers = 2 if collator.collator.is_paired else 1
    values = np.full((len(data), num_answers), np.nan, dtype=np.float32)
    for start in range(0, len(data), batch_size):
        good: dict[int, Any] = {}
        for number in range(start, min(start + batch_size, len(data))):
            try:
                good[number] = data[number]
            except BadSampleError:
                if data.on_bad_sample == "fail":
                    raise
        if good:
            batch = on_device(collator([*good.values()]))
            found = loss.values(built.adapter.forward(built.model, batch))
            values[[*good]] = found.numpy().reshape(-1, num_answers)
        logger.info("%d of %d samples", min(start + batch_size, len(data)), len(data))
    return values


class PrecomputedReference:
    """The reference's log-probabilities of all answers of some data, in a file beside it.

    Args:
        ld_alpha: the setting, which the sums over tokens depend on.

    Attributes:
        described: what must be the same when the file is read, by its name in errors.
    """

    def __init__(self, data: ConversationData, ld_alpha: float | None):
        self.data, self._weights = data, ""
        first = data.files[0]
        self.path = first.with_name(f"{first.name}.reference.npz")
        contents = [list(each) for each in getattr(data, "contents", ())]
        self.described = {
            "the data, or the settings that make samples of it": json.dumps(
                [len(data), contents, data.length_settings()]
            ),
            "preference.ld_alpha": json.dumps(ld_alpha),
        }

    def write(self, values: np.ndarray, checksum: str) -> None:
        """Write the values of `log_probs_of`, with the `weights_checksum` of the reference."""
        content = io.BytesIO()
        described = json.dumps(self.described)
        np.savez(content, values=values, described=described, weights=checksum)
        with replacing(self.path) as partial:
            partial.write_bytes(content.getvalue())

    def read(self) -> None:
        """Give the values to the data.

        Raises:
            RuntimeError: the file is missing or damaged.
            ValueError: it is of other data or settings.
        """
        if not self.path.is_file():
            raise RuntimeError(
                f"preference.precompute_ref_log_probs is set, but {self.path} does not exist: run "
                f"{COMMAND} with this configuration first"
            )
        try:
            with np.load(self.path) as stored:
                values, described = stored["values"], json.loads(str(stored["described"]))
                self._weights = str(stored["weights"])
        # Whatever a damaged archive makes NumPy raise.
        except Exception as error:
            raise RuntimeError(f"{self.path} is damaged ({error}): run {COMMAND} again") from error
        for what, own in self.described.items():
            if described.get(what) != own:
                raise ValueError(
                    f"{what} changed since {self.path} was written: run {COMMAND} again"
                )
        self.data.reference = values

    def check_weights(self, checksum: str) -> None:
        """
        Raises:
            ValueError: the values that were read are of other weights.
        """
        if self._weights != checksum:
            raise ValueError(
                f"the reference's weights changed since {self.path} was written: run {COMMAND} "
                "again"
            )
