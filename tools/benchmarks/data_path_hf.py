"""The pictures of `data_path.py`, decoded and processed by HF transformers (PIL backend).

    PYTHON tools/benchmarks/data_path_hf.py SECONDS MOST_PIXELS FILE...

prints pictures per CPU second. `data_path.py --against PYTHON` runs it with an interpreter that has
transformers; it imports nothing of paddle_vl.
"""

import argparse
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("seconds", type=float, metavar="SECONDS")
    parser.add_argument("most", type=int, metavar="MOST_PIXELS")
    parser.add_argument("files", nargs="+", metavar="FILE")
    options = parser.parse_args()
    # Imported here, so that --help needs neither.
    from PIL import Image
    from transformers import Qwen2VLImageProcessor  # pyright: ignore[reportMissingImports]

    processor = Qwen2VLImageProcessor(
        patch_size=16, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3,
        image_std=[0.5] * 3, size={"shortest_edge": 65536, "longest_edge": options.most},
    )  # fmt: skip

    def once(file: str) -> None:
        processor(images=[Image.open(file).convert("RGB")], return_tensors="np")

    once(options.files[0])
    begin, count = time.process_time(), 0
    while time.process_time() - begin < options.seconds:
        once(options.files[count % len(options.files)])
        count += 1
    print(count / (time.process_time() - begin))


if __name__ == "__main__":
    main()
