"""Tensors of a checkpoint by name, with the type and shape that they have to have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from nbmoe.checkpoints.tensors import CheckpointTensors
from nbmoe.errors import ConfigError, DTypeError, ScaleError, ShapeError, message


@dataclass(frozen=True)
class NamedTensors:
    """The tensors of one checkpoint on behalf of one public function.

    Attributes:
        stored: The files.
        family: Name of the family, for messages.
        api: Name of the public function, for messages.
    """

    stored: CheckpointTensors
    family: str
    api: str

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        return tuple(self.stored.names)

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def is_bf16(self, name: str) -> bool:
        """Whether there is a tensor of that name, and of type bf16."""
        return name in self.stored and self.stored.read(name).dtype == "BF16"

    def read(
        self, name: str, where: str, dtype: str, shape: tuple[int, ...] | None
    ) -> npt.NDArray[Any]:
        """A view of a tensor.

        Args:
            name: Full name.
            where: Layer, expert and projection, for messages.
            dtype: Type tag of the file, or several joined by " or ".
            shape: Exact shape, None for any.

        Raises:
            ConfigError: There is no such tensor.
            DTypeError, ShapeError: It is of another type or shape.
        """
        arg = f"{where}, {name}"
        if name not in self.stored:
            rule = f"a {dtype} tensor of a {self.family} checkpoint"
            raise ConfigError(message(self.api, arg, rule, "nothing"))
        found = self.stored.read(name)
        if found.dtype not in dtype.split(" or "):
            raise DTypeError(message(self.api, arg, dtype, found.dtype))
        if shape is not None and found.data.shape != shape:
            raise ShapeError(message(self.api, arg, str(shape), found.data.shape))
        return found.data

    def scale(
        self, name: str, where: str, dtype: str, shape: tuple[int, ...] | None
    ) -> npt.NDArray[Any]:
        """As `read`, for a scale.

        Raises:
            ScaleError: There is no such tensor.
        """
        if name not in self.stored:
            hint = "without it the weights have no value; export the checkpoint again"
            raise ScaleError(message(self.api, f"{where}, {name}", "a scale", "nothing", hint))
        return self.read(name, where, dtype, shape)
