"""Drawings of what runs where, and when: hosts, servers, trials, copies in memory, microbatches."""

import re
from pathlib import Path

from docs.building.charts import NARROW, OTHER, OURS, bars
from docs.building.concepts import arrow
from spmd.render.svg import SERIES, box, caption, heading, legend, on_box, svg

MEMORY_PAGE = Path(__file__).resolve().parents[1] / "cookbook" / "memory.md"


def _chip(x: float, y: float, width: float, height: float, colour: str, words: str) -> str:
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="5"'
    return (
        f'<rect {shape} fill="var(--{colour})" fill-opacity="0.22" stroke="var(--{colour})"/>'
        + caption(x + width / 2, y + height / 2 + 4, words, "middle")
    )


def _panel(x: float, y: float, width: float, height: float, title: str) -> str:
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="8"'
    return f'<rect {shape} fill="none" stroke="var(--line)"/>' + caption(x + 8, y + 16, title)


def hosts() -> str:
    """A launcher, two hosts with an agent and two processes each, and the devices of all as one
    mesh.
    """
    parts = [_chip(85, 1, 170, 24, "f", "spmd launch --hosts ...")]
    for host in range(2):
        left = 1 + 173 * host
        middle = left + 82
        parts.append(arrow(middle, 26, middle, 42))
        parts += [
            _panel(left, 43, 165, 158, f"host {host}"),
            _chip(left + 60, 49, 98, 22, "f", "agent"),
        ]
        for process in range(2):
            x, rank = left + 7 + 77 * process, 2 * host + process
            parts += [arrow(x + 37, 72, x + 37, 86), _chip(x, 87, 74, 24, "a", f"process {rank}")]
            for device in range(2):
                number, at = 2 * rank + device, x + 38 * device
                parts.append(f'<path d="M{at + 18} 112v14" stroke="currentColor"/>')
                parts += [
                    box(at, 127, 36, 30, SERIES[number], f"GPU {number}"),
                    on_box(at + 18, 146, str(number)),
                ]
            parts.append(
                f'<path d="M{x + 18} 163v9h38v-9" fill="none" stroke="var(--c)" stroke-width="2"/>'
            )
        parts.append(caption(left + 8, 192, "GPUs, fast links"))
    parts.append(
        '<path d="M10 210H330" stroke="var(--c)" stroke-width="2" stroke-dasharray="4 3"/>'
    )
    parts.append(caption(0, 229, 'one mesh of 8 devices: mesh="data=8"'))
    parts.append(caption(0, 246, "NCCL sends arrays; process 0 connects the processes"))
    return svg(
        252,
        parts,
        "spmd launch starts an agent on each host, an agent its processes; all devices are one "
        "mesh",
        width=NARROW,
    )


def servers() -> str:
    """Four positions, each a worker and the server of a quarter of the parameters."""
    parts = [caption(0, 12, "worker: computes gradients of all parameters")]
    for position in range(4):
        x = 86 * position
        parts += [
            _panel(x + 1, 20, 80, 172, f"device {position}"),
            _chip(x + 8, 42, 66, 26, "a", "worker"),
        ]
        for server in range(4):
            begin, end = x + 17 + 16 * server, 86 * server + 41
            line = f'd="M{begin} 69C{begin} 100 {end} 100 {end} 128"'
            parts.append(
                f'<path {line} fill="none" stroke="var(--{SERIES[server]})" stroke-width="1.5"/>'
            )
            parts.append(box(begin - 6, 70, 12, 7, SERIES[server], f"gradient for server {server}"))
        parts.append(f'<path d="M{x + 41} 134l-4 -7h8z" fill="currentColor"/>')
        parts += [
            box(x + 8, 136, 66, 26, SERIES[position], f"parameters of server {position}"),
            on_box(x + 41, 153, f"server {position}"),
        ]
        parts.append(caption(x + 41, 182, "1/4", "middle"))
    parts.append(caption(0, 208, "server: has a quarter of parameters and moments,"))
    parts.append(caption(0, 224, "applies gradients in the order of a simulated clock,"))
    parts.append(caption(0, 240, "and sends the new values back"))
    return svg(
        246,
        parts,
        "four devices, each a worker and the server of a quarter of the parameters",
        width=NARROW,
    )


def trials() -> str:
    """Sixteen trials on a mesh net=4, data=2: four on each pair of devices."""
    parts = [caption(0, 12, 'one program on mesh="net=4,data=2"')]
    for net in range(4):
        x = 86 * net
        parts.append(_panel(x + 1, 20, 80, 146, f"net {net}"))
        for trial in range(4):
            y = 42 + 20 * trial
            parts += [
                box(x + 8, y, 66, 17, SERIES[net], f"trial {4 * net + trial}"),
                on_box(x + 41, y + 13, f"trial {4 * net + trial}"),
            ]
        for data in range(2):
            parts.append(_chip(x + 8 + 34 * data, 130, 32, 28, "f", f"{2 * net + data}"))
    parts.append(caption(0, 184, "each pair of devices trains four trials, and each"))
    parts.append(caption(0, 200, "device of it has half of their rows"))
    return svg(206, parts, "sixteen trials stacked over four pairs of devices", width=NARROW)


