"""Where arrays live: layouts as data, their TOML format, and their application to a model's
shapes.
"""

from spmd.layout.display import html_table, one_line
from spmd.layout.schema import FUNCTIONS
from spmd.layout.toml_reader import load
from spmd.layout.toml_writer import dumps

FUNCTIONS.update(load=load, dumps=dumps, one_line=one_line, html_table=html_table)
