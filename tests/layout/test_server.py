"""What is wrong with a `[parameter_server]` table, word for word, in both spellings; each concrete
fix is applied.
"""

import dataclasses
import re

import numpy as np
import pytest

import spmd
from spmd.errors import LayoutError, OptionError, SpmdError
from spmd.layout.gradients import GradientRule, Gradients
from spmd.layout.schema import Batch, Default, Layout, OptimizerState, Rule
from spmd.layout.toml_reader import loads
from spmd.wire.server.declaration import FRACTIONS, OF_MODE, ParameterServer
from spmd.wire.server.timing import Network, Times
from tests.layout.applied import X, Y, error_text, fits, unreadable

KEYS = [field.name for field in dataclasses.fields(ParameterServer)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of its own; and optimizers are not tried on packed parameters, which compiles for a
    second each time (sgd is fine).
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spmd.train.model_setup.check_packed", lambda *_: None)
    return tmp_path


def headlines(text):
    """Where each problem is, in the order of the report."""
    return [line.strip() for line in text.splitlines() if re.match(r"  \S", line)]


def table(text, gradients=""):
    """Line 4 is the first of the text, or of the lines of `[gradients]` line 3."""
    return f'[gradients]\nreduction = "parameter_server"\n{gradients}[parameter_server]\n{text}\n'


def in_python(*args, codec=("exact",), **more):
    layout = {
        name: more.pop(name) for name in ("batch", "params", "default", "optimizer") if name in more
    }
    gradients = Gradients(
        "parameter_server", *codec, **{name: more.pop(name) for name in GRADIENTS if name in more}
    )
    return Layout(gradients=gradients, parameter_server=ParameterServer(*args, **more), **layout)


GRADIENTS = ("error_feedback", "start_step", "exact_axes", "diagnostics", "rules")
ASYNC, BOUNDED, SOFTSYNC = (
    'mode = "asynchronous"',
    'mode = "bounded"\nbound = 4',
    'mode = "softsync"\nsplits = 2',
)
RULE = '[[gradients.rules]]\npath = "{}"\ncodec = "{}"\n'


# there and back -----------------------------------------------------------------------------------

LINK = {"bandwidth": "10Gb/s", "latency": "50us"}
WRITTEN = {
    "nothing": ({}, ""),
    "placement": ({"placement": "largest_first"}, 'placement = "largest_first"\n'),
    "servers, workers": ({"servers": 2, "workers": 8}, "servers = 2\nworkers = 8\n"),
    "spares": ({"spares": 1}, "spares = 1\n"),
    "bounded": ({"mode": "bounded", "bound": 0}, 'mode = "bounded"\nbound = 0\n'),
    "softsync": ({"mode": "softsync", "splits": 2}, 'mode = "softsync"\nsplits = 2\n'),
    "a distribution": (
        {"compute_time": "lognormal(1.0, 0.3)"},
        'compute_time = "lognormal(1.0, 0.3)"\n',
    ),
    "a list": ({"compute_time": [1, 0.5, 3, 1e-9]}, "compute_time = [1.0, 0.5, 3.0, 1e-09]\n"),
    "a tuple": ({"compute_time": (1.0, 0.5, 3.0, 1e22)}, "compute_time = [1.0, 0.5, 3.0, 1e+22]\n"),
    "a path": ({"compute_time": 'a "b"\\c.csv'}, 'compute_time = "a \\"b\\"\\\\c.csv"\n'),
    "a link": ({"network": LINK}, 'network = { bandwidth = "10Gb/s", latency = "50us" }\n'),
    "half a link": ({"network": {"latency": "50us"}}, 'network = { latency = "50us" }\n'),
    "a link in pairs": ({"network": (("latency", "50us"),)}, 'network = { latency = "50us" }\n'),
    "staleness": (
        {
            "mode": "asynchronous",
            "staleness_scale": "power(0.5)",
            "max_staleness": 0,
            "delay_compensation": 1,
        },
        'mode = "asynchronous"\nstaleness_scale = "power(0.5)"\nmax_staleness = 0\n'
        "delay_compensation = 1.0\n",
    ),
    "the rest": (
        {
            "mode": "asynchronous",
            "warmup_steps": 3,
            "fetch_every": 5,
            "drop_remainder": True,
            "seed": 7,
        },
        'mode = "asynchronous"\nwarmup_steps = 3\nfetch_every = 5\ndrop_remainder = true\nseed = '
        "7\n",
    ),
    "local": (
        {
            "mode": "local",
            "every": 6,
            "fragments": 2,
            "overlap": 1,
            "mix": 0.5,
            "outer_rate": 1,
            "outer_momentum": 0,
        },
        'mode = "local"\nevery = 6\nfragments = 2\noverlap = 1\nmix = 0.5\nouter_rate = 1.0\n'
        "outer_momentum = 0.0\n",
    ),
    "elastic": (
        {"mode": "elastic", "every": 10, "moving_rate": 0.1},
        'mode = "elastic"\nevery = 10\nmoving_rate = 0.1\n',
    ),
    "adaptive": (
        {"mode": "asynchronous", "delay_compensation": 2, "delay_decay": 0.95},
        'mode = "asynchronous"\ndelay_compensation = 2.0\ndelay_decay = 0.95\n',
    ),
    "all that bounded reads": (
        {
            "placement": "greedy_bytes",
            "servers": 3,
            "workers": 8,
            "mode": "bounded",
            "bound": 4,
            "compute_time": [1, 2, 3, 4, 5, 6, 7, 8],
            "network": LINK,
            "staleness_scale": "exp(0.1)",
            "max_staleness": 9,
            "delay_compensation": 0.04,
            "warmup_steps": 3,
            "seed": 2,
        },
        """\
placement = "greedy_bytes"
servers = 3
workers = 8
mode = "bounded"
bound = 4
compute_time = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
network = { bandwidth = "10Gb/s", latency = "50us" }
staleness_scale = "exp(0.1)"
max_staleness = 9
delay_compensation = 0.04
warmup_steps = 3
seed = 2
""",
    ),
}


@pytest.mark.parametrize("options, text", WRITTEN.values(), ids=WRITTEN)
def test_toml_round_trip(options, text):
    layout = in_python(**options)
    head = '[gradients]\nreduction = "parameter_server"\n'
    assert layout.to_toml() == head + (f"\n[parameter_server]\n{text}" if text else ""), (
        "defaults are not written"
    )
    with open("there.toml", "w") as file:
        file.write(layout.to_toml())
    assert Layout.load("there.toml") == layout
    assert Layout.load(layout) == layout and hash(layout.parameter_server) == hash(
        loads(layout.to_toml()).parameter_server
    )


def test_toml_round_trip_covers_every_option():
    assert {key for options, _ in WRITTEN.values() for key in options} == set(KEYS)


def test_nested_network_table():
    """A link is a table: TOML has three ways to write one."""
    inline = loads(table('network = { bandwidth = "10Gb/s", latency = "50us" }'))
    assert loads(table('network.bandwidth = "10Gb/s"\nnetwork.latency = "50us"')) == inline
    assert (
        loads(table('[parameter_server.network]\nbandwidth = "10Gb/s"\nlatency = "50us"')) == inline
    )
    assert fits(inline).layout.parameter_server.network == tuple(LINK.items())


def test_default_table_is_not_written():
    assert loads(table("spares = 0\nfetch_every = 1\nnetwork = {}")) == in_python()
    assert loads("[parameter_server]\n") == Layout()
    fits(in_python())


# what means nothing -------------------------------------------------------------------------------
# each: lines of the file, the same in Python, the error (with the file's line), the file after the
# fix

MODES = "This version knows: synchronous, asynchronous, bounded, softsync, local, elastic."
PLACEMENTS = "This version knows: sliced, round_robin, greedy_bytes, largest_first."
SCALES = '"none", "inverse", "power(a)" or "exp(b)", of numbers from 0.'
TIMES = (
    "constant(seconds), exponential(mean seconds), lognormal(median seconds, sigma), a list of "
    "seconds, or the path of a trace."
)
TIMES_FIXES = [
    'compute_time = "constant(2)"',
    'compute_time = "exponential(1.5)"',
    'compute_time = "lognormal(1.0, 0.3)"',
    "compute_time = [1.0, 1, 1, 3]",
]


def problem(key, why, fix, line=4):
    return f"  line {line}: [parameter_server] {key}\n      {why}\n      fix: {fix}"


def number(key, value, least, mode="synchronous", **more):
    """A whole number that is too small, in a mode that reads it; `least` is not too small."""

    def write(value):
        return "\n".join(
            [
                f'mode = "{mode}"',
                *(f"{other} = {fine}" for other, fine in more.items()),
                f"{key} = {value}",
            ]
        )

    said = problem(key, f"{value}.", f"a whole number from {least}.", 5 + len(more))
    fixes = [write(4 if key == "workers" else least)]
    return write(value), {"mode": mode, key: value, **more}, said, fixes


def large(key, mode="synchronous"):
    text, python, _, fixes = number(key, 2**31, 1, mode)
    return text, python, problem(key, f"{2**31}.", "below 2**31.", 5), fixes


def scale(text):
    fixes = ["none", "inverse", "power(0.5)", "exp(0.1)"]
    return (
        f'{ASYNC}\nstaleness_scale = "{text}"',
        {"mode": "asynchronous", "staleness_scale": text},
        problem("staleness_scale", f'no scale "{text}".', SCALES, 5),
        [f'{ASYNC}\nstaleness_scale = "{fix}"' for fix in fixes],
    )


def times(value, why):
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return (
        f"compute_time = {text}",
        {"compute_time": value},
        problem("compute_time", why, TIMES),
        TIMES_FIXES,
    )


def fraction(key, text, wanted, fixes, mode="asynchronous", **more):
    """A number that is not what it has to be, in a mode that reads it."""
    lines = "\n".join(
        [f'mode = "{mode}"', *(f"{other} = {fine}" for other, fine in more.items()), f"{key} = "]
    )
    said = problem(key, f"{float(text)}.", f"a number {wanted}.", 5 + len(more))
    return (
        f"{lines}{text}",
        {"mode": mode, key: float(text), **more},
        said,
        [f"{lines}{fix}" for fix in fixes],
    )


def compensation(text):
    return fraction("delay_compensation", text, "from 0", (0, 0.04))


def outer(key, text):
    wanted = {"outer_rate": "above 0", "moving_rate": "from 0"}.get(key, "from 0 to below 1")
    return fraction(
        key, text, wanted, (0.1, 0.3), "elastic" if key == "moving_rate" else "local", every=4
    )


LIKE = {
    "placement": ("placment", "sliced"),
    "servers": ("server", 2),
    "workers": ("worker", 8),
    "mode": ("modes", "asynchronous"),
    "bound": ("bounds", None),
    "splits": ("split", None),
    "spares": ("spare", 1),
    "compute_time": ("compute_times", "constant"),
    "network": ("networks", LINK),
    "staleness_scale": ("stalenes_scale", "none"),
    "max_staleness": ("max_stalenes", None),
    "delay_compensation": ("delay_compensaton", 0),
    "warmup_steps": ("warmup_step", 3),
    "fetch_every": ("fetch_evry", 1),
    "delay_decay": ("delay_decays", None),
    "every": ("evry", None),
    "fragments": ("fragment", 1),
    "overlap": ("overlaps", 0),
    "mix": ("mixed", 0.0),
    "outer_rate": ("outer_rte", 0.7),
    "outer_momentum": ("outer_momentm", 0.9),
    "moving_rate": ("moving_rat", None),
    "drop_remainder": ("drop_remainders", True),
    "seed": ("seeds", 7),
}


def toml(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(part)}" for key, part in value.items()) + " }"
    return (
        f'"{value}"'
        if isinstance(value, str)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


@pytest.mark.parametrize("key", KEYS)
def test_misspelt_option(key):
    misspelt, value = LIKE[key]
    said = (
        f"  line 4: unknown key: [parameter_server] {misspelt}\n      nothing reads it.\n      "
        f'fix: did you mean "{key}"?'
    )
    assert error_text(table(f"{misspelt} = {toml(3 if value is None else value)}")) == unreadable(
        said
    )
    if value is not None:
        fits(table(f"{key} = {toml(value)}"))


def test_unknown_option():
    said = (
        "  line 4: unknown key: [parameter_server] queue\n      nothing reads it.\n      fix: "
        f"known: {', '.join(KEYS)}."
    )
    assert error_text(table("queue = 3")) == unreadable(said)


def test_misspelt_table():
    said = (
        "  line 1: unknown key: parameter_sever\n      nothing reads it.\n      fix: did you mean "
        '"parameter_server"?'
    )
    assert error_text("[parameter_sever]\nservers = 2\n") == unreadable(said)
    said = (
        "  line 1: parameter_server\n      3 is not a table.\n      fix: write [parameter_server] "
        "on a line of its own."
    )
    assert error_text("parameter_server = 3\n") == unreadable(said)


UNREAD = {
    "no servers": number("servers", 0, 1),
    "no workers": number("workers", 0, 1),
    "workers below 0": number("workers", -4, 1),
    "spares below 0": number("spares", -1, 0),
    "bound below 0": number("bound", -1, 0, "bounded"),
    "no splits": number("splits", 0, 1, "softsync"),
    "never fetched": number("fetch_every", 0, 1, "asynchronous"),
    "younger than now": number("max_staleness", -1, 0, "asynchronous"),
    "younger than now, bounded": number("max_staleness", -1, 0, "bounded", bound=4),
    "warm before the start": number("warmup_steps", -1, 0),
    "seed below 0": number("seed", -1, 0),
    "servers out of reach": large("servers"),
    "seed out of reach": large("seed"),
    "steps out of reach": large("warmup_steps"),
    "fetches out of reach": large("fetch_every", "asynchronous"),
    "compensation below 0": compensation("-1.0"),
    "compensation by nan": compensation("nan"),
    "compensation by inf": compensation("inf"),
    "decay below 0": fraction(
        "delay_decay", "-0.1", "from 0 to below 1", (0, 0.9), delay_compensation=2
    ),
    "decay of all": fraction(
        "delay_decay", "1.0", "from 0 to below 1", (0.95,), delay_compensation=2
    ),
    "every 0": number("every", 0, 1, "local"),
    "every below 0, elastic": number("every", -1, 1, "elastic"),
    "no fragments": number("fragments", 0, 1, "local", every=4),
    "back before it was sent": number("overlap", -1, 0, "local", every=4),
    "nothing taken": outer("mix", "1.0"),
    "less than nothing kept": outer("mix", "-0.5"),
    "no outer rate": outer("outer_rate", "0.0"),
    "outer rate by nan": outer("outer_rate", "nan"),
    "momentum without end": outer("outer_momentum", "1.0"),
    "moving rate below 0": outer("moving_rate", "-0.1"),
    "misspelt mode": (
        'mode = "synchronus"',
        {"mode": "synchronus"},
        problem("mode", 'no mode "synchronus".', f'did you mean "synchronous"? {MODES}'),
        ['mode = "synchronous"', ASYNC, BOUNDED, SOFTSYNC],
    ),
    "misspelt mode that something else needs": (
        'mode = "boundd"\nbound = 4',
        {"mode": "boundd", "bound": 4},
        problem("mode", 'no mode "boundd".', f'did you mean "bounded"? {MODES}'),
        [BOUNDED],
    ),
    "unknown mode": (
        'mode = "hogwild"',
        {"mode": "hogwild"},
        problem("mode", 'no mode "hogwild".', MODES.replace("This", "this")),
        [ASYNC],
    ),
    "misspelt placement": (
        'placement = "round robin"',
        {"placement": "round robin"},
        problem(
            "placement", 'no placement "round robin".', f'did you mean "round_robin"? {PLACEMENTS}'
        ),
        [
            f'placement = "{placement}"'
            for placement in ("round_robin", "sliced", "greedy_bytes", "largest_first")
        ],
    ),
    "unknown placement": (
        'placement = "hash"',
        {"placement": "hash"},
        problem("placement", 'no placement "hash".', PLACEMENTS.replace("This", "this")),
        [],
    ),
    "half a lognormal": times(
        "lognormal(1.0)", '"lognormal(1.0)" is not lognormal(median seconds, sigma).'
    ),
    "no numbers of a lognormal": times(
        "lognormal", '"lognormal" is not lognormal(median seconds, sigma).'
    ),
    "too many numbers": times("constant(1, 2)", '"constant(1, 2)" is not constant(seconds).'),
    "another distribution": times("normal(1, 2)", 'no distribution "normal".'),
    "a mean below 0": times(
        "exponential(-1)", '"exponential(-1)" is not exponential(mean seconds).'
    ),
    "a mean in words": times(
        "exponential(fast)", '"exponential(fast)" is not exponential(mean seconds).'
    ),
    "forever": times("constant(inf)", '"constant(inf)" is not constant(seconds).'),
    "a list of nothing": times([], "[] are no seconds."),
    "a list with one below 0": times(
        [1.0, -1.0, 1.0, 1.0], "[1.0, -1.0, 1.0, 1.0] are no seconds."
    ),
    "a list with nan": (
        "compute_time = [nan, 1.0, 1.0, 1.0]",
        {"compute_time": [float("nan"), 1, 1, 1]},
        problem("compute_time", "[nan, 1.0, 1.0, 1.0] are no seconds.", TIMES),
        TIMES_FIXES,
    ),
    "no scale": scale("inverted"),
    "a scale without its number": scale("power"),
    "a power below 0": scale("power(-1)"),
    "an exponent in words": scale("exp(x)"),
    "an exponent out of reach": scale("exp(1e999)"),
}


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("text, python, said, fixes", UNREAD.values(), ids=UNREAD)
def test_invalid_table(text, python, said, fixes):
    assert_refused(text, python, said, fixes)


def assert_refused(text, python, said, fixes):
    """In both spellings, with the same words; what fixes it is accepted."""
    assert error_text(table(text)) == unreadable(said)
    line, without = said.split(": ", 1)
    assert line.startswith("  line ")
    assert error_text(in_python(**python)) == unreadable(f"  {without}", where='layout "layout"'), (
        "a layout made in Python has no lines"
    )
    for fix in fixes:
        fits(table(fix))


def test_compute_time_list_of_strings():
    said = problem(
        "compute_time", '["a", "b"] is not a list of seconds.', "such as [1.0, 1.0, 3.0]."
    )
    assert error_text(table('compute_time = ["a", "b"]')) == unreadable(said)


NETWORKS = {
    "unknown key": {"bandwith": "10Gb/s"},
    "no time": {"bandwidth": "10 Gb"},
    "below 0": {"bandwidth": "-10Gb/s"},
    "no bandwidth": {"bandwidth": "0Gb/s"},
    "a number": {"bandwidth": 10},
    "unknown unit": {"bandwidth": "10gb/s"},
    "too much": {"bandwidth": "1e400Gb/s"},
    "no number": {"bandwidth": "fast"},
    "latency without a unit": {"latency": "50"},
    "latency below 0": {"latency": "-1us"},
    "latency in numbers": {"latency": 50},
    "one of two": {"bandwidth": "10Gb/s", "latency": "soon"},
}


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_invalid_network(network):
    """The words are another test's; here: one problem, on its line, about the key and the value
    that are wrong, with the fix.
    """
    key, value = list(network.items())[-1]
    fix = '      fix: such as { bandwidth = "10Gb/s", latency = "50us" }.'
    by_file, by_python = (
        error_text(table(f"network = {toml(network)}")),
        error_text(in_python(network=network)),
    )
    assert headlines(by_file) == ["line 4: [parameter_server] network"] and headlines(
        by_python
    ) == ["[parameter_server] network"]
    for text in (by_file, by_python):
        assert (
            "1 problem:" in text
            and text.endswith(fix)
            and key in text
            and (key == "bandwith" or str(value) in text)
        )
    fits(table('network = { bandwidth = "10Gb/s", latency = "50us" }'))


@pytest.mark.parametrize(
    ("network", "means"),
    [
        ({"bandwidth": "1.5 MB/s"}, Network(bandwidth=1.5e6)),
        ({"bandwidth": "100b/s"}, Network(bandwidth=12.5)),
        ({"latency": "0s"}, Network()),
        ({"latency": "1e-3ms"}, Network(latency=1e-6)),
    ],
    ids=str,
)
def test_valid_network(network, means):
    for layout in (table(f"network = {toml(network)}"), in_python(network=network)):
        assert Network.parse(fits(layout).layout.parameter_server.network) == means


# wrong types --------------------------------------------------------------------------------------

WRONG_TYPES = {
    "placement": [3, True, None],
    "servers": ["4", 2.5, True, [2], np.int64(2)],
    "workers": ["4", 2.5, True],
    "mode": [3, True, None],
    "bound": ["four", 1.5, True],
    "splits": ["2", 1.5, False],
    "spares": ["1", 1.5, True, None],
    "compute_time": [1.5, True, {"a": 1}, None, np.ones(4)],
    "network": [10, "10Gb/s", ["10Gb/s"], None],
    "staleness_scale": [1, True, ["inverse"], None],
    "max_staleness": ["4", 1.5, True],
    "delay_compensation": ["half", True, None],
    "warmup_steps": ["3", 1.5, True, None],
    "fetch_every": ["2", 1.5, True, None],
    "delay_decay": ["half", True],
    "every": ["2", 1.5, True],
    "fragments": ["2", 1.5, True, None],
    "overlap": ["2", 1.5, True, None],
    "mix": ["half", True, None],
    "outer_rate": ["half", True, None],
    "outer_momentum": ["half", True, None],
    "moving_rate": ["half", True],
    "drop_remainder": ["yes", 1, None],
    "seed": ["zero", 0.5, True, None],
}
KIND = {
    "placement": "a str",
    "mode": "a str",
    "staleness_scale": "a str",
    "network": "a dict",
    "drop_remainder": "a bool",
} | dict.fromkeys(FRACTIONS, "a float")
FLAT = [(key, value) for key, values in WRONG_TYPES.items() for value in values]
SPELT = {
    "compute_time": "a list",
    "network": "a table",
    "staleness_scale": "a string",
    "drop_remainder": "true or false",
} | dict.fromkeys(FRACTIONS, "a number")


def test_wrong_types_cover_every_option():
    assert list(WRONG_TYPES) == KEYS


@pytest.mark.parametrize("key, value", FLAT, ids=str)
def test_wrong_type_in_python_names_option(key, value):
    with pytest.raises(OptionError) as caught:
        ParameterServer(**{key: value})
    assert str(caught.value).startswith(f"ParameterServer: {key}={value!r} is ")
    if key != "compute_time":  # of several types; see below
        assert caught.value.fix == f"{KIND.get(key, 'an int')}."


@pytest.mark.parametrize(
    "key, value",
    [(key, value) for key, value in FLAT if type(value) in (int, float, str, bool, list, dict)],
    ids=str,
)
def test_wrong_type_in_file(key, value):
    """Whatever `such as` names is taken at its word."""
    shown = toml(value) if not isinstance(value, list) else str(value).replace("'", '"')
    text = error_text(table(f"{key} = {shown}"))
    assert "1 problem:" in text and headlines(text) == [f"line 4: [parameter_server] {key}"]
    if key in ("placement", "mode"):
        known = PLACEMENTS if key == "placement" else MODES
        shown = shown.strip('"')
        assert text == unreadable(
            problem(key, f'no {key} "{shown}".', known.replace("This", "this"))
        )
        return
    if key != "compute_time":
        assert f" is not {SPELT.get(key, 'a whole number')}." in text
    fix = text.split("fix: ")[1]
    if fix == TIMES:
        return
    assert fix.startswith("such as ") and fix.endswith(".")
    reader = {"delay_decay": "asynchronous"}.get(key, OF_MODE.get(key, ("asynchronous",))[0])
    mode = "\n".join(
        [f'mode = "{reader}"', *(f"{need} = 4" for need in NEEDED.get(reader, {}) if need != key)]
    )
    mode += "\ndelay_compensation = 2" if key == "delay_decay" else ""
    loads(table(f"{mode}\n{key} = {fix.removeprefix('such as ').removesuffix('.')}"))


def test_wrong_type_names_all_accepted_types():
    """Seconds may be a text or a list; an error that asks for a text alone is half the truth."""
    with pytest.raises(OptionError, match=r"list|tuple"):
        ParameterServer(compute_time=1.5)


ODD = {
    "words for seconds": {"compute_time": ["a", "b"]},
    "None for seconds": {"compute_time": [1, None]},
    "None for seconds in a tuple": {"compute_time": (1, None)},
    "lists for seconds": {"compute_time": [[1, 2], [3, 4]]},
    "tuples for seconds": {"compute_time": ((1, 2), (3, 4))},
    "true for seconds": {"compute_time": [1, True, 1, 1]},
    "seconds out of reach": {"compute_time": [10**400, 1, 1, 1]},
    "compensation out of reach": {"delay_compensation": 10**400, "mode": "asynchronous"},
    "half a pair": {"network": (("bandwidth",),)},
    "no pairs": {"network": (1, 2)},
    "a pair": {"network": ("bandwidth", "10Gb/s")},
    "no latency": {"network": {"latency": None}},
    "a key of two words": {"network": {"band width": "10Gb/s"}},
    "a key that is no text": {"network": {5: "10Gb/s"}},
}


@pytest.mark.parametrize("options", ODD.values(), ids=ODD)
def test_invalid_python_values_raise_spmd_error(options):
    """Only spmd errors are raised, and none says that a file that does not exist is not TOML."""
    with pytest.raises(SpmdError) as caught:
        fits(in_python(**options))
    text = str(caught.value)
    assert next(iter(options)) in text and ("fix:" in text or "wanted" in text)
    assert "is not TOML" not in text


@pytest.mark.parametrize(
    "line",
    [f"{ASYNC}\ndelay_compensation = 1{'0' * 400}", f"compute_time = [1{'0' * 400}, 1, 1, 1]"],
)
def test_number_too_large_for_float(line):
    assert "1 problem:" in error_text(table(line))


@pytest.mark.parametrize(
    "seconds",
    [
        [1, 2, 3, 4],
        (1, 2, 3, 4),
        list(np.arange(1.0, 5.0)),
        tuple(np.arange(1.0, 5.0)),
        tuple(np.ones(4, np.float32)),
    ],
)
def test_compute_time_accepts_any_sequence(seconds):
    assert fits(in_python(compute_time=seconds)).layout.parameter_server.compute_time == tuple(
        float(each) for each in seconds
    )


# what does not go together ------------------------------------------------------------------------


def idle(key, value, mode, readers):
    """An option that nothing reads in this mode is reported; other modes read it."""

    def write(mode):
        return "\n".join(
            [
                f'mode = "{mode}"',
                *(f"{other} = {fine}" for other, fine in NEEDED.get(mode, {}).items()),
            ]
        )

    lines = write(mode)
    said = problem(
        key, f'nothing reads it in mode "{mode}".', MODES_FIX[readers], 5 + lines.count("\n")
    )
    fixes = [
        lines,
        *(
            f"{write(reader)}\n{key} = {toml(value)}"
            for reader in readers
            if key not in NEEDED.get(reader, {})
        ),
    ]
    fixes += [write(reader) for reader in readers if key in NEEDED.get(reader, {})]
    return (
        f"{lines}\n{key} = {toml(value)}",
        {"mode": mode, key: value, **NEEDED.get(mode, {})},
        said,
        fixes,
    )


NEEDED = {
    "bounded": {"bound": 4},
    "softsync": {"splits": 2},
    "local": {"every": 4},
    "elastic": {"every": 4},
}
LOCAL = ("local", "elastic")
LATE = ("asynchronous", "bounded", "softsync")
MODES_FIX = {
    ("synchronous",): 'leave it out, or mode = "synchronous".',
    ("asynchronous",): 'leave it out, or mode = "asynchronous".',
    ("bounded",): 'leave it out, or mode = "bounded".',
    ("softsync",): 'leave it out, or mode = "softsync".',
    LATE: 'leave it out, or mode = "asynchronous" or "bounded" or "softsync".',
    (
        "synchronous",
        *LATE,
    ): 'leave it out, or mode = "synchronous" or "asynchronous" or "bounded" or "softsync".',
    LOCAL: 'leave it out, or mode = "local" or "elastic".',
    ("local",): 'leave it out, or mode = "local".',
    ("elastic",): 'leave it out, or mode = "elastic".',
}
CLASHES = {
    **{f"spares, {mode}": idle("spares", 1, mode, ("synchronous",)) for mode in LATE},
    **{
        f"bound, {mode}": idle("bound", 4, mode, ("bounded",))
        for mode in ("synchronous", "asynchronous", "softsync")
    },
    **{
        f"splits, {mode}": idle("splits", 2, mode, ("softsync",))
        for mode in ("synchronous", "asynchronous", "bounded")
    },
    **{
        f"fetch_every, {mode}": idle("fetch_every", 2, mode, ("asynchronous",))
        for mode in ("synchronous", "bounded", "softsync")
    },
    "bound 0": idle("bound", 0, "synchronous", ("bounded",)),
    "staleness_scale": idle("staleness_scale", "inverse", "synchronous", LATE),
    "max_staleness": idle("max_staleness", 4, "synchronous", LATE),
    "max_staleness 0": idle("max_staleness", 0, "synchronous", LATE),
    "delay_compensation": idle("delay_compensation", 0.04, "synchronous", LATE),
    **{
        f"staleness_scale, {mode}": idle("staleness_scale", "inverse", mode, LATE) for mode in LOCAL
    },
    **{
        f"warmup_steps, {mode}": idle("warmup_steps", 3, mode, ("synchronous", *LATE))
        for mode in LOCAL
    },
    "spares, local": idle("spares", 1, "local", ("synchronous",)),
    "every, synchronous": idle("every", 4, "synchronous", LOCAL),
    "every, asynchronous": idle("every", 4, "asynchronous", LOCAL),
    **{
        f"fragments, {mode}": idle("fragments", 2, mode, ("local",))
        for mode in ("synchronous", "elastic")
    },
    "overlap, elastic": idle("overlap", 1, "elastic", ("local",)),
    "mix, elastic": idle("mix", 0.5, "elastic", ("local",)),
    "outer_rate, elastic": idle("outer_rate", 1.0, "elastic", ("local",)),
    "outer_momentum, synchronous": idle("outer_momentum", 0.5, "synchronous", ("local",)),
    "moving_rate, local": idle("moving_rate", 0.1, "local", ("elastic",)),
    "no every": (
        'mode = "local"',
        {"mode": "local"},
        problem("mode", '"local" needs every.', "such as  every = 10."),
        [],
    ),
    "adapts nothing": (
        f"{ASYNC}\ndelay_decay = 0.95",
        {"mode": "asynchronous", "delay_decay": 0.95},
        problem(
            "delay_decay",
            "nothing reads it: delay_compensation is 0.",
            "delay_compensation = 2.0, or leave it out.",
            5,
        ),
        [f"{ASYNC}\ndelay_decay = 0.95\ndelay_compensation = 2.0"],
    ),
    "turns of unequal length": (
        'mode = "local"\nevery = 10\nfragments = 4',
        {"mode": "local", "every": 10, "fragments": 4},
        problem(
            "fragments",
            "10 steps between synchronizations, for 4 fragments in turn; 10 / 4 leaves 2.",
            "every = 12.",
            6,
        ),
        ['mode = "local"\nevery = 12\nfragments = 4'],
    ),
    "back after the next was sent": (
        'mode = "local"\nevery = 8\nfragments = 4\noverlap = 2',
        {"mode": "local", "every": 8, "fragments": 4, "overlap": 2},
        problem(
            "overlap", "2 steps, and the next synchronization is 2 steps later.", "at most 1.", 7
        ),
        ['mode = "local"\nevery = 8\nfragments = 4\noverlap = 1'],
    ),
    "bounded by nothing": (
        'mode = "bounded"',
        {"mode": "bounded"},
        problem("mode", '"bounded" needs bound.', "such as  bound = 1."),
        ['mode = "bounded"\nbound = 1'],
    ),
    "split by nothing": (
        'mode = "softsync"',
        {"mode": "softsync"},
        problem("mode", '"softsync" needs splits.', "such as  splits = 2."),
        ['mode = "softsync"\nsplits = 2'],
    ),
}


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("text, python, said, fixes", CLASHES.values(), ids=CLASHES)
def test_option_of_another_mode(text, python, said, fixes):
    assert_refused(text, python, said, fixes)


@pytest.mark.parametrize("mode", ["synchronous", *LATE, *LOCAL])
def test_options_common_to_all_modes(mode):
    options = {
        "servers": 2,
        "workers": 8,
        "warmup_steps": 0 if mode in LOCAL else 3,
        "seed": 7,
        "compute_time": "exponential(1)",
    }
    options |= {"mode": mode, "network": LINK, **NEEDED.get(mode, {})}
    server = fits(in_python(**options)).layout.parameter_server
    assert {key: getattr(server, key) for key in options} == options | {
        "network": tuple(LINK.items())
    }


# each: lines of [gradients], the same in Python, the error of the file, fixes
APPROXIMATES = (
    "approximates a mean over workers; an asynchronous server applies each gradient separately."
)
NO_MEAN = "nothing reads it: an asynchronous server makes no mean.\n      fix: leave it out."
POWER = 'codec = "power_sgd"\nerror_feedback = true\n'
GRADIENTS_CLASHES = {
    "power_sgd": (
        POWER,
        {"codec": ("power_sgd",), "error_feedback": True},
        f"  line 3: [gradients] codec\n      power_sgd {APPROXIMATES}\n      fix: codec = "
        '"bfloat16", or mode = "synchronous".',
        ['codec = "bfloat16"\nerror_feedback = true\n'],
    ),
    "start_step": (
        'codec = "int8"\nstart_step = 4\n',
        {"codec": ("int8",), "start_step": 4},
        f"  line 4: [gradients] start_step\n      {NO_MEAN}",
        ['codec = "int8"\n'],
    ),
    "diagnostics": (
        'codec = "int8"\ndiagnostics = true\n',
        {"codec": ("int8",), "diagnostics": True},
        f"  line 4: [gradients] diagnostics\n      {NO_MEAN}",
        ['codec = "int8"\n'],
    ),
}


@pytest.mark.parametrize("mode, needed", [(mode, NEEDED.get(mode, {})) for mode in LATE])
@pytest.mark.parametrize(
    "lines, python, said, fixes", GRADIENTS_CLASHES.values(), ids=GRADIENTS_CLASHES
)
def test_gradient_options_invalid_in_asynchronous_modes(lines, python, said, fixes, mode, needed):
    server = "\n".join([f'mode = "{mode}"', *(f"{key} = {value}" for key, value in needed.items())])
    assert error_text(table(server, lines)) == unreadable(said)
    assert error_text(in_python(mode=mode, **needed, **python)) == unreadable(
        f"  {said.split(': ', 1)[1]}", where='layout "layout"'
    )
    for fix in fixes:
        fits(table(server, fix))
    fits(table('mode = "synchronous"', lines))


@pytest.mark.parametrize("mode", LOCAL)
def test_diagnostics_invalid_in_local_modes(mode):
    said = (
        "  line 4: [gradients] diagnostics\n      nothing reads it: in most steps nothing is "
        "exchanged.\n      fix: leave it out."
    )
    assert error_text(
        table(f'mode = "{mode}"\nevery = 4', 'codec = "int8"\ndiagnostics = true\n')
    ) == unreadable(said)
    fits(table(f'mode = "{mode}"\nevery = 4', 'codec = "int8"\n'))


def test_exact_axes_invalid_in_asynchronous_mode():
    batch, mesh, lines = (
        '[batch]\nspec = [["node", "data"]]\n',
        "node=2,data=4",
        'codec = "int8"\nexact_axes = ["data"]\n',
    )
    assert error_text(batch + table(ASYNC, lines), mesh) == unreadable(
        f"  line 6: [gradients] exact_axes\n      {NO_MEAN}"
    )
    python = in_python(
        mode="asynchronous", codec=("int8",), exact_axes="data", batch=Batch((("node", "data"),))
    )
    assert error_text(python, mesh) == unreadable(
        f"  [gradients] exact_axes\n      {NO_MEAN}", where='layout "layout"'
    )
    fits(batch + table(ASYNC, 'codec = "int8"\n'), mesh)
    fits(batch + table("", lines), mesh)


@pytest.mark.parametrize("key", ["start_step = 4", "diagnostics = true"])
def test_option_unread_for_two_reasons_is_one_problem(key):
    """There is neither a codec nor a mean: fixing the first problem must not lead to the second."""
    assert "1 problem:" in error_text(table(ASYNC, f"{key}\n"))


def test_ring_invalid_in_asynchronous_mode():
    """bfloat16 itself is fine, so a fix that says bfloat16 changes nothing: what is wrong is the
    way.
    """
    lines = 'codec = "bfloat16"\nreduce = "ring"\n'
    for layout in (
        table(ASYNC, lines),
        in_python(mode="asynchronous", codec=("bfloat16", {"reduce": "ring"})),
    ):
        text = error_text(layout)
        assert (
            "1 problem:" in text
            and 'reduce = "one_shot"' in text
            and 'codec = "bfloat16",' not in text
        )
    assert headlines(error_text(table(ASYNC, lines))) == ["line 4: [gradients] reduce"]
    fits(table(ASYNC, 'codec = "bfloat16"\nreduce = "one_shot"\n'))
    fits(table("", lines))


def test_invalid_gradient_rule_is_named():
    """In Python there are no lines, so the rule's number is all there is."""
    lines = (
        "error_feedback = true\n"
        + RULE.format("**/bias", "int8")
        + RULE.format("**/kernel", "power_sgd")
    )
    rules = (GradientRule("**/bias", "int8"), GradientRule("**/kernel", "power_sgd"))
    python = in_python(mode="asynchronous", error_feedback=True, rules=rules)
    text = error_text(table(ASYNC, lines))
    assert f"power_sgd {APPROXIMATES}" in text and text.count("line 7: ") == 1
    assert headlines(text) == ["line 7: [[gradients.rules]] rule 2"]
    assert headlines(error_text(python)) == ["[[gradients.rules]] rule 2"]
    fits(table(ASYNC, lines.replace("power_sgd", "bfloat16")))
    fits(table("", lines))


# another reduction --------------------------------------------------------------------------------

REDUCTIONS = ("compiler", "all_reduce", "reduce_scatter")


def unused(reduction):
    return f"""[parameter_server]
      nothing reads it: gradients use reduction "{reduction}".
      fix: [gradients] reduction = "parameter_server", or leave it out."""


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_table_with_another_reduction(reduction):
    text, gradients = (
        "[parameter_server]\nservers = 2\n",
        f'[gradients]\nreduction = "{reduction}"\n',
    )
    python = Layout(gradients=Gradients(reduction), parameter_server=ParameterServer(servers=2))
    assert error_text(python) == unreadable(f"  {unused(reduction)}", where='layout "layout"')
    for layout in (gradients + text, text + gradients):
        assert error_text(layout).replace("line 3: ", "").replace("line 1: ", "") == unreadable(
            f"  {unused(reduction)}"
        )
        fits(layout.replace(reduction, "parameter_server"))
    fits(gradients)
    fits(gradients + "[parameter_server]\n")


def test_unread_table_has_line():
    assert error_text("[parameter_server]\nservers = 2\n") == unreadable(
        f"  line 1: {unused('compiler')}"
    )
    text = error_text('[parameter_server]\nservers = 2\n[gradients]\ncodec = "int5"\n')
    assert headlines(text) == ["line 1: [parameter_server]", "line 4: [gradients] codec"], (
        "in the order of the file"
    )


def test_misspelt_reduction_is_one_problem(golden):
    """What follows is read as if the likely word stood there."""
    text = '[gradients]\nreduction = "parameter_serer"\n[parameter_server]\nspares = 1\n'
    golden("server_misspelt_reduction_is_one_problem", error_text(text))
    fits(text.replace("serer", "server"))


def test_unreadable_option_is_not_also_missing():
    assert error_text(table('mode = "local"\nevery = "10"')) == unreadable(
        problem("every", '"10" is not a whole number.', "such as 2.", 5)
    )


@pytest.mark.parametrize(
    "mode, meant",
    [("async", "asynchronous"), ("sync", "synchronous"), ("asynchron", "asynchronous")],
)
def test_misspelt_mode_is_one_problem(mode, meant):
    """An abbreviation means the mode that begins so, and not one that needs something else as
    well.
    """
    text = error_text(table(f'mode = "{mode}"'))
    assert f'did you mean "{meant}"?' in text and "1 problem:" in text


# what reads well and does not fit -----------------------------------------------------------------

ON_MODEL = "does not fit this model on mesh data=4\n1 problem:\n\n"
KEPT = "the servers keep all parameters, packed, and workers use them unsharded."
RULE_FIX = (
    'fix: remove the rule, or [gradients] reduction = "reduce_scatter", which shards parameters as '
    "the rules say."
)
KERNEL = '[[params]]\npath = "up/kernel"\nspec = ["-", "data"]\n'


def misfit(key, why, fix):
    return f"  [parameter_server] {key}\n      {why}\n      fix: {fix}"


MISFITS = {
    "more servers than positions": (
        table("servers = 5"),
        in_python(servers=5),
        misfit("servers", "5 servers at 4 positions along the data axes.", "at most 4."),
        [table("servers = 4")],
    ),
    "workers that no position has": (
        table("workers = 6"),
        in_python(workers=6),
        misfit(
            "workers", "6 workers at 4 positions along the data axes; 6 / 4 leaves 2.", "such as 8."
        ),
        [table("workers = 8")],
    ),
    "fewer workers than positions": (
        table("workers = 2"),
        in_python(workers=2),
        misfit(
            "workers", "2 workers at 4 positions along the data axes; 2 / 4 leaves 2.", "such as 4."
        ),
        [table("workers = 4")],
    ),
    "as many spares as workers": (
        table("spares = 4"),
        in_python(spares=4),
        misfit("spares", "4, of 4 workers.", "at most 3."),
        [table("spares = 3")],
    ),
    "more spares than simulated workers": (
        table("workers = 8\nspares = 9"),
        in_python(workers=8, spares=9),
        misfit("spares", "9, of 8 workers.", "at most 7."),
        [table("workers = 8\nspares = 7")],
    ),
    "more splits than workers": (
        table('mode = "softsync"\nsplits = 5'),
        in_python(mode="softsync", splits=5),
        misfit("splits", "5, of 4 workers.", "at most 4."),
        [
            table('mode = "softsync"\nsplits = 4'),
            table('workers = 8\nmode = "softsync"\nsplits = 5'),
        ],
    ),
    "more fragments than parameters": (
        table('mode = "local"\nevery = 10\nfragments = 5'),
        in_python(mode="local", every=10, fragments=5),
        misfit("fragments", "5, of 4 parameters.", "at most 4."),
        [table('mode = "local"\nevery = 12\nfragments = 4')],
    ),
    "fragments of what is one array": (
        table('mode = "local"\nevery = 10\nfragments = 2\nplacement = "round_robin"'),
        in_python("round_robin", mode="local", every=10, fragments=2),
        misfit(
            "fragments",
            'placement "round_robin" packs parameters together, so they are synchronized at once.',
            'placement = "sliced", or leave it out.',
        ),
        [
            table('mode = "local"\nevery = 10\nfragments = 2'),
            table('mode = "local"\nevery = 10\nplacement = "round_robin"'),
        ],
    ),
    "further than to the mean and back": (
        table('mode = "elastic"\nevery = 10\nmoving_rate = 0.4'),
        in_python(mode="elastic", every=10, moving_rate=0.4),
        misfit(
            "moving_rate",
            "0.4 with 4 workers: each sync multiplies the servers' distance from the workers' mean "
            "by 1 - 0.4 (4 + 1) = -1.",
            "below 2 / 5, such as 0.225.",
        ),
        [table(f'mode = "elastic"\nevery = 10\nmoving_rate = {rate}') for rate in (0.225, 0.39)],
    ),
    "a list for others": (
        table("compute_time = [1, 2]"),
        in_python(compute_time=[1, 2]),
        misfit("compute_time", "2 numbers for 4 workers.", "one for each."),
        [table("compute_time = [1, 2, 3, 4]")],
    ),
    "a list for positions": (
        table("workers = 8\ncompute_time = [1, 2, 3, 4]"),
        in_python(workers=8, compute_time=[1, 2, 3, 4]),
        misfit("compute_time", "4 numbers for 8 workers.", "one for each."),
        [table("workers = 8\ncompute_time = [1, 2, 3, 4, 5, 6, 7, 8]")],
    ),
    "sharded optimizer state": (
        '[optimizer]\nshard = "data"\n' + table(""),
        in_python(optimizer=OptimizerState("data")),
        "  [optimizer] shard\n      the servers keep the optimizer state.\n      fix: leave it "
        "out.",
        [table("")],
    ),
    "a rule that shards": (
        KERNEL + table(""),
        in_python(params=(Rule("up/kernel", (None, "data")),)),
        f'  up/kernel   spec ["-", "data"]   rule 1, line 1\n      {KEPT}\n      {RULE_FIX}',
        [
            table(""),
            KERNEL + table("").replace("parameter_server", "reduce_scatter", 1),
            KERNEL.replace("data", "-") + table(""),
        ],
    ),
    **{
        f"rules of codecs, {placement}": (
            table(f'placement = "{placement}"', RULE.format("**/bias", "int8")),
            in_python(placement, rules=(GradientRule("**/bias", "int8"),)),
            f"""  [[gradients.rules]]
      placement "{placement}" packs parameters together, so they have one codec.
      fix: placement = "sliced".""",
            [
                table('placement = "sliced"', RULE.format("**/bias", "int8")),
                table(f'placement = "{placement}"', 'codec = "int8"\n'),
            ],
        )
        for placement in ("round_robin", "greedy_bytes", "largest_first")
    },
}


@pytest.mark.parametrize("text, python, said, fixes", MISFITS.values(), ids=MISFITS)
def test_table_does_not_fit_mesh(text, python, said, fixes):
    assert error_text(text) == f"mine.toml {ON_MODEL}{said}"
    assert error_text(python) == f"this layout {ON_MODEL}{said.replace(', line 1', '')}"
    for fix in fixes:
        fits(fix)


def test_positions_span_all_data_axes():
    batch, mesh = '[batch]\nspec = [["node", "data"]]\n', "node=2,data=4"
    assert "9 servers at 8 positions" in error_text(batch + table("servers = 9"), mesh)
    assert (
        "12 workers at 8 positions along the data axes; 12 / 8 leaves 4.\n      fix: such as 16."
        in error_text(table("workers = 12"), "data=8")
    )
    fits(batch + table("servers = 8\nworkers = 8"), mesh)
    fits(table(ASYNC + "\nworkers = 4\nservers = 1"), "data=1")


def test_batch_smaller_than_workers():
    with pytest.raises(
        spmd.errors.DataError, match=r"not divisible by 16 workers \(\[parameter_server\] workers\)"
    ):
        fits(table("workers = 16"))


@pytest.mark.parametrize(
    ("default", "mesh"), [("shard:data", "data=4"), ("shard:model", "data=4,model=2")]
)
def test_sharding_default_with_servers(default, mesh):
    """No rule is written, so none can be left out: the fix is about the default."""
    for layout in (
        f'[default]\nparams = "{default}"\n' + table(""),
        in_python(default=Default(default)),
    ):
        text = error_text(layout, mesh)
        assert KEPT in text and "1 problem:" in text
        assert "[default] params" in text and "remove the rule" not in text
    fits('[default]\nparams = "replicate"\n' + table(""))
    fits(f'[default]\nparams = "{default}"\n[gradients]\nreduction = "reduce_scatter"\n', mesh)


def test_every_sharding_rule_is_reported():
    """Leaving the first out must not be what shows the second."""
    text = error_text(KERNEL + KERNEL.replace("up", "down") + table(""))
    assert "rule 1, line 1" in text and "rule 2, line 4" in text
    text = error_text(KERNEL.replace("up/kernel", "**/kernel") + table(""))
    assert "down/kernel" in text and "up/kernel" in text, (
        "or one problem for all that share the rule"
    )


def test_max_replicated_fix_with_servers():
    """Servers split every parameter, so none is replicated; a default that shards would be the next
    error.
    """
    layout = "[default]\nmax_replicated = 0.5\n" + table("")
    try:
        fits(layout)
    except LayoutError as error:
        assert '"shard:' not in str(error)
        assert "max_replicated = 1." in str(error)
        fits(layout.replace("0.5", "1"))


# many at once -------------------------------------------------------------------------------------

MANY = {
    "queue = 1": "unknown key: [parameter_server] queue",
    "seed = -1": "[parameter_server] seed",
    "spares = 1": "[parameter_server] spares",
    "servers = 0": "[parameter_server] servers",
    'mode = "boundd"': "[parameter_server] mode",
    "network = 3": "[parameter_server] network",
    "bound = -1": "[parameter_server] bound",
    'placement = "hash"': "[parameter_server] placement",
    'staleness_scale = "of"': "[parameter_server] staleness_scale",
    'compute_time = "normal(1)"': "[parameter_server] compute_time",
    'fetch_every = "2"': "[parameter_server] fetch_every",
    "delay_compensation = nan": "[parameter_server] delay_compensation",
}


@pytest.mark.parametrize("order", [list(MANY), list(MANY)[::-1]], ids=["", "backwards"])
def test_all_problems_of_table_in_file_order(order):
    text = error_text(table("\n".join(order)))
    assert headlines(text) == [
        f"line {number}: {MANY[line]}" for number, line in enumerate(order, 4)
    ]
    assert "12 problems:" in text and text.count("fix: ") == 12


def test_problems_of_both_tables_in_file_order():
    server = f"[parameter_server]\n{ASYNC}\nspares = 2\n"
    gradients = f'[gradients]\nreduction = "parameter_server"\n{POWER}start_step = 3\n'
    assert headlines(error_text(server + gradients)) == [
        "line 3: [parameter_server] spares",
        "line 6: [gradients] codec",
        "line 8: [gradients] start_step",
    ]
    assert headlines(error_text(gradients + server)) == [
        "line 3: [gradients] codec",
        "line 5: [gradients] start_step",
        "line 8: [parameter_server] spares",
    ]


def test_all_misfits_are_reported():
    lines = (
        'placement = "greedy_bytes"\nservers = 9\nworkers = 10\nspares = 10\ncompute_time = [1, 2]'
    )
    text = error_text(
        '[optimizer]\nshard = "data"\n' + table(lines, RULE.format("**/bias", "int8"))
    )
    assert headlines(text) == [
        "[optimizer] shard",
        "[[gradients.rules]]",
        "[parameter_server] servers",
        "[parameter_server] workers",
        "[parameter_server] spares",
        "[parameter_server] compute_time",
    ]


# smaller things -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ['[parameter_server.network]\nbandwidth = "10 Gb"', 'network.bandwidth = "10 Gb"']
)
def test_nested_table_has_line(text):
    (where,) = headlines(error_text(table(text)))
    assert re.fullmatch(r"line [45]: \[parameter_server[\].] ?network\]?.*", where)


