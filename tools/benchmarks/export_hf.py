"""The answers of `export.py` in HF transformers on torch (sdpa).

    PYTHON tools/benchmarks/export_hf.py CONFIG TOKENS REPEATS THREADS BATCH...

prints one line of JSON. `export.py --against PYTHON` runs it with an interpreter that has torch,
transformers and PyYAML; it imports nothing of paddle_vl.
"""

import statistics
import time

from step_hf import model_of, options_of, print_result, samples


class Clock:
    """A streamer: the time of every token."""

    def __init__(self):
        self.times = []

    def put(self, value) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def main() -> None:
    parser = options_of(__doc__, "tokens", "repeats", "threads")
    parser.add_argument("batches", metavar="BATCH", type=int, nargs="+")
    options = parser.parse_args()
    model, settings = model_of(options.config, options.threads)
    import torch  # pyright: ignore[reportMissingImports]

    model.eval()
    seconds = {}
    for size in options.batches:
        batch, runs = samples(model.config, settings, size, 200), []
        for _ in range(options.repeats + 1):
            clock, begin = Clock(), time.perf_counter()
            with torch.no_grad():
                model.generate(
                    **batch,
                    do_sample=False,
                    min_new_tokens=options.tokens,
                    max_new_tokens=options.tokens,
                    streamer=clock,
                    pad_token_id=0,
                )
            # The streamer gets the prompt first.
            first, *_, last = clock.times[1:]
            runs.append({"first": first - begin, "rest": last - first})
        seconds[size] = {
            name: statistics.median(run[name] for run in runs[1:]) for name in ("first", "rest")
        }
    print_result(seconds)


if __name__ == "__main__":
    main()
