"""Messages with arrays.

Guarantees: values survive both ways in both dialects; what a message claims is checked before
memory is taken for it, and refused with a ValueError.
"""

import io
import tracemalloc

import msgpack
import numpy as np
import pytest
from PIL import Image

from paddle_vl.serving import msgpack_numpy
from paddle_vl.serving.msgpack_numpy import OPENPI, VLA_EVAL

VALUES = {
    "matrix": np.arange(6, dtype=">f8").reshape(2, 3),
    "column": np.arange(6, dtype=np.int16).reshape(2, 3).T,
    "zero_dim": np.array(2.5, np.float16),
    "empty": np.zeros((0, 4), np.uint8),
    "truth": np.array([True, False]),
    "nested": {"list": [1, 2.5, None, True, "größe", b"\0"]},
}


@pytest.mark.parametrize("dialect", [OPENPI, VLA_EVAL])
def test_values_survive(dialect):
    found = dialect.unpack(dialect.pack(VALUES))
    for name, value in VALUES.items():
        if isinstance(value, np.ndarray):
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
            np.testing.assert_array_equal(found[name], value)
        else:
            assert found[name] == value


def test_scalars_and_texts_are_those_of_the_dialect():
    values = {"a": np.float32(0.1), "b": np.int64(-7), "c": np.array(["ab", "c"])}
    found = OPENPI.unpack(OPENPI.pack(values))
    assert (type(found["a"]), type(found["b"]), found["a"]) == (np.float32, np.int64, values["a"])
    assert found["c"].tolist() == ["ab", "c"]
    plain = VLA_EVAL.unpack(VLA_EVAL.pack({"a": values["a"], "b": values["b"]}))
    assert plain == {"a": float(values["a"]), "b": -7}
    # An array of the other dialect stays a map.
    assert OPENPI.unpack(VLA_EVAL.pack(VALUES))["truth"]["__ndarray__"] is True


def picture(form: str, shape: tuple[int, ...] = (5, 4, 3)) -> tuple[np.ndarray, dict]:
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    entry = {"__image__": True, "format": form, "data": file.getvalue(), "shape": list(shape)}
    return pixels, entry


def test_pictures_of_vla_eval_are_decoded_within_a_limit(monkeypatch):
    pixels, entry = picture("png")
    raw = {"__image__": True, "format": "raw", "data": pixels.tobytes(), "dtype": "|u1"}
    for given in (entry, raw | {"shape": [5, 4, 3]}):
        np.testing.assert_array_equal(VLA_EVAL.unpack(msgpack.packb({"x": given}))["x"], pixels)
    found = VLA_EVAL.unpack(msgpack.packb(picture("jpeg")[1]))
    assert (found.shape, found.dtype) == ((5, 4, 3), np.uint8)
    monkeypatch.setitem(msgpack_numpy._MOST, "pixels in pictures", 30)
    with pytest.raises(ValueError, match="more than 30 pixels in pictures"):
        VLA_EVAL.unpack(msgpack.packb([entry, entry]))


def array(**changes) -> bytes:
    """An array of openpi's dialect, with other claims."""
    claims = {"__ndarray__": True, "data": bytes(8), "dtype": "<f4", "shape": [2]} | changes
    return msgpack.packb({name.encode(): value for name, value in claims.items()})


def image(**changes) -> bytes:
    return msgpack.packb(picture("png")[1] | changes)


@pytest.mark.parametrize(
    ("dialect", "message", "reason"),
    [
        (OPENPI, array(dtype="|O"), "dtype '|O' is none of"),
        (OPENPI, array(dtype="<U0"), "dtype '<U0' is none of"),
        (OPENPI, array(dtype=["<f4"]), "is none of"),
        (VLA_EVAL, msgpack.packb({"__ndarray__": True, "dtype": "<U0"}), "dtype '<U0' is none of"),
        (OPENPI, array(shape=[3]), r"float32 \[3\] has 12 bytes, its data 8 bytes"),
        (OPENPI, array(shape=[1 << 40, 1 << 40]), "bytes, its data 8 bytes"),
        (OPENPI, array(shape=[0, 1 << 63], data=b""), "refused"),
        (OPENPI, array(shape=[-2]), r"shape \[-2\] is no list"),
        (OPENPI, array(shape=[1] * 9), "is no list of up to 8 sizes"),
        (OPENPI, array(data="abcdefgh"), "its data str"),
        (
            OPENPI,
            msgpack.packb({b"__npgeneric__": True, b"data": [1], b"dtype": "<i8"}),
            "has list",
        ),
        (OPENPI, msgpack.packb({b"__npgeneric__": True, b"data": 300, b"dtype": "|i1"}), "refused"),
        (VLA_EVAL, image(shape=[50, 40, 3]), r"picture of 5 x 4 pixels claims the shape \[50, 40"),
        (VLA_EVAL, image(format="tiff"), "picture of format 'tiff'"),
        (VLA_EVAL, image(data=b"\x89PNG"), "picture: the file cannot be decoded"),
        (OPENPI, msgpack.packb([[]] * 2000), "more than 1024 maps and lists"),
        (OPENPI, b"\xdd\xff\xff\xff\xff", "exceeds max_array_len"),
        (OPENPI, b"\xdf\xff\xff\xff\xff", "exceeds max_map_len"),
        (OPENPI, b"\x91" * 5000, "refused"),
        (OPENPI, msgpack.packb(msgpack.ExtType(5, b"12")), "exceeds max_ext_len"),
        (OPENPI, "text", "the message is text"),
    ],
)
def test_false_claims_are_refused_before_memory_is_taken(dialect, message, reason):
    # Pillow imports its other formats at the first file that none of the usual ones reads.
    Image.init()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=reason):
            dialect.unpack(message)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
