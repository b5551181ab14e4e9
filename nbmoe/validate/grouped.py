"""Checks that every grouped operation shares: slots, their rows and their scale tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbmoe.arrays import Array
from nbmoe.errors import ScaleError, ShapeError
from nbmoe.validate.call import Call
from nbmoe.validate.elements import I32, U32
from nbmoe.validate.routing import check_expert_ids, check_scale_offsets, check_starts


@dataclass(frozen=True)
class Groups:
    """Operands that say which rows a slot has, and whose they are."""

    starts_name: str
    starts: Array
    ids: Array

    @property
    def count(self) -> int:
        """Number of slots."""
        return self.ids.shape[0]


@dataclass(frozen=True)
class Slots(Groups):
    """Groups whose rows have scales in tiles: the operands also say which tiles."""

    offsets_name: str
    offsets: Array


def take_groups(call: Call, starts_name: str, starts: Any, ids: Any) -> Groups:
    """Takes row offsets and expert ids and checks that they are of one length.

    Raises:
        ShapeError: lengths differ, or there is no slot.
        ArgTypeError, DTypeError, LayoutError: as `Call.array`.
    """
    expert_ids = call.array("expert_ids", ids, I32, "(S,)")
    row_starts = call.array(starts_name, starts, U32, "(S + 1,)")
    slots = expert_ids.shape[0]
    if slots == 0:
        raise ShapeError(call.message("expert_ids", "(S,) with S >= 1", "shape (0,)"))
    call.shape(starts_name, (slots + 1,), f"(S + 1,) = ({slots + 1},), S from expert_ids")
    return Groups(starts_name, row_starts, expert_ids)


def take_slots(
    call: Call, starts_name: str, starts: Any, offsets_name: str, offsets: Any, ids: Any
) -> Slots:
    """Takes the three operands and checks that they are of one length.

    Raises:
        ScaleError: the scale offsets are None.
        ShapeError: lengths differ.
        ArgTypeError, DTypeError, LayoutError: as `Call.array`.
    """
    groups = take_groups(call, starts_name, starts, ids)
    tiles = take_offsets(call, groups.count, offsets_name, offsets)
    return Slots(starts_name, groups.starts, groups.ids, offsets_name, tiles)


def take_offsets(call: Call, slots: int, name: str, offsets: Any) -> Array:
    """Takes the scale offsets of a number of slots.

    Raises:
        ScaleError: they are None.
        ShapeError: they are of another number.
        ArgTypeError, DTypeError, LayoutError: as `Call.array`.
    """
    tiles = call.array(name, offsets, U32, "(S,)", missing=ScaleError)
    call.shape(name, (slots,), f"(S,) = ({slots},), S from expert_ids")
    return tiles


def check_groups(
    call: Call, groups: Groups, rows: int, rows_of: str, experts: int, experts_of: str
) -> None:
    """Checks what the groups say ("metadata").

    Args:
        call: The call.
        groups: Its groups.
        rows: Rows that the slots share out.
        rows_of: Operand with those rows.
        experts: E.
        experts_of: Operand with that many experts.

    Raises:
        RoutingError: they contradict each other or the operands.
    """
    check_starts(call, groups.starts_name, call.data(groups.starts), rows, rows_of)
    check_expert_ids(call, "expert_ids", call.data(groups.ids), experts, experts_of)


def check_slots(
    call: Call, slots: Slots, rows: int, rows_of: str, tiles: int, experts: int, experts_of: str
) -> None:
    """Checks what the slots say ("metadata").

    Args:
        call: The call.
        slots: Its slots.
        rows: Rows that the slots share out.
        rows_of: Operand with those rows.
        tiles: Tiles of the activation scales.
        experts: E.
        experts_of: Operand with that many experts.

    Raises:
        RoutingError: they contradict each other or the operands.
    """
    check_groups(call, slots, rows, rows_of, experts, experts_of)
    starts, offsets = call.data(slots.starts), call.data(slots.offsets)
    check_scale_offsets(call, slots.offsets_name, starts, offsets, tiles)


def check_slot_count(call: Call, slots: Groups, arg: str, experts: int) -> None:
    """Refuses fewer experts than slots, since no expert has two.

    Raises:
        ShapeError: there are fewer.
    """
    if experts < slots.count:
        rule = f"an entry for each expert, at least the {slots.count} slots of expert_ids"
        raise ShapeError(call.message(arg, rule, f"{experts} entries"))
