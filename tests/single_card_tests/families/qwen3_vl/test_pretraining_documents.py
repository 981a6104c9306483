"""Rows of pretraining data as documents, and the loss of packed pieces of them."""

import io

import numpy as np
import paddle
import pytest
from PIL import Image
from safetensors.numpy import load_file

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.config.data_sources import SourceConfig
from paddle_vl.data.corpus.packed_rows import Piece
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.vlm.inputs.collate import VLCollator
from paddle_vl.families.vlm.inputs.corpus import PieceCollator
from paddle_vl.families.vlm.inputs.documents import DocumentEncoder, ImageDocument
from paddle_vl.families.vlm.inputs.processor import Qwen3VLProcessor
from paddle_vl.testing.tiny_run import write_processor
from tests.single_card_tests.data.corpus.corpus_files import picture
from tests.support.tiny import GOLDEN

IMAGE = "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>"
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    write_processor(folder / "processor", "a red green blue page")
    (folder / "a.png").write_bytes(picture(1))
    return folder


@pytest.fixture(scope="module")
def processor(folder):
    return Qwen3VLProcessor.from_pretrained(folder / "processor")


def encode(processor, folder, row, kind="text", **settings):
    source = SourceConfig(path="x", format=kind, **settings)
    return DocumentEncoder(processor, source, max_length=200)(row, folder)


def shown(processor, ids) -> str:
    return processor.decode(ids.tolist(), skip_special_tokens=False)


def learned(processor, document) -> str:
    return shown(processor, document.labels[document.labels != -100])


TEXTS_ONLY = "a red page" + END
MMC4 = {
    "text_list": ["a red", "page"],
    "image_info": [{"image_name": "a.png", "matched_text_index": 1}],
}


@pytest.mark.parametrize(
    ("kind", "row", "wanted"),
    [
        ("text", {"text": "a red page"}, TEXTS_ONLY),
        ("text", {"text": ["a red", "page"]}, "a red\npage" + END),
        ("image_text", {"image": "a.png", "text": "a page"}, IMAGE + "a page" + END),
        ("image_text", {"image": {"bytes": picture(1), "path": None}, "text": "a"},
         IMAGE + "a" + END),
        ("interleaved",
         {"texts": ["a", None, "red", None], "images": [None, "a.png", None, "a.png"]},
         "a" + IMAGE + "red" + IMAGE + END),
        ("interleaved", {"texts": [None, "a", "red"], "images": [picture(1), None, None]},
         IMAGE + "a\n\nred" + END),
        ("interleaved", MMC4, "a red" + IMAGE + "page" + END),
    ],
)  # fmt: skip
def test_formats_give_texts_and_images_in_order(processor, folder, kind, row, wanted):
    document = encode(processor, folder, row, kind)
    assert shown(processor, document.input_ids) == wanted
    # Everything but images is learned, the end too.
    assert learned(processor, document) == wanted.replace(IMAGE, "")
    np.testing.assert_array_equal(
        document.labels[document.labels != -100], document.input_ids[document.labels != -100]
    )
    assert document.visual.sum() == 4 * wanted.count(IMAGE)


def test_columns_give_entries_other_names(processor, folder):
    row = {"caption": "a page", "jpg": picture(1)}
    columns = {"text": "caption", "image": "jpg"}
    document = encode(processor, folder, row, "image_text", columns=columns)
    assert shown(processor, document.input_ids) == IMAGE + "a page" + END


def test_targets_behind_the_first_image(processor, folder):
    row = {"texts": ["a", None, "red"], "images": [None, "a.png", None]}
    document = encode(processor, folder, row, "interleaved", targets="after_image")
    assert learned(processor, document) == "red" + END
    assert learned(processor, encode(processor, folder, {"text": "a"}, targets="after_image")) == ""


