"""spmd: train a Flax model over many devices, laid out by a file, as one compiled step.

Start with `fit`; `Trainer` is for people who own their loop. Names are imported when they are first
used.
"""

import importlib
import sys
from typing import TYPE_CHECKING

if sys.platform == "win32":
    raise ImportError(
        "spmd runs on Linux and macOS: Windows lacks the signals and file locks that a run relies "
        "on.\n    fix: WSL2, which is Linux."
    )

__version__ = "0.1.0"

_MODULES = (
    "callbacks",
    "data",
    "errors",
    "launch",
    "loggers",
    "losses",
    "metrics",
    "nn",
    "optimizers",
    "pretrained",
    "ray",
    "viz",
    "wire",
)
_NAMES = {
    "spmd.api": ("Result", "fit"),
    "spmd.distributed.initialize": ("join",),
    "spmd.distributed.world": ("World",),
    "spmd.errors": ("SpmdError",),
    "spmd.inference.ensemble": ("Ensemble",),
    "spmd.inference.exporter": ("export",),
    "spmd.inference.generation": ("Generator", "generate"),
    "spmd.inference.loader": ("ExportedModel", "load_exported"),
    "spmd.layout.gradients": ("GradientRule", "Gradients"),
    "spmd.layout.compiler": ("Compiler",),
    "spmd.layout.model_parallel": ("Experts", "Pipeline", "Sequence"),
    "spmd.layout.precision": ("Precision",),
    "spmd.layout.trained": ("Adapter", "Train"),
    "spmd.layout.remat": ("Remat",),
    "spmd.layout.schema": (
        "Attention",
        "Default",
        "Layout",
        "Memory",
        "OptimizerState",
        "Recurrence",
        "Rule",
    ),
    "spmd.mesh": ("MeshSpec", "make_mesh", "simulate_devices"),
    "spmd.models.functional": ("FunctionalModel",),
    "spmd.planner.calibration": ("Calibration", "calibrate"),
    "spmd.planner.curves": ("saturation", "utilization"),
    "spmd.planner.layout_search": ("search",),
    "spmd.planner.planning": ("Plan", "compare", "plan"),
    "spmd.run.checkpoint": ("Checkpoint",),
    "spmd.run.history": ("History",),
    "spmd.run.step_profiler": ("Profile",),
    "spmd.run.watch": ("Watch",),
    "spmd.sweeps.api": ("sweep",),
    "spmd.sweeps.search_space": ("Halving", "log_uniform", "uniform"),
    "spmd.sync.simulation": ("simulate",),
    "spmd.train.state": ("State",),
    "spmd.trainer": ("Trainer",),
    "spmd.wire.server.declaration": ("ParameterServer",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted([*_MODULES, *_HOMES])

# The same names, in a form that editors read.
if TYPE_CHECKING:
    from spmd import (
        callbacks as callbacks,
        data as data,
        errors as errors,
        launch as launch,
        loggers as loggers,
        losses as losses,
        metrics as metrics,
        nn as nn,
        optimizers as optimizers,
        pretrained as pretrained,
        ray as ray,
        viz as viz,
        wire as wire,
    )
    from spmd.api import Result as Result, fit as fit
    from spmd.distributed.initialize import join as join
    from spmd.distributed.world import World as World
    from spmd.errors import SpmdError as SpmdError
    from spmd.inference.ensemble import Ensemble as Ensemble
    from spmd.inference.exporter import export as export
    from spmd.inference.generation import Generator as Generator, generate as generate
    from spmd.inference.loader import ExportedModel as ExportedModel, load_exported as load_exported
    from spmd.layout.compiler import Compiler as Compiler
    from spmd.layout.gradients import GradientRule as GradientRule, Gradients as Gradients
    from spmd.layout.model_parallel import (
        Experts as Experts,
        Pipeline as Pipeline,
        Sequence as Sequence,
    )
    from spmd.layout.precision import Precision as Precision
    from spmd.layout.remat import Remat as Remat
    from spmd.layout.schema import (
        Attention as Attention,
        Default as Default,
        Layout as Layout,
        Memory as Memory,
        OptimizerState as OptimizerState,
        Recurrence as Recurrence,
        Rule as Rule,
    )
    from spmd.layout.trained import Adapter as Adapter, Train as Train
    from spmd.mesh import (
        MeshSpec as MeshSpec,
        make_mesh as make_mesh,
        simulate_devices as simulate_devices,
    )
    from spmd.models.functional import FunctionalModel as FunctionalModel
    from spmd.planner.calibration import Calibration as Calibration, calibrate as calibrate
    from spmd.planner.curves import saturation as saturation, utilization as utilization
    from spmd.planner.layout_search import search as search
    from spmd.planner.planning import Plan as Plan, compare as compare, plan as plan
    from spmd.run.checkpoint import Checkpoint as Checkpoint
    from spmd.run.history import History as History
    from spmd.run.step_profiler import Profile as Profile
    from spmd.run.watch import Watch as Watch
    from spmd.sweeps.api import sweep as sweep
    from spmd.sweeps.search_space import (
        Halving as Halving,
        log_uniform as log_uniform,
        uniform as uniform,
    )
    from spmd.sync.simulation import simulate as simulate
    from spmd.train.state import State as State
    from spmd.trainer import Trainer as Trainer
    from spmd.wire.server.declaration import ParameterServer as ParameterServer


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module 'spmd' has no attribute {name!r}")
    if name in _MODULES:
        # Importing a submodule also sets it as the attribute of this module.
        return importlib.import_module(f"spmd.{name}")
    globals()[name] = value = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
