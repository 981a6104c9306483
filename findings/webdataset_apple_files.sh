#!/usr/bin/env bash
# One would expect that webdataset (1.0.2) passes over the AppleDouble files of macOS (`._0.jpg`, which
# its tar puts before each file), wherever they lie, as names without a stem are of no sample. It does at
# the top of an archive. In a folder its pattern for keys takes the folder for the stem: `d/._0.jpg` is a
# sample with the key `d/`, and stands between `d/0.jpg` and `d/0.json`, which become two samples.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q webdataset==1.0.2 2>/dev/null
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import io
import sys
import tarfile
from importlib.metadata import version

import webdataset


def samples(prefix):
    path = f"{sys.argv[1]}/a.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("._0.jpg", "0.jpg", "._0.json", "0.json"):
            info = tarfile.TarInfo(prefix + name)
            info.size = 2
            archive.addfile(info, io.BytesIO(b"{}"))
    found = webdataset.WebDataset(path, shardshuffle=False)
    return [(each["__key__"], sorted(set(each) - {"__key__", "__url__", "__local_path__"}))
            for each in found]


print("webdataset", version("webdataset"))
top, inside = samples(""), samples("d/")
print("at the top: ", top)
print("in a folder:", inside)
if top != [("0", ["jpg", "json"])] or len(inside) != 4:
    sys.exit("the behaviour changed: files of macOS are grouped in another way")
PYTHON
