"""A process that renders the chat template of a folder, a program from outside: memory and
processor time are limited.

    python -P template_server.py FOLDER_OF_JINJA2 SECONDS BYTES CHARACTERS

Limits: seconds of the processor for the template or one conversation, bytes of addresses,
characters of one answer. This is run as a file and imports nothing of the library. Jinja2's sandbox
keeps a template from files and attributes, and not from `{{ 10 ** (10 ** 10) }}`, which is computed
as early as when the template is compiled. Lines of JSON come and go: first the template, answered
by an error or nothing, then conversations, each answered by texts or an error.
"""

import json
import math
import resource
import sys
from typing import Any


def main(home: str, seconds: int, most_memory: int, most_text: int) -> None:
    """Answer until the input ends."""
    # Last in the path, so that nothing beside jinja2 hides a module of Python.
    sys.path.append(home)  # where jinja2 is
    # The signal at the limit of time would write a core file.
    lower(resource.RLIMIT_CORE, 0)
    # macOS reserves more addresses at the start of a process than this limit
    if sys.platform != "darwin":
        lower(resource.RLIMIT_AS, most_memory)
    template = None
    for line in sys.stdin:
        request, answer = json.loads(line), {}
        # The limit counts from the start of the process, so the time that it has used is added.
        used = resource.getrusage(resource.RUSAGE_SELF)
        # above it the system ends this process
        lower(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + seconds)
        try:
            if template is None:
                template = compiled(request)
            else:
                answer["texts"] = rendered(template, request, most_text)
        except BaseException as error:  # a template is a program
            lines = [*str(error).strip().splitlines(), ""]
            answer = {"error": f"{type(error).__name__}: {lines[0]}".rstrip(": ")}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def rendered(template: Any, calls: list[dict[str, Any]], most_text: int) -> list[str]:
    """The texts of some calls, each with its variables."""
    texts = [template.render(**call) for call in calls]
    if (size := sum(map(len, texts))) > most_text:
        raise ValueError(f"its text has {size:,} characters; at most {most_text:,} are allowed")
    return texts


def lower(kind: int, limit: int) -> None:
    """Set a limit that can be raised again, up to the one that there is."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(kind, (limit, hard))


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as the filter `tojson` of transformers does, with the same options."""
    # Jinja2's own filter sorts keys, and writes "<", ">", "&" and "'" as \u003c and the like, for
    # HTML: a model was not trained on such text.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def compiled(source: str) -> Any:
    """The template, as transformers knows templates."""
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):  # transformers' block around an answer
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(why: str) -> None:
        raise ValueError(why)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = to_json
    return environment.from_string(source)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
