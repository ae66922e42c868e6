"""Paths and URIs as Arrow filesystems: local, object stores, whatever fsspec knows."""

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from raymm.errors import PlanError

ARROW_SCHEMES = frozenset({"gs", "gcs", "hdfs", "viewfs", "abfs", "abfss"})
"""What Arrow opens itself, besides local files and S3."""
S3_OPTIONS = {
    "endpoint_override": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
}
"""Query parameters of an ``s3://`` URI, and the environment variables that stand in for them."""


def is_remote(text: str) -> bool:
    """Whether it is a URI of something that is not a local file."""
    return "://" in text and not text.startswith("file://")


def resolve(uri: str) -> tuple[Any, str]:
    """Return the filesystem of a path or URI, and the path within it.

    Parameters
    ----------
    uri : str
        A local path, ``file://``, ``s3://bucket/key``, ``gs://``, ``abfs://``, ``hdfs://``, or any
        address that fsspec knows. Options of S3 follow a question mark (``endpoint_override``,
        ``region``, ``scheme``, ``anonymous``) or come from AWS's environment variables.

    Returns
    -------
    filesystem : pyarrow.fs.FileSystem
    path : str

    Raises
    ------
    PlanError
        Nothing here knows such an address, or what does is not installed.
    """
    from pyarrow import fs  # noqa: PLC0415  only loaded for tables

    if not is_remote(uri):
        path = Path(uri.removeprefix("file://")).expanduser()
        return fs.LocalFileSystem(), os.path.abspath(path)  # noqa: PTH100  not the links' targets
    scheme = uri.partition("://")[0]
    try:
        if scheme == "s3":
            return _resolve_s3(uri)
        if scheme in ARROW_SCHEMES:
            filesystem, path = fs.FileSystem.from_uri(uri)
            return filesystem, path
    except (ValueError, OSError, NotImplementedError) as error:
        raise PlanError(f"{redacted(uri)} cannot be opened: {error}") from error
    return _resolve_foreign(uri, scheme)


def explicit(uri: str) -> str:
    """Return a URI that means the same in a process with another environment.

    Credentials stay out of it: every process finds its own.
    """
    if not uri.startswith("s3://"):
        return uri if is_remote(uri) else resolve(uri)[1]
    parts = urlsplit(uri)
    return parts._replace(query=urlencode(_s3_options(parts.query))).geturl()


def redacted(uri: str) -> str:
    """Return a URI without the secrets that it may hold, for messages."""
    without = re.sub(r"://[^/@]*@", "://", uri)
    return re.sub(r"(?i)((?:secret|token|key|password)[^=&?]*)=[^&]*", r"\1=...", without)


def base_of(uri: str) -> str:
    """Return a URI without its options and secrets."""
    return redacted(uri).partition("?")[0] if is_remote(uri) else uri


def _s3_options(query: str) -> dict[str, str]:
    options = dict(parse_qsl(query))
    for option, variables in S3_OPTIONS.items():
        found = next((os.environ[each] for each in variables if os.environ.get(each)), None)
        if found is not None:
            options.setdefault(option, found)
    return options


def _resolve_s3(uri: str) -> tuple[Any, str]:
    from pyarrow import fs  # noqa: PLC0415  only loaded for tables

    parts = urlsplit(uri)
    bucket = parts.netloc.rpartition("@")[2]
    if not bucket:
        raise PlanError(f"{redacted(uri)} names no bucket: give s3://bucket/path")
    options = _s3_options(parts.query)
    unknown = sorted(options.keys() - {*S3_OPTIONS, "scheme", "anonymous"})
    if unknown:
        raise PlanError(
            f"{redacted(uri)}: unknown options {', '.join(unknown)}; known are "
            "endpoint_override, region, scheme and anonymous"
        )
    given: dict[str, Any] = {}
    if parts.username:
        given["access_key"] = unquote(parts.username)
        given["secret_key"] = unquote(parts.password or "")
    given |= _s3_settings(options)
    if "region" not in given:
        given["region"] = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(**given), f"{bucket}{unquote(parts.path)}".rstrip("/")


def _s3_settings(options: dict[str, str]) -> dict[str, Any]:
    """Return the arguments of Arrow's filesystem that a URI's options stand for."""
    given: dict[str, Any] = {}
    endpoint = options.get("endpoint_override")
    if endpoint is not None:
        scheme, _, host = endpoint.rpartition("://")
        given |= {"endpoint_override": host.rstrip("/"), "scheme": scheme or "https"}
        given["region"] = "us-east-1"  # asking Amazon where a bucket of others lies is no use
    given |= {option: options[option] for option in ("region", "scheme") if option in options}
    if options.get("anonymous", "").lower() in ("1", "true"):
        given["anonymous"] = True
    return given


def _resolve_foreign(uri: str, scheme: str) -> tuple[Any, str]:
    """Resolve an address through fsspec, where that is installed."""
    from pyarrow import fs  # noqa: PLC0415  only loaded for tables

    try:
        import fsspec  # noqa: PLC0415  optional
    except ImportError as error:
        raise PlanError(
            f"{redacted(uri)}: {scheme}:// addresses need fsspec (pip install fsspec); without it "
            "there are local paths, s3://, gs://, abfs:// and hdfs://"
        ) from error
    try:
        filesystem, path = fsspec.core.url_to_fs(uri)
    except (ValueError, ImportError) as error:
        raise PlanError(
            f"{redacted(uri)}: {scheme}:// is no address that pyarrow or fsspec can open here: "
            f"{error}"
        ) from error
    return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), str(path).rstrip("/")
