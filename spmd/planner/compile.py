"""A step compiled for hardware that need not be there, in a process of its own: bounded in time, and kept for the next time."""

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

from spmd.errors import CompileError, OptionError, how_to_install
from spmd.mesh import MeshSpec
from spmd.planner import compile_client
from spmd.planner.target import Cluster, Target
from spmd.train.compiled_step import Program

PLUGIN = "jax_cuda13_plugin"
COMPILERS = {  # by platform: the module that has it, its distribution, our extra, and what it is called
    "cuda": (PLUGIN, "jax-cuda13-plugin", "gpu-compiler", "XLA:GPU", "GPU"),
    "tpu": ("libtpu", "libtpu", "tpu-compiler", "XLA:TPU", "TPU"),
}
FILES = ("program.hlo", "memory.json", "buffers.txt")
_HOST = re.sub(r"\W", "_", socket.gethostname())
KEPT = 64  # compiled programs in the cache; the one that was not used for longest goes first


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler made of a step.

    Attributes:
      compiler: which one, in words; `exact` says whether it is the target's own.
      hlo: the scheduled program of one device, as text.
      sizes: bytes on one device as XLA has them: argument, output, alias (outputs that take an argument's place), temp, generated_code.
      buffers: XLA's report of what shares which memory; "" where it writes none.
      seconds: how long compiling took, without tracing.
    """

    compiler: str
    exact: bool
    hlo: str
    sizes: dict[str, int]
    buffers: str
    seconds: float


def compiler_of(target: Target, nodes: int = 1) -> tuple[str, str]:
    """The platform whose compiler is taken for a target, and in words which that is and why."""
    if target.platform == "cpu":
        return "cpu", "XLA:CPU, on simulated devices"
    module, _, extra, name, kind = COMPILERS[target.platform]
    if target.platform == "tpu" and nodes > 1:
        return "cpu", "an ESTIMATE by XLA:CPU: what XLA:TPU sends between slices is in no collective that could be read; of one slice it is"
    if importlib.util.find_spec(module) is not None:
        return target.platform, f"{name}, told of {target.title}; no {kind} was needed"
    return "cpu", f"an ESTIMATE by XLA:CPU: the compiler for {target.title} is not installed ({how_to_install(extra)})"


def compile_step(program: Program, cluster: Cluster, *, timeout: float = 600.0, say: Callable[[str], None] = lambda line: None) -> Compiled:
    """A step on a full batch, compiled for a cluster; nothing is allocated at the model's size.

    Args:
      timeout: seconds after which the compiler is stopped.
      say: is told once a second how long it has taken.

    Raises:
      CompileError: the compiler fails, or takes too long.
    """
    platform, words = compiler_of(cluster.target, cluster.nodes)
    exported, donated = _exported(program, platform)
    fields = {field.name: getattr(exported, field.name) for field in dataclasses.fields(exported)}
    request = {
        "exported": fields | {"_get_vjp": None},  # a function, which cannot be sent, and which nobody calls
        "donated": donated,
        "mesh": MeshSpec.parse(program.placed.mesh).axes,
        "platform": platform,
        "x64": jax.config.jax_enable_x64,  # type: ignore[attr-defined]
        "nodes": cluster.nodes,
        "devices": cluster.devices,
        "topology": topology(cluster) if platform != "cpu" else {},
    }
    blob = pickle.dumps(request)
    known_by = [blob, *(text.encode() for text in (jax.__version__, jaxlib.__version__, _plugin(platform), _flags()))]
    folder = cache_folder() / hashlib.sha256(b"\0".join(known_by)).hexdigest()[:32]
    found = _kept(folder)
    if found is None:
        _compile(blob, folder, cluster.count if platform == "cpu" else 1, f"{cluster} with {words.split(',')[0]}", timeout, say)
        found = _kept(folder)
    if found is None:
        raise CompileError(f"what was compiled is not in {folder} any more.", fix="once more; or another folder, in $SPMD_CACHE.")
    hlo, memory, buffers = found
    sizes = json.loads(memory)
    return Compiled(words, platform == cluster.target.platform, hlo, sizes, buffers, sizes.pop("seconds"))


def check_timeout(timeout: float) -> None:
    """Refuse what are no seconds.

    Raises:
      OptionError: told.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or not timeout > 0:
        raise OptionError(f"timeout={timeout!r}.", fix="seconds, more than none.")


def _exported(program: Program, platform: str) -> tuple[Any, tuple[int, ...]]:
    """The step as it is sent to the compiler.

    Raises:
      CompileError: something in it runs in this process only.
    """
    try:
        return program.exported(platform)
    except (NotImplementedError, ValueError, RuntimeError, TypeError) as error:  # jax.export's words for what cannot leave this process
        first = (str(error).strip().splitlines() or [""])[0]
        raise CompileError(
            f"the step cannot be sent to a compiler elsewhere: {type(error).__name__}: {first}\n"
            "    fix: plan it without what runs on the host or asks for devices: jax.debug.print, jax.pure_callback, a mesh of one's own."
        ) from error


def _kept(folder: Path) -> tuple[str, ...] | None:
    """What the cache has of a program, its files' texts; None where any is missing or cut off."""
    try:
        texts = tuple((folder / name).read_text(encoding="utf-8") for name in FILES)
        json.loads(texts[1])
        os.utime(folder)  # the ones that are used stay longest
    except (OSError, ValueError):
        return None
    return texts if all(texts[:2]) else None


def cache_folder() -> Path:
    """Where compiled programs are kept: `$SPMD_CACHE`, or `spmd/plans` in the user's cache folder."""
    given = os.environ.get("SPMD_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spmd" / "plans"


def _compile(blob: bytes, folder: Path, devices: int, what: str, timeout: float, say: Callable[[str], None]) -> None:
    """Have it compiled, and put what it leaves into the cache at once or not at all."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent)
        with tempfile.TemporaryDirectory(prefix=f"plan-{os.getpid()}-{_HOST}-", dir=folder.parent, ignore_cleanup_errors=True) as name:
            work = Path(name)
            (work / "request.pickle").write_bytes(blob)
            compile_client.ask(work, _environment(), devices, what, timeout, say)
            if not (work / "memory.json").is_file():
                raise CompileError(f"compiling for {what} failed:\n{_last(work / compile_client.LOG)}")
            _keep(work, folder)
    except OSError as error:
        why = f"{folder.parent}, where compiled programs are kept: {error}"
        raise CompileError(f"{why}.", fix="another folder, in $SPMD_CACHE.") from error


def _keep(work: Path, folder: Path) -> None:
    """Put what there is into the cache at once or not at all."""
    done = work / "done"
    done.mkdir()
    (work / "buffers.txt").touch()  # a compiler that reports none
    for file in FILES:
        (work / file).replace(done / file)
    if _kept(folder) is None:
        shutil.rmtree(folder, ignore_errors=True)  # damaged
    with contextlib.suppress(OSError):  # another process was first, with the same
        done.replace(folder)


def _sweep(folder: Path) -> None:
    """Take away the oldest programs of a full cache, and what processes left that were killed."""
    kept = [path for path in folder.iterdir() if re.fullmatch(r"[0-9a-f]{32}", path.name)]
    old = sorted(kept, key=lambda path: path.stat().st_mtime)[: -KEPT + 1]
    of_here = re.compile(rf"plan-(\d+)-{re.escape(_HOST)}-")  # a folder may be shared by hosts
    left = [path for path in folder.glob("plan-*") if (found := of_here.match(path.name)) and not _alive(int(found.group(1)))]
    for path in [*old, *left]:
        shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)  # asks only
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _environment() -> dict[str, str]:
    """What the helper is told beside what this process was; "" for what it is not to know."""
    source = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    own = {"XLA_FLAGS": _flags(), "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": paths}
    own |= dict.fromkeys(("JAX_NUM_CPU_DEVICES", "JAX_COMPILATION_CACHE_DIR"), "")  # what comes out of that cache has no report of buffers
    return own | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # it asks no cloud which machine this is, and locks nothing


def _plugin(platform: str) -> str:
    return importlib.metadata.version(COMPILERS[platform][1]) if platform in COMPILERS else ""


def _flags() -> str:
    """What the user asks of XLA; they change the program, so they are asked of it here as well. The number of devices is ours."""
    given = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(flag for flag in given if "host_platform_device_count" not in flag)


def _last(path: Path) -> str:
    """The last error of a log, without the traceback before it."""
    lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    fatal = [line for line in lines if re.match(r"F\d{4} ", line)]  # the compiler gave up; what follows is its stack
    if fatal:
        return f"    {fatal[-1].partition('] ')[2] or fatal[-1]}"
    starts = [number for number, line in enumerate(lines) if re.match(r"[\w.]*Error\b", line)]
    shown = lines[starts[-1] :] if starts else lines[-5:]
    end = next((number for number, line in enumerate(shown) if line.startswith("-----")), len(shown))  # what follows is about jax's frames
    return "\n".join(f"    {line}" for line in shown[:end][:12]) or "    it printed nothing; is there room for files?"


def topology(cluster: Cluster) -> dict[str, Any]:
    """What `jax.experimental.topologies` is asked for: as many devices of that kind on as many nodes; slices, for TPUs.

    Raises:
      OptionError: a number of chips of which there is no slice.
    """
    target = cluster.target
    if target.platform == "cuda":
        shape = f"1x{cluster.nodes}x{cluster.devices}"
        return {"platform": "cuda", "target_config": description(target), "topology": shape}
    bounds, dims, left = [1] * target.compiler["dims"], target.compiler["dims"], cluster.devices
    while left > 1 and left % 2 == 0:
        at = min(range(dims), key=lambda dim: (bounds[dim], -dim if dims == 2 else dim))
        bounds[at], left = 2 * bounds[at], left // 2
    if left != 1:
        near = 2 ** (cluster.devices.bit_length() - 1)
        fix = f'"{near}x{target.name}" or "{2 * near}x{target.name}"'
        raise OptionError(f'target "{cluster}": slices have 1, 2, 4, 8, 16 … chips.', fix=f"{fix}.")
    host = [min(size, 2) for size in bounds[:2]] + [1]
    name = f"{target.compiler['name']}:{'x'.join(map(str, bounds))}"
    kind = "megacore" if dims == 3 else "default"  # both cores of a chip as one device
    return {"platform": "tpu", "topology_name": name, "chips_per_host_bounds": tuple(host), "chip_config_name": kind}


def description(target: Target) -> str:
    """What the GPU compiler is told of a device, as a text proto; it takes an incomplete one without a word, so all is written."""
    facts = target.compiler
    major, minor = facts["compute_capability"]
    same = {
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
    own = {name: value for name, value in facts.items() if name not in ("compute_capability", "name")}
    sizes = {"memory_bandwidth": int(target.memory_bandwidth), "device_memory_size": target.memory}
    lines = [f"  {name}: {value}" for name, value in (same | own | sizes).items()]
    texts = {"device_vendor": "NVIDIA Corporation", "name": facts["name"], "dnn_version": "9.10.0"}
    texts |= dict.fromkeys(("driver_version", "runtime_version", "compile_time_toolkit_version"), "13.0.0")
    lines += [f'  {name}: "{value}"' for name, value in texts.items()]
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor} }}")
    rest = f'dnn_version_info {{ major: 9 minor: 10 patch: 0 }}\ndevice_description_str: "{facts["name"]}"\n'
    return "\n".join(["gpu_device_info {", *lines, "}", 'platform_name: "CUDA"', rest])
