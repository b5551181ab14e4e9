"""Compiled code on disk, by content.

One file an entry: a JSON header line, then the object code. The key is a hash of everything that
reaches the machine code, so an entry is never stale and never rewritten. A damaged file is a miss.
"""

import functools
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.registry import cpu_target

import nbmoe_kernels.device.op as op_table


def folder() -> Path:
    """The cache's folder: ``$NBMOE_CACHE_DIR/emulate``, by default ``~/.cache/nbmoe/emulate``."""
    root = os.environ.get("NBMOE_CACHE_DIR")
    return (Path(root) if root else Path.home() / ".cache" / "nbmoe") / "emulate"


def load(key: str) -> tuple[dict[str, Any], bytes] | None:
    """The header and the object code stored under ``key``."""
    try:
        head, _, code = (folder() / key).read_bytes().partition(b"\n")
        header = json.loads(head)
        if header.pop("sha256") != hashlib.sha256(code).hexdigest():
            return None
    except (OSError, ValueError, KeyError):
        return None
    return header, code


def save(key: str, header: dict[str, Any], code: bytes) -> None:
    """Store an entry; a folder that cannot be written leaves the cache as it was."""
    head = json.dumps({**header, "sha256": hashlib.sha256(code).hexdigest()}).encode()
    try:
        folder().mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder(), prefix=".new-")
        with os.fdopen(handle, "wb") as file:
            file.write(head + b"\n" + code)
        os.replace(name, folder() / key)  # readers see the whole file or none
    except OSError:
        return


@functools.cache
def environment() -> str:
    """What every key contains besides content: versions, the CPU, the compiler's own source."""
    here = Path(__file__).parent
    names = ("rebind.py", "fingerprint.py", "stock.py")
    sources = [*sorted((here / "fast").glob("*.py")), *(here / name for name in names)]
    digest = hashlib.sha256()
    for source in [*sources, Path(op_table.__file__)]:
        digest.update(source.read_bytes())
    cpu = cpu_target.target_context.codegen().magic_tuple()
    versions = (sys.version_info[:3], numba.__version__, llvmlite.__version__, np.__version__)
    return f"{versions} {cpu} {digest.hexdigest()}"


def key(*parts: str) -> str:
    """The key of an entry made of these contents."""
    digest = hashlib.sha256()
    for part in (environment(), *parts):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()
