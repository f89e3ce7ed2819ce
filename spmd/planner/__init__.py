"""The needs of a training step and its time, known before it runs, for hardware that need not be
there: memory, traffic and seconds.

- `planning.py` has `spmd.plan`. `plan_data.py` computes a plan: `compile.py` compiles the step, and
  `hlo.py` reads the program for `memory.py`, `traffic.py`, `timeline.py` and `flop_shares.py`.
- `target.py` and `cluster.py` describe hardware; `calibration.py` measures the devices here.
- `text_report.py`, `html_report.py` and `notes.py` show a plan; `suggestions.py` has what helps,
  and `curves.py` what follows for other hardware.
- `layout_search.py` plans the candidates of `candidates.py`; `step_profile.py` sets traced steps
  beside a plan.
"""
