"""A collective as a picture: the blocks that each device has before and after it."""

import numpy as np

from spmd.errors import OptionError, did_you_mean
from spmd.render.html import Html, framed
from spmd.render.svg import SERIES, box, caption, frame, on_box, svg

# the title of a drawing, with the share that each of n devices sends around a ring
KINDS = {
    "all_reduce": "all-reduce: each sends 2 (n - 1) / n of the array",
    "reduce_scatter": "reduce-scatter: each sends (n - 1) / n of the array",
    "all_gather": "all-gather: each sends (n - 1) / n of the array",
    "all_to_all": "all-to-all: each sends (n - 1) / n of its array",
    "ring": "ring: each sends its block to the next",
}
# in SVG units: a block, the space between devices, and the height of the arrows
WIDTH, HEIGHT = 78, 19
GAP = 8
ARROWS = 46


def collective(kind: str, *, devices: int = 4) -> Html:
    """Draw a collective, for a notebook's cell: the blocks that each device has before it, who
    sends to whom, and the blocks that each has after it.

    A number is one block of an array. A block's colour is that of the device it comes from; a sum
    has the colours of all.

    Args:
      kind: `"all_reduce"`, `"reduce_scatter"`, `"all_gather"`, `"all_to_all"` or `"ring"`.
      devices: from 2 to 8.

    Returns:
      HTML, which a notebook shows.

    Raises:
      OptionError: another collective, or another number of devices.

    Example:
      >>> shown = collective("all_reduce", devices=2)
      >>> "device 1, before: 10" in shown, "device 1, after: 11" in shown
      (True, True)
    """
    if kind not in KINDS:
        raise OptionError(
            f'collective: there is no drawing of "{kind}".', fix=did_you_mean(str(kind), KINDS)
        )
    is_integer = isinstance(devices, int) and not isinstance(devices, bool)
    if not is_integer or not 2 <= devices <= 8:
        raise OptionError(f"collective: devices={devices!r}.", fix="a whole number from 2 to 8.")
    before, after = blocks(kind, devices)
    bottom = 34 + HEIGHT * before.shape[1]
    parts = [caption(0, 12, KINDS[kind])]
    for device in range(devices):
        label = f"device {device}"
        parts.append(caption(_middle(device), 29, label, "middle"))
    parts += _row("before", before, 34)
    parts += _arrows(kind, devices, bottom)
    top = bottom + ARROWS
    parts += _row("after", after, top)
    height = top + HEIGHT * after.shape[1] + 2
    width = devices * (WIDTH + GAP) - GAP
    return framed(svg(height, parts, KINDS[kind], width=width))


def blocks(kind: str, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the blocks [device, position] that each device has before and after; 0 where it has
    none.

    >>> [array.tolist() for array in blocks("reduce_scatter", 2)]
    [[[1, 2], [10, 20]], [[11, 0], [0, 22]]]
    """
    # A digit for each device: positions are at most 8, so the sum of all has no carry.
    digits = 10 ** np.arange(devices)
    positions = np.arange(1, devices + 1)
    arrays = np.outer(digits, positions)
    sum_of_all = arrays.sum(axis=0)
    sums = np.broadcast_to(sum_of_all, arrays.shape)
    shards = np.diag(sum_of_all)
    firsts = arrays[:, :1]
    shifted = np.roll(firsts, 1, axis=0)
    return {
        "all_reduce": (arrays, sums),
        "reduce_scatter": (arrays, shards),
        "all_gather": (shards, sums),
        "all_to_all": (arrays, arrays.T),
        "ring": (firsts, shifted),
    }[kind]


def _left(device: int) -> float:
    return device * (WIDTH + GAP)


def _middle(device: int) -> float:
    return _left(device) + WIDTH / 2


def _row(when: str, blocks_of_devices: np.ndarray, top: float) -> list[str]:
    """Return the drawing of the blocks of all devices, before or after."""
    parts = []
    for (device, position), number in np.ndenumerate(blocks_of_devices):
        left = _left(device)
        y = top + position * HEIGHT
        inner_top = y + 1
        inner_height = HEIGHT - 2
        title = f"device {device}, {when}: {number or 'nothing'}"
        if not number:
            parts.append(frame(left, inner_top, WIDTH, inner_height, title))
            continue
        # a digit of the number is not 0 where the block of that device is in it
        digits = enumerate(reversed(str(number)))
        sources = [source for source, digit in digits if digit != "0"]
        width = WIDTH / len(sources)
        for place, source in enumerate(sources):
            colour = SERIES[source]
            share_left = left + place * width
            parts.append(box(share_left, inner_top, width, inner_height, colour, title))
        parts.append(on_box(_middle(device), y + 14, str(number)))
    return parts


def _arrows(kind: str, devices: int, top: float) -> list[str]:
    """Return the drawing of arrows from the devices that send to those that receive."""
    parts = []
    tip = top + ARROWS - 5
    for sender in range(devices):
        receivers = [device for device in range(devices) if device != sender]
        if kind == "ring":
            receivers = [(sender + 1) % devices]
        for receiver in receivers:
            start = _middle(sender)
            end = _middle(receiver)
            begin = f"M{start:.1f} {top + 4:.1f}"
            controls = f"C{start:.1f} {top + 24:.1f} {end:.1f} {top + 18:.1f}"
            bend = f"{begin}{controls} {end:.1f} {tip:.1f}"
            stroke = f'stroke="var(--{SERIES[sender]})" stroke-width="1.5"'
            parts.append(f'<path d="{bend}" fill="none" {stroke}/>')
    for device in range(devices):
        left = _middle(device) - 4
        head = tip - 4
        parts.append(f'<path d="M{left:.1f} {head:.1f}h8l-4 7z" fill="currentColor"/>')
    return parts
