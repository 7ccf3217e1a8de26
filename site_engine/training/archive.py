"""Store an adapter as one file: a tar archive of the two files of peft's format."""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from pathlib import Path

from site_engine.core.training import AdapterShape
from site_engine.errors import VariantRefused
from site_engine.training.adapter import write_folder
from site_engine.training.snapshot import decode
from site_engine.training.temporary_folder import temporary_folder
from site_engine.variants.peft_folder import CONFIG, WEIGHTS


def pack(snapshot: bytes, shape: AdapterShape, base: str) -> bytes:
    """Return the archive of a snapshot's adapter. Equal adapters have equal archives."""
    with temporary_folder("mico-packed-") as parent:
        folder = parent / "adapter"
        write_folder(folder, decode(snapshot).adapter, shape, base)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name in (CONFIG, WEIGHTS):
                content = (folder / name).read_bytes()
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def unpack(archive: bytes, parent: Path) -> Path:
    """Extract an archive to a new folder in `parent` and return the folder.

    Raises VariantRefused and OSError, after removing the folder.
    """
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
            for name in (CONFIG, WEIGHTS):
                file = opened.extractfile(name)
                if file is None:
                    raise VariantRefused(f"{name} in the archive of the adapter is no file")
                (folder / name).write_bytes(file.read())
    except Exception as exc:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(exc, tarfile.TarError | KeyError):
            raise VariantRefused(f"the content is no archive of an adapter: {exc}") from exc
        raise
    return folder
