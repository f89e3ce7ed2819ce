#!/bin/sh
# Check the files in examples/cluster of engines that nothing else here installs, by the engines' own packages (600 MB, in .venv-engines):
#   tools/check_engine_files.sh python3.11
set -eu
for package in skypilot==0.14.1 dstack==0.22.5; do
    folder=.venv-engines/files/$package
    [ -x "$folder/bin/pip" ] || "$1" -m venv "$folder"
    "$folder/bin/pip" install --quiet --disable-pip-version-check "$package" pyyaml
done
.venv-engines/files/skypilot==0.14.1/bin/python - <<'END'
import yaml
from sky.utils import common_utils, schemas

job = yaml.safe_load(open("examples/cluster/skypilot.yaml"))
common_utils.validate_schema(job, schemas.get_task_schema(), "skypilot.yaml: ")
print("skypilot.yaml: as SkyPilot's schema says")
END
.venv-engines/files/dstack==0.22.5/bin/python - <<'END'
import yaml
from dstack._internal.core.models.configurations import parse_apply_configuration

parse_apply_configuration(yaml.safe_load(open("examples/cluster/dstack.yml")))
print("dstack.yml: as dstack's models say")
END
