"""What is on disk after a loss of power, in the worst case: what was not synced is lost.

A file whose contents have changed since they were synced is empty. A new name, of `open`, `mkdir`,
`link` or `rename`, is there only if its folder was synced later; the old name of a rename that was
lost is there, and a file that it replaced. A deletion is on disk at once. Or all names are on disk,
and only contents are lost: a file system may write them in any order.
"""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

from fault_shim import KINDS, SIZE, SYNC, WRITE, Call


@dataclasses.dataclass(eq=False)
class Node:
    """A file or a folder.

    Attributes:
      now, disk: what is in a folder, by name: as processes see it, and as it is on disk. None for a
        file.
      synced: the contents of a file are on disk.
      kept: a copy of a file that was replaced.
    """

    now: "dict[str, Node] | None" = None
    disk: "dict[str, Node]" = dataclasses.field(default_factory=dict)
    synced: bool = True
    kept: Path | None = None


def before(folder: Path) -> Node:
    """A folder that is on disk as it is."""
    node = Node(now={})
    for path in folder.iterdir():
        node.now[path.name] = before(path) if path.is_dir() and not path.is_symlink() else Node()
    node.disk = dict(node.now)
    return node


def folders(node: Node) -> Iterator[Node]:
    """All folders of a tree, as processes see it."""
    if node.now is not None:
        yield node
        for inner in node.now.values():
            yield from folders(inner)


class Disk:
    """What calls do to a folder.

    Args:
      root: the folder.
      tree: what was in it before the calls.
      copies: the folder of what renames replaced.
    """

    def __init__(self, root: Path, tree: Node, copies: Path):
        self._root, self.tree, self._copies = root, tree, copies

    def _place(self, path: str) -> tuple[Node | None, str]:
        """The folder that a path is in, and its name there."""
        node: Node | None = self.tree
        *parents, name = Path(path).relative_to(self._root).parts or [""]
        for part in parents:
            node = node.now.get(part) if node is not None and node.now is not None else None
        return node, name

    def _find(self, path: str) -> Node | None:
        parent, name = self._place(path)
        if not name:
            return parent
        return None if parent is None else parent.now.get(name)

    def apply(self, call: Call) -> None:
        """What a call does that succeeded; files that have no name any more do not matter."""
        parent, name = self._place(call.path)
        node = self._find(call.path)
        kind = KINDS[call.name]
        if call.name == "mkdir":
            parent.now[name] = Node(now={})
        elif call.name == "symlink" or (
            call.name in ("creating open", "truncating open") and node is None
        ):
            parent.now[name] = Node(synced=call.name == "symlink")
        elif call.name == "truncating open" or (kind & (WRITE | SIZE) and node is not None):
            node.synced = False
        elif kind & SYNC and node is not None:
            self._sync(node)
        elif call.name == "link":
            other, new_name = self._place(call.other)
            other.now[new_name] = node
        elif call.name == "rename":
            other, new_name = self._place(call.other)
            replaced = other.now.get(new_name)
            if replaced is not None and call.kept:
                replaced.kept = self._copies / str(call.kept)
            other.now[new_name] = parent.now.pop(name)
        elif call.name in ("unlink", "rmdir"):
            removed = parent.now.pop(name)
            parent.disk = {
                key: node
                for key, node in parent.disk.items()
                if not (key == name and node is removed)
            }
            if not any(removed in folder.now.values() for folder in folders(self.tree)):
                for folder in folders(self.tree):
                    folder.disk = {
                        key: node for key, node in folder.disk.items() if node is not removed
                    }

    def _sync(self, node: Node) -> None:
        if node.now is None:
            node.synced = True
            return
        node.disk = dict(node.now)
        # a rename from another folder is on disk with its new name
        for folder in folders(self.tree):
            moved = [
                key
                for key, inner in folder.disk.items()
                if inner not in folder.now.values() and inner in node.now.values()
            ]
            for key in moved:
                del folder.disk[key]


def _sources(node: Node, path: Path, sources: dict[int, Path]) -> dict[int, Path]:
    sources[id(node)] = path
    for name, inner in (node.now or {}).items():
        _sources(inner, path / name, sources)
    return sources


def _write(node: Node, target: Path, sources: dict[int, Path], names: bool) -> None:
    source = sources.get(id(node), node.kept)
    if node.now is not None:
        target.mkdir()
        for name, inner in (node.disk if names else node.now).items():
            _write(inner, target / name, sources, names)
    elif node.synced:
        shutil.copy2(source, target, follow_symlinks=False)
    else:
        target.touch()
        shutil.copystat(source, target)


def lose_power(
    root: Path, tree: Node, copies: Path, calls: list[Call], *, names: bool = True
) -> None:
    """Replace a folder by what is on disk after the calls.

    Args:
      root: the folder, as the calls left it.
      tree: `before` of it.
      copies: the folder of what renames replaced.
      calls: of the log; the one that was killed was not made.
      names: those that were not synced are lost, too.
    """
    disk = Disk(root, tree, copies)
    for call in calls:
        if call.result >= 0 and not call.faulty:
            disk.apply(call)
    seen = root.with_name(f"{root.name}.seen")
    root.rename(seen)
    _write(disk.tree, root, _sources(disk.tree, seen, {}), names)
    shutil.rmtree(seen)
