"""Where a checkpoint named by hub id lies on this machine. The network is used only to fetch what is not there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tpkit.errors import CheckpointError, UsageError
from tpkit.spec.bound import BoundSpec

__all__ = ["cached", "locate"]

#: what a download takes; no pickles
PATTERNS = ["*.safetensors", "*.json", "*.jinja"]


def locate(checkpoint: str | os.PathLike[str] | None, spec: BoundSpec) -> Path:
    """Returns the folder or file of a checkpoint: the one given, else the local copy of the description's hub id.

    Raises:
        UsageError: if neither is there.
        CheckpointError: if the hub id has no local copy and cannot be fetched.
    """
    if checkpoint is not None:
        return Path(checkpoint)
    if spec.checkpoint is None:
        raise UsageError(f"{spec.source} names no weights", hint="give --checkpoint DIR, or --dummy-weights")
    return cached(spec.checkpoint) or _download(spec.checkpoint)


def cached(repository: str) -> Path | None:
    """Returns the newest complete snapshot of a repository in the local Hugging Face cache, or None.

    The cache is a public layout: ``models--ORG--NAME/refs/main`` holds the name of a folder under ``snapshots``.
    https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    folder = cache / ("models--" + repository.replace("/", "--"))
    reference = folder / "refs" / "main"
    if not reference.is_file():
        return None
    snapshot = folder / "snapshots" / reference.read_text(encoding="utf-8").strip()
    return snapshot if (snapshot / "config.json").is_file() and any(snapshot.glob("*.safetensors")) else None


def _download(repository: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{repository} is not in the local Hugging Face cache",
            hint="give --checkpoint DIR, or install huggingface_hub (the extra 'hub') to download it",
        ) from None
    sys.stderr.write(f"{repository} is not in the local cache; downloading it (HF_HUB_OFFLINE=1 forbids that)\n")
    try:
        return Path(snapshot_download(repository, allow_patterns=PATTERNS))
    except Exception as cause:  # the library has many kinds, one for every way to be offline
        raise CheckpointError(
            f"{repository} is not in the local Hugging Face cache and cannot be downloaded: {cause}",
            hint="give --checkpoint DIR",
        ) from cause
