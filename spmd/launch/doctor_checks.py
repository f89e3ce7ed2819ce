"""Checks of `spmd doctor`. Nothing here imports jax, so that an installation whose jax does not
import can be examined too.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.errors import Problem, how_to_install, pip_install

PACKAGE = Path(__file__).parents[1]
PROJECT = PACKAGE.parent / "pyproject.toml"  # of a checkout
SETTINGS = (
    "JAX_PLATFORMS",
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_ENABLE_COMPILATION_CACHE",
    "SPMD_CACHE",
    "XLA_FLAGS",
    "CUDA_VISIBLE_DEVICES",
)
COMMAND_SECONDS = 10.0  # for git, for nvidia-smi, and for the resolver
WRITTEN = 32 << 20  # bytes
LEAST_FREE = 2 << 30  # bytes
# https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/
DRIVER_OF_CUDA_13 = 580
WAYS_OUT = "JAX_PLATFORMS=cpu uses no accelerator; if `nvidia-smi` hangs too, the driver does."
# Runs in a process of its own, since a driver may hang. Devices first: the cache asks for them.
PROBE = """
import json, os
# else JAX allocates three quarters of a GPU's memory when it looks for devices
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax
devices = [
    {
        "platform": device.platform,
        "kind": device.device_kind,
        "bytes": (device.memory_stats() or {}).get("bytes_limit", 0),
    }
    for device in jax.local_devices()
]
print(json.dumps({"devices": devices}), flush=True)
from spmd.program_cache import activate, folder
chosen = jax.config.jax_compilation_cache_dir if activate.user_chose() else None
path = folder.choose_folder(None, None) if chosen is None else None
part = path and folder.machine_folder(path)
enabled = jax.config.jax_enable_compilation_cache and bool(chosen or part)
unsafe = folder.distrust(*filter(None, [path, part])) if enabled else ""
wrong = {"version": bool(folder.misordered()), "one_cpu_device": folder.loads_wrongly()}
cache = {"folder": str(chosen or path or ""), "enabled": enabled, "unsafe": unsafe, **wrong}
print(json.dumps(cache))
"""


@dataclasses.dataclass(frozen=True)
class Output:
    """The text that a command wrote, and why it has failed: "" if it has not."""

    text: str
    failure: str = ""


def run_bounded(command: Sequence[str], limit: float, cwd: Path | None = None) -> Output:
    """Run a command, and kill it with its descendants after `limit` seconds; what it wrote before
    is kept.
    """
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # a group of its own, to kill it with its descendants
            start_new_session=True,
            cwd=cwd,
        )
    except OSError as error:
        return Output("", error.strerror or str(error))
    late = threading.Event()

    def kill() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit, kill)
    timer.start()
    try:
        out, err = process.communicate()
    finally:
        timer.cancel()
    if not process.returncode:
        return Output(out)
    if process.returncode == -signal.SIGKILL and late.is_set():
        return Output(out, f"no answer within {limit:g} s")
    return Output(out, next(reversed(err.strip().splitlines()), f"exit code {process.returncode}"))


def machine() -> dict[str, Any]:
    """The system, its processors and its memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "bytes": memory,
    }


def versions() -> dict[str, str | None]:
    """The versions of Python, of this package with its state in git, and of the packages that it
    requires; None: not installed.
    """
    installed: dict[str, str | None] = {
        "python": platform.python_version(),
        "spmd": spmd_version() + _checkout(),
    }
    for requirement in requirements()[""]:
        name = _name(requirement)
        installed[name] = _version(name)
    return installed


def spmd_version() -> str:
    """This package's version: of the checkout, or of what is installed."""
    if PROJECT.exists():
        return tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["version"]
    return importlib.metadata.version("spmd")


def _checkout() -> str:
    """The commit of a checkout and the number of changed files; "" if this is none."""
    if not (PACKAGE.parent / ".git").exists():
        return ""
    commit = run_bounded(["git", "rev-parse", "--short", "HEAD"], COMMAND_SECONDS, PACKAGE.parent)
    changed = run_bounded(["git", "status", "--porcelain"], COMMAND_SECONDS, PACKAGE.parent)
    if commit.failure or changed.failure:
        return ", a checkout that git cannot read"
    text = f", a checkout at {commit.text.strip()}"
    if count := len(changed.text.splitlines()):
        text += f", {count} file{'s' * (count != 1)} changed"
    return text


def requirements() -> dict[str, list[str]]:
    """The requirements of this package by extra, under "" those without one: of the checkout, or of
    what is installed.
    """
    if PROJECT.exists():
        declared = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
        return {"": declared["dependencies"], **declared["optional-dependencies"]}
    by_extra: dict[str, list[str]] = {"": []}
    for line in importlib.metadata.requires("spmd") or ():
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra == ['\"]([^'\"]+)", marker)
        name = ""
        if extra is not None:
            name = extra[1]
        by_extra.setdefault(name, []).append(requirement.strip())
    return by_extra


