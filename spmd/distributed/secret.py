"""A secret that a user's processes share, on all hosts with the same home folder, and that other
users of these hosts cannot read.
"""

import contextlib
import dataclasses
import hashlib
import hmac
import os
import secrets
import shlex
import stat
from collections.abc import Callable
from pathlib import Path

from spmd.distributed.world import World
from spmd.errors import ClusterError

# in the home folder: 32 random bytes, created once, readable only by their owner
FILE = ".spmd/secret"
SIZE = 32


def with_token(world: World, log: Callable[[str], None], home: Path | None = None) -> World:
    """Add a token that other users cannot guess, for a job whose launcher has set none.

    The token is derived from the user's secret, so processes that share a home folder know it:
    those on one host, or in a SLURM job. Elsewhere home folders may differ, and process 0 logs a
    warning.

    Raises:
      ClusterError: another user could read the secret, or has created it.
    """
    if world.token:
        return world
    one_host = (
        world.local_size == world.size
        or world.host in ("localhost", "::1")
        or world.host.startswith("127.")
    )
    secret = None
    if one_host or world.source.startswith("SLURM"):
        secret = user_secret(home or Path.home())
    if secret is None:
        if world.rank == 0:
            log(
                f"anyone who reaches {world.address} can end this job at its start; to prevent it, "
                "set a random SPMD_TOKEN everywhere"
            )
        return world
    # The hosts of a job may know process 0 by several addresses.
    job = f"{world.job or world.address} {world.size}"
    token = hmac.new(secret, job.encode(), hashlib.sha256).hexdigest()
    return dataclasses.replace(world, token=token)


def user_secret(home: Path) -> bytes | None:
    """The user's secret, created if it does not exist; None if the home folder is not writable.

    Raises:
      ClusterError: it is not a file that only this user may read.
    """
    path = home / FILE
    if not path.exists():
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            part = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                stream.write(secrets.token_bytes(SIZE))
                # Written to the disk before it has its name: a crash must not leave an empty
                # secret.
                os.fsync(stream.fileno())
            # link, not rename, which would replace the secret of a process that was first
            with contextlib.suppress(FileExistsError):
                os.link(part, path)
            part.unlink()
        except OSError:
            return None
    return _read_secret(path)


def _read_secret(path: Path) -> bytes:
    fix = f"rm {shlex.quote(str(path))}; a new one is created."
    try:
        # another user may have put a link or a pipe there: open neither follows it nor waits
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ClusterError(f"{path} cannot be read: {error.strerror}.", fix=fix) from None
    with open(descriptor, "rb") as stream:
        # Of the open file: the path may be another file by now.
        info = os.fstat(descriptor)
        if info.st_uid != os.geteuid() or not stat.S_ISREG(info.st_mode) or info.st_mode & 0o077:
            raise ClusterError(
                f"{path} is not private to this user: others may know it.",
                fix=fix,
            )
        secret = stream.read()
    if len(secret) != SIZE:
        raise ClusterError(f"{path} has {len(secret)} bytes, not {SIZE}.", fix=fix)
    return secret
