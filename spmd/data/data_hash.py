"""A hash of data, so that a run is not resumed on other data: of all bytes if they are few, else of
evenly spaced blocks.
"""

import concurrent.futures
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spmd.base.output_files import name_errors
from spmd.base.tree import Tree, flatten

BLOCK = 1 << 14  # bytes that are read at a time
BLOCKS = 1 << 10  # read at most: 16 MiB
READERS = 16  # threads that read
# blocks that a thread reads at a time, where there are many: handing one over takes longer than
# reading a small file
TOGETHER = 16


def of_files(paths: Sequence[str], sizes: Sequence[int], blocks: int = BLOCKS) -> str:
    """A hash of the sizes of files, and of their contents or a number of blocks of them."""
    begins = np.cumsum([0, *sizes])
    total = int(begins[-1])
    firsts, length = [0], total
    if total > blocks * BLOCK:
        firsts = np.linspace(0, total - BLOCK, blocks).astype(np.int64).tolist()
        length = BLOCK
    spans = []
    for first in firsts:
        file = int(np.searchsorted(begins, first, "right")) - 1
        left = length
        while left:  # a block may continue in the next file
            size = min(left, int(begins[file + 1]) - first)
            spans.append((paths[file], first - int(begins[file]), size))
            file, first, left = file + 1, first + size, left - size
    digest = hashlib.sha256(repr(list(sizes)).encode())
    together = max(1, min(TOGETHER, len(spans) // READERS))
    groups = [spans[first : first + together] for first in range(0, len(spans), together)]
    threads = min(READERS, len(spans) or 1)
    # `map` keeps the order of the groups, on which the hash depends.
    with concurrent.futures.ThreadPoolExecutor(threads, "spmd-contents") as pool:
        for piece in pool.map(_read_spans, groups):
            digest.update(piece)
    return digest.hexdigest()[:16]


def of_arrays(arrays: Tree) -> dict[str, str]:
    """By path, a hash of each array [examples, ...]: of its dtype, its shape, and its rows, or a
    sample with the first and the last.
    """
    return {path: _of_array(leaf) for path, leaf in flatten(arrays).items()}


def _of_array(leaf: np.ndarray) -> str:
    digest = hashlib.sha256(f"{leaf.dtype} {leaf.shape}".encode())
    # Rows of an array [n, 0] have no bytes.
    row_bytes = max(leaf.itemsize * int(np.prod(leaf.shape[1:])), 1)
    most_rows = BLOCKS * BLOCK // row_bytes
    if most_rows < len(leaf):
        sample = np.linspace(0, len(leaf) - 1, max(most_rows, 2)).astype(np.int64)
        leaf = leaf[sample]
    # As bytes: an array of bfloat16 has no memoryview (ml_dtypes 0.6).
    digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:16]


def _read_spans(spans: Sequence[tuple[str, int, int]]) -> bytes:
    """Return the bytes of spans, each a file, the span's first byte there, and its length."""
    pieces = []
    for path, first, size in spans:
        with name_errors(Path(path)):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                pieces.append(os.pread(descriptor, size, first))
            finally:
                os.close(descriptor)
    return b"".join(pieces)
