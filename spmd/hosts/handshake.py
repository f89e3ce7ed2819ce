"""The handshake: before anything is compiled, all processes say what they are about to do, and hear whether it is the same."""

import base64
import hashlib
import itertools
import json
import re
import zlib
from collections.abc import Mapping

from spmd.errors import ClusterError, escaped
from spmd.hosts import coordination

SHOWN = 8  # differences that are told

_numbers = itertools.count()


def agree(facts: Mapping[str, str], timeout: float = 300.0) -> None:
    """Hold facts against those of all other processes; a process that is alone agrees with itself.

    All processes call it, in the same order. Only a hash of each travels to process 0, which looks into those that differ; so it costs each
    process two short messages.

    Args:
      facts: what must be the same, by name.
      timeout: seconds until all must have called it.

    Raises:
      ClusterError: in all processes, with the same text: which facts differ, in which process, and both values; or who did not come.
    """
    if not coordination.started():
        return
    place = f"agree/{next(_numbers)}"
    rank, size, _ = coordination.place()
    text = json.dumps(dict(facts), sort_keys=True)
    coordination.put(f"{place}/facts/{rank}", base64.b64encode(zlib.compress(text.encode())).decode())
    coordination.put(f"{place}/hash/{rank}", hashlib.sha256(text.encode()).hexdigest())
    if rank == 0:
        verdict = _verdict(place, size, facts, timeout)
        coordination.put(f"{place}/verdict", verdict)
    else:
        try:
            verdict = coordination.get(f"{place}/verdict", timeout + 10.0)
        except TimeoutError:
            verdict = f"process 0 did not come to the handshake in {timeout:g} s"
    if verdict:
        raise ClusterError(f"the processes do not agree: {verdict}\n    cure: the same script, files, options and environment everywhere.")


def first_of_all(text: str, timeout: float = 1800.0) -> str:
    """The first text that is not "", by rank; all processes call it, in the same order, and hear the same.

    Raises:
      TimeoutError: some did not call it.
    """
    if not coordination.started():
        return text
    place, (rank, size, _) = f"first/{next(_numbers)}", coordination.place()
    coordination.put(f"{place}/{rank}", text)
    return next((said for said in [coordination.get(f"{place}/{other}", timeout) for other in range(size)] if said), "")


def _verdict(place: str, size: int, facts: Mapping[str, str], timeout: float) -> str:
    """What differs, by process 0; "" where nothing does."""
    hashes = {}
    for rank in range(size):
        try:
            hashes[rank] = coordination.get(f"{place}/hash/{rank}", timeout)
        except TimeoutError:
            return f"process {rank} did not come to the handshake in {timeout:g} s"
    others = [rank for rank in range(size) if hashes[rank] != hashes[0]]
    if not others:
        return ""
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
    return "".join(lines[:SHOWN]) + more + also


def program_facts(text: str, what: str) -> dict[str, str]:
    """A program's text in facts: its hash, and the numbers written in it, by which a learning rate or a seed that differs is found.

    >>> list(program_facts("stablehlo.constant dense<1.000000e-01> : tensor<f32>", "the step").items())[0]
    ('number 1 in the step', '1.000000e-01 (f32)')
    """
    found = re.findall(r"constant dense<([^<>\"]{1,40})> : tensor<(\w+)>", text)
    numbers = {f"number {at} in {what}": f"{value} ({kind})" for at, (value, kind) in enumerate(found, 1)}
    return numbers | {f"the program of {what}": hashlib.sha256(text.encode()).hexdigest()[:16]}
