"""Pretraining data at growing sizes: time to start, resident memory, documents per second.

    python tools/benchmarks/corpus.py --sizes 10000 100000 1000000

Makes JSONL shards of texts of about 600 bytes, and token files of the same texts, in a temporary
folder. Per size, fresh processes build the indexes (`index`), start with them until the first row
of 4096 tokens (`start`), and make rows for a while on one core. Memory is that of the process
beyond its imports, at the first row and at the end. Paddle is not loaded. Times are CPU seconds,
which do not depend on what else the machine does.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from harness import Table, parser, show

ROW_TOKENS = 4096
SHARD_DOCUMENTS = 100_000
WORDS = 4000


def made_words() -> list[str]:
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    return ["".join(rng.choice(letters, rng.integers(2, 11))) for _ in range(WORDS)]


def write_shards(folder: Path, num_documents: int) -> None:
    """JSONL shards; their texts are drawn from two thousand different ones."""
    rng, words = np.random.default_rng(1), made_words()
    texts = [" ".join(rng.choice(words, 1 + int(rng.exponential(85)))) for _ in range(2000)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    for shard, begin in enumerate(range(0, num_documents, SHARD_DOCUMENTS)):
        count = min(SHARD_DOCUMENTS, num_documents - begin)
        with (folder / f"shard_{shard:04}.jsonl").open("w", encoding="ascii") as file:
            for first in range(0, count, 2000):
                order = rng.permutation(2000)[: count - first]
                file.write("".join([lines[i] for i in order]))


def write_processor(folder: Path) -> None:
    from paddle_vl.families.qwen3_vl.inputs.image_processor import ImageProcessor
    from paddle_vl.families.qwen3_vl.inputs.processor import Qwen3VLProcessor
    from paddle_vl.families.qwen3_vl.inputs.tokenizer import CONTROL_TOKENS, train_bpe

    images = ImageProcessor(
        min_pixels=65536, max_pixels=262144, patch_size=16, temporal_patch_size=2, merge_size=2,
        image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5),
    )  # fmt: skip
    tokenizer = train_bpe([" ".join(made_words())], 4000, CONTROL_TOKENS)
    Qwen3VLProcessor(tokenizer, images).save_pretrained(folder)


def resident_mib() -> float:
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * 4096 / 2**20


def measure(files: str, processor_folder: str, seconds: float, shuffle: str) -> dict[str, float]:
    """Start from the files and make rows for some seconds; in a process of its own."""
    from paddle_vl.config.data_sources import SourceConfig
    from paddle_vl.families.qwen3_vl.inputs.collate import VLCollator
    from paddle_vl.families.qwen3_vl.inputs.corpus import Corpus
    from paddle_vl.families.qwen3_vl.inputs.processor import Qwen3VLProcessor
    from paddle_vl.families.qwen3_vl.settings import Qwen3VLDataConfig

    processor = Qwen3VLProcessor.from_pretrained(processor_folder)
    source = SourceConfig(path=files, format="text", weight=1.0)
    data = Qwen3VLDataConfig.model_validate(
        {"packing": True, "packing_length": ROW_TOKENS, "shuffle": shuffle}
    )
    processor.tokenizer.encode("warm up")
    imported, begin = resident_mib(), time.process_time()
    corpus = Corpus.opened([source], data, processor, seed=1)
    collator = VLCollator(
        processor.pad_token_id, processor.image_token_id, processor.video_token_id
    )
    batches = corpus.train_loader(collator, 1, 0, 1)
    next(batches)
    found = {"start_s": time.process_time() - begin, "start_mib": resident_mib() - imported}
    begin, documents, tokens, rows = time.process_time(), 0, 0, 0
    while not rows or time.process_time() - begin < seconds:
        batch = next(batches)
        documents += int(batch["source_documents"].sum())
        tokens += int(batch["attention_mask"].sum())
        rows += 1
    passed = time.process_time() - begin
    return found | {
        "documents_per_s": documents / passed,
        "tokens_per_s": tokens / passed,
        "fill": tokens / rows / ROW_TOKENS,
        "end_mib": resident_mib() - imported,
    }


def in_process(*arguments: str) -> dict[str, float]:
    """The result of `measure` in a fresh process."""
    command = [sys.executable, __file__, "--measure", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def tokenize(files: str, processor: Path, prefix: Path, processes: int) -> float:
    """CPU seconds of all processes."""
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "paddle_vl", "tokenize", files, "--tokenizer", str(processor)]
    command += ["--output", str(prefix), "--processes", str(processes)]
    subprocess.run(command, check=True, capture_output=True)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime - begin.ru_utime + end.ru_stime - begin.ru_stime


def row_of(kind: str, count: int, shards: int, index_s: float, found: dict[str, float]) -> list:
    return [
        f"{kind}, {count:,} documents", f"{shards}", f"{index_s:.2f}", f"{found['start_s']:.2f}",
        f"{found['start_mib']:.0f}", f"{found['end_mib']:.0f}",
        f"{found['documents_per_s']:.0f}", f"{found['tokens_per_s']:.3g}", f"{found['fill']:.4f}",
    ]  # fmt: skip


def sized(count: int, options: argparse.Namespace, work: Path) -> list[tuple[list, dict]]:
    """Rows of the table for one number of documents."""
    folder, processor = work / f"{count}", work / "processor"
    folder.mkdir()
    write_shards(folder, count)
    files, seconds = str(folder / "*.jsonl"), str(options.seconds)
    shards = len(list(folder.glob("*.jsonl")))
    first = in_process(files, str(processor), "0", "documents")
    rows = []
    for name, shuffle in (("JSONL", "documents"), ("JSONL by shards", "shards")):
        found = in_process(files, str(processor), seconds, shuffle)
        index_s = first["start_s"] if shuffle == "documents" else 0.0
        rows.append((row_of(name, count, shards, index_s, found), found | {"index_s": index_s}))
    if count <= options.most_tokenized:
        took = tokenize(files, processor, folder / "tokens", options.processes)
        found = in_process(str(folder / "tokens.idx"), str(processor), seconds, "documents")
        rows.append((row_of("tokens", count, 1, took, found), found | {"tokenize_s": took}))
    shutil.rmtree(folder)
    return rows


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    made.add_argument("--seconds", type=float, default=10.0, help="of rows per size (default 10)")
    made.add_argument("--processes", type=int, default=2, help="that tokenize (default 2)")
    made.add_argument(
        "--most-tokenized", type=int, default=100_000, help="largest size of token files"
    )
    made.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.measure:
        files, processor, seconds, shuffle = options.measure
        print(json.dumps(measure(files, processor, float(seconds), shuffle)))
        return
    with tempfile.TemporaryDirectory() as work:
        write_processor(Path(work) / "processor")
        results = [each for count in options.sizes for each in sized(count, options, Path(work))]
    columns = [
        "corpus", "shards", "index s", "start s", "MiB at start", "MiB at end",
        "documents per CPU s", "tokens per CPU s", "fill",
    ]  # fmt: skip
    note = (
        "CPU seconds. Index: the first start; for token files `paddle-vl tokenize`. Start: until "
        "the first row of 4096 tokens, with the index. Then rows are made for a while by one "
        "process. Memory is resident, beyond that of the imports."
    )
    table = Table("corpus", columns, [row for row, _ in results], note)
    show(options, [table], [{"corpus": row[0], **found} for row, found in results])


if __name__ == "__main__":
    main()
