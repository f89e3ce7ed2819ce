"""spmd: train a Flax model over many devices, laid out by a file, as one compiled step.

Start with `fit`; `Trainer` is for people who own their loop. Names are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "spmd.run.checkpoint",
    "Default": "spmd.layout.schema",
    "Experts": "spmd.layout.model_parallel",
    "Ensemble": "spmd.inference.ensemble",
    "ExportedModel": "spmd.inference.loader",
    "FunctionalModel": "spmd.models.functional",
    "GradientRule": "spmd.layout.gradients",
    "Gradients": "spmd.layout.gradients",
    "Halving": "spmd.sweeps.successive_halving",
    "History": "spmd.run.history",
    "Layout": "spmd.layout.schema",
    "ParameterServer": "spmd.layout.server",
    "MeshSpec": "spmd.mesh",
    "OptimizerState": "spmd.layout.schema",
    "Remat": "spmd.layout.schema",
    "Pipeline": "spmd.layout.model_parallel",
    "Plan": "spmd.planner.planning",
    "Result": "spmd.api",
    "Rule": "spmd.layout.schema",
    "Sequence": "spmd.layout.model_parallel",
    "SpmdError": "spmd.errors",
    "State": "spmd.train.state",
    "Trainer": "spmd.trainer",
    "callbacks": "spmd.callbacks:",
    "compare": "spmd.planner.comparison",
    "data": "spmd.data:",
    "errors": "spmd.errors:",
    "export": "spmd.inference.exporter",
    "fit": "spmd.api",
    "join": "spmd.distributed.initialize",
    "launch": "spmd.launch:",
    "load_exported": "spmd.inference.loader",
    "log_uniform": "spmd.sweeps.search_space",
    "loggers": "spmd.loggers:",
    "losses": "spmd.losses:",
    "make_mesh": "spmd.mesh",
    "metrics": "spmd.metrics:",
    "nn": "spmd.nn:",
    "plan": "spmd.planner.planning",
    "saturation": "spmd.planner.scaling",
    "search": "spmd.planner.layout_search",
    "simulate": "spmd.sync.param_server.simulation",
    "simulate_devices": "spmd.mesh",
    "sweep": "spmd.sweeps.api",
    "uniform": "spmd.sweeps.search_space",
    "viz": "spmd.viz:",
}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:  # what the table above says, in a form that editors read
    from spmd import callbacks as callbacks
    from spmd import data as data
    from spmd import errors as errors
    from spmd import launch as launch
    from spmd import loggers as loggers
    from spmd import losses as losses
    from spmd import metrics as metrics
    from spmd import nn as nn
    from spmd import viz as viz
    from spmd.api import Result as Result
    from spmd.api import fit as fit
    from spmd.distributed.initialize import join as join
    from spmd.errors import SpmdError as SpmdError
    from spmd.inference.ensemble import Ensemble as Ensemble
    from spmd.inference.exporter import export as export
    from spmd.inference.loader import ExportedModel as ExportedModel
    from spmd.inference.loader import load_exported as load_exported
    from spmd.layout.gradients import GradientRule as GradientRule
    from spmd.layout.gradients import Gradients as Gradients
    from spmd.layout.model_parallel import Experts as Experts
    from spmd.layout.model_parallel import Pipeline as Pipeline
    from spmd.layout.model_parallel import Sequence as Sequence
    from spmd.layout.schema import Default as Default
    from spmd.layout.schema import Layout as Layout
    from spmd.layout.schema import OptimizerState as OptimizerState
    from spmd.layout.schema import Remat as Remat
    from spmd.layout.schema import Rule as Rule
    from spmd.layout.server import ParameterServer as ParameterServer
    from spmd.mesh import MeshSpec as MeshSpec
    from spmd.mesh import make_mesh as make_mesh
    from spmd.mesh import simulate_devices as simulate_devices
    from spmd.models.functional import FunctionalModel as FunctionalModel
    from spmd.planner.comparison import compare as compare
    from spmd.planner.layout_search import search as search
    from spmd.planner.planning import Plan as Plan
    from spmd.planner.planning import plan as plan
    from spmd.planner.scaling import saturation as saturation
    from spmd.run.checkpoint import Checkpoint as Checkpoint
    from spmd.run.history import History as History
    from spmd.sweeps.api import sweep as sweep
    from spmd.sweeps.search_space import log_uniform as log_uniform
    from spmd.sweeps.search_space import uniform as uniform
    from spmd.sweeps.successive_halving import Halving as Halving
    from spmd.sync.param_server.simulation import simulate as simulate
    from spmd.train.state import State as State
    from spmd.trainer import Trainer as Trainer


def __getattr__(name: str):
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'spmd' has no attribute {name!r}")
    found = importlib.import_module(home.removesuffix(":"))  # a colon marks the module itself
    value = found if home.endswith(":") else getattr(found, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
