"""The files of a table: one file, a folder, a glob, or what a manifest lists; local or remote."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raymm.errors import SourceError
from raymm.filesystems import base_of, is_remote, redacted, resolve
from raymm.manifests import NAME, read_manifest
from raymm.sources.formats import as_source_error, kind_of, sniff

WILDCARDS = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Parts:
    """The files of one table, in order."""

    uri: str = field(repr=False)
    """What to resolve for the filesystem; it may hold secrets."""
    paths: tuple[str, ...]
    """Within the filesystem."""
    nbytes: tuple[int, ...]
    path: str
    """The file or folder, for messages and comparisons; of a glob, the folder above it."""
    is_folder: bool
    rows: tuple[int, ...] | None = None
    """Of each file, where a manifest tells."""

    def where(self, place: int) -> str:
        """Return what to call a file in messages."""
        if not self.is_folder:
            return self.path
        scheme = f"{self.path.partition('://')[0]}://" if "://" in self.path else ""
        return scheme + self.paths[place]


def find_parts(text: str) -> Parts:
    """Return the files that a path, glob or URI names.

    Raises
    ------
    SourceError
        There are none, or not those that the manifest lists.
    PlanError
        The address is of an unknown kind.
    """
    is_there = not is_remote(text) and Path(text.removeprefix("file://")).exists()
    uri, pattern = (text, None) if is_there else _split_glob(text)
    filesystem, root = resolve(uri)
    shown = base_of(uri) if is_remote(uri) else root
    where = redacted(text)
    try:
        info = filesystem.get_file_info(root)
        if pattern is None and info.is_file:
            return Parts(uri, (root,), (int(info.size),), shown, False)
        if pattern is None and (manifest := read_manifest(filesystem, root)) is not None:
            return _listed_parts(filesystem, root, uri, shown, manifest)
        found = _files_below(filesystem, root)
    except (OSError, ValueError, NotImplementedError) as error:
        raise as_source_error(error, where) from error
    if pattern is not None:
        matches = _expression(f"{root}/{pattern}".replace("//", "/")).fullmatch
        found = [each for each in found if matches(each[0])]
    else:
        found = _tables_only(filesystem, found, where)
    if not found:
        raise SourceError(f"{where}: no Parquet or Arrow files are there")
    paths, sizes = zip(*found, strict=True)
    return Parts(uri, paths, sizes, shown, True)


def has_wildcards(text: str) -> bool:
    """Whether a path is a pattern that stands for several."""
    return WILDCARDS.search(text.partition("?")[0] if "://" in text else text) is not None


def _split_glob(text: str) -> tuple[str, str | None]:
    """Return the folder above the first wildcard, and the pattern below it."""
    address, mark, options = text.partition("?") if "://" in text else (text, "", "")
    wildcard = WILDCARDS.search(address)
    if wildcard is None:
        return text, None
    end = address.rfind("/", 0, wildcard.start())
    folder, pattern = (address[:end] or "/", address[end + 1 :]) if end >= 0 else (".", address)
    return folder + mark + options, pattern


def _expression(pattern: str) -> re.Pattern[str]:
    """Return a glob as a regular expression: ``**/`` is any number of folders."""
    pieces = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    found = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+\])", pattern)
    is_set = re.compile(r"\[[^]]+\]").fullmatch
    return re.compile(
        "".join(
            each.replace("[!", "[^") if is_set(each) else pieces.get(each, re.escape(each))
            for each in found
        )
    )


def _files_below(filesystem: Any, root: str) -> list[tuple[str, int]]:
    """Return path and size of all files below a folder, by name; hidden ones and ``_`` are not."""
    from pyarrow import fs  # noqa: PLC0415  only loaded for tables

    infos = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    found = []
    for info in infos:
        below = info.path[len(root) :].split("/")
        if info.is_file and not any(part.startswith((".", "_")) for part in below):
            found.append((info.path, int(info.size)))
    return sorted(found)


def _tables_only(
    filesystem: Any, found: list[tuple[str, int]], where: str
) -> list[tuple[str, int]]:
    """Return the files of a folder that are tables; all must be of one format."""
    kinds = {kind_of(path) for path, _ in found}
    if kinds == {None} and sniff(filesystem, found[0][0]) is not None:
        return found  # of a writer that gives no suffix
    if {"parquet", "arrow"} <= kinds:
        raise SourceError(
            f"{where} holds Parquet and Arrow files: give a pattern such as *.parquet"
        )
    return [each for each in found if kind_of(each[0]) is not None]


def _listed_parts(
    filesystem: Any, root: str, uri: str, shown: str, manifest: dict[str, Any]
) -> Parts:
    """Return the parts that a manifest lists, if all are there as it says."""
    parts = manifest["parts"]
    paths = tuple(f"{root}/{part['path']}" for part in parts)
    infos = filesystem.get_file_info(list(paths))
    for part, info in zip(parts, infos, strict=True):
        if not info.is_file:
            raise SourceError(
                f"{shown}/{part['path']} is missing, {NAME} lists it: write the table again"
            )
        if info.size != part["nbytes"]:
            raise SourceError(
                f"{shown}/{part['path']} has {info.size:,} bytes, {NAME} says "
                f"{part['nbytes']:,}: write the table again"
            )
    if not parts:
        raise SourceError(f"{shown}: {NAME} lists no parts")
    rows = tuple(int(part["rows"]) for part in parts)
    return Parts(uri, paths, tuple(int(part["nbytes"]) for part in parts), shown, True, rows)
