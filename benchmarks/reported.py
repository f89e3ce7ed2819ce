"""Headers and output files that all benchmarks share."""

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def hardware() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [
            line.split(":")[1].strip()
            for line in cpuinfo.read_text().splitlines()
            if "model name" in line
        ]
        if cpuinfo.exists()
        else []
    )
    model = names[0] if names else platform.processor()
    return f"{os.cpu_count()} cores of {model}, Python {platform.python_version()}"


def head(title: str, command: str, *packages: str) -> list[str]:
    """The first lines of a report: what was run, when, on what, with which versions."""
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return [
        f"# {title}",
        "",
        f"`{command}`, {datetime.date.today()}, {hardware()}, {versions}.",
        "",
    ]


def print_sections(sections: Iterable[list[str]]) -> list[str]:
    """Print each section as soon as it exists; return the lines of all."""
    lines: list[str] = []
    for section in sections:
        print("\n".join(section), flush=True)
        lines += section
    return lines


def write(name: str, lines: list[str]) -> None:
    """Write a report to `results/NAME.md`."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
