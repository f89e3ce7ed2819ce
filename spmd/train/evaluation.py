"""The program that evaluates data: that of training where batches are alike, else one of its own, and what does not fit is raised."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator

from spmd.data.batches import differences, kind_of
from spmd.errors import DataError, LossError, listed, problems_text
from spmd.train.placed import Placed
from spmd.train.program import Program
from spmd.tree import Tree, flatten


@contextlib.contextmanager
def naming_differences(sample: Tree, trained: Tree) -> Iterator[None]:
    """Around a trace of evaluation: where it fails on batches like `sample`, what differs from those that are trained on is raised."""
    try:
        yield
    except LossError as error:
        problems = [] if trained is None else differences(sample, trained)
        if not problems:
            raise
        problems[-1] = dataclasses.replace(problems[-1], cure="batches like those for training, but for the number of rows.")
        raise DataError(problems_text(f"the data to evaluate does not fit: {str(error).splitlines()[0]}", problems)) from error


def evaluation_program(placed: Placed, sample: Tree, trained: Program | None) -> Program:
    """The program for evaluation batches like `sample`, traced; `trained` is that of training, if there is one.

    Raises:
      DataError: the loss or a metric fails on such batches, and they differ from those that are trained on.
    """
    with naming_differences(sample, placed.sample):
        program = trained if trained is not None and kind_of(trained.sample) == kind_of(sample) else Program(placed, sample)
        names = program.eval_names
    there, wanted = flatten(sample), {} if trained is None else flatten(trained.sample)
    lost = [name for name in trained.eval_names if name not in names] if trained is not None and list(there) != list(wanted) else []
    if lost:
        text = "evaluation does not measure %s: the loss returns it for batches of %s, and the data to evaluate has %s."
        logging.getLogger("spmd").warning(text, ", ".join(lost), listed(wanted), listed(there))
    return program
