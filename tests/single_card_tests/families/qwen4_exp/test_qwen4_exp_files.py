"""Checkpoints of Qwen4-Exp: tables of n-grams in parts, and the whole numbers of their hashes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paddle_vl import LoRAConfig, Qwen4ExpForConditionalGeneration
from paddle_vl.checkpoint import reading
from paddle_vl.checkpoint.safetensors_io import StoredTensor, read_checkpoint_headers
from paddle_vl.families.vlm.training.adapter import merge_adapter
from paddle_vl.nn.linear import default_dtype
from paddle_vl.testing import tiny_qwen4_exp, tiny_qwen4_exp_config
from tests.support.tiny import GOLDEN

MODELS = GOLDEN / "qwen4_exp" / "models"
NGRAMS = "model.language_model.layers.2.ple.ple_embedding."
TABLE = f"{NGRAMS}ngram_embedding."
Arrays = dict[str, np.ndarray]
load = Qwen4ExpForConditionalGeneration.from_pretrained


def arrays_in(folder: Path) -> Arrays:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def assert_same_arrays(found: Arrays, wanted: Arrays) -> None:
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        assert found[key].dtype == array.dtype, key
        np.testing.assert_array_equal(found[key], array, err_msg=key)


def part(number: int) -> str:
    return f"{TABLE}shard_{number}.weight"


def joined(arrays: Arrays) -> np.ndarray:
    """The table of 192 rows, without its parts in the arrays."""
    return np.concatenate([arrays.pop(part(number)) for number in range(3)])


@pytest.fixture
def changed(tmp_path) -> Callable[..., Path]:
    """The folder of a small model, its tensors changed."""
    folder = Path(shutil.copytree(MODELS / "ple", tmp_path / "changed"))

    def change(edit: Callable[[Arrays], object]) -> Path:
        arrays = load_file(folder / "model.safetensors")
        edit(arrays)
        save_file(arrays, folder / "model.safetensors")
        return folder

    return change


@pytest.mark.parametrize("max_shard_bytes", [16_000_000, 100_000], ids=["single", "sharded"])
@pytest.mark.parametrize("kind", ["full", "sparse", "ple", "ple_saved"])
def test_saving_gives_the_tensors_of_the_hubs_files(kind, max_shard_bytes, tmp_path):
    """With `mtp.` tensors where there are some, and from what transformers saves too."""
    load(MODELS / kind).save_pretrained(tmp_path, max_shard_bytes=max_shard_bytes)
    wanted = load_file(MODELS / kind.removesuffix("_saved") / "model.safetensors")
    assert_same_arrays(arrays_in(tmp_path), wanted)


def split(count: int) -> Callable[[Arrays], None]:
    def edit(arrays: Arrays) -> None:
        pieces = np.array_split(joined(arrays), count)
        arrays.update({part(number): piece for number, piece in enumerate(pieces)})

    return edit


def as_one(arrays: Arrays) -> None:
    arrays[f"{TABLE}weight"] = joined(arrays)


def with_unused(arrays: Arrays) -> None:
    key = "model.language_model.hyper_connection_mixer.block_inject_weight.weight"
    arrays[key] = np.ones([3, 72], np.float32)


def without_constants(arrays: Arrays) -> None:
    for key in [key for key in arrays if key.startswith(NGRAMS) and not key.startswith(TABLE)]:
        del arrays[key]


@pytest.mark.parametrize(
    "edit", [split(1), split(7), split(12), as_one, with_unused, without_constants]
)
def test_a_table_is_read_in_any_number_of_parts_and_what_no_one_uses_is_left_out(
    edit, changed, tmp_path
):
    """Of 12 parts in the order of their numbers, in which 2 comes before 10."""
    load(changed(edit)).save_pretrained(tmp_path / "saved")
    assert_same_arrays(arrays_in(tmp_path / "saved"), load_file(MODELS / "ple/model.safetensors"))


def test_a_large_table_is_read_a_part_after_the_other(monkeypatch):
    """So that beside the parameter only a part of it is in memory."""
    wanted, read = load(MODELS / "ple").hf_state_dict(), StoredTensor.read
    counts = []

    def recorded(tensor: StoredTensor, **options) -> np.ndarray:
        counts.append((tensor.name, read(tensor, **options).size))
        return read(tensor, **options)

    monkeypatch.setattr(reading, "PART_VALUES", 100)
    monkeypatch.setattr(StoredTensor, "read", recorded)
    found = load(MODELS / "ple").hf_state_dict()
    assert_same_arrays(found, wanted)
    of_table = [count for name, count in counts if name.startswith(TABLE)]
    # 16 rows of 6 at once; parts of the file end after 64.
    assert (len(of_table), max(of_table), sum(of_table)) == (12, 96, 192 * 6)


@pytest.mark.parametrize(
    ("parts", "rows"), [(4, [44] * 4), (3, [59, 59, 58]), (150, [2] * 88), (1, [176])]
)
def test_tables_are_written_in_equal_parts(parts, rows, tmp_path):
    """Fewer than asked for where each but the last must be as long as the first."""
    text = {"ple_layer_ids": [1], "heads_per_ngram": 2, "ngram_vocab_size_base": 35}
    model = tiny_qwen4_exp(split_ngram_parts=parts, **text)
    model.save_pretrained(tmp_path)
    stored = read_checkpoint_headers(tmp_path)
    prefix = TABLE.replace("layers.2", "layers.0")
    assert [stored[f"{prefix}shard_{number}.weight"].shape[0] for number in range(len(rows))] == (
        rows
    )
    assert sum(key.startswith(prefix) for key in stored) == len(rows)


OTHER = {"multipliers": [3, 2**45 + 1, 5, 7], "sizes": [50, 51, 52], "offsets": [0, 60, 120]}
KEYS = dict(
    zip(
        OTHER,
        ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"),
        strict=True,
    )
)


def test_the_hash_of_the_file_is_used_and_exact_in_every_dtype(changed, tmp_path):
    """Whatever the seed of the configuration gives; 2^45 + 1 is no float32."""

    def edit(arrays: Arrays) -> None:
        arrays.update({NGRAMS + key: np.array(OTHER[name]) for name, key in KEYS.items()})

    folder = changed(edit)
    model = load(folder, "bfloat16")
    found = model.config.text_config.ngram_hash(2)
    assert {name: list(getattr(found, name)) for name in OTHER} == OTHER
    model.save_pretrained(tmp_path / "saved")
    stored = read_checkpoint_headers(tmp_path / "saved")
    for name, key in KEYS.items():
        assert stored[NGRAMS + key].dtype == "I64"
        assert stored[NGRAMS + key].read().tolist() == OTHER[name]
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["text_config"]["seed"] == 77


def moved(key: str, array: np.ndarray) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.update({key: array})


def without(key: str) -> Callable[[Arrays], object]:
    return lambda arrays: arrays.pop(key)


def constants(name: str, values: list, dtype: str = "int64") -> Callable[[Arrays], None]:
    return moved(NGRAMS + KEYS[name], np.array(values, dtype))


ZEROS = np.zeros([64, 6], np.float32)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (without(part(1)), rf"{part(1)} is missing, but the table has part 2"),
        (without(part(2)), r"shard_0\.weight to .*shard_1\.weight have 128 rows, .* 192, of 6"),
        (moved(part(1), ZEROS[:60]), r"188 rows, .* 192, .* perhaps .*shard_1\.weight \[60, 6\]"),
        (moved(part(1), ZEROS[:, :5]), r"another size, perhaps .*shard_1\.weight \[64, 5\]"),
        (moved(part(3), ZEROS), r"have 256 rows, .* 192"),
        (moved(part(1), ZEROS.astype("float16")), r"have the dtypes \['F16', 'F32'\]"),
        (moved(f"{TABLE}weight", ZEROS), rf"{TABLE}weight is there beside its parts"),
        (moved(f"{TABLE}shard_00.weight", ZEROS), "1 unexpected: .*shard_00"),
        (moved(f"{TABLE}weight_scale", ZEROS[:1, 0]), "weight_scale; quantized weights"),
        (constants("multipliers", [1.0] * 4, "float32"), r"multipliers is F32 \[4\]; .* I64 \[4\]"),
        (constants("multipliers", [1] * 3), r"layer_multipliers is I64 \[3\]; .* I64 \[4\]"),
        (constants("multipliers", [1, 2**62, 1, 1]), r"\[1, 46\d+, 1, 1\]; each must be 1 to"),
        (constants("sizes", [53, 59, 99]), r"sizes is \[53, 59, 99\]; .* within the 192 rows"),
        (constants("sizes", [53, 0, 61]), r"sizes is \[53, 0, 61\]; .* within the 192 rows"),
        (constants("offsets", [-1, 53, 112]), r"offsets is \[-1, 53, 112\]; .* at least 0"),
    ],
)  # fmt: skip
def test_a_table_or_hash_that_does_not_fit_is_named(edit, named, changed):
    with pytest.raises(ValueError, match=named):
        load(changed(edit))


def test_merging_an_adapter_copies_the_parts(tmp_path):
    model = tiny_qwen4_exp()
    model.save_pretrained(tmp_path / "base")
    adapted = load(tmp_path / "base")
    adapted.add_lora(LoRAConfig(r=2, target_modules=["*.key_proj"]))
    adapted.save_adapter(tmp_path / "adapter")
    merge_adapter(Qwen4ExpForConditionalGeneration, tmp_path / "adapter", tmp_path / "merged")
    base, merged = (arrays_in(tmp_path / name) for name in ("base", "merged"))
    assert_same_arrays(merged, base)


def test_a_half_precision_model_has_tables_of_its_dtype(tmp_path):
    with default_dtype("bfloat16"):
        model = Qwen4ExpForConditionalGeneration.from_config(tiny_qwen4_exp_config())
    model.save_pretrained(tmp_path)
    stored = read_checkpoint_headers(tmp_path)
    assert {stored[part(number)].dtype for number in range(4)} == {"BF16"}
    assert load(tmp_path, "auto").config == model.config
