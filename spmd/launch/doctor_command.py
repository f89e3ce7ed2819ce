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

from spmd.base.user_paths import as_path
from spmd.errors import Problem, how_to_install
from spmd.launch.doctor_checks import examine, gib, problems
from spmd.render.html import aligned, filled
from spmd.render.terminal import show_progress

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
    facts = examine(as_path(options.folder, "folder"), options.timeout)
    # Replaced in the text of all facts at once, since a path may be in any of them. Without
    # ensure_ascii=False a home folder with letters outside ASCII would be escaped, and not found.
    facts = json.loads(without_home(json.dumps(facts, ensure_ascii=False)))
    show_progress("")
    wrong = problems(facts)
    code = PROBLEMS if wrong else 0
    if not options.json:
        return report(facts, wrong), code
    listed = [{"where": one.where, "why": list(one.why), "fix": one.fix} for one in wrong]
    return json.dumps(facts | {"problems": listed}, indent=1), code


def without_home(text: str) -> str:
    """A text without the path of the user's home folder."""
    home = os.path.expanduser("~").rstrip("/")
    if not home:
        return text
    return re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)


def report(facts: Mapping[str, Any], wrong: Sequence[Problem]) -> str:
    """The facts about an installation, section by section, and the problems at the end.

    Args:
      facts: what `examine` returned.
      wrong: its problems.
    """
    machine, cache, disk = facts["machine"], facts["cache"], facts["disk"]
    system = f"{machine['system']}, {machine['cpus']} CPUs, {gib(machine['bytes'])} of memory"
    versions = [(name, version or "not installed") for name, version in facts["versions"].items()]
    extras = [(name, *_extra(extra)) for name, extra in facts["extras"].items()]
    sections = {
        "VERSIONS": aligned([*versions, ("system", system)]),
        "ENVIRONMENT": [f"{name}={value}" for name, value in facts["environment"].items()],
        "DEVICES": _devices(facts["devices"], facts["drivers"]),
        "EXTRAS": [*aligned([EXTRAS, *extras], ruled=True), INSTALL],
        "NETWORK": aligned(
            [
                ("ports on this machine", facts["network"]["loopback"] or "can be opened"),
                ("name of this machine", facts["network"]["host_name"] or "resolves"),
            ]
        ),
        "FOLDERS": aligned(
            [
                ("runs", disk["folder"], _speed(disk)),
                ("compiled programs", cache.get("folder", ""), _cache(cache)),
            ]
        ),
    }
    last = "no problem found."
    if wrong:
        last = f"{len(wrong)} problem{'s' * (len(wrong) != 1)}:"
    shown = [filled("\n".join([title, *lines])) for title, lines in sections.items() if lines]
    return "\n\n".join([*shown, filled("\n".join([last, *map(str, wrong)]))])


def _devices(devices: Mapping[str, Any], drivers: Mapping[str, Any]) -> list[str]:
    """Equal devices in one line, then what the driver says."""
    lines = []
    if why := devices.get("failure"):
        lines.append(f"JAX: {why}")
    else:
        counts = Counter((one["platform"], one["kind"], one["bytes"]) for one in devices["devices"])
        for (platform, kind, size), count in counts.items():
            memory = f", {gib(size)}" if size else ""
            lines.append(f"JAX: {count} x {kind} ({platform}{memory})")
    gpus = [f"driver: {count} x {gpu}" for gpu, count in Counter(drivers["gpus"]).items()]
    return [*lines, *(gpus or [f"nvidia-smi: {drivers.get('failure') or 'not here'}"])]


def _extra(extra: Mapping[str, Any]) -> tuple[str, str]:
    """The cells of an extra: "yes" or "no", as it is installed or not, and the packages that it
    brings or would bring.
    """
    if extra["missing"]:
        return "no", ", ".join(extra["missing"])
    return "yes", ", ".join(extra["packages"])


def _speed(disk: Mapping[str, Any]) -> str:
    return (
        disk.get("failure")
        or f"{disk['bytes_per_second'] / 1e6:,.0f} MB/s to the disk, {gib(disk['free'])} free"
    )


def _cache(cache: Mapping[str, Any]) -> str:
    if "enabled" not in cache:
        return cache["failure"]
    if not cache["enabled"]:
        return "off"
    if cache["unsafe"]:
        return "not used"
    access = "writable" if cache["writable"] else "not writable"
    text = f"{cache['entries']:,} files, {gib(cache['bytes'])}, {access}"
    if cache.get("one_cpu_device"):
        text += "; not used by several CPU devices with this jaxlib: each start compiles"
    return text
