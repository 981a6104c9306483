"""`paddle-vl train` as a script, for launchers: python tools/train.py CONFIG key=value"""

import sys

from paddle_vl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
