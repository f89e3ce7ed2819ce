"""The folder that keeps compiled programs, and checks that it can be trusted."""

import contextlib
import hashlib
import logging
import os
import platform
import stat
from pathlib import Path
from typing import Any

import jax
import jaxlib.version

from spmd.base.log_info import log_info
from spmd.base.user_paths import as_path
from spmd.errors import OptionError, short_repr

# what people write to turn something off, or on
NO_FOLDERS = ("off", "false", "no", "none", "0", "disable", "true", "on", "1")
# The first version of jaxlib that loads programs wrongly (see `misordered`).
MISORDERED = (0, 11, 2)
# The folder, in a run's folder or in the user's cache folder.
PROGRAMS = "programs"


def cache_folder(kind: str) -> Path:
    """The folder of a kind of cache: in `$SPMD_CACHE`, or in `spmd` in the user's cache folder.

    Raises:
      OptionError: the user has no home folder, as in some containers; or `$SPMD_CACHE` is "off".
    """
    chosen = os.environ.get("SPMD_CACHE")
    if chosen and _is_a_word(chosen):
        fix = (
            "a folder; to keep no compiled programs, fit(compile_cache=False) or "
            "JAX_ENABLE_COMPILATION_CACHE=false."
        )
        raise OptionError(f'$SPMD_CACHE is "{chosen}", which is not a folder.', fix=fix)
    if chosen:
        return as_path(chosen, "$SPMD_CACHE") / kind
    try:
        return (
            as_path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "$XDG_CACHE_HOME")
            / "spmd"
            / kind
        )
    except RuntimeError as error:
        raise OptionError(
            f"there is no home folder for caches: {error}", fix="$SPMD_CACHE names another folder."
        ) from error


def _is_a_word(chosen: str) -> bool:
    return chosen.strip().lower() in NO_FOLDERS


def choose_folder(compile_cache: Any, run: str | os.PathLike | None) -> Path | None:
    """The folder that `compile_cache=` of `fit` asks for; None: no cache.

    Args:
      compile_cache: a folder; False or "off"; or None or True: `$SPMD_CACHE` if it is set, else the
        run's folder, else the user's.
      run: the run's folder, if it has one.

    Raises:
      OptionError: it is none of these.

    Example:
      >>> choose_folder("off", "runs/digits"), choose_folder("kept", "runs/digits").name
      (None, 'kept')
    """
    if compile_cache is False or (isinstance(compile_cache, str) and compile_cache == "off"):
        return None
    if compile_cache is not None and compile_cache is not True:
        if not isinstance(compile_cache, str | os.PathLike):
            raise OptionError(
                f"compile_cache={short_repr(compile_cache)}.",
                fix='a folder; None for the usual one; False or "off" for none.',
            )
        return as_path(compile_cache, "compile_cache").absolute()
    chosen = os.environ.get("SPMD_CACHE")
    if run is not None and not chosen:
        return Path(run).absolute() / PROGRAMS
    if chosen and not _is_a_word(chosen):
        return cache_folder(PROGRAMS).absolute()
    try:
        return cache_folder(PROGRAMS).absolute()
    except OptionError as error:
        logging.getLogger("spmd").warning("no compiled programs are kept or loaded: %s", error)
        return None


def machine_folder(folder: Path) -> Path:
    """The part of a folder for this kind of machine: programs for a CPU run only where the CPU has
    the same features.
    """
    if jax.default_backend() != "cpu":
        return folder / jax.default_backend()
    cpu = Path("/proc/cpuinfo")
    lines = []
    if cpu.exists():
        lines = cpu.read_text(encoding="utf-8", errors="replace").splitlines()
    features = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    facts = "\n".join([platform.machine(), *features])
    return folder / f"cpu-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"


# what follows from `misordered`, as a sentence after it
COMPILED_INSTEAD = (
    " This run compiles its programs, so its results are right; only starts take longer."
)


def misordered() -> str:
    """Return the reason why this process must not load any program; "" if it may.

    Since 0.11.2, jaxlib loads a program for several CPU devices without the order of its
    collectives across loops: two that run at the same time give wrong values or end the process
    (0.12.0.1 too; 0.11.1 and programs that are compiled are right; GPUs have another loader).
    """
    if jax.device_count() == 1 or not loads_wrongly():
        return ""
    return f"jaxlib {jaxlib.__version__} does not load programs for several CPU devices correctly"


def note_misordered(folder: Path | None) -> None:
    """Log that programs in a folder are not loaded, as `misordered` says: once on a machine, since
    nothing is to be done about it.

    Nothing is logged of the user's own folder, unless `$SPMD_CACHE` names it: it was not asked for.
    """
    try:
        usual: Path | None = cache_folder(PROGRAMS).absolute()
    except OptionError:  # no home folder
        usual = None
    if folder == usual and not os.environ.get("SPMD_CACHE"):
        return
    if usual is not None:
        noted = usual / f"{jaxlib.__version__}-loads-none"
        # a folder that cannot be written to: logged by each process
        with contextlib.suppress(OSError):
            noted.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if noted.exists():
                return
            noted.touch()
    log_info(f"no compiled programs are kept or loaded: {misordered()}.{COMPILED_INSTEAD}")


def loads_wrongly() -> bool:
    """Return whether this jaxlib, on a CPU, loads programs for several devices incorrectly; see
    `misordered`.
    """
    return jax.default_backend() == "cpu" and jaxlib.version.__version_info__ >= MISORDERED


def distrust(*folders: Path) -> str:
    """Return the reason why programs in these folders must not be run; "" if there is none, or no
    folder yet.
    """
    why = misordered()
    if why:
        return why
    for folder in folders:
        try:
            status = folder.stat()
        except OSError:  # a folder without a status cannot be read either, which is logged then
            continue
        if status.st_uid not in (os.geteuid(), 0):
            return (
                f"{folder} belongs to another user (id {status.st_uid}), and loading a program "
                "runs it"
            )
        if status.st_mode & stat.S_IWOTH:
            return (
                f"every user can write to {folder} (chmod o-w changes that), and loading a program "
                "runs it"
            )
    return ""
