"""run.json: code, command, machine and settings of every start of a run.

    {"starts": [{"started": "2026-11-21T10:00:00+00:00", "ended": null, "first_step": 0,
                 "last_step": null, "command": [...], "overrides": [...], "folder": ...,
                 "git": {"revision": ..., "is_dirty": ...}, "paddle_vl_git": ..., "versions": {...},
                 "host": ..., "platform": ..., "device": ..., "device_name": ...,
                 "num_processes": 4, "hub": {...}, "parallel": {...}, "settings": {...}}, ...]}

`git` is the revision of the working directory, `paddle_vl_git` that of the code; null outside of
git. `is_dirty` means that tracked files differ from the revision. `ended` and `last_step` stay null
if the run was killed. `hub` has name and revision of models from a hub, by setting.
`allocator` has the flags of Paddle's allocator. `settings` is the whole configuration of this
start; config.yaml has that of the last step.
"""

import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import paddle

from paddle_vl.config.family_settings import settings_classes
from paddle_vl.config.parallel_settings import CONNECTIONS
from paddle_vl.config.schema import RunConfig
from paddle_vl.files.hub_names import origins
from paddle_vl.files.text_file import write_text
from paddle_vl.parallel.fleet_strategy import effective_options, fleet_strategy, overlaps
from paddle_vl.parallel.launcher import COMMAND_VARIABLE
from paddle_vl.train.allocator import allocator_flags
from paddle_vl.train.layout import parallel_degrees
from paddle_vl.train.reporting.run_files import RUN_FILE, read_starts

# Packages whose versions are recorded where they are installed.
PACKAGES = (
    "paddle-vl", "paddlepaddle", "paddlepaddle-gpu", "numpy", "safetensors", "tokenizers", "pillow",
    "pydantic", "av", "scipy", "matplotlib", "visualdl", "tensorboardX",
    "swanlab", "wandb",
)  # fmt: skip
_GIT_SECONDS = 20


class RunRecord:
    """Writes run.json in `output_dir`; used by rank 0 only."""

    def __init__(self, output_dir: Path):
        self.output_dir = output_dir
        self._is_started = False

    def start(self, config: RunConfig, first_step: int) -> None:
        """Append an entry.

        Args:
            first_step: completed steps of the run.

        Raises:
            RuntimeError: an existing run.json is damaged.
        """
        starts = read_starts(self.output_dir)
        self._write([*starts, start_entry(config, first_step)])
        self._is_started = True

    def end(self, last_step: int) -> None:
        """Complete the newest entry, if this start has one."""
        if self._is_started:
            *before, entry = read_starts(self.output_dir)
            self._write([*before, entry | {"ended": _now(), "last_step": last_step}])

    def _write(self, starts: list[dict[str, Any]]) -> None:
        text = json.dumps({"starts": starts}, indent=2, ensure_ascii=False)
        write_text(self.output_dir / RUN_FILE, text + "\n")


def start_entry(config: RunConfig, first_step: int) -> dict[str, Any]:
    """The run.json entry of a start now, in this process."""
    device, degrees = paddle.get_device(), parallel_degrees(config)
    fleet_options, parallel = None, config.parallel
    if degrees.num_processes > 1:
        fleet_options = effective_options(fleet_strategy(degrees, parallel.fleet))
    gathers, sums = parallel.sharding_gather_overlap, parallel.dp_comm_overlap
    hidden = overlaps(degrees, parallel.fleet, gathers, sums, parallel.cp_gather_overlap)
    name = paddle.device.cuda.get_device_name() if device.startswith("gpu") else processor_name()
    return {
        "started": _now(),
        "ended": None,
        "first_step": first_step,
        "last_step": None,
        "command": start_command(),
        "overrides": overrides_in(sys.argv[1:]),
        "folder": os.getcwd(),
        "git": git_state(Path.cwd()),
        "paddle_vl_git": git_state(Path(__file__).parent, of=Path(__file__)),
        "versions": versions(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "device": device,
        "device_name": name,
        "num_processes": degrees.num_processes,
        "fleet": fleet_options,
        "overlaps": {name: [each.is_on, each.reason] for name, each in hidden.items()},
        CONNECTIONS: os.environ.get(CONNECTIONS),
        "allocator": allocator_flags(),
        "hub": origins(
            {"model.pretrained": config.model.pretrained, "data.processor": config.data.processor}
        ),
        "parallel": parallel.model_dump(),
        "settings": config.model_dump(),
    }


def start_command(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The command that starts this run again, from the same folder.

    Ranks of --nproc have their launcher's; those of fleetrun say how many there are.
    """
    program, *arguments = json.loads(environment.get(COMMAND_VARIABLE, "null")) or sys.argv
    if Path(program).name == "__main__.py":
        return [sys.executable, "-m", "paddle_vl", *arguments]
    if not program.endswith(".py"):
        return [program, *arguments]
    starter = [sys.executable]
    if int(environment.get("PADDLE_TRAINERS_NUM", "1")) > 1:
        nodes = environment.get("PADDLE_NNODES", "1")
        starter = ["fleetrun", *(["--nnodes", nodes] if nodes != "1" else [])]
        per_node = int(environment["PADDLE_TRAINERS_NUM"]) // int(nodes)
        starter += ["--nproc_per_node", environment.get("PADDLE_LOCAL_SIZE", str(per_node))]
    return [*starter, program, *arguments]


def overrides_in(arguments: Sequence[str]) -> list[str]:
    """The `section.name=value` settings among a command's arguments."""
    sections = tuple(f"{name}." for run in settings_classes() for name in run.model_fields)
    return [text for text in arguments if text.startswith(sections) and "=" in text]


def versions() -> dict[str, str]:
    """Versions of Python, the installed packages of `PACKAGES`, CUDA and cuDNN."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if paddle.is_compiled_with_cuda():
        from paddle import version

        found |= {"cuda": version.cuda(), "cudnn": version.cudnn()}
    return found


def git_state(folder: Path, of: Path | None = None) -> dict[str, Any] | None:
    """Git revision of a folder.

    Args:
        of: file that must be tracked there; code installed into another project's working tree is
            not part of that project's revision.

    Returns:
        `revision` and `is_dirty`; None outside of git, without a commit or without git.
    """
    revision = _git(folder, "rev-parse", "--verify", "HEAD")
    if revision is None or (of and _git(folder, "ls-files", "--error-unmatch", str(of)) is None):
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "is_dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command; None if it fails."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def processor_name() -> str:
    """Model name of the CPU."""
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        for line in cpu_info.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
