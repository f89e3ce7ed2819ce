"""Modules and functions that a layout may shard over a mesh axis. Outside of a step they are
ordinary model code.
"""

from spmd.nn.attention import attention as attention
from spmd.nn.bidirectional import Bidirectional as Bidirectional
from spmd.nn.embed import Embed as Embed
from spmd.nn.layer_stack import LayerStack as LayerStack
from spmd.nn.moe import MixtureOfExperts as MixtureOfExperts, Routing as Routing
from spmd.nn.pool import max_pool2 as max_pool2
from spmd.nn.rnn_stack import RNNStack as RNNStack
from spmd.nn.schedule import (
    Schedule as Schedule,
    best_chunk as best_chunk,
    make_schedule as make_schedule,
)
from spmd.nn.stacking import repeat as repeat
