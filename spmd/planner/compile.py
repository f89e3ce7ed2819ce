"""Compile a step for hardware that need not be present: in a separate process, with a timeout and a
cache.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import numbers
import os
import pickle
import re
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib

from spmd.errors import CompileError, OptionError, first_line, how_to_install, option
from spmd.mesh import MeshSpec
from spmd.output_files import name_errors, sync_tree
from spmd.planner import compile_server
from spmd.planner.cluster import Cluster
from spmd.planner.gpu_kernels import VERSION, gpu_of
from spmd.planner.target import Target
from spmd.program_cache.folder import cache_folder
from spmd.train.compiled_step import Program
from spmd.train.compiler_options import check_buffering

PLUGIN = "jax_cuda13_plugin"
# by platform: the compiler's module, its distribution, our extra, and the kind of device
COMPILERS = {
    "cuda": (PLUGIN, "jax-cuda13-plugin", "gpu-compiler", "GPU"),
    "tpu": ("libtpu", "libtpu", "tpu-compiler", "TPU"),
    "cpu": ("jaxlib", "jaxlib", "", "CPU"),
}
FILES = ("program.hlo", "memory.json", "buffers.txt")
_HOST = re.sub(r"\W", "_", socket.gethostname())
PLANS = "plans"  # the folder, in that of caches
CACHE_SIZE = 64  # compiled programs; the least recently used ones are removed


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled step.

    Attributes:
      compiler: a description of the compiler; `exact` says whether it is the target's own.
      hlo: the scheduled program of one device, as text.
      sizes: bytes on one device according to XLA: argument, output, alias (outputs in donated
        arguments), temp, generated_code.
      buffers: XLA's buffer assignment report; "" if it writes none.
      seconds: compile time, without tracing.
      options: the compiler options of the layout and of the platform, by XLA's names; an estimate
        by another compiler has none.
      retried: XLA's error with these options alone, where it needed another one, which is among
        them; "" where it needed none.
    """

    compiler: str
    exact: bool
    hlo: str
    sizes: dict[str, int]
    buffers: str
    seconds: float
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    retried: str = ""


def compiler_of(target: Target, nodes: int = 1) -> tuple[str, str]:
    """The platform whose compiler is used for a target, and a description of it."""
    if target.platform == "cpu":
        return "cpu", "XLA:CPU, on simulated devices"
    module, _, extra, kind = COMPILERS[target.platform]
    if target.platform == "tpu" and nodes > 1:
        return (
            "cpu",
            "an ESTIMATE by XLA:CPU: XLA:TPU does not express communication between slices as "
            "collectives, only within one",
        )
    if importlib.util.find_spec(module) is not None:
        return (
            target.platform,
            f"XLA:{kind} with a description of {target.title}; no {kind} was needed",
        )
    return (
        "cpu",
        f"an ESTIMATE by XLA:CPU: the compiler for {target.title} is not installed "
        f"({how_to_install(extra)})",
    )


def compile_step(
    program: Program,
    cluster: Cluster,
    *,
    timeout: float = 600.0,
    say: Callable[[str], None] = lambda line: None,
) -> Compiled:
    """Compile a step on a full batch for a cluster; nothing is allocated at the model's size.

    Args:
      timeout: seconds after which the compiler is stopped.
      say: called once a second with a line on how long it has taken.

    Raises:
      CompileError: a part of the step runs in this process only, or the compiler fails, or takes
        too long.
    """
    platform, compiler = compiler_of(cluster.target, cluster.nodes)
    try:
        with gpu_of(cluster.target):
            exported, donated = program.export(platform)
    except (
        NotImplementedError,
        ValueError,
        RuntimeError,
        TypeError,
        AssertionError,
        AttributeError,
    ) as error:
        # jax.export raises all of these, for what it cannot serialize; whatever it was is in the
        # error, with what to leave out
        raise CompileError(
            f"the step cannot be exported to another process: {first_line(error)}",
            fix="plan it without code that needs the host or its devices: jax.debug.print, "
            "jax.pure_callback, a mesh of your own, or "
            "cuDNN's attention where XLA partitions it (beside model axes, or under reduction "
            '"compiler").',
        ) from error
    fields = {field.name: getattr(exported, field.name) for field in dataclasses.fields(exported)}
    _, distribution, _, kind = COMPILERS[platform]
    exact = platform == cluster.target.platform
    options, declared = (
        dict(program.compiler_options) if exact else {},
        program.placed.resolved.layout.compiler,
    )
    request = {
        # a function, which cannot be pickled and is not called
        "exported": fields | {"_get_vjp": None},
        "donated": donated,
        "options": options,
        "chosen": sorted(declared.chosen),
        "layout": program.placed.resolved.layout.source if options else "",
        "mesh": MeshSpec.parse(program.placed.mesh).axes,
        "x64": jax.config.jax_enable_x64,  # type: ignore[attr-defined]
        "topology": topology(cluster) if platform != "cpu" else {},
        # part of the cache's key
        "compiler": (
            jax.__version__,
            jaxlib.__version__,
            importlib.metadata.version(distribution),
            _flags(),
        ),
    }
    blob = pickle.dumps(request)
    folder = cache_folder(PLANS) / hashlib.sha256(blob).hexdigest()[:32]
    try:
        hlo, memory, buffers = program_files(
            blob,
            folder,
            cluster.count if platform == "cpu" else 1,
            f"{cluster} with XLA:{kind}",
            timeout,
            say,
        )
    except CompileError as error:
        check_buffering(str(error), declared, program.placed.resolved.layout.source)
        raise
    sizes = json.loads(memory)
    options |= sizes.pop("options", {})
    return Compiled(
        compiler,
        exact,
        hlo,
        sizes,
        buffers,
        sizes.pop("seconds"),
        options,
        sizes.pop("retried", ""),
    )


