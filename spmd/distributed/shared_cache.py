"""Several processes use a cache of compiled programs only where all of them see the same folder.

If one loaded a program that another has to compile, the two could wait for each other: XLA:GPU divides its measurements of kernels
among the processes that compile.
"""

import contextlib
import logging
import secrets
from pathlib import Path

import jax

from spmd.distributed import coordination
from spmd.distributed.consistency import first_nonempty
from spmd.program_cache.activate import user_chose
from spmd.program_cache.entries import make_private
from spmd.program_cache.folder import distrust, machine_folder

OFF = "off"  # not a problem: chosen in one process, so for all


def agree_on_folder(folder: Path | None) -> Path | None:
    """The folder, if all processes see the same one and may use it; else None in all, and a warning of process 0. All processes call it."""
    if not coordination.is_initialized():
        return folder
    rank, token, problem = coordination.process_info()[0], None, ""
    try:
        part = None if folder is None or user_chose() else machine_folder(folder)
        if folder is None or part is None:
            problem = OFF
        elif why := distrust(folder, part):
            problem = f"{why}, and programs are code"
        elif rank == 0:
            make_private(part)
            token = part / f".process-0-{secrets.token_hex(8)}"
            token.touch()
        common = first_nonempty("" if token is None else str(token))
        if common and not problem and not (Path(common).parent == part and Path(common).exists()):
            problem = f"process {rank} does not see the folder of process 0, {Path(common).parent}"
    except OSError as error:
        common, problem = first_nonempty(""), f"process {rank} cannot use {folder}: {error.strerror}"
    verdict = first_nonempty(problem)
    if token is not None:
        with contextlib.suppress(OSError):
            token.unlink()
    if verdict and verdict != OFF and rank == 0:
        logging.getLogger("spmd").warning("no compiled programs are kept or loaded: %s. compile_cache= chooses another folder.", verdict)
    if not verdict and jax.default_backend() == "cpu":
        coordination.write_programs_in_every_process()
    return None if verdict else folder
