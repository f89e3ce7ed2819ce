"""A file with fields of a pod, such as tolerations, that is merged into the pods of
`spmd launch --kubernetes`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmd.errors import OptionError, import_extra, short_repr

# Lists whose items are merged by this field, as in Kubernetes' own patches; other lists are
# replaced.
KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
}
# that the launcher has set
POD_FIELDS = ("subdomain", "restartPolicy", "hostname")
CONTAINER_FIELDS = ("image", "command", "args")


def read_pod_template(path: Path) -> Any:
    """Read a file with the fields `metadata` and `spec` of a pod.

    Raises:
      OptionError: there is no such file, or it is no YAML.
      MissingExtraError: PyYAML is not installed.
    """
    yaml = import_extra("yaml", "kubernetes")
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OptionError(f"--pod {path} cannot be read: {error}.", fix="a YAML file.") from None


def merge_template(pod: dict[str, Any], template: Any) -> dict[str, Any]:
    """Return the pod with the fields of a template: mappings are merged, lists of `KEYS` by that
    field of their items, and everything else is replaced.

    Args:
      pod: `metadata` and `spec`; its first container is the one that trains.
      template: the same fields, any of them.

    Raises:
      OptionError: the template has other fields, or changes what the launcher has set.
    """
    fields = set(template) if isinstance(template, Mapping) else {short_repr(template)}
    if others := sorted(map(str, fields - {"metadata", "spec"})):
        raise OptionError(
            f"a pod has no field {others[0]}.", fix="metadata: and spec:, with what is below them."
        )
    merged = _merge(pod, template, "pod")
    before, after = pod["spec"], merged["spec"]
    _check_unchanged("spec", before, after, POD_FIELDS)
    trained, container = before["containers"][0], after["containers"][0]
    _check_unchanged(f"container {trained['name']}", trained, container, CONTAINER_FIELDS)
    variables = {item["name"]: item for item in container["env"]}
    for item in trained["env"]:
        _check_unchanged("env", {item["name"]: item}, variables, (item["name"],))
    # by which the Service finds the pods
    labels = pod["metadata"]["labels"]
    _check_unchanged("labels", labels, merged["metadata"]["labels"], tuple(labels))
    return merged


def _merge(value: Any, changes: Any, field: str) -> Any:
    if isinstance(value, Mapping):
        if not isinstance(changes, Mapping):
            raise OptionError(f"{field}: {short_repr(changes)}.", fix="fields with values.")
        merged = dict(value)
        for name, change in changes.items():
            merged[name] = _merge(value[name], change, name) if name in value else change
        return merged
    if field not in KEYS or not isinstance(value, list):
        return changes
    key = KEYS[field]
    items = {item[key]: item for item in value}
    for change in changes if isinstance(changes, list) else [changes]:
        if not isinstance(change, Mapping) or key not in change:
            raise OptionError(f"{field}: {short_repr(change)} has no {key}.", fix=f"{key}: …")
        items[change[key]] = _merge(items.get(change[key], {}), change, field)
    return list(items.values())


def _check_unchanged(
    name: str, before: Mapping[str, Any], after: Mapping[str, Any], fields: tuple[str, ...]
) -> None:
    for field in fields:
        if before.get(field) != after.get(field):
            raise OptionError(
                f"{name}: {field} is set by the launcher.",
                fix="leave it out; the options of spmd launch set what can be chosen.",
            )
