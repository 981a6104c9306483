"""Arrow streams, and what Hugging Face's `datasets` says about columns.

Guarantees: rows of a stream are read batch by batch, also in another process; streams that are cut
off, damaged or compressed are refused; lists of structs and JSON text have the meaning
that the features give them, in Parquet files too; strings and lists of all types of Arrow are read.
"""

import base64
import json
import pickle

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from paddle_vl.data.jsonl import BadSampleError
from tests.single_card_tests.data.corpus.corpus_files import opener

ROWS = [{"text": f"row {i}", "images": [{"bytes": bytes([i])}]} for i in range(5)]


def write_stream(path, table, **options):
    with path.open("wb") as file, ipc.new_stream(file, table.schema, **options) as stream:
        stream.write_table(table, max_chunksize=2)


def featured(columns, features):
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return pa.table(columns).replace_schema_metadata(metadata)


def test_streams_give_their_rows_and_batches(tmp_path):
    write_stream(tmp_path / "a.arrow", pa.Table.from_pylist(ROWS))
    shard = pickle.loads(pickle.dumps(opener()(tmp_path / "a.arrow")))
    assert shard.groups == (2, 2, 1)
    assert [shard.read(row) for row in (4, 0, 3, 1, 2)] == [ROWS[row] for row in (4, 0, 3, 1, 2)]
    assert shard.place(4) == f"{tmp_path / 'a.arrow'}:row 5"


@pytest.mark.parametrize("cut", [8, 40, 500])
def test_streams_that_are_cut_off_are_refused(tmp_path, cut):
    write_stream(tmp_path / "a.arrow", pa.Table.from_pylist(ROWS))
    raw = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(raw[:-cut])
    with pytest.raises(RuntimeError, match="no whole Arrow stream"):
        opener()(tmp_path / "a.arrow")


def test_compressed_streams_and_other_files_are_refused(tmp_path):
    table = pa.table({"text": ["x" * 5000] * 4})
    write_stream(tmp_path / "a.arrow", table, options=ipc.IpcWriteOptions(compression="zstd"))
    (tmp_path / "b.arrow").write_bytes(b"ARROW1\0\0" + bytes(100))
    with pa.memory_map(str(tmp_path / "a.arrow")) as file:
        ipc.open_stream(file)
        # A batch stands where the schema should.
        (tmp_path / "d.arrow").write_bytes(file.read())
    packed = pa.table({"text": pa.array(["a", "b"]).dictionary_encode()})
    write_stream(tmp_path / "c.arrow", packed)
    for name, reason in (
        ("a", "are compressed"),
        ("b", "is an Arrow file.*write_ipc_stream"),
        ("d", "no whole"),
        ("c", "has a dictionary"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            opener()(tmp_path / f"{name}.arrow")


def test_offsets_that_lead_out_of_a_batch_are_bad_samples(tmp_path):
    write_stream(tmp_path / "a.arrow", pa.table({"text": ["abcd", "efgh"]}))
    raw = (tmp_path / "a.arrow").read_bytes()
    offsets = b"".join(each.to_bytes(4, "little") for each in (0, 4, 8))
    assert raw.count(offsets) == 1
    lying = b"".join(each.to_bytes(4, "little") for each in (0, 1 << 30, 8))
    (tmp_path / "a.arrow").write_bytes(raw.replace(offsets, lying))
    with pytest.raises(BadSampleError, match="record batch 1 cannot be read"):
        opener()(tmp_path / "a.arrow").read(0)


def of_pairs(kind):
    return pa.list_(kind, 2)


@pytest.mark.parametrize("text", ["string", "large_string", "string_view"])
@pytest.mark.parametrize(
    "list_of", [pa.list_, pa.large_list, pa.list_view, pa.large_list_view, of_pairs]
)
def test_strings_and_lists_of_all_types_are_read(tmp_path, text, list_of):
    """Parquet files say under ARROW:schema as what polars, DataFusion and others had written them;
    texts lie in dictionaries. pyarrow 26 reads them, but casts no dictionary to a view."""
    rows = [{"t": f"{i % 2}", "b": b"same", "l": [{"u": "a"}, {"u": f"{i}"}]} for i in range(9)]
    kind = getattr(pa, text)()
    types = {"t": kind, "b": pa.binary_view(), "l": list_of(pa.struct({"u": kind}))}
    plain = pa.Table.from_pylist(rows)
    stated = base64.b64encode(pa.schema(types).serialize())
    with parquet.ParquetWriter(tmp_path / "a.parquet", plain.schema, store_schema=False) as file:
        file.write_table(plain)
        file.add_key_value_metadata({"ARROW:schema": stated})
    assert parquet.read_schema(tmp_path / "a.parquet").types == [*types.values()]
    write_stream(tmp_path / "a.arrow", pa.Table.from_pylist(rows, pa.schema(types)))
    for name in ("a.parquet", "a.arrow"):
        shard = opener()(tmp_path / name)
        assert [shard.read(row) for row in range(shard.count)] == rows


def test_a_row_of_views_has_the_size_of_its_own_texts(tmp_path):
    texts = [["x" * 1000], ["x" * 1000] * 3, ["a", None]] * 100
    table = pa.table({"texts": pa.array(texts, pa.list_(pa.string_view()))})
    with (tmp_path / "a.arrow").open("wb") as file, ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    shard = opener(max_line_bytes=2048)(tmp_path / "a.arrow")
    assert shard.groups == (300,)
    assert [shard.read(row)["texts"] for row in (0, 5)] == [texts[0], texts[5]]
    with pytest.raises(BadSampleError, match="3000 bytes of text"):
        shard.read(4)


@pytest.mark.parametrize("kind", ["a.parquet", "a.arrow"])
def test_columns_mean_what_their_features_say(tmp_path, kind):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant"}]
    columns = {
        "messages": [{"role": ["user", "assistant"], "content": ["q", None]}],
        "tools": ['[{"name": "f", "default": null}]'],
        "plain": ['["text"]'],
    }
    value = {"_type": "Value", "dtype": "string"}
    features = {
        "messages": {"_type": "Sequence", "feature": {"role": value, "content": value}},
        "tools": {"_type": "Json"},
        "plain": value,
    }
    table = featured(columns, features)
    if kind == "a.parquet":
        parquet.write_table(table, tmp_path / kind)
    else:
        write_stream(tmp_path / kind, table)
    row = opener()(tmp_path / kind).read(0)
    assert row == {
        "messages": turns,
        "tools": [{"name": "f", "default": None}],
        "plain": '["text"]',
    }


def test_columns_that_do_not_fit_their_features_are_bad_samples(tmp_path):
    columns = {"messages": [{"role": ["user"], "content": ["q", "r"]}], "tools": ["[1"]}
    sequence = {"messages": {"_type": "Sequence", "feature": {}}}
    for features, reason in ((sequence, "unequal lengths"), ({"tools": {"_type": "Json"}}, "JSON")):
        write_stream(tmp_path / "a.arrow", featured(columns, features))
        with pytest.raises(BadSampleError, match=reason):
            opener()(tmp_path / "a.arrow").read(0)
