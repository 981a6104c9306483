"""Starting a subcommand again in several processes."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_MAIN = Path(__file__).parents[1] / "__main__.py"


def launch(arguments: Sequence[str], num_processes: int, log_dir: Path) -> int:
    """`paddle-vl ARGUMENTS` in processes on this machine, through Paddle's launcher.

    Rank 0 speaks, all of them write a log.

    Returns:
        The launcher's exit code.
    """
    launcher = [sys.executable, "-m", "paddle.distributed.launch"]
    launcher += [f"--nproc_per_node={num_processes}", f"--log_dir={log_dir}"]
    return subprocess.call([*launcher, str(_MAIN), *arguments])
