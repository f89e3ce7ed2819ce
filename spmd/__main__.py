"""`python -m spmd` is the `spmd` command."""

from spmd.launch.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
