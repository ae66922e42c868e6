"""Operands in an uncompressed `.npz` archive, read in place."""

import struct
import zipfile
from pathlib import Path

from raymm.errors import SourceError
from raymm.sources.files import FileSource, from_npy

LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Signature, then the lengths of what follows it: the name and the extra field."""


def from_npz(path: Path, member: str | None, name: str) -> FileSource:
    """Return the description of one array of a `.npz` file; its header is read.

    Parameters
    ----------
    member : str, optional
        Its name in the archive, without ``.npy``; not needed if there is one.

    Raises
    ------
    SourceError
        There is no such member, several that could be meant, or it is compressed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            infos = {
                info.filename.removesuffix(".npy"): info
                for info in archive.infolist()
                if info.filename.endswith(".npy")
            }
    except (OSError, zipfile.BadZipFile) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no .npz file: {error}"
        raise SourceError(f"cannot read {path}: {reason}") from error
    info = infos[_chosen(path, member, list(infos))]
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise SourceError(
            f"{name}: the member {info.filename!r} is compressed, and cannot be read in place; "
            f"members: {_listed(list(infos))}. Save it with numpy.savez, or as a .npy file"
        )
    begin = _data_position(path, info)
    if begin + info.file_size > path.stat().st_size:
        raise SourceError(f"{path} was cut short: its member {info.filename!r} goes beyond its end")
    return from_npy(path, name, begin, begin + info.file_size)


def _chosen(path: Path, member: str | None, names: list[str]) -> str:
    if member is None and len(names) == 1:
        return names[0]
    if member is not None and member.removesuffix(".npy") in names:
        return member.removesuffix(".npy")
    if not names:
        raise SourceError(f"{path} holds no arrays")
    problem = "holds several arrays" if member is None else f"has no member {member!r}"
    raise SourceError(
        f"{path} {problem}: name one of {_listed(names)}, as in {path.name}::{names[0]}"
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names)


def _data_position(path: Path, info: zipfile.ZipInfo) -> int:
    """Return where a member's bytes begin: the header before them repeats its name."""
    with path.open("rb") as file:
        file.seek(info.header_offset)
        header = file.read(LOCAL_HEADER.size)
    if len(header) < LOCAL_HEADER.size or header[:4] != b"PK\3\4":
        raise SourceError(f"{path} is damaged: the header of its member {info.filename!r} is none")
    _, name_nbytes, extra_nbytes = LOCAL_HEADER.unpack(header)
    return int(info.header_offset + LOCAL_HEADER.size + name_nbytes + extra_nbytes)
