"""The order of the results of parallel calls in a conversation.

Many chat templates write no ids, so that only the order shows which result belongs to which call.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from graftlm.backbone.chat_templates import Message
from graftlm.errors import DataError


def result_order(messages: Sequence[Message], where: str) -> list[int]:
    """Return the positions of messages, from 0, with the results of each answer in the order of its calls.

    Results stay as they are if none of them names a call, or no call before them has an id.

    Args:
        messages: the messages in the form of chat templates.
        where: their location, for error messages.

    Raises:
        DataError: a result names no call of the answer before it, or the same as another one; only some results name
            calls; or a call has no result, but a later one of the same answer has.
    """
    order: list[int] = []
    for role, group in groupby(range(len(messages)), key=lambda number: messages[number]["role"]):
        positions = list(group)
        calls = messages[positions[0] - 1].get("tool_calls", ()) if positions[0] else ()
        if role == "tool":
            positions = _in_order_of_calls(messages, positions, calls, where)
        order += positions
    return order


def _in_order_of_calls(
    messages: Sequence[Message], positions: Sequence[int], calls: Sequence[Message], where: str
) -> list[int]:
    """Return the positions of results in the order of the calls before them."""
    named = {position: messages[position].get("tool_call_id") for position in positions}
    ids = [call.get("id") for call in calls]
    if not any(named.values()) or not any(ids):
        return list(positions)
    results: dict[object, int] = {}
    for position, name in named.items():
        place = f"{where}, message {position + 1}"
        if not name:
            raise DataError(
                f"{place} has no tool_call_id, but another result has one: name the call of each result, or of none."
            )
        if ids.count(name) != 1:
            found = "several calls" if name in ids else "no call"
            verb = "have" if name in ids else "has"
            raise DataError(
                f"{place} has the tool_call_id {name!r}, but {found} of the answer before it {verb} this id: correct "
                "the ids."
            )
        if name in results:
            raise DataError(
                f"{place} has the tool_call_id {name!r}, but so has message {results[name] + 1}: keep one result for "
                "each call."
            )
        results[name] = position
    answered = ids[: len(results)]
    for name in answered:
        if name not in results:
            raise DataError(
                f"{where}, message {positions[0] + 1} follows calls of which one, with the id {name!r}, has no result, "
                "but a later one has: add the result."
            )
    return [results[name] for name in answered]
