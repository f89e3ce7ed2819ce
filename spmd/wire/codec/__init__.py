"""Codecs: the wire formats of gradients, one file per codec."""

from typing import Any

from spmd.wire.codec.base import Codec
from spmd.wire.codec.bfloat16 import Bfloat16
from spmd.wire.codec.exact import Exact
from spmd.wire.codec.float8 import Float8
from spmd.wire.codec.int8 import Int8
from spmd.wire.codec.power_sgd import PowerSgd
from spmd.wire.codec.sign import Sign
from spmd.wire.codec.top_k import TopK

CODECS: dict[str, type[Codec]] = {
    "exact": Exact,
    "bfloat16": Bfloat16,
    "int8": Int8,
    "float8": Float8,
    "sign": Sign,
    "top_k": TopK,
    "power_sgd": PowerSgd,
}


def make_codec(name: str, options: Any) -> Codec:
    """The codec that a layout names, with its options.

    >>> make_codec("int8", {"block": 128})
    Int8(block=128)
    """
    return CODECS[name](**dict(options))
