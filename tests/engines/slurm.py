"""A real SLURM of two nodes, on this host or on simulated ones, from Debian's packages slurmctld,
slurmd, slurm-client and munge; for tests that run as root.
"""

import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spmd.distributed.world import free_port
from tests.processes import end

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc")
NODES = ("n1", "n2")
# The nodes' names resolve nowhere: processes find each other by the addresses that SLURM knows.
CONFIG = """\
ClusterName=tests
SlurmctldHost={host}({address})
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
KillWait=5
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs=2 State=UNKNOWN\n"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a node is: the name and address of its host, and what runs a command there."""

    host: str
    address: str
    enter: tuple[str, ...] = ()


HERE = Place(socket.gethostname().partition(".")[0], "127.0.0.1")


def missing() -> str:
    """Return why SLURM cannot be started here, or ""."""
    if os.geteuid() != 0:
        return "SLURM's tests run as root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)} (make test-engines)" if absent else ""


@contextlib.contextmanager
def cluster(places: Sequence[Place] = (HERE, HERE)) -> Iterator[dict[str, str]]:
    """Start the cluster; within the block, SLURM's commands use it with these variables. The
    controller is in the first place.
    """
    with contextlib.ExitStack() as ending:
        # Not pytest's folder, which munge's own user could not enter.
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="spmd-slurm-")))
        folder.chmod(0o755)
        for name in ("state", "munge", *(f"spool.{node}" for node in NODES)):
            (folder / name).mkdir(mode=0o755)
        first = places[0]
        config = folder / "slurm.conf"
        ports = [free_port("127.0.0.1") for _ in range(1 + len(NODES))]
        text = CONFIG.format(
            host=first.host, address=first.address, controller=ports[0], folder=folder
        )
        for name, place, port in zip(NODES, places, ports[1:], strict=True):
            text += NODE.format(name=name, host=place.host, address=place.address, port=port)
        config.write_text(f"{text}PartitionName=main Nodes={','.join(NODES)} Default=YES\n")
        key = folder / "munge" / "key-file"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        for path in (key, key.parent):
            shutil.chown(path, "munge")
        names = ("socket", "key-file", "log-file", "pid-file", "seed-file")
        files = [f"--{name}={folder}/munge/{name}" for name in names]
        munged = ["munged", "--foreground", "--force", *files]
        variables = {"SLURM_CONF": str(config)}
        ending.callback(_end_all, f"SLURM_CONF={config}".encode())
        ending.enter_context(_running(munged, user="munge", group="munge"))
        commands = [[*first.enter, "slurmctld", "-D", "-f", config]]
        for name, place in zip(NODES, places, strict=True):
            commands.append([*place.enter, "slurmd", "-D", "-f", config, "-N", name])
        for command in commands:
            ending.enter_context(_running(command, env=os.environ | variables))
        _wait_until_idle(first, variables, folder)
        yield variables


def _end_all(variable: bytes) -> None:
    """End what has this variable in its environment: a step's daemon outlives that of its node, and
    waits without limit where it was cut off.
    """
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if variable in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


@contextlib.contextmanager
def _running(command: list[Any], **options: Any) -> Iterator[None]:
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, **options)
    try:
        yield
    finally:
        end(process)


def _wait_until_idle(first: Place, variables: dict[str, str], folder: Path) -> None:
    command = [*first.enter, "sinfo", "--noheader", "--Node", "--format=%T"]
    # A bound for a start that hangs, and no judge: on two cores it takes 5 s.
    deadline = time.monotonic() + 300
    while True:
        shown = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, check=False
        )
        if shown.stdout.split() == ["idle"] * len(NODES):
            return
        if time.monotonic() > deadline:
            logs = [path.read_text()[-2000:] for path in folder.glob("*.log")]
            raise RuntimeError("\n".join([shown.stdout, shown.stderr, *logs]))
        time.sleep(0.5)
