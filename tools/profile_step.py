"""`paddle-vl profile` as a script, for launchers: python tools/profile_step.py CONFIG key=value"""

import sys

from paddle_vl.cli.main import run

if __name__ == "__main__":
    run(["profile", *sys.argv[1:]])
