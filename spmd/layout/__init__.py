"""Layouts: which shards of arrays live where, as data without code.

`schema` has the tables (with `gradients`, `remat`, `trained`, `precision`, `model_parallel`,
`server`, `compiler`), `toml_reader` and `toml_writer` spell them, `layout_files` finds files.
`resolve` makes the spec of every array from a layout and a model's shapes; `check` finds all
problems first, and `fixes` fixes them.
"""

from spmd.layout.display import html_table, one_line
from spmd.layout.layout_files import load
from spmd.layout.schema import FUNCTIONS
from spmd.layout.toml_writer import dumps

# Methods of `Layout` that need more than its data: data imports no functions.
FUNCTIONS.update(load=load, dumps=dumps, one_line=one_line, html_table=html_table)