@pytest.mark.parametrize(
    ("targets", "wanted"),
    [
        (None, "red<|im_end|>"),
        ("answers", "red<|im_end|>"),
        ("all", "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"),
        ("after_image", "a<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n"),
    ],
)
def test_conversations_keep_their_template(processor, folder, targets, wanted):
    messages = [{"role": "user", "content": "<image>a"}, {"role": "assistant", "content": "red"}]
    row = {"messages": messages, "images": ["a.png"]}
    document = encode(processor, folder, row, "messages", targets=targets)
    assert learned(processor, document) == wanted
    # Never cut.
    assert document.end_of_piece(0, len(document) - 1, 100) is None
    sample = document.piece(0, len(document))
    np.testing.assert_array_equal(sample["labels"], document.labels)
    assert sample["pixel_values"].shape[0] == 16


def test_a_piece_has_the_pixels_of_its_images(processor, folder):
    images = [picture(number) for number in range(3)]
    row = {"texts": ["a", None, "red", None, None, "page"]}
    row["images"] = [None, images[0], None, images[1], images[2], None]
    document = encode(processor, folder, row, "interleaved")
    whole = document.piece(0, len(document))
    begin = 0
    pixels, grids = [], []
    while begin < len(document):
        # Room for one image.
        end = document.end_of_piece(begin, 8, 4)
        piece = document.piece(begin, end)
        pixels.append(piece.get("pixel_values", whole["pixel_values"][:0]))
        grids.append(piece.get("image_grid_thw", whole["image_grid_thw"][:0]))
        begin = end if end == len(document) else document.next_begin(end)
    np.testing.assert_array_equal(np.concatenate(pixels), whole["pixel_values"])
    np.testing.assert_array_equal(np.concatenate(grids), whole["image_grid_thw"])
    assert len(pixels) > 3


def tiff_of_16_bits() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((12, 12), 9000, dtype=np.uint16)).save(file, "TIFF")
    return file.getvalue()


