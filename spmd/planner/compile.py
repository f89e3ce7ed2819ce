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

from spmd.base.output_files import name_errors, sync_tree
from spmd.errors import CompileError, OptionError, first_line, how_to_install, option
from spmd.mesh import MeshSpec
from spmd.planner import compile_server
from spmd.planner.cluster import Cluster
from spmd.planner.gpu_kernels import VERSION, gpu_of
from spmd.planner.target import Target
from spmd.program_cache.folder import cache_folder
from spmd.train.compiled_step import TrainingProgram
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
    """Return the platform whose compiler is used for a target, and a description of it."""
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


def widened_dtype(precision: str, compiled: Compiled) -> str:
    """Return the dtype whose products XLA:CPU computes in float32, in an estimate; "" if there is
    none.
    """
    if precision != "float32" and not compiled.exact:
        return precision
    return ""


def compile_step(
    program: TrainingProgram,
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
    exact = platform == cluster.target.platform
    options = {}
    if exact:
        options = dict(program.functions.options)
    layout = program.placed.resolved.layout
    # the request is the key of the cache: whatever changes the program is in it
    blob = pickle.dumps(_request(program, cluster, platform, options))
    _, _, _, kind = COMPILERS[platform]
    try:
        hlo, memory, buffers = program_files(
            blob,
            cache_folder(PLANS) / hashlib.sha256(blob).hexdigest()[:32],
            # Only CPUs are simulated, as many as the mesh has. A topology describes GPUs and TPUs.
            cluster.count if platform == "cpu" else 1,
            f"{cluster} with XLA:{kind}",
            timeout,
            say,
        )
    except CompileError as error:
        check_buffering(str(error), layout.compiler, layout.source)
        raise
    sizes = json.loads(memory)
    options |= sizes.pop("options", {})
    seconds, retried = sizes.pop("seconds"), sizes.pop("retried", "")
    return Compiled(compiler, exact, hlo, sizes, buffers, seconds, options, retried)


def _request(
    program: TrainingProgram, cluster: Cluster, platform: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Return everything that the compile server needs, and that the program depends on.

    Raises:
      CompileError: a part of the step runs in this process only.
    """
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
    fields["_get_vjp"] = None  # a function, which cannot be pickled and is not called
    layout = program.placed.resolved.layout
    _, distribution, _, _ = COMPILERS[platform]
    source = ""
    if options:
        source = layout.source
    devices = {}
    if platform != "cpu":
        devices = topology(cluster)
    versions = (jax.__version__, jaxlib.__version__, importlib.metadata.version(distribution))
    return {
        "exported": fields,
        "donated": donated,
        "options": options,
        "chosen": sorted(layout.compiler.chosen),
        "layout": source,
        "mesh": MeshSpec.parse(program.placed.mesh).axes,
        "x64": jax.config.jax_enable_x64,  # type: ignore[attr-defined]
        "topology": devices,
        "compiler": (*versions, _flags()),  # part of the cache's key
    }


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
    """Return `FILES` of a program, as texts: from its folder in the cache, where the compile
    server's results are kept.

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
            files = _read_files(folder)
        except (OSError, ValueError) as error:
            raise CompileError(
                f"the compiled program in {folder} cannot be read: {error}.",
                fix="try again; or another folder, in $SPMD_CACHE.",
            ) from error
    return files


def _cached(folder: Path) -> tuple[str, ...] | None:
    """Return the files of a program in the cache, as texts; None if any is missing or
    truncated.
    """
    try:
        return _read_files(folder)
    except (OSError, ValueError):
        return None


def _read_files(folder: Path) -> tuple[str, ...]:
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
    prefix = f"plan-{os.getpid()}-{_HOST}-"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _evict(folder.parent)
        with tempfile.TemporaryDirectory(
            prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True
        ) as name:
            work = Path(name)
            (work / "request.pickle").write_bytes(blob)
            compile_server.compile_request(work, _environment(), devices, target, timeout, say)
            if not (work / "memory.json").is_file():
                failure = f"compiling for {target} failed:"
                log = _last(work / compile_server.LOG)
                first = log.splitlines()[0]
                raise CompileError(f"{failure}\n{log}", summary=f"{failure} {first.strip()}")
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
    programs.sort(key=lambda path: path.stat().st_mtime)
    # One place is left for the program that is about to be stored.
    removed = programs[: -CACHE_SIZE + 1]
    # a folder may be shared by hosts, whose processes cannot be asked for
    local = re.compile(rf"plan-(\d+)-{re.escape(_HOST)}-")
    for path in folder.glob("plan-*"):
        if (match := local.match(path.name)) and not _alive(int(match.group(1))):
            removed.append(path)
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    """Return True if a process exists."""
    try:
        os.kill(process, 0)  # sends no signal
    except OSError as error:
        # A process of another user exists, too, though it may be sent no signal.
        return not isinstance(error, ProcessLookupError)
    return True


def _environment() -> dict[str, str]:
    """Return environment variables that the compile server gets in addition to this process's; ""
    removes one.
    """
    # The server imports this spmd, also where it is a checkout that is not installed.
    source = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    return {
        "XLA_FLAGS": _flags(),
        # JAX would find the plugin of the GPU compiler, and complain of missing CUDA libraries.
        "JAX_PLATFORMS": "cpu",
        # XLA's errors only: users see the log where compiling fails.
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONPATH": paths,
        # The server sets its own number.
        "JAX_NUM_CPU_DEVICES": "",
        # programs from JAX's own cache have no buffer report
        "JAX_COMPILATION_CACHE_DIR": "",
        # libtpu makes no query of a cloud's metadata, and no lock file
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def _flags() -> str:
    """Return the user's XLA flags, which change the program, except the number of devices."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(flag for flag in flags if "host_platform_device_count" not in flag)


def _last(path: Path) -> str:
    """Return the last error of a log, without its traceback."""
    text = path.read_text(encoding="utf-8", errors="replace")
    # XLA prints warnings before an error, and absl its stack after a fatal one
    lines = [line for line in text.splitlines() if line.strip()]
    # the compiler aborted; its stack follows
    fatal = [line for line in lines if re.match(r"F\d{4} ", line)]
    if fatal:
        return f"    {fatal[-1].partition('] ')[2] or fatal[-1]}"
    starts = [number for number, line in enumerate(lines) if re.match(r"[\w.]*Error\b", line)]
    shown = []
    for line in lines[starts[-1] if starts else -5 :]:
        if line.startswith("-----"):  # a note on JAX's frames follows
            break
        shown.append(f"    {line}")
    return "\n".join(shown[:12]) or "    it printed nothing; is the disk full?"


def topology(cluster: Cluster) -> dict[str, Any]:
    """Return the arguments of `jax.experimental.topologies.get_topology_desc` for a cluster; a TPU
    cluster is a slice.

    Raises:
      OptionError: no slice has this number of chips.
    """
    target = cluster.target
    if target.platform == "cuda":
        # XLA's order: partitions, hosts of each partition, devices of each host.
        shape = f"1x{cluster.nodes}x{cluster.devices}"
        return {"platform": "cuda", "target_config": description(target), "topology": shape}
    dims = target.compiler["dims"]
    bounds = [1] * dims
    remaining = cluster.devices
    while remaining > 1 and remaining % 2 == 0:
        # double the shortest dim: of two, first the last, as libtpu's slices of 2 chips are 1x2
        at = min(range(dims), key=lambda dim: (bounds[dim], -dim if dims == 2 else dim))
        bounds[at] *= 2
        remaining //= 2
    if remaining != 1:
        near = 2 ** (cluster.devices.bit_length() - 1)
        fix = f'"{near}x{target.name}" or "{2 * near}x{target.name}"'
        raise OptionError(f'target "{cluster}": slices have 1, 2, 4, 8, 16 … chips.', fix=f"{fix}.")
    return {
        "platform": "tpu",
        "topology_name": f"{target.compiler['name']}:{'x'.join(map(str, bounds))}",
        "chips_per_host_bounds": (*(min(size, 2) for size in bounds[:2]), 1),
        "chip_config_name": "megacore" if dims == 3 else "default",  # both cores as one device
    }


def description(target: Target) -> str:
    """Return a device's description for the GPU compiler, as a text proto.

    All fields are set, because missing ones go unnoticed.
    """
    specific = target.compiler
    major, minor = specific["compute_capability"]
    large = (major, minor) in ((8, 0), (9, 0), (10, 0))  # the GPUs of data centres
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        # Without opting in to more (CUDA C++ Programming Guide, compute capabilities).
        "shared_memory_per_block": 49152,
        "threads_per_core_limit": 2048 if large else 1536,
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
    fields |= specific
    del fields["compute_capability"], fields["name"]
    fields["memory_bandwidth"] = int(target.memory_bandwidth)
    fields["device_memory_size"] = target.memory
    texts = {
        "device_vendor": "NVIDIA Corporation",
        "name": specific["name"],
        # JAX's lowering, which chooses kernels of cuDNN, gets the same version from `gpu_of`.
        "dnn_version": ".".join(map(str, VERSION)),
        "driver_version": "13.0.0",
        "runtime_version": "13.0.0",
        "compile_time_toolkit_version": "13.0.0",
    }
    lines = ["gpu_device_info {"]
    lines += [f"  {name}: {value}" for name, value in fields.items()]
    lines += [f'  {name}: "{value}"' for name, value in texts.items()]
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor} }}")
    lines += ["}", 'platform_name: "CUDA"']
    version = zip(("major", "minor", "patch"), VERSION, strict=True)
    numbers = " ".join(f"{part}: {number}" for part, number in version)
    lines.append(f"dnn_version_info {{ {numbers} }}")
    lines.append(f'device_description_str: "{specific["name"]}"\n')
    return "\n".join(lines)