@pytest.mark.parametrize("network", [{"bandwidth": "10 Gb"}, {"latency": "50"}], ids=str)
def test_network_error_says_what_is_wrong(network):
    """As the file spells it, and why: a unit is missing."""
    ((key, value),) = network.items()
    why = error_text(table(f"network = {toml(network)}")).splitlines()[-2].strip()
    assert f'"{value}"' in why and f"'{value}'" not in why, "as the file spells it"
    assert why != f'{key} = "{value}".', "the value alone is no reason"


def test_misspelt_network_key():
    assert 'did you mean "bandwidth"?' in error_text(table('network = { bandwith = "10Gb/s" }'))


@pytest.mark.parametrize("text", ["uniform", "lognormal(1.0, 0.3", "", "times.csv"])
def test_missing_trace_raises_before_first_step(text):
    """A word that is no distribution is a path, and a path that leads nowhere is known before
    anything is compiled.
    """
    for layout in (table(f'compute_time = "{text}"'), in_python(compute_time=text)):
        with pytest.raises(SpmdError, match=r"(?s)compute_time.*fix: "):
            fits(layout)


TRACES = {
    "columns": ("csv", "1,2\n"),
    "words": ("csv", "a,b,c,d\n"),
    "ragged": ("csv", "1,2,3,4\n1\n"),
    "below 0": ("csv", "1,2,3,-4\n"),
    "nan": ("csv", "1,2,3,nan\n"),
    "nothing": ("csv", ""),
    "words in .npy": ("npy", "a,b,c,d\n"),
    "nothing in .npy": ("npy", ""),
}


