"""A process that `spmd launch` starts: it joins the others, then runs the script: `python -m
spmd.launch.runner SCRIPT ...`.
"""

import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from spmd.base.xla import simulate_cpus
from spmd.distributed import watchdog
from spmd.distributed.initialize import join
from spmd.distributed.launcher_protocol import PEER, TERMINATED, exit_at_once, report_to_launcher
from spmd.launch.spares import wait_as_spare


def main(argv: Sequence[str]) -> None:
    """Run a script, or a module after "-m", as Python would; report its failure to the other
    processes.
    """
    threading.Thread(
        target=_exit_with, args=(int(os.environ.get("SPMD_LAUNCHER", "0")),), daemon=True
    ).start()
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, exit_at_once)
    # Before anything below reads the environment: a spare process gets that of its attempt here.
    wait_as_spare()
    try:
        if simulated := os.environ.get("SPMD_SIMULATE"):
            # The number of simulated devices is fixed once JAX has looked for any.
            simulate_cpus(int(simulated))
        # `launch/srun.py` signals this step
        if os.environ.get("SLURM_PROCID") == "0" and "SPMD_PROCESSES" not in os.environ:
            report_to_launcher(
                "srun",
                {"id": f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"},
            )
        join()
        if argv[0] == "-m":
            sys.argv = list(argv[1:])
            # runpy leaves the import path to its caller; `python -m` adds the working folder
            sys.path.insert(0, os.getcwd())
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            # as `python SCRIPT` does
            sys.path.insert(0, str(Path(argv[0]).resolve().parent))
            runpy.run_path(argv[0], run_name="__main__")
        watchdog.current().script_finished()
    except BaseException as error:
        code = watchdog.exit_code(error)
        # All other processes exit the same way.
        if code in (0, TERMINATED):
            watchdog.current().script_finished()
            raise
        if not isinstance(error, SystemExit) or isinstance(error.code, str):
            watchdog.print_error(error)
        watchdog.current().report_failure(error, code)
        raise SystemExit(code) from None


def _exit_with(launcher: int) -> None:
    """Exit, with all child processes, when the launcher is gone; `orphan_reaper.py` does so on
    Linux only.
    """
    while launcher in (0, os.getppid()):
        time.sleep(1.0)
    # A process that leads its group has only its descendants in it.
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(PEER)


if __name__ == "__main__":
    main(sys.argv[1:])