def check_timeout(timeout: float, name: str = "timeout") -> None:
    """Check that a time limit is a positive number of seconds.

    Raises:
      OptionError: it is not.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or not timeout > 0:
        raise OptionError(f"{option(name, repr(timeout))}.", fix="a positive number of seconds.")


def program_files(
    blob: bytes, folder: Path, devices: int, target: str, timeout: float, say: Callable[[str], None]
) -> tuple[str, ...]:
    """`FILES` of a program, as texts: from its folder in the cache, where the compile server's
    results are kept.

    Args:
      blob: the request, if they are not there.
      folder: the program's, in the cache.
      devices: that the server needs to compile it.
      target: what it is compiled for, in errors.
      timeout: seconds after which the compiler is stopped.
      say: called once a second with a line on how long it has taken.

    Raises:
      CompileError: it cannot be compiled, or the cache cannot be written or read.
    """
    files = _cached(folder)
    if files is None:
        _compile(blob, folder, devices, target, timeout, say)
        try:
            files = _read(folder)
        except (OSError, ValueError) as error:
            raise CompileError(
                f"the compiled program in {folder} cannot be read: {error}.",
                fix="try again; or another folder, in $SPMD_CACHE.",
            ) from error
    return files


def _cached(folder: Path) -> tuple[str, ...] | None:
    """The files of a program in the cache, as texts; None if any is missing or truncated."""
    try:
        return _read(folder)
    except (OSError, ValueError):
        return None


def _read(folder: Path) -> tuple[str, ...]:
    """Read the files of a program; raises an `OSError` or a `ValueError` if any is missing or
    truncated.
    """
    texts = []
    for name in FILES:
        with name_errors(folder / name):
            texts.append((folder / name).read_text(encoding="utf-8"))
    json.loads(texts[1])
    if not texts[0]:
        raise ValueError("program.hlo is empty")
    with contextlib.suppress(OSError):  # the cache may be another user's
        os.utime(folder)  # marks it as recently used
    return tuple(texts)


def _compile(
    blob: bytes, folder: Path, devices: int, target: str, timeout: float, say: Callable[[str], None]
) -> None:
    """Compile a request in the compile server, and store the results in the cache."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _evict(folder.parent)
        with tempfile.TemporaryDirectory(
            prefix=f"plan-{os.getpid()}-{_HOST}-", dir=folder.parent, ignore_cleanup_errors=True
        ) as name:
            work = Path(name)
            (work / "request.pickle").write_bytes(blob)
            compile_server.compile_request(work, _environment(), devices, target, timeout, say)
            if not (work / "memory.json").is_file():
                failed, log = f"compiling for {target} failed:", _last(work / compile_server.LOG)
                raise CompileError(
                    f"{failed}\n{log}", summary=f"{failed} {log.splitlines()[0].strip()}"
                )
            _store(work, folder)
    except OSError as error:
        why = f"the cache of compiled programs, {folder.parent}, cannot be written: {error}"
        raise CompileError(f"{why}.", fix="another folder, in $SPMD_CACHE.") from error


def _store(work: Path, folder: Path) -> None:
    """Move the results into the cache, atomically."""
    done = work / "done"
    done.mkdir()
    (work / "buffers.txt").touch()  # some compilers write none
    for file in FILES:
        (work / file).replace(done / file)
    if _cached(folder) is None:
        shutil.rmtree(folder, ignore_errors=True)  # damaged
    # before it has its name: after a loss of power, a program with a name is complete
    sync_tree(done)
    try:
        done.replace(folder)
    except OSError:
        if _cached(folder) is None:  # else another process has stored the same program
            raise