@pytest.mark.parametrize(
    ("kind", "row", "reason"),
    [
        ("text", {"content": "a"}, r"no 'text'.*its entries are \['content'\].*columns"),
        ("text", {"text": 3}, "'text' is of type int"),
        ("text", {"text": ["a", None]}, "a string or a list of strings"),
        ("text", {"text": " \n"}, "no text, so that nothing is learned"),
        ("text", {"text": "a<|im_end|>b"}, r"special token\(s\) <\|im_end\|>"),
        ("text", {"text": "a<|image_pad|>"}, r"<\|image_pad\|>"),
        ("image_text", {"text": "a"}, "no 'image'"),
        ("image_text", {"image": "a.png"}, "no 'text'"),
        ("image_text", {"image": "none.png", "text": "a"}, "there is no file"),
        ("image_text", {"image": "http://x/a.png", "text": "a"}, "not a file name"),
        ("image_text", {"image": b"no image", "text": "a"}, "cannot be decoded as an image"),
        ("image_text", {"image": tiff_of_16_bits(), "text": "a"}, "more than 8 bits"),
        ("image_text", {"image": 3, "text": "a"}, "a file name or an image's bytes"),
        ("interleaved", {"texts": ["a"], "images": []}, "equally long"),
        ("interleaved", {"texts": ["a"], "images": ["a.png"]}, "entry 1 has both"),
        ("interleaved", {"texts": [None], "images": [None]}, "entry 1 has neither"),
        ("interleaved", {"texts": [None], "images": ["a.png"]}, "no text"),
        ("interleaved", {"texts": "a", "images": [None]}, "'texts' must be a list"),
        ("interleaved", {**MMC4, "image_info": [{"image_name": "a.png"}]}, "matched_text_index"),
        ("interleaved", {**MMC4, "image_info": 1}, "'image_info' must be a list"),
        ("messages", {"text": "a"}, "it is a document.*format: text"),
        ("messages", {"words": "a"}, "no 'messages'"),
        ("text", {"tokens": np.array([5, 10_000])}, "the id 10000 .*another tokenizer"),
        ("text", {"tokens": np.array([5, -1])}, "another tokenizer"),
        ("text", {"tokens": np.array([], dtype=int)}, "no token"),
        ("interleaved", {"tokens": np.array([5])}, "set format to text"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(processor, folder, kind, row, reason):
    with pytest.raises(BadSampleError, match=reason):
        encode(processor, folder, row, kind)


def test_control_tokens_within_token_files_are_refused(processor, folder):
    ids = np.array([5, processor.image_token_id, 6])
    with pytest.raises(BadSampleError, match=r"special token <\|image_pad\|>"):
        encode(processor, folder, {"tokens": ids})


def test_token_files_give_the_same_document_as_their_text(processor, folder):
    wanted = encode(processor, folder, {"text": "a red page"})
    ids = wanted.input_ids
    for stored in (ids, ids[:-1]):
        found = encode(processor, folder, {"tokens": stored})
        np.testing.assert_array_equal(found.input_ids, ids)
        np.testing.assert_array_equal(found.labels, wanted.labels)
    mask = np.ones(len(ids) - 1, dtype=np.uint8)
    mask[0] = 0
    masked = encode(processor, folder, {"tokens": ids[:-1], "mask": mask})
    assert masked.labels.tolist() == [-100, *ids[1:].tolist()]


class GoldenProcessor:
    """Ids of the golden models; an image is its patches."""

    image_token_id, video_token_id, vision_start_token_id, vision_end_token_id = 500, 501, 502, 503

    def image_processor(self, images):
        pixels, grids = zip(*images, strict=True)
        return {"pixel_values": np.concatenate(pixels), "image_grid_thw": np.stack(grids)}


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.5, 2.0)])
def test_the_loss_of_packed_documents_is_hf_loss_on_the_same_labels(weights):
    """HF's loss from its logits of the separate documents; samples 0 and 2 are of source 1."""
    case = load_file(GOLDEN / "qwen_vl" / "multi_image_right_pad" / "tensors.safetensors")
    grids = case["in.image_grid_thw"]
    ends = np.cumsum(grids.prod(axis=1))[:-1]
    images = list(zip(np.split(case["in.pixel_values"], ends), grids, strict=True))
    row, total, count = [], 0.0, 0
    for number in range(3):
        length = int(case["in.attention_mask"][number].sum())
        ids = case["in.input_ids"][number, :length].astype(np.int64)
        own = [images.pop(0) for _ in range(int((ids == 502).sum()))]
        document = ImageDocument(GoldenProcessor(), ids, own, "all", False)  # type: ignore[arg-type]
        source = number % 2 == 0
        row.append(Piece(int(source), document.piece(0, length), True))
        logits = case["logits"][number, : length - 1].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        is_target = document.labels[1:] != -100
        total -= weights[source] * log_probs[np.arange(length - 1), ids[1:]][is_target].sum()
        count += is_target.sum()
        assert not np.isin(ids[1:][is_target], (500, 502, 503)).any()
    collator = PieceCollator(VLCollator(504, 500, 501), True, weights)
    batch = collator([row])
    assert batch["num_target_tokens"] == count
    folder = GOLDEN / "qwen_vl" / "models" / "dense_untied"
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    with paddle.no_grad():
        loss = float(model(**batch).loss)
    assert loss == pytest.approx(total / count, abs=1e-5)


def test_a_weight_belongs_to_the_token_that_is_predicted():
    folder = GOLDEN / "qwen_vl" / "models" / "dense_untied"
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 400, (2, 9))
    weights = rng.uniform(0.1, 3.0, (2, 9)).astype(np.float32)
    labels = np.where(rng.uniform(size=ids.shape) < 0.3, -100, ids)
    with paddle.no_grad():
        output = model(ids, labels=labels, loss_weights=weights)
        log_probs = paddle.nn.functional.log_softmax(output.logits, axis=-1).numpy()
    total = sum(
        -weights[row, i] * log_probs[row, i - 1, ids[row, i]]
        for row in range(2)
        for i in range(1, 9)
        if labels[row, i] != -100
    )
    assert float(output.loss_sum) == pytest.approx(total, rel=1e-5)
