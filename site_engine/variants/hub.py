"""Fetch variants from the Hugging Face Hub: of one commit of a repository, safetensors and settings alone."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub

from site_engine.config import HUB
from site_engine.errors import VariantRefused

SOURCE = re.compile(r"hf:(?P<repository>[\w.-]+/[\w.-]+)@(?P<commit>[0-9a-f]{40})")
FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]
NESTED = ["*/*"]  # checkpoints of training and the like


def parse(source: str) -> tuple[str, str]:
    """Return the repository and the commit that a source names. Raises VariantRefused."""
    found = SOURCE.fullmatch(source)
    if found is None:
        raise VariantRefused(
            f"{source!r} names no commit of the Hub: hf:organization/name@ and the 40 digits of one, since "
            "branches and tags can come to name something else"
        )
    return found["repository"], found["commit"]


def local_folder(source: str, room_bytes: int | None = None) -> Path:
    """Return the folder of a variant; what the Hub has is downloaded first, unless it is here.

    At most `room_bytes` of safetensors, and no more than the disk has room for. Raises VariantRefused.
    """
    if not source.startswith(HUB):
        return Path(source)
    repository, commit = parse(source)
    wanted: dict[str, Any] = {
        "repo_id": repository,
        "revision": commit,
        "allow_patterns": FILES,
        "ignore_patterns": NESTED,
        "endpoint": os.environ.get("HF_ENDPOINT"),
        "cache_dir": os.environ.get("HF_HUB_CACHE"),
    }
    try:
        with suppress(huggingface_hub.errors.DryRunError):  # the Hub is out of reach: it may be here
            check_sizes(source, huggingface_hub.snapshot_download(**wanted, dry_run=True), room_bytes)
        return Path(huggingface_hub.snapshot_download(**wanted))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise VariantRefused(f"{source} cannot be fetched: {type(error).__name__}: {reason}") from error


def check_sizes(source: str, planned: Any, room_bytes: int | None) -> None:
    """Refuse what memory or the disk has no room for, before it is downloaded."""
    weights = sum(each.file_size or 0 for each in planned if each.filename.endswith(".safetensors"))
    if room_bytes is not None and weights > room_bytes:
        raise VariantRefused(f"{source} has {weights:,} bytes, and there is room for {room_bytes:,}")
    missing = sum(each.file_size or 0 for each in planned if each.will_download)
    cache = Path(os.environ.get("HF_HUB_CACHE") or huggingface_hub.constants.HF_HUB_CACHE).absolute()
    free = shutil.disk_usage(next(each for each in (cache, *cache.parents) if each.exists())).free
    if missing > free:
        raise VariantRefused(f"{source}: {missing:,} bytes would be downloaded, and the disk has {free:,}")
