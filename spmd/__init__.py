"""spmd: train a Flax model over many devices, laid out by a file, as one compiled step.

Start with `fit`; `Trainer` is for people who own their loop. Names are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "spmd.run.checkpoint",
    "Default": "spmd.layout.declare",
    "Experts": "spmd.layout.forward",
    "Ensemble": "spmd.serve.ensemble",
    "ExportedModel": "spmd.serve.loaded",
    "FunctionalModel": "spmd.model.functional",
    "GradientRule": "spmd.layout.gradients",
    "Gradients": "spmd.layout.gradients",
    "Halving": "spmd.trials.rungs",
    "History": "spmd.run.history",
    "Layout": "spmd.layout.declare",
    "ParameterServer": "spmd.layout.server",
    "MeshSpec": "spmd.mesh",
    "OptimizerState": "spmd.layout.declare",
    "Remat": "spmd.layout.declare",
    "Pipeline": "spmd.layout.forward",
    "Plan": "spmd.preflight.planned",
    "Result": "spmd.api",
    "Rule": "spmd.layout.declare",
    "Sequence": "spmd.layout.forward",
    "SpmdError": "spmd.errors",
    "State": "spmd.train.state",
    "Trainer": "spmd.trainer",
    "callbacks": "spmd.callbacks:",
    "compare": "spmd.preflight.compared",
    "data": "spmd.data:",
    "errors": "spmd.errors:",
    "export": "spmd.serve.write",
    "fit": "spmd.api",
    "join": "spmd.hosts.arrival",
    "launch": "spmd.launch:",
    "load_exported": "spmd.serve.loaded",
    "log_uniform": "spmd.trials.space",
    "loggers": "spmd.loggers:",
    "losses": "spmd.losses:",
    "make_mesh": "spmd.mesh",
    "metrics": "spmd.metrics:",
    "nn": "spmd.nn:",
    "plan": "spmd.preflight.planned",
    "saturation": "spmd.preflight.saturate",
    "search": "spmd.preflight.searched",
    "simulate": "spmd.comm.server.ask",
    "simulate_devices": "spmd.mesh",
    "sweep": "spmd.trials.sweeping",
    "uniform": "spmd.trials.space",
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
    from spmd.comm.server.ask import simulate as simulate
    from spmd.errors import SpmdError as SpmdError
    from spmd.hosts.arrival import join as join
    from spmd.layout.declare import Default as Default
    from spmd.layout.declare import Layout as Layout
    from spmd.layout.declare import OptimizerState as OptimizerState
    from spmd.layout.declare import Remat as Remat
    from spmd.layout.declare import Rule as Rule
    from spmd.layout.forward import Experts as Experts
    from spmd.layout.forward import Pipeline as Pipeline
    from spmd.layout.forward import Sequence as Sequence
    from spmd.layout.gradients import GradientRule as GradientRule
    from spmd.layout.gradients import Gradients as Gradients
    from spmd.layout.server import ParameterServer as ParameterServer
    from spmd.mesh import MeshSpec as MeshSpec
    from spmd.mesh import make_mesh as make_mesh
    from spmd.mesh import simulate_devices as simulate_devices
    from spmd.model.functional import FunctionalModel as FunctionalModel
    from spmd.preflight.compared import compare as compare
    from spmd.preflight.planned import Plan as Plan
    from spmd.preflight.planned import plan as plan
    from spmd.preflight.saturate import saturation as saturation
    from spmd.preflight.searched import search as search
    from spmd.run.checkpoint import Checkpoint as Checkpoint
    from spmd.run.history import History as History
    from spmd.serve.ensemble import Ensemble as Ensemble
    from spmd.serve.loaded import ExportedModel as ExportedModel
    from spmd.serve.loaded import load_exported as load_exported
    from spmd.serve.write import export as export
    from spmd.train.state import State as State
    from spmd.trainer import Trainer as Trainer
    from spmd.trials.rungs import Halving as Halving
    from spmd.trials.space import log_uniform as log_uniform
    from spmd.trials.space import uniform as uniform
    from spmd.trials.sweeping import sweep as sweep


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
