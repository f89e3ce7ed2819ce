#!/bin/sh
# Install what tests/engines starts: Debian's packages of SLURM, MPICH and Open MPI, as root, and Ray and PyTorch in .venv-engines. What
# cannot be installed is named, and its tests are skipped.
set -u
packages="slurmctld slurmd slurm-client munge mpich openmpi-bin"
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "not installed, which needs root and apt-get: $packages"
elif ! dpkg --status $packages >/dev/null 2>&1; then
    # Runlevel 1: the packages' own services are not started; the tests start theirs, on loopback.
    RUNLEVEL=1 apt-get install --yes --quiet --no-install-recommends $packages || echo "not installed: $packages"
fi
if [ ! -x .venv-engines/bin/torchrun ] || [ ! -x .venv-engines/bin/ray ]; then
    "$1" -m venv .venv-engines && .venv-engines/bin/pip install --quiet --disable-pip-version-check -e . torch==2.13.0 "ray[train]" ||
        echo "not installed: Ray and torch"
fi
