"""`python -m paddle_vl` is the `paddle-vl` command."""

from paddle_vl.cli.main import run

if __name__ == "__main__":
    run()
