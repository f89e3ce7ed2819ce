"""Drawings of results: bars of the tables in benchmarks/results/, the plans of the README, and the
timelines of a wavefront.
"""

import functools
import json
import re
from pathlib import Path

from spmd.nn.schedule import make_schedule
from spmd.planner.text_report import seconds
from spmd.render.svg import SERIES, box, caption, heading, legend, svg

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
NARROW, PANEL = 340, 262  # pixels: what a phone shows, and a third of a page
GIB = 2**30


@functools.cache
def plans() -> dict:
    """The figures of `benchmarks/headline_plans.py`."""
    return json.loads((RESULTS / "headline_plans.json").read_text(encoding="utf-8"))


def table(name: str, *below: str) -> list[dict[str, str]]:
    """The rows of the first table in a page of results after these texts, which follow each other,
    by column.
    """
    text = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    for words in below:
        text = text[text.index(words) :]
    lines = re.search(r"(?:^\|.*\n?)+", text, re.MULTILINE)[0].strip().split("\n")
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(header, row, strict=True)) for row in rows]


def number(text: str) -> float:
    """The first number in a cell."""
    return float(re.search(r"[\d.,]*\d", text)[0].replace(",", ""))


def bars(title: str, rows: list[tuple[str, float, str, str]], *, mark: float | None = None) -> str:
    """Horizontal bars: a label, a value, what is written beside the bar, with its unit, and a
    colour; `mark` is a vertical line.
    """
    left = min(158, 14 + max(7 * len(label) for label, *_ in rows))
    right = NARROW - 12 - max(7 * len(text) for _, _, text, _ in rows)
    most = max(mark or 0.0, *(value for _, value, _, _ in rows))
    line = 0.0 if mark is None else left + (right - left) * mark / most
    parts = [heading(0, 13, title)]
    for at, (label, value, text, colour) in enumerate(rows):
        y = 24 + 24 * at
        wide = max((right - left) * value / most, 1.5)
        parts.append(f'<g opacity="0.85">{caption(left - 6, y + 13, label, "end")}</g>')
        parts.append(box(left, y, wide, 17, colour, f"{label}: {text}"))
        # the text begins after the line
        crossed = left + wide < line < left + wide + 12 + 7 * len(text)
        parts.append(caption((line if crossed else left + wide) + 5, y + 13, text))
    if mark is not None:
        parts.append(
            f'<path d="M{line:.1f} 20V{24 + 24 * len(rows)}" stroke="currentColor" '
            'stroke-dasharray="3 3"/>'
        )
    return svg(26 + 24 * len(rows), parts, title, width=NARROW)


OURS, OTHER, GOOD, LOST = "a", "f", "good", "bad"


def ratios(
    title: str, rows: list[tuple[str, float]], *, more_is_better: bool, written: str = "x{:.2f}"
) -> str:
    """Bars of ratios to another program: green if better than it, red if worse, blue within 1 %; a
    line at 1.
    """

    def colour(ratio: float) -> str:
        return OURS if abs(ratio - 1) <= 0.01 else GOOD if (ratio > 1) == more_is_better else LOST

    return bars(
        title,
        [(label, ratio, written.format(ratio), colour(ratio)) for label, ratio in rows],
        mark=1.0,
    )


def wavefront() -> str:
    """Steps of eight LSTM layers on one device, data parallel and as a wavefront, on the same axis
    of time.
    """
    names = {
        "lstm one device": "one H100",
        "lstm data_parallel": "8 H100s, data parallel",
        "lstm wavefront": "8 H100s, wavefront",
    }
    longest = plans()["lstm one device"]["seconds"]
    parts, y = [], 0.0
    for name, title in names.items():
        plan = plans()[name]
        faster = (
            f", {longest / plan['seconds']:.1f} times as fast" if name != "lstm one device" else ""
        )
        more = "" if plan["fits"] else ", does not fit"
        parts.append(heading(0, y + 13, title))
        parts.append(caption(0, y + 29, f"{seconds(plan['seconds'])} per step{faster}{more}"))
        for kind, colour in (("computation", "a"), ("communication", "c")):
            top = y + (35 if kind == "computation" else 51)
            shape = f'x="0" y="{top}" width="{NARROW}" height="14"'
            parts.append(f'<rect {shape} fill="var(--soft)"/>')
            for begin, end in plan["spans"][kind]:
                where, wide = NARROW * begin / longest, max(NARROW * (end - begin) / longest, 0.5)
                parts.append(box(where, top, wide, 14, colour, f"{kind}: {seconds(end - begin)}"))
        y += 74
    for half_seconds in range(int(2 * longest) + 1):
        x = NARROW * half_seconds / 2 / longest
        parts.append(f'<path d="M{x:.1f} {y - 4}v6" stroke="currentColor"/>')
        parts.append(
            caption(x, y + 15, f"{half_seconds / 2} s", "middle" if half_seconds else "start")
        )
    y += 24
    parts += [legend(0, y + 12, "a", "computation"), legend(120, y + 12, "c", "communication")]
    return svg(
        y + 18,
        parts,
        "timelines of one step of eight LSTM layers: one device, data parallel, wavefront",
        width=NARROW,
    )