@pytest.mark.parametrize("form, content", TRACES.values(), ids=TRACES)
def test_invalid_trace(form, content, folder):
    (folder / f"times.{form}").write_text(content)
    with pytest.raises(SpmdError, match=r"(?s)compute_time.*fix: ") as caught:
        trainer = fits(table(f'compute_time = "times.{form}"'))
        trainer.step(trainer.init(), (X, Y))
    assert "pickle" not in str(caught.value) and "inhomogeneous" not in str(caught.value), (
        "numpy's words are not ours"
    )


def test_trace_sets_compute_times(folder):
    (folder / "times.csv").write_text("1,2,3,4\n" * 3)
    np.save("times.npy", np.ones((3, 8)))
    for text, workers in (
        ('compute_time = "times.csv"', 4),
        ('workers = 8\ncompute_time = "times.npy"', 8),
    ):
        trainer = fits(table(text))
        wanted = [1.0, 2.0, 3.0, 4.0] if workers == 4 else [1.0] * 8
        times = Times(trainer.layout.parameter_server.compute_time, workers, 0)
        assert [times.of(worker, 0) for worker in range(workers)] == wanted


@pytest.mark.parametrize("text", ["exponential(1,,)", "lognormal(1,,2)", "constant(,1)"])
def test_missing_number_in_compute_time(text):
    assert "compute_time" in error_text(table(f'compute_time = "{text}"'))
