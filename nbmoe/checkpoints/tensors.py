"""Safetensors checkpoints, read lazily: only the bytes of the tensors that are asked for.

The safetensors package checks the file (header, offsets, overlaps). Its numpy frontend cannot
return F8_E4M3, because numpy has no such type, so the bytes are taken from a memory map at the
offsets of the checked header and viewed, never cast.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from nbmoe.errors import ConfigError, DTypeError, message

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# Stored type -> numpy type. Eight-bit floats are bit patterns here.
_DTYPES: dict[str, Any] = {
    "U8": np.uint8,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.dtype("<f4"),
}
_LENGTH_BYTES = 8


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor as the file holds it.

    Attributes:
        name: Full name in the checkpoint.
        dtype: Type tag of the file, such as "F8_E4M3".
        data: Read-only view of the file; eight-bit floats as uint8 bit patterns.
    """

    name: str
    dtype: str
    data: npt.NDArray[Any]


class _File:
    """One safetensors file: its checked header and a memory map."""

    def __init__(self, api: str, path: Path) -> None:
        try:
            with safe_open(str(path), framework="np"):
                pass
        except SafetensorError as error:
            rule = "a readable safetensors file"
            raise ConfigError(message(api, str(path), rule, str(error))) from error
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            self.header: dict[str, Any] = json.loads(stream.read(length))
        self.header.pop("__metadata__", None)
        self.start = _LENGTH_BYTES + length
        self.bytes: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r")


class CheckpointTensors:
    """The tensors of a checkpoint folder, in one file or in shards listed by an index file.

    Args:
        folder: The checkpoint folder.
        api: Name of the public function on whose behalf files are read, for messages.

    Raises:
        FileNotFoundError: The folder holds neither an index nor a single safetensors file.
        ConfigError: A file is malformed.
    """

    def __init__(self, folder: Path, api: str) -> None:
        self._folder = folder
        self._api = api
        self._files: dict[str, _File] = {}
        index = folder / INDEX_NAME
        if index.is_file():
            self._file_of = self._read_index(index)
        elif (folder / SINGLE_NAME).is_file():
            self._file_of = dict.fromkeys(self._open(SINGLE_NAME).header, SINGLE_NAME)
        else:
            found = ", ".join(sorted(p.name for p in folder.iterdir())) or "an empty folder"
            rule = f"{SINGLE_NAME} or {INDEX_NAME} in {folder}"
            raise FileNotFoundError(message(api, "path", rule, found))

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str) -> StoredTensor:
        """Views one tensor without copying it.

        Raises:
            KeyError: The checkpoint lists no such tensor (callers ask `in` first, because what a
                missing tensor means depends on its role).
            FileNotFoundError: The shard that should hold it does not exist.
            ConfigError: The index names a shard that does not hold it.
            DTypeError: It has a type that no supported family uses.
        """
        file_name = self._file_of[name]
        file = self._open(file_name)
        if name not in file.header:
            rule = f"tensor {name!r} in {file_name}, as {INDEX_NAME} says"
            raise ConfigError(message(self._api, "path", rule, "no such tensor there"))
        entry = file.header[name]
        if entry["dtype"] not in _DTYPES:
            raise DTypeError(message(self._api, name, " | ".join(_DTYPES), entry["dtype"]))
        begin, end = (file.start + offset for offset in entry["data_offsets"])
        data = np.asarray(file.bytes[begin:end]).view(_DTYPES[entry["dtype"]])
        return StoredTensor(name, entry["dtype"], data.reshape(entry["shape"]))

    def _read_index(self, path: Path) -> dict[str, str]:
        index = read_json(path, self._api)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(message(self._api, str(path), "a weight_map", sorted(index)))
        for file_name in set(weight_map.values()):
            # A name with a folder part could reach outside the checkpoint.
            if Path(file_name).name != file_name:
                raise ConfigError(message(self._api, str(path), "plain file names", file_name))
        return weight_map

    def _open(self, file_name: str) -> _File:
        if file_name not in self._files:
            path = self._folder / file_name
            if not path.is_file():
                raise FileNotFoundError(message(self._api, "path", f"the file {path}", "nothing"))
            self._files[file_name] = _File(self._api, path)
        return self._files[file_name]


def read_json(path: Path, api: str) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ConfigError: The file is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(message(api, str(path), "JSON", str(error))) from error
    if not isinstance(content, dict):
        raise ConfigError(message(api, str(path), "a JSON object", type(content).__name__))
    return content