def wavefront_schedule() -> str:
    """Which stage works on which chunk of time, in the forward pass of the wavefront."""
    made = plans()["lstm wavefront"]["schedule"]
    schedule = make_schedule(made["name"], stages=made["stages"], microbatches=made["microbatches"])
    forward = [row for row in schedule.table if not any(work and work.backward for work in row)]
    wide, high, left = (NARROW - 50) / len(forward), 15, 50
    parts = []
    for stage in range(schedule.stages):
        parts.append(caption(0, stage * high + 12, f"GPU {stage}"))
    for tick, row in enumerate(forward):
        for stage, work in enumerate(row):
            shape = (
                f'x="{left + tick * wide:.2f}" y="{stage * high + 1}" width="{wide - 0.6:.2f}" '
                f'height="{high - 3}"'
            )
            opacity = (
                ""
                if work is None
                else f' fill-opacity="{0.45 + 0.55 * work.microbatch / made["microbatches"]:.2f}"'
            )
            parts.append(
                f'<rect {shape} fill="var(--{"soft" if work is None else "a"})"{opacity}/>'
            )
    y = schedule.stages * high
    parts.append(caption(left, y + 14, f"{len(forward)} ticks forward; darker chunks are later"))
    return svg(
        y + 20,
        parts,
        "a wavefront: each GPU has one layer, and works one chunk of time behind the one above",
        width=NARROW,
    )


def schedules() -> str:
    """The three schedules of a pipeline of four stages and eight microbatches, in time: a tick of
    two groups is half as long.
    """
    left, high, y, parts = 48, 15, 0.0, []
    kinds = {"gpipe": 1, "circular": 2, "1f1b": 1}
    made = {
        name: make_schedule(name, stages=4, microbatches=8, groups=groups)
        for name, groups in kinds.items()
    }
    longest = max(schedule.ticks / kinds[name] for name, schedule in made.items())
    for name, schedule in made.items():
        wide = (NARROW - left) / longest / kinds[name]
        groups = f", {kinds[name]} groups of layers" if kinds[name] > 1 else ""
        parts.append(heading(0, y + 13, f"{name}{groups}: {schedule.bubble:.0%} idle"))
        y += 20
        for stage in range(schedule.stages):
            parts.append(caption(0, y + stage * high + 12, f"stage {stage}"))
        for tick, row in enumerate(schedule.table):
            for stage, work in enumerate(row):
                colour = "soft" if work is None else "c" if work.backward else "a"
                shade = (
                    "" if work is None else f' fill-opacity="{0.5 + 0.5 * work.microbatch / 7:.2f}"'
                )
                shape = (
                    f'x="{left + tick * wide:.1f}" y="{y + stage * high + 1:.0f}" '
                    f'width="{wide - 0.7:.1f}" height="{high - 2}"'
                )
                parts.append(f'<rect {shape} fill="var(--{colour})"{shade}/>')
        y += schedule.stages * high + 10
    parts += [
        legend(0, y + 12, "a", "forward"),
        legend(90, y + 12, "c", "backward"),
        legend(190, y + 12, "soft", "idle"),
    ]
    return svg(
        y + 18,
        parts,
        "gpipe, circular and 1f1b schedules of four stages and eight microbatches",
        width=NARROW,
    )


def finetuning() -> str:
    """Memory of an H100 that fine-tuning 8 B parameters is expected to need."""
    rows = [row for row in table("finetune_plans") if row["devices"] == "1xh100"]
    drawn = [
        (
            row["trained"].replace(" weights", "") if "," in row["trained"] else row["trained"],
            number(row["expected"]),
            row,
        )
        for row in rows
    ]
    words = [
        (name, size, f"{size:.1f} GiB", LOST if "not fit" in row["expected"] else GOOD)
        for name, size, row in drawn
    ]
    return bars("8 B parameters on one 80 GB H100, planned", words, mark=79.1)