def copies() -> str:
    """Checkpoints in the memory of three hosts: each keeps its shards, and a copy of its
    neighbour's.
    """
    parts = []
    for host in range(3):
        x, neighbour = 1 + 114 * host, (host - 1) % 3
        parts += [_panel(x, 1, 108, 142, f"host {host}"), caption(x + 8, 38, "devices")]
        parts += [
            box(x + 8, 44, 92, 20, SERIES[host], f"shards of host {host}"),
            on_box(x + 54, 58, f"shards {host}"),
        ]
        parts += [arrow(x + 30, 66, x + 30, 84), caption(x + 8, 100, "memory")]
        for at, owner in enumerate((host, neighbour)):
            words = "copy" if at else "shards"
            parts += [box(x + 8 + 47 * at, 106, 45, 28, SERIES[owner], f"{words} of host {owner}")]
            parts += [on_box(x + 30 + 47 * at, 124, f"{words} {owner}" if at else f"{owner}")]
    for host in range(2):
        x = 1 + 114 * host
        parts.append(
            f'<path d="M{x + 30} 136v22h{161 - 4}v-16" fill="none" stroke="var(--c)" '
            'stroke-width="1.5"/>'
        )
        parts.append(f'<path d="M{x + 187} 136l-4 7h8z" fill="var(--c)"/>')
    parts.append(
        '<path d="M259 136v30H77v-24" fill="none" stroke="var(--c)" stroke-width="1.5" '
        'stroke-dasharray="3 3"/>'
    )
    parts.append('<path d="M77 136l-4 7h8z" fill="var(--c)"/>')
    parts.append(caption(0, 186, "a lost host's shards are in the memory of the next host"))
    return svg(
        192,
        parts,
        "each host's memory has its shards and a copy of those of the host before it",
        width=NARROW,
    )


def microbatches() -> str:
    """A step of one batch, and of four microbatches: what a device computes, and how many rows'
    activations it holds.
    """
    parts, y = [], 0
    for title, count in (("accumulate=1", 1), ("accumulate=4", 4)):
        parts.append(heading(0, y + 13, title))
        wide = 232 / count
        for number in range(count):
            x = number * wide
            parts.append(
                box(x, y + 20, wide / 3 - 1, 18, "a", f"forward pass of microbatch {number}")
            )
            parts.append(
                box(
                    x + wide / 3,
                    y + 20,
                    2 * wide / 3 - 2,
                    18,
                    "e",
                    f"backward pass of microbatch {number}",
                )
            )
            high = 44 / count
            parts.append(
                f'<path d="M{x:.1f} {y + 88}L{x + wide / 3:.1f} {y + 88 - high}L{x + wide - 2:.1f} '
                f'{y + 88}z" '
                'fill="var(--g)" fill-opacity="0.8"/>'
            )
        parts += [box(234, y + 20, 44, 18, "c", "reduce"), box(280, y + 20, 58, 18, "d", "update")]
        parts += [on_box(256, y + 33, "reduce"), on_box(309, y + 33, "update")]
        parts.append(f'<path d="M0 {y + 88.5}H338" stroke="var(--line)"/>')
        parts.append(caption(338, y + 80, "activations held", "end"))
        y += 104
    parts += [
        legend(0, y + 12, "a", "forward"),
        legend(84, y + 12, "e", "backward"),
        legend(180, y + 12, "g", "activations"),
    ]
    return svg(
        y + 18,
        parts,
        "a step in one piece and in four microbatches: one reduction, a quarter of the activations",
        width=NARROW,
    )


def memory() -> str:
    """Gigabytes of a device by means, as the programs of the page print them."""
    text = MEMORY_PAGE.read_text(encoding="utf-8")
    # and the words before the number
    printed = {"data_parallel": "data_parallel", "fsdp": "data_parallel .* fsdp"}
    printed |= {"fsdp, remat": "with remat", "fsdp, accumulate=4": "microbatches"}
    sizes = {
        name: re.search(rf"^.*{words} ([\d.]+)", text, re.MULTILINE)[1]
        for name, words in printed.items()
    }
    rows = [
        (name, float(size), f"{size} GB", OTHER if name == "data_parallel" else OURS)
        for name, size in sizes.items()
    ]
    return bars("GB of a device for a step of this model", rows)
