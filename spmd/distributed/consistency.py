"""The handshake: before anything is compiled, all processes say what they are about to do, and hear whether it is the same."""

import base64
import hashlib
import itertools
import json
import re
import time
import zlib
from collections.abc import Mapping

from spmd.distributed import coordination
from spmd.errors import ClusterError, RendezvousTimeout, escaped

SHOWN = 8  # differences that are told
LATER = 10.0  # seconds that all wait longer than process 0, which knows who is missing

_numbers = itertools.count()


def agree(facts: Mapping[str, str], timeout: float = 300.0) -> None:
    """Hold facts against those of all other processes; a process that is alone agrees with itself.

    All processes call it, in the same order. Each leaves its facts with the coordination service, and a hash of them; process 0 reads the
    hashes, and the facts of the first process whose hash is another.

    Args:
      facts: what must be the same, by name.
      timeout: seconds until all must have called it.

    Raises:
      ClusterError: in all processes, with the same text: which facts differ, in which process, and both values.
      RendezvousTimeout: some did not come.
    """
    if not coordination.started():
        return
    place = f"agree/{next(_numbers)}"
    rank, size, _ = coordination.place()
    text = json.dumps(dict(facts), sort_keys=True)
    coordination.put(f"{place}/facts/{rank}", base64.b64encode(zlib.compress(text.encode())).decode())
    coordination.put(f"{place}/hash/{rank}", hashlib.sha256(text.encode()).hexdigest())
    if rank == 0:
        absent, verdict = _verdict(place, size, facts, timeout)
        coordination.put(f"{place}/verdict", json.dumps([absent, verdict]))
    else:
        try:
            absent, verdict = json.loads(coordination.get(f"{place}/verdict", timeout + LATER))
        except TimeoutError:
            absent, verdict = True, f"process 0 did not come in {timeout:g} s"
    if absent:
        raise RendezvousTimeout(f"the handshake failed: {verdict}", fix="the log of that process; a longer timeout where it only was slow.")
    if verdict:
        raise ClusterError(f"the processes do not agree: {verdict}", fix="the same script, files, options and environment everywhere.")


def first_of_all(text: str, timeout: float = 1800.0) -> str:
    """The first text that is not "", by rank; all processes call it, in the same order, and hear the same.

    Raises:
      RendezvousTimeout: some did not call it.
    """
    if not coordination.started():
        return text
    place, (rank, size, _) = f"first/{next(_numbers)}", coordination.place()
    coordination.put(f"{place}/{rank}", text)
    try:
        return next((said for said in [coordination.get(f"{place}/{other}", timeout) for other in range(size)] if said), "")
    except TimeoutError as error:
        raise RendezvousTimeout(f"a process did not come in {timeout:g} s: {error}.", fix="the log of that process.") from None


def _verdict(place: str, size: int, facts: Mapping[str, str], timeout: float) -> tuple[bool, str]:
    """By process 0: whether somebody did not come; and who, or what differs, "" where nothing does."""
    hashes, until = {}, time.monotonic() + timeout
    for rank in range(size):
        try:
            hashes[rank] = coordination.get(f"{place}/hash/{rank}", max(0.0, until - time.monotonic()))
        except TimeoutError:
            return True, f"process {rank} did not come in {timeout:g} s"
    others = [rank for rank in range(size) if hashes[rank] != hashes[0]]
    if not others:
        return False, ""
    packed = coordination.get(f"{place}/facts/{others[0]}", timeout)
    theirs = json.loads(zlib.decompress(base64.b64decode(packed)))
    shown = lambda given, name: escaped(given.get(name, "nothing"), 300)
    lines = [
        f"\n    {name} is {shown(facts, name)} in process 0, and {shown(theirs, name)} in process {others[0]}"
        for name in dict.fromkeys([*facts, *theirs])
        if facts.get(name) != theirs.get(name)
    ]
    also = f"\n    {len(others) - 1} more processes differ from process 0" if len(others) > 1 else ""
    more = f"\n    and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return False, "".join(lines[:SHOWN]) + more + also


def program_facts(text: str, what: str) -> dict[str, str]:
    """A program's text in facts: its hash, and the numbers written in it, by which a learning rate or a seed that differs is found.

    >>> list(program_facts("stablehlo.constant dense<1.000000e-01> : tensor<f32>", "the step").items())[0]
    ('number 1 in the step', '1.000000e-01 (f32)')
    """
    found = re.findall(r"constant dense<([^<>\"]{1,40})> : tensor<(\w+)>", text)
    numbers = {f"number {at} in {what}": f"{value} ({kind})" for at, (value, kind) in enumerate(found, 1)}
    return numbers | {f"the program of {what}": hashlib.sha256(text.encode()).hexdigest()[:16]}
