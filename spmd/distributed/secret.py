"""What processes of one user know, on all hosts that share their home, and other users of these hosts do not."""

import contextlib
import dataclasses
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from spmd.distributed.detect_cluster import World
from spmd.errors import ClusterError

FILE = ".spmd/secret"  # below the home: 32 random bytes, made once, which only their owner may read
SIZE = 32


def with_token(world: World, say: Callable[[str], None], home: Path | None = None) -> World:
    """The same place, with a token that other users cannot guess, where no launcher has given one.

    It is made from the user's secret, and so known to processes that share a home: on one host, or in a job of SLURM. Elsewhere homes may
    differ, and process 0 says what that means.

    Raises:
      ClusterError: somebody else could read the secret, or has made it.
    """
    one_host = world.local_size == world.size or world.host in ("localhost", "::1") or world.host.startswith("127.")
    one_home = one_host or world.source.startswith("SLURM")
    known = user_secret(Path.home() if home is None else home) if one_home else None
    if known is None:
        if world.rank == 0:
            say(f"whoever reaches {world.address} can end this job at its start; SPMD_TOKEN, a random text in all processes, prevents it")
        return world
    token = hmac.new(known, f"{world.token} {world.address} {world.size}".encode(), hashlib.sha256).hexdigest()
    return dataclasses.replace(world, token=token)


def user_secret(home: Path) -> bytes | None:
    """The user's secret, made where it is not there; None where the home cannot be written to.

    Raises:
      ClusterError: it is no file of this user that nobody else may read.
    """
    path = home / FILE
    if not path.exists():
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            part = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                stream.write(secrets.token_bytes(SIZE))
                os.fsync(stream.fileno())
            with contextlib.suppress(FileExistsError):  # another process was first: its secret counts
                os.link(part, path)
            part.unlink()
        except OSError:
            return None
    return _read(path)


def _read(path: Path) -> bytes:
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ClusterError(f"{path} cannot be read: {error.strerror}.", fix=f"rm {path}; it is made anew.") from None
    with open(number, "rb") as stream:
        about = os.fstat(number)
        if about.st_uid != os.geteuid() or not stat.S_ISREG(about.st_mode) or about.st_mode & 0o077:
            raise ClusterError(f"{path} is not this user's alone: others may know it.", fix=f"rm {path}; it is made anew.")
        found = stream.read()
    if len(found) != SIZE:
        raise ClusterError(f"{path} has {len(found)} bytes, and not {SIZE}.", fix=f"rm {path}; it is made anew.")
    return found
