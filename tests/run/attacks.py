"""What may befall a folder, by accident or by hand: each attack changes one thing in a copy of
it.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal

from spmd.run.manifest import MANIFEST_FILE

# in the place of any value in JSON
WRONG = (None, True, -1, 10**30, 0.5, "x", "", [], [1], {}, {"x": 1}, [[]])


def files(folder):
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def _without(path):
    path.unlink()
    return path


def _flip(path, at):
    data = bytearray(path.read_bytes())
    if data:
        data[int(at * len(data))] ^= 1 << 3
    path.write_bytes(data)


HARM = {
    "truncated to nothing": lambda path: path.write_bytes(b""),
    "truncated to half": lambda path: path.write_bytes(
        path.read_bytes()[: path.stat().st_size // 2]
    ),
    "a bit near its begin": lambda path: _flip(path, 0.1),
    "a bit near its end": lambda path: _flip(path, 0.9),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"}"),
    "missing": lambda path: path.unlink(),
    "a pipe": lambda path: os.mkfifo(_without(path)),
    "a folder": lambda path: _without(path).mkdir(),
    "a link to nowhere": lambda path: _without(path).symlink_to("nowhere"),
}


def harms(folder):
    """(Name, function of a copy) of every harm to every file."""
    for name in files(folder):
        for kind, harm in HARM.items():
            yield f"{name}: {kind}", lambda copy, name=name, harm=harm: harm(copy / name)


def _places(value, at=()):
    """Every place in JSON."""
    yield at
    for key, inner in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield from _places(inner, (*at, key))


def _put(value, at, new):
    if not at:
        return new
    value[at[0]] = _put(value[at[0]], at[1:], new)
    return value


def forgeries(folder, name):
    """(Name, function of a copy) of wrong values in a file of JSON, under a manifest that was made
    anew; and of values that are gone.
    """
    document = json.loads((folder / name).read_text())
    for at in _places(document):
        for wrong in WRONG:
            yield (
                f"{name}: {'/'.join(map(str, at))} = {wrong!r}",
                lambda copy, at=at, wrong=wrong: forge(copy, name, at, wrong),
            )
        if at and isinstance(at[-1], str):
            yield (
                f"{name}: no {'/'.join(map(str, at))}",
                lambda copy, at=at: forge(copy, name, at, None, remove=True),
            )


def forge(copy, name, at, wrong, *, remove=False):
    value = json.loads((copy / name).read_text())
    if remove:
        inner = value
        for key in at[:-1]:
            inner = inner[key]
        del inner[at[-1]]
    else:
        value = _put(value, at, wrong)
    (copy / name).write_text(json.dumps(value))
    if name != MANIFEST_FILE:
        believe(copy)


def believe(copy):
    """Make a copy's manifest say what is there."""
    manifest = json.loads((copy / MANIFEST_FILE).read_text())
    for name in manifest["files"]:
        data = (copy / name).read_bytes()
        manifest["files"][name] = [len(data), hashlib.sha256(data).hexdigest()]
    (copy / MANIFEST_FILE).write_text(json.dumps(manifest))


@contextlib.contextmanager
def bounded(seconds=20):
    """Ends what hangs, in a thread that can be interrupted."""

    def late(number, frame):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcomes(folder, attacks, place, use):
    """What `use` of an attacked copy at `place` came to, by attack: what it gives, or what it
    raises.
    """
    results = {}
    for name, attack in attacks:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder, place)
        attack(place)
        try:
            with bounded():
                results[name] = use(place)
        except Exception as error:
            results[name] = error
    return results
