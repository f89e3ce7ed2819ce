"""Traced programs: one walk over them, and one table of what each of JAX's primitives is.

`primitives` is the table; `inner_programs` the programs that loops, branches and calls run;
`interpreter` the walk, on which everything that reads a trace is a class with rules; `programs` the
questions that need no walk, and parts of programs; `derivatives` functions with a derivative of
their own.
"""