def sweep() -> str:
    """Seconds for 64 networks."""
    names = {"one program": "one program", "the same": "exact=False", "`spmd.fit`": "one by one"}
    drawn = [
        (
            next(short for start, short in names.items() if row["arm"].startswith(start)),
            number(row["seconds, median"]),
        )
        for row in table("sweep")
    ]
    words = [
        (name, value, f"{value:.1f} s", OTHER if name == "one by one" else OURS)
        for name, value in drawn
    ]
    return bars("64 networks, 20 epochs of digits", words)


def published() -> str:
    """Planned / measured of every published run that has both."""
    rows = [row for row in table("published") if row["ratio"]]
    low, high = 0.25, 1.2
    parts = [heading(0, 13, "planned / measured, published runs")]
    sources = list(dict.fromkeys(row["source"] for row in rows))

    def x(ratio: float) -> float:
        return 128 + (NARROW - 140) * (ratio - low) / (high - low)

    for at, source in enumerate(sources):
        y = 34 + 22 * at
        parts.append(
            f'<g opacity="0.85">{caption(120, y + 4, source.removesuffix("Examples"), "end")}</g>'
        )
        parts.append(f'<path d="M128 {y}H{NARROW}" stroke="var(--soft)"/>')
        for row in (row for row in rows if row["source"] == source):
            ratio = number(row["ratio"])
            colour = "good" if abs(ratio - 1) <= 0.25 else "bad"
            title = f"{row['run']}, {row['model']} on {row['hardware']}: {ratio:.2f}"
            parts.append(
                f'<circle cx="{x(ratio):.1f}" cy="{y}" r="5" fill="var(--{colour})" '
                f'fill-opacity="0.7"><title>{title}</title></circle>'
            )
    bottom = 34 + 22 * len(sources)
    for ratio in (0.5, 0.75, 1.0):
        parts.append(
            f'<path d="M{x(ratio):.1f} 20V{bottom - 6}" stroke="var(--line)"/>'
            + caption(x(ratio), bottom + 9, str(ratio), "middle")
        )
    return svg(
        bottom + 16,
        parts,
        "planned divided by measured step times of published runs, by source",
        width=NARROW,
    )


def bandwidth(link: str, rate: str) -> str:
    """Steps per second with each codec on a link, beside exact."""
    rows = [
        row
        for row in table("bandwidth", f"### {link}")
        if row["rate"] == rate and row["arm"] in ("bfloat16", "int8 + feedback")
    ]
    kind = "" if rate == "unthrottled" else ", shared" if link == "shared" else " each way"
    title = f"steps/s beside exact: {rate}{kind}"
    return ratios(
        title, [(row["arm"], number(row["against exact"])) for row in rows], more_is_better=True
    )


def overhead() -> str:
    """Time of a step of `fit` beside others."""
    rows = [
        (f"{model}: {row['ratio'].removeprefix('fit / ')}", number(row["median"]))
        for model, names in (
            ("cnn", ("fit / functional", "fit / nnx_jit", "fit / keras")),
            ("mlp", ("fit / functional", "fit / nnx_jit")),
        )
        for row in table("step_overhead", f"### {model}", "| ratio")
        if row["ratio"] in names
    ]
    return ratios("time of a step of fit / that of ...", rows, more_is_better=False)


def input_rates(kind: str) -> str:
    """Records per second of a format, by reader."""
    rows = [
        (row["arm"], number(row["records/s, median"]))
        for row in table("input", f"### {kind}")
        if "in order" not in row["arm"]
    ]
    words = [
        (reader, rate, f"{rate:,.0f}/s", OURS if "spmd" in reader else OTHER)
        for reader, rate in rows
    ]
    return bars(f"records/s, {kind}, shuffled", words)


def processes() -> str:
    """Steps per second of two processes, beside PyTorch's DDP."""
    rows = table("processes", "### steps")
    drawn = [(row["arm"], number(row["steps/s"]), row["steps/s"]) for row in rows]
    names = dict.fromkeys(name for name, _, _ in drawn)
    best = {
        name: next((value, text) for label, value, text in drawn if label == name) for name in names
    }
    return bars(
        "steps/s of a CNN on 2 cores",
        [
            (name, value, f"{text}/s", OTHER if "torch" in name else OURS)
            for name, (value, text) in best.items()
        ],
    )


