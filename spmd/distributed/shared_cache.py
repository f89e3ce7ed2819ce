"""Several processes use a cache of compiled programs only where all of them see the same folder.

If one loaded a program that another has to compile, the two could wait for each other: XLA:GPU can
divide its measurements of kernels among the processes that compile.
"""

import contextlib
import logging
import os
import secrets
from pathlib import Path

import jax

from spmd.base.user_paths import explain_os_error
from spmd.distributed import coordination
from spmd.distributed.consistency import first_nonempty
from spmd.program_cache.activate import user_chose
from spmd.program_cache.entries import log_once, make_private
from spmd.program_cache.folder import distrust, machine_folder, misordered, note_misordered

# A choice and no failure: one process has turned the cache off, so it is off in all.
OFF = "off"


def agree_on_folder(folder: Path | None) -> Path | None:
    """The folder, if all processes see the same one and may use it; else None in all, and a warning
    of process 0. All processes call it.
    """
    if not coordination.is_initialized():
        return folder
    rank, _, _ = coordination.process_info()
    token = None
    part = None
    problem = ""
    # Looks for devices, which all processes do together: before the first line that may raise in
    # one.
    backend = jax.default_backend()
    try:
        if folder is None or user_chose():
            problem = OFF
        else:
            part = machine_folder(folder)
            problem = distrust(folder, part)
            if rank == 0 and not problem:
                make_private(part)
                token = part / f".process-0-{secrets.token_hex(8)}"
                token.touch()
    except OSError as error:
        token = None
        problem = f"process {rank} cannot use {folder}: {explain_os_error(folder or Path(), error)}"
    common = first_nonempty("" if token is None else str(token))
    if common and part is not None and not problem:
        problem = _unseen(Path(common), part, rank)
    verdict = first_nonempty(problem)
    if token is not None:
        with contextlib.suppress(OSError):
            token.unlink()
    if verdict == OFF and problem != OFF:
        text = (
            "process %d keeps and loads no compiled programs: another process has turned that off "
            "(compile_cache=False, or JAX's cache)."
        )
        logging.getLogger("spmd").warning(text, rank)
    if verdict and verdict != OFF and rank == 0:
        if verdict == misordered():
            note_misordered(folder)
        else:
            log_once(
                Path(),
                verdict,
                f"no compiled programs are kept or loaded: {verdict}. compile_cache= chooses "
                "another folder.",
            )
    if verdict:
        return None
    if backend == "cpu":
        coordination.write_programs_in_every_process()
    return folder


def _unseen(token: Path, part: Path, rank: int) -> str:
    """The reason why this process, with its folder `part`, does not see the file that process 0 has
    made in its folder; "" if it does.
    """
    theirs = token.parent
    if theirs == part:
        # Path.exists raises for a stale handle of a network file system, os.path.exists does not.
        if os.path.exists(token):
            return ""
    elif theirs.parent == part.parent:
        return (
            f"process {rank} has another kind of device than process 0 ({part.name}, and not "
            f"{theirs.name})"
        )
    return f"process {rank} does not see the folder of process 0, {theirs}"
