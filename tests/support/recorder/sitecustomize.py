"""Writes the rows that each rank trains on, in a run whose PYTHONPATH begins with this folder.

Python imports this module before `tools/train.py`. RECORD names the folder: a file per process, a
line per row with its number in the stream of rows and its real tokens. DELAY is seconds to wait
before each micro-batch, so that a test can kill the run before its end.
"""

import json
import os
import time

folder, delay_s = os.environ.get("RECORD"), float(os.environ.get("DELAY", "0"))
if folder is not None:
    from paddle_vl.data.corpus.loader import CorpusLoader

    take_next = CorpusLoader.__next__

    def recorded(self):
        time.sleep(delay_s)
        batch = take_next(self)
        first = (self._step - 1) * self._batch_size * self.size + self.rank
        with open(f"{folder}/{os.getpid()}.jsonl", "a", encoding="utf-8") as stream:
            rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
            for place, (ids_L, mask_L) in enumerate(rows):
                row = {"row": first + place * self.size, "ids": ids_L[mask_L == 1].tolist()}
                stream.write(json.dumps(row) + "\n")
        return batch

    CorpusLoader.__next__ = recorded