def checkpoints() -> str:
    """Seconds of a save."""
    rows = [row for row in table("checkpoints", "### save") if not row["arm"].startswith("plain")]
    return bars(
        "seconds of a save, 0.40 GB",
        [
            (
                row["arm"],
                number(row["median s"]),
                f"{row['median s']} s",
                OURS if "spmd" in row["arm"] else OTHER,
            )
            for row in rows
        ],
    )


def restarts() -> str:
    """Seconds from a fault to a new step, with checkpoints on disk only, and in memory."""
    rows = table("restarts", "## small")
    kinds = {"disk only": OTHER, "memory_every": OURS}
    drawn = [
        (
            f"{row['fault']}".replace(" and its workers", "")
            .replace("all workers of a host", "a host's workers")
            .replace(" with its memory", ""),
            row,
        )
        for row in rows
    ]
    return bars(
        "seconds from a fault to a new step",
        [
            (
                name,
                number(row["s to a new step"]),
                f"{number(row['s to a new step'])} s, {row['checkpoints'].split('_')[0]}",
                kinds[row["checkpoints"]],
            )
            for name, row in drawn
        ],
    )


def codecs() -> str:
    """Final loss beside exact over bytes beside exact, with AdamW."""
    rows = [
        row
        for row in table("convergence", "### AdamW")
        if "nudged" not in row["arm"] and row["arm"] != "exact"
    ]
    return ratios(
        "final loss / that of exact, AdamW",
        [(row["arm"], number(row["ratio to exact"])) for row in rows],
        more_is_better=False,
    )


def codec_bytes() -> str:
    """Bytes of gradients beside exact."""
    rows = [row for row in table("convergence", "### AdamW") if "feedback" in row["arm"]]
    drawn = [
        (
            row["arm"].removesuffix(" + feedback"),
            (share := number(row["gradient bytes / exact"])),
            f"{share:.1%}",
            OURS,
        )
        for row in rows
    ]
    return bars("bytes of gradients, of exact's", [("exact", 1.0, "100%", OTHER), *drawn])


def sharded_kernel() -> str:
    """A kernel in eight shards, and the eight devices that hold them."""
    parts = [heading(0, 13, 'layout="fsdp": a kernel over 8 GPUs')]
    for device in range(8):
        y = 26 + 15 * device
        parts.append(box(0, y, 92, 14, SERIES[device], f"shard {device}"))
        column, row = device % 2, device // 2
        x, top = 140 + 56 * column, 26 + 31 * row
        parts.append(
            f'<rect x="{x}" y="{top}" width="50" height="26" rx="4" fill="var(--soft)" '
            'stroke="var(--line)"/>'
        )
        parts.append(box(x + 4, top + 16, 42, 6, SERIES[device], f"shard {device}"))
        parts.append(caption(x + 25, top + 12, f"GPU {device}", "middle"))
    parts.append(
        '<path d="M102 86h24" stroke="currentColor" stroke-width="2"/><path d="M132 86l-8 -5v10z" '
        'fill="currentColor"/>'
    )
    return svg(152, parts, "a kernel in eight shards, one on each of eight GPUs", width=PANEL)


def verdict(name: str) -> str:
    """The memory of a plan, beside what a device has."""
    plan = plans()[f"gpt {name}"]
    colour = "good" if plan["fits"] else "bad"
    expected, capacity = plan["expected"] / GIB, plan["capacity"] / GIB
    most = max(p["expected"] for key, p in plans().items() if key.startswith("gpt")) / GIB
    scale = (PANEL - 4) / most
    figures = f"{expected:.1f} of {capacity:.1f} GiB"
    parts = [heading(0, 13, f"spmd plan --layout {name}")]
    parts.append(box(0, 50, expected * scale, 34, colour, figures))
    parts.append(
        f'<rect x="1" y="44" width="{capacity * scale:.1f}" height="46" fill="none" '
        'stroke="currentColor" stroke-width="2" rx="2"/>'
    )
    parts.append(caption(capacity * scale, 39, f"{plan['target']}: {capacity:.1f} GiB", "end"))
    said = f"{'fits' if plan['fits'] else 'DOES NOT FIT'}: {figures}"

    large = f'style="fill:var(--{colour});font-size:14px;font-weight:700"'
    parts.append(f'<text x="0" y="113" {large}>{said}</text>')

    billions = f"{plan['parameters'] / 1e9:.1f} B parameters, {plan['devices']} GPUs"
    parts.append(
        caption(
            0,
            134,
            f"{billions}" + (f", {seconds(plan['seconds'])} per step" if plan["fits"] else ""),
        )
    )
    return svg(152, parts, f"a plan of {billions} under {name}: {said} on each", width=PANEL)
