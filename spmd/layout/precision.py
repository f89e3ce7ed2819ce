"""The `[[precision]]` rules: in which dtype the matrix products of a module's weights are
computed.
"""

import dataclasses

from spmd.base.fields import check_types, names
from spmd.base.tracebacks import trims_tracebacks
from spmd.errors import OptionError

PRODUCTS = ("bfloat16", "float8", "int8")


@trims_tracebacks
@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtype of the products of weights in all modules whose path matches `path`, and none of
    `except_`.

    `products` is "bfloat16", "float8" (e4m3 forward, e5m2 for gradients) or "int8" (forward only).
    Parameters and optimizer state keep their dtypes. `line` is where the file says so.

    Args:
      path: a pattern of layers.
      products: "bfloat16", "float8" or "int8".
      except_: patterns of layers that the rule leaves out.
      line: of the file; None without one.

    Example:
      >>> Precision("blocks/**", "float8", except_="**/router").except_
      ('**/router',)
    """

    path: str
    products: str
    except_: tuple[str, ...] = ()
    line: int | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        check_types(self)
        object.__setattr__(self, "except_", names(self.except_))
        if self.products not in PRODUCTS:
            raise OptionError(
                f"Precision: products={self.products!r}.", fix=f"one of {', '.join(PRODUCTS)}."
            )
