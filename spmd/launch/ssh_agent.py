"""The agent of `spmd launch --hosts` on each host: starts the processes of this host, attempt by
attempt, and ends them when the launcher is gone.

Exchanges lines of JSON with the launcher, over the standard input and output of ssh: `python -m
spmd.launch.ssh_agent ADDRESS`.
"""

import contextlib
import functools
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

from spmd.distributed.host_gpus import visible_gpus
from spmd.distributed.world import free_port
from spmd.errors import ClusterError
from spmd.launch.local_launcher import remove_memory_folders, report_folder, worker_command
from spmd.launch.process_group import ProcessGroup, start_processes
from spmd.launch.restart_policy import read_records
from spmd.launch.spares import Spares

SILENCE = 12.0  # seconds without a message after which the launcher counts as gone
# Characters of a line in one message; JSON may take six for each.
CHUNK = 65536
_writing = threading.Lock()


def main(address: str) -> None:
    """Answer the launcher: send this host's resources, start the requested processes and send their
    exit codes, until it is gone.
    """
    messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_queue_messages, args=(messages,), daemon=True).start()
    spares: Spares | None = None
    with contextlib.ExitStack() as ending:
        while (request := _next(messages)) is not None:
            remove_memory_folders(request.get("remove", ()))
            if "hello" in request:
                _say("hello", {"host": socket.gethostname(), **_resources(address)})
            if "start" in request:
                if spares is None:
                    log = functools.partial(_log, address)
                    spares = ending.enter_context(Spares(request["start"]["spares"], log))
                _say("ended", _attempt(request["start"], messages, spares))


def _attempt(start: dict[str, Any], messages: queue.Queue, spares: Spares) -> dict[str, Any]:
    """Run the processes of one attempt; their exit codes and records."""
    with report_folder() as folder:
        shared = {
            **os.environ,
            **start["shared"],
            "SPMD_REPORT": str(folder),
            "SPMD_LAUNCHER": str(os.getpid()),
        }
        command = worker_command(start["words"])
        commands = {
            int(rank): (command, shared | environment)
            for rank, environment in start["environments"].items()
        }
        prefixes = {int(rank): text for rank, text in start["prefixes"].items()}
        with (
            start_processes(
                commands, prefixes.__getitem__, write=_print, pop_spare=spares.pop_ready
            ) as group,
            spares.replace(commands, folder),
        ):
            forwarding = threading.Thread(
                target=_forward_signals, args=(group, messages, folder), daemon=True
            )
            forwarding.start()
            codes = group.wait(start["grace"])
            # Wakes the thread, which waits for the launcher's next message.
            messages.put({"ended": True})
            forwarding.join()
        return {"codes": codes, "first": group.first, "records": read_records(folder)}


def _resources(address: str) -> dict[str, Any]:
    """This host's GPUs, and a free port of its address; or what is wrong."""
    try:
        resolved = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0]
        return {"gpus": visible_gpus(), "address": resolved, "port": free_port(str(resolved))}
    except OSError as error:
        return {"problem": f"{address} is not an address of this host: {error}"}
    except ClusterError as error:
        return {"problem": str(error)}


def _queue_messages(messages: queue.Queue) -> None:
    for line in sys.stdin:
        messages.put(json.loads(line))
    messages.put(None)


def _next(messages: queue.Queue) -> dict[str, Any] | None:
    """The launcher's next message; None if it is gone or unreachable."""
    try:
        return messages.get(timeout=SILENCE)
    except queue.Empty:
        return None


def _forward_signals(group: ProcessGroup, messages: queue.Queue, folder: Path) -> None:
    """Forward signals until the attempt has ended; when the launcher is gone, end all processes."""
    while (message := _next(messages)) is not None:
        if "ended" in message:
            return
        if "signal" in message:
            # first: an exit by this signal was requested
            group.stop_signal = group.stop_signal or message["signal"]
            group.signal(message["signal"])
    group.stop_signal = group.stop_signal or signal.SIGKILL
    until = time.monotonic() + 5.0
    # Repeated, for a process that is just being started.
    while time.monotonic() < until:
        group.signal(signal.SIGKILL)
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)
    # Nothing reads the output any more, so writing could block forever.
    os._exit(1)


def _print(line: str) -> None:
    """Send an output line of a process, in chunks that the launcher accepts."""
    for start in range(0, len(line), CHUNK):
        _say("line", line[start : start + CHUNK])


def _log(address: str, text: str) -> None:
    _say("line", f"spmd launch: {address}: {text}\n")


def _say(kind: str, content: Any) -> None:
    # Threads of all processes write here; two lines at once would be no JSON.
    with _writing:
        sys.stdout.write(json.dumps({kind: content}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
