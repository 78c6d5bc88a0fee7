"""Recognition of strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def longest_beginning(text: str, strings: Sequence[str]) -> int:
    """Return the length of the longest suffix of a text that is a beginning, but not the whole, of one of the strings.

    It is the number of characters that may become one of the strings with further text; 0 if there are none.
    """
    longest = 0
    for string in strings:
        for length in range(1, len(string)):
            if text.endswith(string[:length]):
                longest = max(longest, length)
    return longest
