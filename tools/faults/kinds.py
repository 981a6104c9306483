"""The table of all kinds of faults."""

from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, Signals
from typing import Any

from faults import damages, strikes
from faults.fault import ALL_STARTS, SEVERAL_RANKS, Fault
from faults.tiny_run import NUM_STEPS, SAVE_STEPS

_GOALS = {"command": "the command", "group": "the process group", "rank": "one rank"}


def _request(number: Signals, target: str, times: int) -> Fault:
    """A stop request by people, launchers and batch systems."""
    burst = f"{times} times {number.name}, 0.2 s apart," if times > 1 else number.name
    # At startup a rank has no signal handlers yet.
    rank: dict[str, Any] = {"starts": SEVERAL_RANKS, "places": ("step", "write", "end")}
    return Fault(
        f"{number.name.lower()}-{target}" + (f"-x{times}" if times > 1 else ""),
        f"{burst} to {_GOALS[target]}",
        strikes.signalled(number, target, times),
        is_request=True,
        check=strikes.ended_by(number),
        **(rank if target == "rank" else {}),
    )


# Malformed lines of training data.
HOSTILE_LINES = (
    b"[" * 100_000,
    b'{"messages": ' * 20_000,
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "\xff\xfe\x00"}]}',
    b'{"messages": ' + b"9" * 10_000 + b"}",
    b'{"messages": [{"role": "user", "content": "<image>"}], "images": ["../../../etc/passwd"]}',
    b'{"messages": [{"role": "user", "content": "' + b"a" * 2_000_000 + b'"}]}',
    b"\x00\x00\x00",
)
_WEIGHTS, _STATE, _MANIFEST = "*.safetensors", "trainer_state.json", "manifest.json"
_PACKED = ("data.packing=true", "data.packing_length=192", "data.max_vision_tokens_per_row=40")
_MIX = ("data.train=[{path: DATA/train.jsonl, format: messages, weight: 1}]", *_PACKED)
_OWN_DATA: Any = {"starts": ("one", "nproc", "colocated"), "own_data": True}
_GOES_ON: Any = {"places": ("step", "write"), "goes_on": True}
# At least one more checkpoint follows.
_ROOM: Any = {"places": ("step", "write"), "steps": range(1, NUM_STEPS - 3)}
_REFUSED = "the same command is started again while the first is held up, and has to be refused"
_ONE_AND_TWO = ("one", "nproc", "fleetrun", "sharding3", "pipeline", "colocated")
POWER_LOSS = Fault("power-loss", "SIGKILL to all processes at once", strikes.kill_all)

