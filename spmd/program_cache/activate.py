"""Turns JAX's persistent compilation cache on, at a folder of ours. JAX has one such cache in a
process.
"""

from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from spmd.program_cache.counts import compilations
from spmd.program_cache.entries import SCHEME, begin, log_once
from spmd.program_cache.folder import distrust, machine_folder, misordered, note_misordered

FOLDER = "jax_compilation_cache_dir"
# Small programs are kept too, so that a restart compiles nothing. A folder for XLA's other caches
# would be part of each program's key: a folder that was moved would have nothing. The limit on the
# size is ours, since JAX's needs another package, and locks.
OPTIONS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_enable_xla_caches": "none",
    "jax_compilation_cache_max_size": -1,
}
# The values of these options before.
_before: dict[str, object] = {}


def user_chose() -> bool:
    """Return whether the user has set up JAX's cache, or turned it off; then all of its options
    stay as they are.
    """
    folder = getattr(jax.config, FOLDER)
    if not jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        return True
    return bool(folder and not folder.startswith(SCHEME))


def active_folder() -> Path | None:
    """Return the folder in use, if it is ours."""
    folder = getattr(jax.config, FOLDER) or ""
    if not folder.startswith(SCHEME):
        return None
    return Path(folder.removeprefix(SCHEME))


def use_folder(folder: Path | None) -> None:
    """Keep the programs that this process compiles in a folder, and load them from there; None:
    neither.

    Nothing changes where the user has set up JAX's cache. A folder in which others could have put
    programs is not used, with a warning.
    """
    # Start counting.
    compilations()
    if user_chose():
        users_folder = getattr(jax.config, FOLDER)
        if not (users_folder and jax.config.jax_enable_compilation_cache):  # type: ignore[attr-defined]
            return
        why = misordered()
        if why:
            log_once(
                Path(users_folder),
                "loaded",
                f"{why}: their values can be wrong, and JAX loads those in {users_folder}: set "
                "JAX_ENABLE_COMPILATION_CACHE=false.",
            )
        return
    part = None
    if folder is not None:
        part = machine_folder(folder)
    why = ""
    if not (folder is None or part is None):
        why = distrust(folder, part)
    if why:
        if why == misordered():
            note_misordered(folder)
        else:
            log_once(Path(), why, f"no compiled programs are kept or loaded: {why}.")
        part = None
    if part is not None:
        begin(part)
    if part == active_folder():
        return
    _before.update({name: getattr(jax.config, name) for name in OPTIONS if name not in _before})
    options = _before
    address = None
    if part is not None:
        options = OPTIONS
        address = f"{SCHEME}{part}"
    for name, value in options.items():
        jax.config.update(name, value)
    jax.config.update(FOLDER, address)
    # JAX looks at the folder once, when it compiles its first program.
    compilation_cache.reset_cache()
