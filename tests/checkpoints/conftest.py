"""Checkpoint folders that tests may break: read and written without the code under test."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors

FIXTURES = Path(__file__).parents[1] / "fixtures"
NUMPY_TYPES = {
    "U8": np.uint8,
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}


@dataclass
class Checkpoint:
    """A checkpoint held in memory; `write` puts it back on disk."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    def rename(self, old: str, new: str) -> None:
        """Replaces `old` by `new` in every tensor name."""
        self.tensors = {name.replace(old, new): data for name, data in self.tensors.items()}

    def write(self) -> Path:
        (self.folder / "config.json").write_text(json.dumps(self.config))
        self.write_shard("model.safetensors", list(self.tensors))
        return self.folder

    def write_shard(self, file_name: str, names: list[str]) -> None:
        arrays = {name: np.ascontiguousarray(self.tensors[name]) for name in names}
        specs = {
            name: safetensors.TensorSpec(
                dtype=array.dtype.name,
                shape=array.shape,
                data_ptr=array.ctypes.data,
                data_len=array.nbytes,
            )
            for name, array in arrays.items()
        }
        safetensors.serialize_file(specs, self.folder / file_name)


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Folder of the checkpoints that vendors' tools wrote."""
    return FIXTURES


def load_raw(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a single-file checkpoint, through safetensors' own parser."""
    tensors = {}
    for name, entry in safetensors.deserialize((folder / "model.safetensors").read_bytes()):
        dtype = NUMPY_TYPES[entry["dtype"]]
        data = np.frombuffer(bytearray(entry["data"]), dtype).reshape(entry["shape"])
        tensors[name] = data
    return tensors


@pytest.fixture(scope="session")
def raw_tensors() -> Callable[[str], dict[str, np.ndarray]]:
    """Reads a fixture's tensors by name."""
    return lambda name: load_raw(FIXTURES / name)


@pytest.fixture
def editable(tmp_path: Path) -> Callable[[str], Checkpoint]:
    """Copies a fixture to a folder of its own, as a `Checkpoint` to change and write."""

    def copy(name: str) -> Checkpoint:
        folder = tmp_path / name
        shutil.copytree(FIXTURES / name, folder)
        config = json.loads((folder / "config.json").read_text())
        return Checkpoint(folder, config, load_raw(folder))

    return copy