# fmt: off
_ALL = [
    # Stop requests.
    *(_request(number, target, 1) for target in _GOALS for number in (SIGINT, SIGTERM, SIGHUP)),
    _request(SIGTERM, "command", 3),
    Fault("second-ctrl-c", "Ctrl-C in the terminal, and again half a second to a second later",
          strikes.interrupted_twice, starts=("one", "nproc", "nproc4")),
    Fault("short-grace",
          "SIGTERM where train.stop_grace_s is over before the step or its checkpoint is done",
          strikes.signalled(SIGTERM, "command"), overrides=("train.stop_grace_s=0.05",)),
    # Kills. Ranks outlive their launcher by seconds, in which they may save.
    Fault("kill-command",
          "SIGKILL to the command, which is the launcher where there are several ranks",
          strikes.signalled(SIGKILL, "command")),
    Fault("kill-rank", "SIGKILL to one rank", strikes.kill_rank, starts=SEVERAL_RANKS),
    # Other ranks wait for its shard of the checkpoint.
    Fault("kill-rank-in-write", "SIGKILL to one rank while a checkpoint is written",
          strikes.kill_rank, starts=SEVERAL_RANKS, places=("write",)),
    Fault("restarts", "SIGKILL to one rank under --max_restarts 1, which goes on by itself",
          strikes.kill_rank, starts=("nproc", "nproc4"), overrides=("--max_restarts", "1"),
          **_GOES_ON),
    # Workers exist only between the first and the last step.
    Fault("kill-worker", "SIGKILL to a data worker", strikes.kill_worker,
          starts=("one", "nproc", "fleetrun"), overrides=("data.num_workers=1",),
          places=("step", "write")),
    POWER_LOSS,
    Fault("kill-in-write", "SIGKILL to all processes while a checkpoint is written",
          strikes.kill_all, places=("write",)),
    Fault("stale-lock",
          "SIGKILL to all processes, and run.lock is of another machine",
          strikes.kill_all, damages.stale_lock, starts=("one", "nproc"), places=("step",)),
    Fault("cut-metrics",
          "SIGKILL to all processes, and the last line of metrics.jsonl is cut short",
          strikes.kill_all, damages.cut_metrics, starts=("one", "nproc4"), places=("step",)),
    # From inside a rank.
    Fault("dead-thread",
          "a thread of the package raises at a random moment of one rank, which has to end",
          strikes.let_thread_die, damages.dead_thread, places=(), waits=True, may_trace=True,
          environment=strikes.thread_to_die, check=strikes.told_of_thread),
    Fault("kill-at-rename",
          "SIGKILL to rank 0 at a random rename or removal of a folder of the run",
          strikes.wait_for_kill, damages.at_rename, places=(), waits=True,
          environment=strikes.rename_to_die_at),
    Fault("kill-in-replacement",
          "a damaged checkpoint is written again, and SIGKILL to rank 0 while it is replaced",
          strikes.kill_with_checkpoints(2), damages.killed_in_replacement, places=("step",),
          steps=range(2 * SAVE_STEPS + 1, NUM_STEPS - 1)),
    # A damaged checkpoint; two exist from this step on.
    *(Fault(f"damage-{name}", f"{sentence} in the newest checkpoint, after a power loss",
            strikes.kill_with_checkpoints(2, waits=True), damages.of_checkpoint(pattern, alter),
            starts=("one", "nproc4", "sharding3", "pipeline", "colocated"), places=("step",),
            steps=range(2 * SAVE_STEPS, NUM_STEPS - 1))
      for name, sentence, pattern, alter in (
          ("delete", "weights or optimizer state deleted", _WEIGHTS, damages.delete),
          ("truncate", "weights or optimizer cut short", _WEIGHTS, damages.truncate),
          ("empty", "weights or optimizer state emptied", _WEIGHTS, damages.empty),
          ("flip", "a bit of weights or optimizer state flipped", _WEIGHTS, damages.flip),
          ("flip-state", "a bit of trainer_state.json flipped", _STATE, damages.flip),
          ("truncate-state", "trainer_state.json cut short", _STATE, damages.truncate),
          ("flip-manifest", "a bit of manifest.json flipped", _MANIFEST, damages.flip),
          ("truncate-manifest", "manifest.json cut short", _MANIFEST, damages.truncate),
      )),
    # Data that changes between a stop and the next start: it has to be refused by name; once
    # restored, the run goes on. Without a checkpoint the next start begins anew, with edited data.
    *(Fault(name, f"an answer in {sentence} is edited, which the next start has to refuse",
            strikes.kill_with_checkpoints(1), damages.edited_source, places=("step",),
            steps=range(SAVE_STEPS + 1, NUM_STEPS - 1), data_settings=settings, **_OWN_DATA)
      for name, sentence, settings in (
          ("edit-data", "a file of samples", ()),
          ("edit-mix", "a source of a mix", _MIX),
      )),
    *(Fault(name, f"DATA/{pattern} is damaged, which the next start has to make again",
            strikes.kill_all, damages.of_cache(pattern), data_settings=settings, **_OWN_DATA)
      for name, pattern, settings in (
          ("damage-lengths", ".*.lengths-*.npz", _PACKED),
          ("damage-index", ".paddle_vl/*.index", _MIX),
      )),
    # Storage without room.
    Fault("file-size-limit", "files may suddenly not be larger than 40 kB, and a checkpoint's are",
          strikes.limit_files, check=strikes.no_room("File too large"),
          starts=("one", "nproc", "fleetrun"), **_ROOM),
    Fault("full-disk",
          "the disk of train.output_dir is suddenly full, and has room again at the next start",
          strikes.fill_disk, damages.room_again, check=strikes.no_room("No space left on device"),
          starts=("one", "nproc", "nproc4"), around=strikes.small_disk,
          unavailable=strikes.cannot_mount, **_ROOM),
    # What a run must survive. The long pause is longer than gloo's default timeout.
    Fault("pause-rank", "SIGSTOP to a rank, SIGCONT one to three seconds later",
          strikes.paused(1, 3), starts=ALL_STARTS, **_GOES_ON),
    Fault("long-pause", "SIGSTOP to a rank, SIGCONT 45 seconds later",
          strikes.paused(45, 45), starts=("nproc", "sharding3", "pipeline", "colocated"),
          **_GOES_ON),
    Fault("second-run", _REFUSED, strikes.started_again(deletes_lock=False), starts=_ONE_AND_TWO,
          **_GOES_ON),
    Fault("deleted-lock", f"run.lock is deleted, then {_REFUSED}",
          strikes.started_again(deletes_lock=True), starts=_ONE_AND_TWO, **_GOES_ON),
    Fault("hostile-lines",
          "eight hostile lines in train.jsonl with on_bad_sample=skip, and a power loss on top",
          strikes.kill_all, starts=("one", "nproc"), extra_lines=HOSTILE_LINES),
]
# fmt: on
KINDS = {fault.name: fault for fault in _ALL}
