"""Sources of a mix, from their settings to documents.

Guarantees: patterns name files, each once; the same documents come from every container; a source
read by shards has every document once an epoch, from few local copies at a time; empty and missing
sources are refused.
"""

import gzip
import time

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from paddle_vl.config.data_sources import SourceConfig, as_sources
from paddle_vl.data.corpus import cache as cache_module
from paddle_vl.families.vlm.inputs.corpus import Corpus
from paddle_vl.families.vlm.settings import VLDataConfig
from tests.single_card_tests.data.corpus.corpus_files import lines, picture, write_tar

ROWS = [{"text": f"red {i}"} for i in range(120)]


def opened(processor, *entries, **settings) -> Corpus:
    data = VLDataConfig.model_validate(settings)
    return Corpus.opened(list(entries), data, processor, seed=1)


def texts(corpus: Corpus, numbers) -> list[str]:
    (source,) = corpus.sources
    processor = source.encode.processor
    return [processor.decode(source.encoded(number).input_ids.tolist()) for number in numbers]


def test_patterns_name_files_once(tmp_path):
    for name in ("a.jsonl", "b.jsonl", "t.idx", "t.bin"):
        (tmp_path / name).write_bytes(b"")
    paths = [str(tmp_path / name) for name in ("b.jsonl", "*.jsonl", "t", "t.bin", "t.*")]
    found = SourceConfig(path=paths).files()
    assert [file.removeprefix(f"{tmp_path}/") for file in found] == ["b.jsonl", "a.jsonl", "t.idx"]


def test_sources_get_different_names():
    paths = ["x/train.jsonl", "y/train.jsonl.gz", "web/*.parquet"]
    assert [each.name for each in as_sources(paths)] == ["train", "train_2", "web"]


def test_every_container_gives_the_same_documents(tmp_path, processor):
    image = picture(1)
    rows = [{"image": "a.png", "text": f"red {i}"} for i in range(30)]
    (tmp_path / "a.png").write_bytes(image)
    (tmp_path / "j.jsonl").write_bytes(lines(rows))
    (tmp_path / "g.jsonl.gz").write_bytes(gzip.compress(lines(rows)))
    (tmp_path / "z.jsonl.zst").write_bytes(zstandard.compress(lines(rows)))
    table = {"text": [row["text"] for row in rows]}
    structs = [{"bytes": image, "path": "a.png"}] * 30
    parquet.write_table(pa.table({**table, "image": structs}), tmp_path / "p.parquet")
    parquet.write_table(pa.table({**table, "image": [image] * 30}), tmp_path / "b.parquet")
    parquet.write_table(pa.table({**table, "image": ["a.png"] * 30}), tmp_path / "f.parquet")
    members = {}
    for i, row in enumerate(rows):
        members |= {f"{i:03}.png": image, f"{i:03}.txt": row["text"].encode()}
    write_tar(tmp_path / "t.tar", members)
    names = ["j.jsonl", "g.jsonl.gz", "z.jsonl.zst", "p.parquet", "b.parquet", "f.parquet", "t.tar"]
    wanted = None
    for name in names:
        corpus = opened(processor, SourceConfig(path=str(tmp_path / name), format="image_text"))
        samples = [corpus.samples()[number] for number in range(30)]
        wanted = wanted or samples
        for sample, other in zip(samples, wanted, strict=True):
            assert sample.keys() == other.keys()
            for key, array in sample.items():
                np.testing.assert_array_equal(array, other[key], err_msg=f"{name} {key}")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_by_shards_every_document_comes_once_an_epoch(tmp_path, processor, suffix, monkeypatch):
    copied = []
    copy = cache_module._copy
    monkeypatch.setattr(cache_module, "_copy", lambda *paths: (copied.append(paths), copy(*paths)))
    pack = gzip.compress if suffix else bytes
    for shard in range(12):
        own = lines(ROWS[shard * 10 : shard * 10 + 10])
        (tmp_path / f"{shard:02}.jsonl{suffix}").write_bytes(pack(own))
    source = SourceConfig(path=str(tmp_path / f"*.jsonl{suffix}"), format="text")
    cache = tmp_path / "cache"
    settings = {"shuffle": "shards", "shuffle_shards": 2, "cache": str(cache)}
    corpus = opened(processor, source, **settings)
    for epoch in range(2):
        found, most = [], 0
        for number in range(120):
            found += texts(corpus, [epoch * 120 + number])
            most = max(most, len(list(cache.glob("*.copy"))))
        assert sorted(found) == sorted(row["text"] for row in ROWS)
        # Two in use, two of the next block, four to spare, and those just made by two threads.
        assert 0 < most <= 10
    # Once for the index, and once an epoch.
    assert 12 < len(copied) <= 36
    # A place of the stream is the same whatever was read before.
    assert texts(opened(processor, source, **settings), [57, 130]) == texts(corpus, [57, 130])


def test_shards_of_the_next_block_are_copied_ahead(tmp_path, processor):
    for shard in range(6):
        (tmp_path / f"{shard}.jsonl").write_bytes(lines(ROWS[shard * 10 : shard * 10 + 10]))
    source = SourceConfig(path=str(tmp_path / "*.jsonl"), format="text")
    cache = tmp_path / "cache"
    settings = {"shuffle": "shards", "shuffle_shards": 1, "cache": str(cache)}
    corpus = opened(processor, source, **settings)
    order = corpus.sources[0].order
    # Opening made copies to index them.
    for copy in cache.glob("*.copy"):
        copy.unlink()
    texts(corpus, [0])
    wanted = {order.document(place) // 10 for place in (0, 10)}
    deadline = time.monotonic() + 60
    while (found := {int(copy.name.split("-")[1][0]) for copy in cache.glob("*.copy")}) != wanted:
        assert time.monotonic() < deadline, (found, wanted)
        time.sleep(0.01)


def test_missing_and_empty_sources_are_refused(tmp_path, processor):
    with pytest.raises(ValueError, match="source none has no file"):
        opened(processor, SourceConfig(path=str(tmp_path / "none.jsonl"), format="text"))
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    with pytest.raises(ValueError, match="source empty has no document"):
        opened(processor, SourceConfig(path=str(tmp_path / "empty.jsonl"), format="text"))