def _evict(folder: Path) -> None:
    """Remove the oldest programs of a full cache, and what killed processes have left."""
    programs = [path for path in folder.iterdir() if re.fullmatch(r"[0-9a-f]{32}", path.name)]
    old = sorted(programs, key=lambda path: path.stat().st_mtime)[: -CACHE_SIZE + 1]
    local = re.compile(rf"plan-(\d+)-{re.escape(_HOST)}-")  # a folder may be shared by hosts
    stale = [
        path
        for path in folder.glob("plan-*")
        if (match := local.match(path.name)) and not _alive(int(match.group(1)))
    ]
    for path in [*old, *stale]:
        shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)  # sends no signal
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _environment() -> dict[str, str]:
    """Environment variables that the compile server gets in addition to this process's; "" removes
    one.
    """
    source = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    variables = {
        "XLA_FLAGS": _flags(),
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONPATH": paths,
    }
    # programs from that cache have no buffer report
    variables |= dict.fromkeys(("JAX_NUM_CPU_DEVICES", "JAX_COMPILATION_CACHE_DIR"), "")
    # no query of a cloud's metadata, and no lock file
    return variables | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def _flags() -> str:
    """The user's XLA flags, which change the program, except the number of devices."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(flag for flag in flags if "host_platform_device_count" not in flag)


def _last(path: Path) -> str:
    """The last error of a log, without its traceback."""
    lines = [
        line
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    # the compiler aborted; its stack follows
    fatal = [line for line in lines if re.match(r"F\d{4} ", line)]
    if fatal:
        return f"    {fatal[-1].partition('] ')[2] or fatal[-1]}"
    starts = [number for number, line in enumerate(lines) if re.match(r"[\w.]*Error\b", line)]
    shown = lines[starts[-1] :] if starts else lines[-5:]
    # a note on JAX's frames follows
    end = next(
        (number for number, line in enumerate(shown) if line.startswith("-----")), len(shown)
    )
    return (
        "\n".join(f"    {line}" for line in shown[:end][:12])
        or "    it printed nothing; is the disk full?"
    )


def topology(cluster: Cluster) -> dict[str, Any]:
    """The arguments of `jax.experimental.topologies.get_topology_desc` for a cluster; a TPU cluster
    is a slice.

    Raises:
      OptionError: no slice has this number of chips.
    """
    target = cluster.target
    if target.platform == "cuda":
        shape = f"1x{cluster.nodes}x{cluster.devices}"
        return {"platform": "cuda", "target_config": description(target), "topology": shape}
    bounds, dims, remaining = (
        [1] * target.compiler["dims"],
        target.compiler["dims"],
        cluster.devices,
    )
    while remaining > 1 and remaining % 2 == 0:
        at = min(range(dims), key=lambda dim: (bounds[dim], -dim if dims == 2 else dim))
        bounds[at], remaining = 2 * bounds[at], remaining // 2
    if remaining != 1:
        near = 2 ** (cluster.devices.bit_length() - 1)
        fix = f'"{near}x{target.name}" or "{2 * near}x{target.name}"'
        raise OptionError(f'target "{cluster}": slices have 1, 2, 4, 8, 16 … chips.', fix=f"{fix}.")
    host = [min(size, 2) for size in bounds[:2]] + [1]
    name = f"{target.compiler['name']}:{'x'.join(map(str, bounds))}"
    kind = "megacore" if dims == 3 else "default"  # both cores of a chip as one device
    return {
        "platform": "tpu",
        "topology_name": name,
        "chips_per_host_bounds": tuple(host),
        "chip_config_name": kind,
    }


def description(target: Target) -> str:
    """A device's description for the GPU compiler, as a text proto. All fields are set, because
    missing ones go unnoticed.
    """
    specific = target.compiler
    major, minor = specific["compute_capability"]
    common = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "threads_per_core_limit": 2048 if (major, minor) in ((8, 0), (9, 0), (10, 0)) else 1536,
        "block_dim_limit_x": 2147483647,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "device_address_bits": 64,
    }
    fields = common | {
        name: value
        for name, value in specific.items()
        if name not in ("compute_capability", "name")
    }
    fields |= {
        "memory_bandwidth": int(target.memory_bandwidth),
        "device_memory_size": target.memory,
    }
    lines = [f"  {name}: {value}" for name, value in fields.items()]
    texts = {
        "device_vendor": "NVIDIA Corporation",
        "name": specific["name"],
        "dnn_version": ".".join(map(str, VERSION)),
    }
    texts |= dict.fromkeys(
        ("driver_version", "runtime_version", "compile_time_toolkit_version"), "13.0.0"
    )
    lines += [f'  {name}: "{value}"' for name, value in texts.items()]
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor} }}")
    numbers = " ".join(
        f"{part}: {number}"
        for part, number in zip(("major", "minor", "patch"), VERSION, strict=True)
    )
    rest = f'dnn_version_info {{ {numbers} }}\ndevice_description_str: "{specific["name"]}"\n'
    return "\n".join(["gpu_device_info {", *lines, "}", 'platform_name: "CUDA"', rest])
