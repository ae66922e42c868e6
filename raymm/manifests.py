"""The list of a remote folder's parts: readers see only what it names."""

import json
from typing import Any

from raymm.errors import SourceError

NAME = "_manifest.json"
VERSION = 1


def read_manifest(filesystem: Any, root: str) -> dict[str, Any] | None:
    """Return what a folder's manifest says; None if there is none.

    Parameters
    ----------
    filesystem : pyarrow.fs.FileSystem
    root : str
        The folder within it.

    Raises
    ------
    SourceError
        It cannot be read, is no manifest, or was made by a newer version.
    """
    path = f"{root}/{NAME}"
    try:
        with filesystem.open_input_stream(path) as file:
            text = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        if filesystem.get_file_info(path).is_file:
            raise SourceError(f"cannot read {path}: {error}") from error
        return None
    try:
        found = json.loads(text)
        parts = [(each["path"], each["rows"], each["nbytes"]) for each in found["parts"]]
        version = found["raymm"]
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path} is no manifest of raymm: {error!r}") from error
    if version != VERSION:
        raise SourceError(f"{path} has version {version}, this raymm reads {VERSION}: update it")
    if any(path.startswith("/") or ".." in path.split("/") for path, _, _ in parts):
        raise SourceError(f"{path} names parts outside of its folder")
    manifest: dict[str, Any] = found
    return manifest


def write_manifest(filesystem: Any, root: str, manifest: dict[str, Any]) -> None:
    """Write a folder's manifest, at once: readers find the old one, or this.

    Parameters
    ----------
    filesystem : pyarrow.fs.FileSystem
    root : str
        The folder within it, which exists where folders are made.
    manifest : dict
        ``{"raymm": 1, "parts": [{"path", "rows", "nbytes"}, ...], "metadata": {...}}``; paths are
        relative to `root`.
    """
    path = f"{root}/{NAME}"
    is_local = filesystem.type_name == "local"  # elsewhere an object appears when it is complete
    written = f"{path}.partial" if is_local else path
    with filesystem.open_output_stream(written) as file:
        file.write(json.dumps(manifest, indent=1).encode())
    if is_local:
        filesystem.move(written, path)
