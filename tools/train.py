"""`paddle-vl train` as a script, for launchers: python tools/train.py CONFIG key=value"""

import sys

from paddle_vl.cli.main import run

if __name__ == "__main__":
    run(["train", *sys.argv[1:]])
