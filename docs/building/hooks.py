"""Hooks of MkDocs: pictures, fences with notes, files outside of docs/ as pages, and a check that
browsers fetch nothing elsewhere.

`mkdocs.yml` names this file; `mkdocs build --strict` fails if a check fails.
"""

import posixpath
import re
import shutil
import sys
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, InclusionLevel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # MkDocs loads this file alone
from docs.building import draw, notebook_pages
from spmd.layout.layout_files import load, shipped
from spmd.render.html import STYLE

ROOT = Path(__file__).resolve().parents[2]
# shown as a page each
SOURCES = {".py": "python", ".toml": "toml", ".sbatch": "bash", ".yaml": "yaml", "": "text"}
SEARCH_BOOSTS = {
    "cookbook/": 2,
    "troubleshooting.md": 2,
    "mesh_layout_step.md": 2,
    "from_": 0.8,
    "reference/": 0.5,
    "examples/": 0.3,
    "renamed.md": 0.2,
}  # by the beginning of a page
# of questions; the theme's search would look for every word that begins with one: "tokens" for "to"
FILLERS = (
    "a an and any are as at be been but by can could did do does for from get got had has have how "
    "i if in instead into is it its me "
    "much must my no not of off on one or our set should so some than that the their them then "
    "there these they this to too up us use "
    "used using want was we were what when where which while who why will with would you your"
).split()
_FILLER = "|".join(f"[{word[0].upper()}{word[0]}]{word[1:]}" for word in FILLERS)
_SPACE = r"""[\s\-,;:!?=(){}\[\]"`/|]|\.(?!\d)|&(?:[lg]t|amp);"""
SEPARATOR = rf"(?:{_SPACE}|\b(?:{_FILLER})(?:n?['’]\w+)?\b)+"  # of words, in pages and in questions
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^```python (tensorflow|no-run: [^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_PAIR = re.compile(
    r"(^```python tensorflow\n.*?^```\n)\n((?:^```\w+\n.*?^```\n\n?)+)", re.DOTALL | re.MULTILINE
)
_HIDDEN = re.compile(r"^<!--.*?-->\n", re.DOTALL | re.MULTILINE)
_OUTSIDE = re.compile(
    r"""(?:\b(?:src|href|srcset|data)\s*=\s*["']?|url\(\s*["']?|@import\s+["'])(?:https?:)?//[^"'\s)>]*""",
    re.IGNORECASE,
)
_PICTURE = re.compile(r'<img\b(?=[^>]*\bsrc="(?:\.\./)*pictures/(\w+)\.svg")[^>]*>')
_INDEX = "cookbook/index.md"
_GALLERY = "<!-- every shipped layout -->"
UNSEARCHED = ("benchmarks/", _INDEX)  # logs, and a list of headings
_NOTEBOOK = re.compile(r'(<li><a href="notebooks/(\w+)\.html">)(.*?</a>)')
_PLAIN_LINK = re.compile(r"<a\b[^>]*>", re.IGNORECASE)


def outside(page: str, target: str) -> str | None:
    """The path in the repository that a page links to, if it is outside of docs/.

    >>> (
    ...     outside("plan.md", "../benchmarks/results/soak.md"),
    ...     outside("plan.md", "codecs.md"),
    ...     outside("plan.md", "https://a.org"),
    ... )
    ('benchmarks/results/soak.md', None, None)
    """
    if re.match(r"[a-z]+:", target):
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith("docs/") or path == "docs" else path


def shown_as(path: str) -> str:
    """The name on the site of a file outside of docs/: pages keep their names; programs and
    notebooks become pages.
    """
    file = ROOT / path
    if file.suffix == ".ipynb":
        return path.removesuffix(".ipynb") + ".md"
    return (
        f"{path}.md"
        if file.suffix in SOURCES and file.is_file()
        else f"{path.rstrip('/')}/index.md"
        if file.is_dir()
        else path
    )


@event_priority(100)  # before the search reads it
def on_config(config):
    """Let the search drop punctuation and filler words."""
    config.plugins["material/search"].config["separator"] = SEPARATOR
    return config


def on_files(files, config):
    """Add the style of pictures, and the files outside of docs/ that pages link to.

    Raises:
      PluginError: a picture is not what is drawn now.
    """
    files.append(File.generated(config, "building/cells.css", content=STYLE))
    for name in draw.ON_SITE:
        files.append(File.generated(config, f"pictures/{name}.svg", content=draw.file_text(name)))
    stale = [name for name in draw.NAMES if not _is_drawn(name)]
    if stale:
        raise PluginError(
            f"docs/pictures/: {', '.join(stale)} are not what is drawn; python "
            "docs/building/draw.py"
        )
    pending = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    added = set()
    while pending:
        page, text = pending.pop()
        for _, _, target, _ in _LINK.findall(text):
            path = outside(page, target)
            if path is None or path in added:
                continue
            added.add(path)
            source, name = ROOT / path, shown_as(path)
            if not source.exists():
                raise PluginError(f"{page}: no file {target}")
            if not name.endswith(".md"):
                files.append(File.generated(config, name, abs_src_path=str(source)))
                continue
            if source.suffix == ".ipynb":
                content, inclusion = notebook_pages.markdown(source), InclusionLevel.INCLUDED
                files.append(File.generated(config, name, content=content, inclusion=inclusion))
                for part in (source, source.with_suffix(".py")):  # to download
                    files.append(
                        File.generated(
                            config, f"{source.parent.name}/{part.name}", abs_src_path=str(part)
                        )
                    )
                pending.append((f"../{path}", content))
                continue
            content = _listing(path) if source.is_dir() else source.read_text(encoding="utf-8")
            if source.is_file() and source.suffix in SOURCES:
                content = f"# {path}\n\n````{SOURCES[source.suffix]}\n{content}````\n"
            files.append(
                File.generated(config, name, content=content, inclusion=InclusionLevel.NOT_IN_NAV)
            )
            pending.append((f"../{path}" if source.is_file() else f"../{path}/index.md", content))
    return files


def _is_drawn(name: str) -> bool:
    path = draw.FOLDER / f"{name}.svg"
    return path.is_file() and path.read_text(encoding="utf-8") == draw.file_text(name)


def _gallery() -> str:
    """A heading, a picture and when to use it, for each shipped layout."""
    cards = []
    for name in shipped():
        layout = load(name)
        text = (
            f"### {name}\n\n![What each of 8 devices holds under "
            f"{name}](pictures/layout_{name}.svg)\n\n"
        )
        text += f"{layout.description}\n\n**Use it when:** {layout.use_when}"
        cards.append(f'<div class="card" markdown="1">\n\n{text}\n\n</div>')
    return '<div class="cards" markdown="1">\n\n' + "\n\n".join(cards) + "\n\n</div>"


def _listing(path: str) -> str:
    names = sorted(
        file.name
        for file in (ROOT / path).iterdir()
        if file.is_file() and file.suffix in (".py", ".md", ".ipynb")
    )
    return f"# {path}\n\n" + "\n".join(f"- [{name}]({name})" for name in names) + "\n"


def on_page_markdown(markdown, page, config, files):
    """Rewrite links into the repository, place pairs of programs side by side, and remove notes
    from fences.
    """
    uri = page.file.src_uri
    generated = page.file.generated_by is not None
    boost = next((boost for begin, boost in SEARCH_BOOSTS.items() if uri.startswith(begin)), 1)
    page.meta.setdefault("search", {"exclude": uri.startswith(UNSEARCHED), "boost": boost})
    here = (
        f"../{uri.removesuffix('.md') if uri.endswith(('.py.md', '.toml.md')) else uri}"
        if generated
        else uri
    )

    def link(match):
        mark, text, target, anchor = match.groups()
        path = outside(here, target)
        if path is None:
            if generated and not re.match(r"[a-z]+:", target):  # a link back into docs/
                inside = posixpath.normpath(
                    posixpath.join("docs", posixpath.dirname(here), target)
                ).removeprefix("docs/")
                target = posixpath.relpath(inside, posixpath.dirname(uri) or ".")
            return f"{mark}[{text}]({target}{anchor or ''})"
        target = posixpath.relpath(shown_as(path), posixpath.dirname(uri) or ".")
        return f"{mark}[{text}]({target}{anchor or ''})"

    markdown = markdown.replace(_GALLERY, _gallery()) if _GALLERY in markdown else markdown
    if not generated:
        markdown = _HIDDEN.sub("", markdown)
    markdown = _LINK.sub(link, markdown)
    markdown = _PAIR.sub(_side_by_side, markdown)
    return _FENCE.sub(lambda match: f"```python\n{match[2]}```", markdown)


def on_page_content(html, page, config, files):
    """Put the outputs of notebooks into their pages, their pictures into the gallery, and the
    cookbook's index into columns.
    """
    uri = page.file.src_uri
    if uri == "notebooks.md":
        return _NOTEBOOK.sub(
            lambda match: (
                f'{match[1]}<span class="thumbnail">{_picture(match[2])}</span>{match[3]}'
            ),
            html,
        )
    if uri == _INDEX:
        page.toc.items.clear()  # the pages beside it have the same names
        text, first, lists = html.partition("<h2")
        return f'{text}<div class="columns">{first}{lists}</div>'
    source = ROOT / uri.replace(".md", ".ipynb")
    return (
        notebook_pages.fill(html, source)
        if uri.startswith("notebooks/") and source.is_file()
        else html
    )


def _picture(name: str) -> str:
    return notebook_pages.thumbnail(ROOT / "notebooks" / f"{name}.ipynb")


def _side_by_side(match) -> str:
    left, right = match[1].replace("```python tensorflow", "```python"), match[2].rstrip() + "\n"

    def column(title: str, text: str) -> str:
        return f'<div markdown="1">\n<p class="title">{title}</p>\n\n{text}\n</div>'

    return (
        f'<div class="pair" markdown="1">\n{column("TensorFlow 1.x", left)}\n'
        f"{column('spmd', right)}\n</div>\n"
    )


def on_post_page(output, page, config):
    """Put pictures into the page, so that they have its colours; search does not read them."""

    def picture(match):
        return f'<span class="spmd-cell picture">{draw.drawn(match[1])}</span>'

    return _PICTURE.sub(picture, output)


def on_post_build(config):
    """Remove what no page loads; fail if a page makes a browser load something from another server,
    unless a reader clicks.
    """
    site = Path(config["site_dir"])
    # pictures are in their pages
    for path in (*site.glob("assets/**/*.map"), *(site / "pictures").glob("*.svg")):
        path.unlink()
    shutil.rmtree(site / "assets/javascripts/lunr")  # search in other languages
    requests = []
    for path in sorted(site.rglob("*")):
        if path.suffix not in (".html", ".css"):
            continue
        text = path.read_text(encoding="utf-8")
        text = _PLAIN_LINK.sub("", text) if path.suffix == ".html" else text
        requests += [f"{path.name}: {request}" for request in _OUTSIDE.findall(text)]
    if requests:
        raise PluginError("the site loads from other servers:\n" + "\n".join(requests[:20]))
