"""On a host of several, for `spmd launch --hosts`: it starts the processes of this host, and ends them when nobody asks for them any more.

Speaks lines of JSON with the launcher, over the standard input and output of ssh: `python -m spmd.launch.ssh_agent ADDRESS`.
"""

import json
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from spmd.distributed.detect_cluster import free_port, visible_gpus
from spmd.errors import ClusterError
from spmd.launch.local_launcher import report_folder, runner
from spmd.launch.process_group import Group, started
from spmd.launch.restart_policy import records

SILENCE = 12.0  # seconds without a word from the launcher, which says one every few
PIECE = 65536  # letters of a line, each of which may take six
_writing = threading.Lock()


def main(address: str) -> None:
    """Say what there is here, start what is asked for, and say what it came to."""
    heard: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_read, args=(heard,), daemon=True).start()
    _say("hello", {"host": socket.gethostname(), **_here(address)})
    while (asked := _next(heard)) is not None and "start" not in asked:
        pass  # it only says that it is there
    if asked is None:
        return
    with report_folder() as folder:
        group_of = asked["start"]
        shared = {**os.environ, **group_of["environment"], "SPMD_REPORT": str(folder), "SPMD_LAUNCHER": str(os.getpid())}
        command = runner(group_of["words"])
        commands = {int(rank): (command, shared | own) for rank, own in group_of["own"].items()}
        prefixes = {int(rank): text for rank, text in group_of["prefixes"].items()}
        with started(commands, prefixes.__getitem__, write=_print) as group:
            threading.Thread(target=_obey, args=(group, heard, folder), daemon=True).start()
            codes = group.wait(group_of["grace"])
        _say("ended", {"codes": codes, "first": group.first, "records": records(folder)})


def _here(address: str) -> dict[str, Any]:
    """This host's GPUs, and a free port of its address; or what is wrong."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0]
        return {"gpus": visible_gpus(), "address": found, "port": free_port(str(found))}
    except OSError as error:
        return {"problem": f"{address} is no address of this host: {error}"}
    except ClusterError as error:
        return {"problem": str(error)}


def _read(heard: queue.Queue) -> None:
    for line in sys.stdin:
        heard.put(json.loads(line))
    heard.put(None)


def _next(heard: queue.Queue) -> dict[str, Any] | None:
    """What the launcher says next; None when it is gone, or cut off."""
    try:
        return heard.get(timeout=SILENCE)
    except queue.Empty:
        return None


def _obey(group: Group, heard: queue.Queue, folder: Path) -> None:
    """Pass signals on; when the launcher is gone, end all."""
    while (said := _next(heard)) is not None:
        if "signal" in said:
            group.asked = group.asked or said["signal"]  # first: who ends by it was asked to
            group.signal(said["signal"])
    group.asked = group.asked or signal.SIGKILL
    until = time.monotonic() + 5.0
    while time.monotonic() < until:  # one that is just being started too
        group.signal(signal.SIGKILL)
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)  # the launcher reads nothing any more, and writing could wait for it for ever


def _print(line: str) -> None:
    """A line that a process has printed, in pieces that the launcher reads."""
    for start in range(0, len(line), PIECE):
        _say("line", line[start : start + PIECE])


def _say(kind: str, what: Any) -> None:
    with _writing:
        sys.stdout.write(json.dumps({kind: what}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
