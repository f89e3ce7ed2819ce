"""The secret of a user: who may read it, and the tokens that are derived from it."""

import dataclasses
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from spmd.distributed.secret import FILE, user_secret, with_token
from spmd.distributed.world import World
from spmd.errors import ClusterError

SLURM = World(0, 4, "node1:61445", "SLURM job 23", 0, 2, job="23.0")


def test_secret_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(lambda _: user_secret(tmp_path), range(8)))
    assert len(secrets) == 1 and len(secrets.pop()) == 32
    info = (tmp_path / FILE).stat()
    assert (
        info.st_mode & 0o777 == 0o600
        and info.st_uid == os.geteuid()
        and os.listdir(tmp_path / ".spmd") == ["secret"]
    )


def test_secret_that_others_can_read_is_refused(tmp_path):
    user_secret(tmp_path)
    path = tmp_path / FILE
    path.chmod(0o644)
    with pytest.raises(ClusterError, match=rf"{re.escape(str(path))} is not private to this user"):
        user_secret(tmp_path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(ClusterError, match="has 5 bytes, not 32"):
        user_secret(tmp_path)
    path.unlink()
    (tmp_path / "elsewhere").write_bytes(b"x" * 32)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ClusterError, match="cannot be read"):
        user_secret(tmp_path)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ClusterError, match="is not private to this user"):
        user_secret(tmp_path)


@pytest.mark.parametrize(
    "world",
    [
        SLURM,
        World(0, 2, "10.0.0.1:4000", "WORLD_SIZE and RANK", 0, 2),
        World(0, 2, "localhost:4000", "JAX's variables"),
    ],
    ids=["SLURM", "one host", "loopback"],
)
def test_token_depends_on_the_user_alone(tmp_path, world):
    logged, homes = [], [tmp_path / "me", tmp_path / "other"]
    for home in homes:
        home.mkdir()
    first, again, other = (with_token(world, logged.append, home) for home in (homes[0], *homes))
    assert (
        first == again
        and first.token != other.token
        and re.fullmatch(r"[0-9a-f]{64}", first.token)
        and logged == []
    )


def test_token_of_a_job_whose_hosts_know_several_addresses(tmp_path):
    """A node's own name may resolve only there; the others take the address that SLURM has."""
    others = dataclasses.replace(SLURM, rank=1, address="10.77.0.1:61445")
    tokens = {with_token(world, print, tmp_path).token for world in (SLURM, others)}
    assert len(tokens) == 1
    another_job = dataclasses.replace(SLURM, job="24.0")
    assert with_token(another_job, print, tmp_path).token not in tokens


def test_token_of_the_launcher_stays(tmp_path):
    world = World(0, 2, "10.0.0.1:4000", "Ray Train", token="secret")
    logged = []
    assert with_token(world, logged.append, tmp_path) == world and logged == []


@pytest.mark.parametrize("rank", [0, 1])
def test_unprotected_job_is_logged_once(tmp_path, rank):
    logged, world = [], World(rank, 2, "10.0.0.1:4000", "JAX's variables")
    assert with_token(world, logged.append, tmp_path) == world and len(logged) == (rank == 0)
    assert not logged or "to prevent it, set a random SPMD_TOKEN everywhere" in logged[0]
    assert (
        with_token(SLURM, logged.append, tmp_path / "no home") == SLURM
        and "can end this job at its start" in logged[-1]
    )
