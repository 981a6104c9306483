"""`python -m paddle_vl` is the `paddle-vl` command."""

import sys

from paddle_vl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
