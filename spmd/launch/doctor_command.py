"""`spmd doctor`: examine the installation and the machine; what it prints can be pasted into a bug
report.
"""

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.errors import Problem, how_to_install
from spmd.launch.doctor_checks import examine, gib, problems
from spmd.launch.progress_line import show_progress
from spmd.render.html import aligned, filled
from spmd.user_paths import as_path

EXTRAS = ("extra", "here", "brings")
INSTALL = f"to install one, {how_to_install('EXTRA')}"
PROBLEMS = 1  # the exit code if there are any
DESCRIPTION = (
    "Print versions, devices, extras, drivers, ports, the speed of the disk and the compilation "
    "cache, and end with what is wrong and how "
    "to fix it. Names no home folder, so that it can be pasted into a bug report. Exit code 1 if "
    "there are problems."
)


def add_to(commands: Any) -> None:
    """Declare `spmd doctor`."""
    parser = commands.add_parser(
        "doctor", help="examine this installation, for a bug report", description=DESCRIPTION
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--folder",
        default=".",
        metavar="FOLDER",
        help="where runs will be kept (default: this folder)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="limit for JAX to find devices (default: 60)",
    )
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> tuple[str, int]:
    show_progress(f"looking for devices, {options.timeout:g} s at most")
    found = json.loads(
        without_home(
            json.dumps(
                examine(as_path(options.folder, "folder"), options.timeout), ensure_ascii=False
            )
        )
    )
    show_progress("")
    wrong = problems(found)
    listed = [{"where": one.where, "why": list(one.why), "fix": one.fix} for one in wrong]
    text = (
        json.dumps(found | {"problems": listed}, indent=1) if options.json else report(found, wrong)
    )
    return text, PROBLEMS if wrong else 0


def without_home(text: str) -> str:
    """A text without the path of the user's home folder."""
    home = os.path.expanduser("~").rstrip("/")
    return re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text) if home else text


def report(found: Mapping[str, Any], wrong: Sequence[Problem]) -> str:
    """What was found, section by section, and the problems at the end."""
    missing = "not installed"
    machine, cache, disk = found["machine"], found["cache"], found["disk"]
    system = f"{machine['system']}, {machine['cpus']} CPUs, {gib(machine['bytes'])} of memory"
    sections = {
        "VERSIONS": aligned(
            [
                *((name, version or missing) for name, version in found["versions"].items()),
                ("system", system),
            ]
        ),
        "ENVIRONMENT": [f"{name}={value}" for name, value in found["environment"].items()],
        "DEVICES": _devices(found["devices"], found["drivers"]),
        "EXTRAS": [
            *aligned(
                [EXTRAS, *((name, *_extra(extra)) for name, extra in found["extras"].items())],
                ruled=True,
            ),
            INSTALL,
        ],
        "NETWORK": aligned(
            [
                ("ports on this machine", found["network"]["loopback"] or "can be opened"),
                ("name of this machine", found["network"]["host_name"] or "resolves"),
            ]
        ),
        "FOLDERS": aligned(
            [
                ("runs", disk["folder"], _speed(disk)),
                ("compiled programs", cache.get("folder", ""), _cache(cache)),
            ]
        ),
    }
    count = f"{len(wrong)} problem{'s' * (len(wrong) != 1)}" if wrong else "no problem found"
    shown = [filled("\n".join([title, *lines])) for title, lines in sections.items() if lines]
    return "\n\n".join(
        [*shown, filled("\n".join([f"{count}{':' if wrong else '.'}", *map(str, wrong)]))]
    )


def _devices(devices: Mapping[str, Any], drivers: Mapping[str, Any]) -> list[str]:
    """Equal devices in one line, then what the driver says."""
    if why := devices.get("failure"):
        lines = [f"JAX: {why}"]
    else:
        counts = Counter((one["platform"], one["kind"], one["bytes"]) for one in devices["devices"])
        lines = [
            f"JAX: {count} x {kind} ({platform}{f', {gib(size)}' if size else ''})"
            for (platform, kind, size), count in counts.items()
        ]
    known = [f"driver: {count} x {gpu}" for gpu, count in Counter(drivers["gpus"]).items()]
    return [*lines, *(known or [f"nvidia-smi: {drivers.get('failure') or 'not here'}"])]


def _extra(extra: Mapping[str, Any]) -> tuple[str, str]:
    """Whether it is installed, and what it brings or would bring."""
    return (
        ("no", ", ".join(extra["missing"]))
        if extra["missing"]
        else ("yes", ", ".join(extra["packages"]))
    )


def _speed(disk: Mapping[str, Any]) -> str:
    return (
        disk.get("failure")
        or f"{disk['bytes_per_second'] / 1e6:,.0f} MB/s to the disk, {gib(disk['free'])} free"
    )


def _cache(cache: Mapping[str, Any]) -> str:
    if "enabled" not in cache:
        return cache["failure"]
    if not cache["enabled"] or cache["unsafe"]:
        return "off" if not cache["enabled"] else "not used"
    count = f"{cache['entries']:,} files, {gib(cache['bytes'])}"
    note = (
        "; not used by several CPU devices with this jaxlib: each start compiles"
        if cache.get("one_cpu_device")
        else ""
    )
    return f"{count}, {'writable' if cache['writable'] else 'not writable'}{note}"