def _name(requirement: str) -> str:
    """The package of a requirement.

    >>> _name("jax[cuda13]>=0.10,<0.12"), _name("etils[epath]>=1.12")
    ('jax', 'etils')
    """
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def extras() -> dict[str, dict[str, Any]]:
    """Each extra: the packages that it brings, and those of them that are missing here."""
    declared = requirements()
    by_extra = {}
    for extra in filter(None, declared):
        names = map(_name, declared[extra])
        brought = set(_brought_packages(declared[extra], declared))
        by_extra[extra] = {
            "packages": [name for name in names if name != "spmd"],
            "missing": sorted(name for name in brought if _version(name) is None),
            "install": pip_install(extra),
        }
    return by_extra


def _brought_packages(
    listed: Sequence[str], declared: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """The packages that requirements name, those of extras that they name included."""
    for requirement in listed:
        name = _name(requirement)
        if name != "spmd":
            yield name
        brackets = re.search(r"\[(.*?)\]", requirement)
        if brackets is None:
            continue
        for extra in brackets[1].split(","):
            if name == "spmd":
                yield from _brought_packages(declared[extra], declared)
            elif _version(name) is not None:
                marker = re.compile(rf"extra == ['\"]{re.escape(extra)}['\"]")
                lines = importlib.metadata.requires(name) or ()
                yield from _brought_packages(list(filter(marker.search, lines)), declared)


def is_allowed(version: str, requirement: str) -> bool:
    """Return whether a version is in the range of a requirement; parts that are no numbers do not
    count.

    >>> [is_allowed(version, "jax>=0.10,<0.12") for version in ("0.9.1", "0.10.2", "0.12.0")]
    [False, True, False]
    """
    numbers = _numbers(version)
    bounds = re.findall(r"(>=|<|==)([\d.]+)", requirement)
    tests = {
        ">=": lambda bound: numbers >= bound,
        "<": lambda bound: numbers < bound,
        "==": lambda bound: numbers == bound,
    }
    return all(tests[sign](_numbers(bound)) for sign, bound in bounds)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def devices_and_cache(limit: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """The devices that JAX sees, and the folder of compiled programs; with `failure` where it could
    not be found out.
    """
    output = run_bounded([sys.executable, "-c", PROBE], limit)
    lines = [json.loads(line) for line in output.text.splitlines() if line.startswith("{")]
    # The probe prints devices before it looks at the cache, so a hang in between still leaves them.
    failures = [{"failure": output.failure}] * (2 - len(lines))
    devices, cache = [*lines, *failures]
    return devices, cache | _folder_state(cache.get("folder", ""))


def _folder_state(folder: str) -> dict[str, Any]:
    """The number and bytes of the files in a folder, and whether it, or the first of its parents
    that exists, can be written to.
    """
    if not folder:
        return {}
    sizes = []
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                sizes.append(os.stat(os.path.join(root, name)).st_size)
            except OSError:  # another process has removed it
                continue
    paths = (Path(folder), *Path(folder).absolute().parents)
    nearest = next(path for path in paths if path.exists())
    return {
        "entries": len(sizes),
        "bytes": sum(sizes),
        "writable": nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
    }


def drivers() -> dict[str, Any]:
    """The GPUs that NVIDIA's driver knows; without its command nothing."""
    if shutil.which("nvidia-smi") is None:
        return {"gpus": []}
    output = run_bounded(
        ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
        COMMAND_SECONDS,
    )
    if output.failure:
        return {"gpus": [], "failure": output.failure}
    return {"gpus": output.text.strip().splitlines(), "failure": ""}


def _cuda_extra(gpu: str) -> str:
    """The extra whose CUDA the driver of this GPU supports.

    >>> _cuda_extra("NVIDIA A100-SXM4-40GB, 40960 MiB, 570.133.20")
    'cuda12'
    """
    major = gpu.rpartition(", ")[2].partition(".")[0]
    is_older = major.isdecimal() and int(major) < DRIVER_OF_CUDA_13
    return "cuda12" if is_older else "cuda13"


def network() -> dict[str, str]:
    """Try to connect two sockets of this machine, and to resolve its name; "" or what is wrong with
    each.
    """
    failures = {"loopback": "", "host_name": f"no answer within {COMMAND_SECONDS:g} s"}
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=COMMAND_SECONDS).close()
    except OSError as error:
        failures["loopback"] = error.strerror or str(error)

    def resolve() -> None:
        try:
            socket.getaddrinfo(socket.gethostname(), None)
            failures["host_name"] = ""
        except OSError as error:
            failures["host_name"] = error.strerror or str(error)

    # in a thread, since getaddrinfo takes no timeout, and waits for each name server in turn
    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(COMMAND_SECONDS)
    return dict(failures)


def disk(folder: Path) -> dict[str, Any]:
    """Measure how fast a file is written to a folder and reaches the disk, and the space that is
    left.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            started = time.perf_counter()
            part = os.urandom(1 << 20)
            for _ in range(WRITTEN // len(part)):
                file.write(part)
            file.flush()
            # else only the page cache of the operating system would be measured
            os.fsync(file.fileno())
            seconds = time.perf_counter() - started
    except OSError as error:
        return {"folder": str(folder.absolute()), "failure": error.strerror or str(error)}
    return {
        "folder": str(folder.absolute()),
        "free": shutil.disk_usage(folder).free,
        "bytes_per_second": WRITTEN / seconds,
    }


def examine(folder: Path, limit: float) -> dict[str, Any]:
    """Everything, as JSON has it; `limit` seconds for JAX to find devices."""
    devices, cache = devices_and_cache(limit)
    return {
        "versions": versions(),
        "machine": machine(),
        "environment": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "devices": devices,
        "drivers": drivers(),
        "extras": extras(),
        "network": network(),
        "disk": disk(folder),
        "cache": cache,
    }


def problems(facts: Mapping[str, Any]) -> list[Problem]:
    """The problems of an examined installation, each with a fix.

    Args:
      facts: what `examine` returned.
    """
    return [
        *_package_problems(facts["versions"]),
        *_device_problems(facts),
        *_network_problems(facts["network"]),
        *_folder_problems(facts["disk"], facts["cache"]),
    ]


def _package_problems(installed: Mapping[str, str | None]) -> Iterator[Problem]:
    for requirement in requirements()[""]:
        name = _name(requirement)
        version = installed.get(name)
        if version is None:
            yield Problem(
                name, ["it is required, and not installed."], f"pip install '{requirement}'."
            )
        elif not is_allowed(version, requirement):
            yield Problem(
                f"{name} {version}",
                [f"{requirement} is required."],
                f"pip install '{requirement}'.",
            )


def _device_problems(facts: Mapping[str, Any]) -> Iterator[Problem]:
    devices = facts["devices"]
    gpus = facts["drivers"]["gpus"]
    if why := facts["drivers"].get("failure"):
        yield Problem(
            "nvidia-smi",
            [why],
            "the driver does not work: restart the machine, or install the driver again.",
        )
    if why := devices.get("failure"):
        if facts["versions"]["jax"] is not None:
            yield Problem("JAX finds no devices", [why], WAYS_OUT)
    elif gpus and not any(device["platform"] in ("gpu", "cuda") for device in devices["devices"]):
        why = (
            f"the driver knows {len(gpus)} GPU{'s' * (len(gpus) != 1)}, and JAX uses "
            f"{devices['devices'][0]['platform']}."
        )
        fix = f"{how_to_install(_cuda_extra(gpus[0]))}."
        if platforms := facts["environment"].get("JAX_PLATFORMS", ""):
            fix = f"unset JAX_PLATFORMS, which is {platforms}."
        yield Problem("JAX uses no GPU", [why], fix)


def _network_problems(failures: Mapping[str, str]) -> Iterator[Problem]:
    if failures["loopback"]:
        fix = "a sandbox or a firewall is in the way: allow connections to 127.0.0.1."
        yield Problem("processes of this machine cannot connect", [failures["loopback"]], fix)
    if failures["host_name"]:
        fix = 'add a line to /etc/hosts:  echo "127.0.1.1 $(hostname)" | sudo tee -a /etc/hosts'
        yield Problem("the name of this machine does not resolve", [failures["host_name"]], fix)


def _folder_problems(disk: Mapping[str, Any], cache: Mapping[str, Any]) -> Iterator[Problem]:
    if why := disk.get("failure"):
        yield Problem(
            f"{disk['folder']} cannot be written to",
            [why],
            "fit(checkpoint=...) in another folder; --folder examines it.",
        )
    elif disk["free"] < LEAST_FREE:
        why = f"{gib(disk['free'])} are free, and checkpoints need space."
        yield Problem(
            disk["folder"],
            [why],
            "remove what is not needed, or use another folder; --folder examines it.",
        )
    if cache.get("enabled") and cache["unsafe"]:
        fix = "SPMD_CACHE names another folder."
        if cache["version"]:
            fix = (
                "none is needed: results are right, and only starts take longer; jaxlib before "
                "0.11.2 loads programs."
            )
        yield Problem("no compiled programs are kept or loaded", [f"{cache['unsafe']}."], fix)
    elif cache.get("enabled") and not cache["writable"]:
        yield Problem(
            f"{cache['folder']} cannot be written to",
            ["so no compiled programs are kept."],
            "SPMD_CACHE names another folder.",
        )


def gib(count: float) -> str:
    """Bytes in GiB, or in MiB where that reads better; `spmd.base.tree`, which formats them
    elsewhere, imports jax.

    >>> gib(3 << 30), gib(5 << 20)
    ('3.0 GiB', '5.0 MiB')
    """
    if count < 1 << 30:
        return f"{count / 2**20:.1f} MiB"
    return f"{count / 2**30:,.1f} GiB"
