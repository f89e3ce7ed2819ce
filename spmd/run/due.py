"""Which steps something must look at the state after."""

import dataclasses


def due(every: int | None, step: int) -> bool:
    """Whether what happens every so many steps happens after this one; None: it never does, but at ends of epochs.

    >>> due(3, 6), due(3, 7), due(None, 6)
    (True, False, False)
    """
    return every is not None and step % every == 0


@dataclasses.dataclass(frozen=True)
class Due:
    """Steps between two evaluations, two checkpoints, and two calls of each callback that reads the state.

    Attributes:
      judged: whether an evaluation decides which checkpoint is the best.
    """

    evaluate: int | None
    save: int | None
    judged: bool
    exact: tuple[int, ...]

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation is due at this step of an epoch, for itself or to judge a checkpoint."""
        return due(self.evaluate, step) or (self.judged and due(self.save, step))

    @property
    def strides(self) -> list[int]:
        """All of these numbers."""
        return [every for every in (self.evaluate, self.save, *self.exact) if every is not None]

    def left(self, step: int) -> list[int]:
        """Steps until each happens next."""
        return [every - step % every for every in self.strides]
