"""Gradient communication for any `jax.shard_map` loop: optax transformations that average gradients
over workers.

    tx = optax.chain(
        wire.all_reduce("data", wire.int8(block=256), error_feedback=True), optax.adamw(1e-3)
    )

`spmd.fit` builds the same from a layout's `[gradients]`. This package imports no layout, loop or
launcher.

Begin with `all_reduce` in `transformations.py`. Its update goes through `Averaging`
(`reduction.py`: buckets and error feedback) and a codec (`codec/`) to the collectives
(`collectives.py`).
"""

from spmd.wire.check_codec import check
from spmd.wire.codec import register
from spmd.wire.codec.base import Codec, RowCodec, option
from spmd.wire.codec.bfloat16 import Bfloat16 as bfloat16
from spmd.wire.codec.exact import Exact as exact
from spmd.wire.codec.float8 import Float8 as float8
from spmd.wire.codec.int8 import Int8 as int8
from spmd.wire.codec.power_sgd import PowerSgd as power_sgd
from spmd.wire.codec.sign import Sign as sign
from spmd.wire.codec.top_k import TopK as top_k
from spmd.wire.communication import WireState
from spmd.wire.count import bytes_sent, comm_log as log
from spmd.wire.gathering import all_gather, gather, residual_like
from spmd.wire.local_steps import LocalState, local_sgd
from spmd.wire.reduction_registry import register_reduction
from spmd.wire.resplit_state import resplit
from spmd.wire.server.clock import server_clock
from spmd.wire.server.transformation import ServerState, parameter_server
from spmd.wire.states import init, local_params, specs
from spmd.wire.transformations import all_reduce, hierarchical, reduce_scatter
from spmd.wire.zero import ZeroState, zero1

__all__ = [
    "Codec",
    "LocalState",
    "RowCodec",
    "ServerState",
    "WireState",
    "ZeroState",
    "all_gather",
    "all_reduce",
    "bfloat16",
    "bytes_sent",
    "check",
    "exact",
    "float8",
    "gather",
    "hierarchical",
    "init",
    "int8",
    "local_params",
    "local_sgd",
    "log",
    "option",
    "parameter_server",
    "power_sgd",
    "reduce_scatter",
    "register",
    "register_reduction",
    "residual_like",
    "resplit",
    "server_clock",
    "sign",
    "specs",
    "top_k",
    "zero1",
]
