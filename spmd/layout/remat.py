"""The `[remat]` table: which activations are recomputed in the backward pass, kept, or moved to the
host's memory.
"""

import dataclasses
from collections.abc import Iterator

from spmd.base.fields import Conflict, as_rules, names
from spmd.base.tracebacks import trims_tracebacks

SAVES = ("everything", "dots", "dots_no_batch", "nothing", "offload")


@trims_tracebacks
@dataclasses.dataclass(frozen=True)
class Remat:
    """The activations that are recomputed in the backward pass instead of being kept.

    `save` names what is kept: "everything", "dots" (results of matrix products, and of cuDNN's
    attention), "dots_no_batch" (the same without products that have batch dims, as unfused
    attention's), "offload" (products of weights, in the host's memory), "nothing", or a tuple of
    names that the model gives to values by `jax.ad_checkpoint.checkpoint_name`. Values named in
    `offload` are kept in the host's pinned memory.

    `modules` are path patterns of submodules, each rematerialised on its own; without them it is
    the whole forward pass. `rules` are further `Remat`s, for other modules.

    Args:
      save: what is kept; None: everything, and nothing inside of `modules`.
      modules: patterns of submodules; (): the forward pass as one.
      offload: names of values that are kept in the host's memory.
      rules: further `Remat`s, for other modules.

    Example:
      >>> Remat("nothing", "blocks/*").modules
      ('blocks/*',)
      >>> Remat(("attention",), ("blocks/layers",), offload=("features",)).names
      ('attention', 'features')
    """

    save: str | tuple[str, ...] | None = None
    modules: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    rules: tuple["Remat", ...] = ()

    def __post_init__(self):
        # Layouts are compared and hashed, and a list has no hash.
        if isinstance(self.save, list):
            object.__setattr__(self, "save", tuple(self.save))
        if self.save is not None and not isinstance(self.save, str):
            names(self.save)
        for field in ("modules", "offload"):
            object.__setattr__(self, field, names(getattr(self, field)))
        as_rules(self, "rules", Remat)

    @property
    def saves(self) -> str | tuple[str, ...]:
        """The values that are kept: if the layout does not say, nothing of named modules but
        offloaded values, else everything.
        """
        if self.save:
            return self.save
        if self.modules or self.offload:
            return "nothing"
        return "everything"

    @property
    def saved_names(self) -> tuple[str, ...]:
        """The names that `save` gives to values."""
        if isinstance(self.save, tuple):
            return self.save
        return ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of values that are kept or offloaded."""
        return tuple(dict.fromkeys([*self.saved_names, *self.offload]))

    @property
    def offloads(self) -> bool:
        """Return whether any value goes to the host's memory."""
        return (
            self.save == "offload"
            or bool(self.offload)
            or any(rule.offloads for rule in self.rules)
        )

    @property
    def of_modules(self) -> "tuple[Remat, ...]":
        """The tables for modules: this one, if it is for modules, and its rules."""
        if self.modules:
            return (self, *self.rules)
        return self.rules

    @property
    def patterns(self) -> tuple[str, ...]:
        """Path patterns of all modules that are rematerialised."""
        return tuple(pattern for remat in self.of_modules for pattern in remat.modules)

    def __str__(self) -> str:
        """Return the table in a few words.

        >>> str(Remat(("attention",), offload=("features",)))
        'attention, features offloaded'
        """
        text = self.saves
        if isinstance(text, tuple):
            text = ", ".join(text)
        if self.offload:
            text += f", {', '.join(self.offload)} offloaded"
        rules = [f"{', '.join(rule.modules)}: {rule}" for rule in self.rules]
        return "; ".join([text, *rules])


def remat_problems(remat: Remat) -> Iterator[Conflict]:
    """Yield values of `[remat]` that contradict each other."""
    twice = sorted(set(remat.offload) & set(remat.saved_names))
    if twice:
        yield Conflict(
            "offload",
            f"{', '.join(twice)}: kept on the device by save, too.",
            "each name in one of the two.",
        )
    if remat.offload and remat.save == "everything":
        yield Conflict(
            "offload",
            'save = "everything" keeps these values on the device, too.',
            'save = "nothing", "dots" or names.',
        )
    if remat.rules and not remat.modules and remat.saves != "everything":
        why = (
            "without modules, save is for the whole forward pass, and what it says then holds "
            "inside the modules of rules, too."
        )
        yield Conflict("save", why, 'modules = ["..."] for it, or only rules.')
    if isinstance(remat.save, tuple) and not remat.save:
        yield Conflict("save", "no names.", 'save = "nothing".')
    for rule in remat.rules:
        if not rule.modules or rule.rules:
            why = f"a rule ({rule}) without modules."
            if rule.rules:
                why = f"a rule ({rule}) has rules."
            yield Conflict("rules", why, 'such as modules = ["blocks/*"].')
        for conflict in remat_problems(dataclasses.replace(rule, rules=())):
            yield dataclasses.replace(
                conflict, why=f"rule for {', '.join(rule.modules)}: {conflict.why}"
            )
