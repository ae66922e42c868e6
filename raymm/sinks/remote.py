"""A folder of parts in an object store: parts under a run's id, and last a manifest."""

import contextlib
import errno
import re
import secrets
from collections.abc import Iterator
from typing import Any, BinaryIO

from raymm.errors import SinkError, SinkExistsError
from raymm.filesystems import base_of, explicit, resolve
from raymm.manifests import NAME, read_manifest, write_manifest

_RUN = re.compile("[0-9a-f]{16}")


class RemoteFolder:
    """``<uri>/<run id>/`` for the parts; ``<uri>/_manifest.json`` makes them the output.

    Readers see only what the manifest lists, so a run that ends half way leaves the old output as
    it was. Object stores have no locks: of two runs the one that commits last is the output.
    """

    def __init__(self, uri: str) -> None:
        address, _, options = explicit(uri).partition("?")
        self._address, self._options = address.rstrip("/"), options and f"?{options}"
        self.uri = base_of(address).rstrip("/")
        self._run = ""
        self._names: tuple[str, ...] = ()
        self._opened: tuple[Any, str] | None = None

    def __str__(self) -> str:
        return self.uri

    @property
    def finished(self) -> str:
        """The address, with its options."""
        return self._address + self._options

    @property
    def unfinished(self) -> str:
        """Where this run's parts are."""
        return f"{self._address}/{self._run}{self._options}"

    def is_one_of(self, path: str) -> bool:
        """Whether an address is this one or lies below."""
        named = base_of(path).rstrip("/")
        return f"{named}/".startswith(f"{self.uri}/")

    def open(self, parts: dict[str, int], overwrite: bool, is_direct: bool) -> None:
        """Check that the place is free."""
        del is_direct
        filesystem, root = self._filesystem()
        self._run, self._names = secrets.token_hex(8), tuple(parts)
        with self._errors("created"):
            if not overwrite and _is_taken(filesystem, root):
                raise SinkExistsError(
                    errno.EEXIST, f"{self.uri} exists: choose another place or pass overwrite=True"
                )
            filesystem.create_dir(f"{root}/{self._run}", recursive=True)

    def attach(self) -> None:
        """Connect from this process."""
        self._filesystem()

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[BinaryIO]:
        """Give a part to be written from its beginning."""
        filesystem, root = self._filesystem()
        with (
            self._errors("written"),
            filesystem.open_output_stream(f"{root}/{self._run}/{name}") as out,
        ):
            yield out

    def finish(self, name: str) -> None:
        """Do nothing: a stream that has ended is a part."""

    def detach(self, sync: bool) -> None:
        """Do nothing: what was streamed is durable."""

    def commit(self, rows: dict[str, int], metadata: dict[str, Any]) -> None:
        """Check that every part is there, and write the manifest."""
        filesystem, root = self._filesystem()
        with self._errors("committed"):
            paths = [f"{root}/{self._run}/{name}" for name in self._names]
            found = filesystem.get_file_info(paths)
            missing = [info.path for info in found if not info.is_file]
            if missing:
                raise SinkError(errno.ENOENT, f"{missing[0]} was removed while it was written")
            old = read_manifest(filesystem, root)
            parts = [
                {"path": f"{self._run}/{name}", "rows": rows[name], "nbytes": info.size}
                for name, info in zip(self._names, found, strict=True)
            ]
            write_manifest(filesystem, root, {"raymm": 1, "parts": parts, "metadata": metadata})
            runs = {part["path"].partition("/")[0] for part in (old or {}).get("parts", [])}
            for run in runs - {self._run}:
                with contextlib.suppress(OSError):  # only garbage: the manifest names it no more
                    filesystem.delete_dir(f"{root}/{run}")
        self._run = ""

    def abort(self) -> None:
        """Remove this run's parts."""
        if self._run:
            with contextlib.suppress(Exception):  # nothing more can be done from here
                filesystem, root = self._filesystem()
                filesystem.delete_dir(f"{root}/{self._run}")
        self._run = ""

    def __getstate__(self) -> dict[str, Any]:
        """Leave connections behind."""
        return self.__dict__ | {"_opened": None}

    def _filesystem(self) -> tuple[Any, str]:
        if self._opened is None:
            self._opened = resolve(self.finished)
        return self._opened

    @contextlib.contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except SinkError:
            raise
        except OSError as error:
            raise SinkError(error.errno, f"{self.uri} could not be {verb}: {error}") from error


def _is_taken(filesystem: Any, root: str) -> bool:
    """Whether there is an output, or anything that is not a run's parts."""
    from pyarrow import fs  # noqa: PLC0415  only loaded for remote outputs

    if filesystem.get_file_info(f"{root}/{NAME}").is_file:
        return True
    found = filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True))
    return any(info.is_file or not _RUN.fullmatch(info.base_name) for info in found)
