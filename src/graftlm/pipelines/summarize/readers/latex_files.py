"""The files of a LaTeX document: those that its main file includes, in its folder or below."""

from __future__ import annotations

from pathlib import Path

from graftlm.errors import DataError
from graftlm.files.reading import read_text


class LatexFiles:
    """Opens included files, and remembers what was read.

    Args:
        name: name of the document in messages.
        path: the main file; None for a text without one, which includes nothing.
        max_characters: maximum number of characters of all files; None for any number.

    Attributes:
        pages: the text of each file.
        names: the name of each, relative to the folder of the main file.
        notes: what was not read, as predicates of the document.
    """

    def __init__(self, name: str, path: Path | None, max_characters: int | None) -> None:
        self.pages: list[str] = []
        self.names: list[str] = []
        self.notes: list[str] = []
        self._name = name
        self._folder = path.parent.resolve() if path else None
        self._max_characters = max_characters
        self._open = [path.name if path else name]

    def add(self, text: str) -> None:
        """Remember the text of the file that was opened last.

        Raises:
            DataError: all files are too large together.
        """
        self.pages.append(text)
        self.names.append(self._open[-1])
        length = sum(map(len, self.pages))
        if self._max_characters is not None and length > self._max_characters:
            raise DataError(
                f"{self._name} and the files that it includes have more than {self._max_characters:,} characters: "
                "split the document into its chapters."
            )

    def open(self, name: str) -> str | None:
        """Return the text of an included file, or None with a note if it is not read. Call `close` after the text.

        Raises:
            DataError: the file is there but can't be read.
        """
        path = self._find(name)
        if path is None:
            return None
        assert self._folder is not None, "a file is found in the folder of the document"
        relative = path.relative_to(self._folder).as_posix()
        if relative in self._open:
            self.notes.append(f"includes {name} inside itself, which is not read again")
            return None
        text = read_text(path)
        self._open.append(relative)
        return text

    def close(self) -> None:
        """Go back to the file that includes the one that was opened last."""
        self._open.pop()

    def read_preamble(self, name: str) -> str | None:
        """Return the text of a file that a preamble includes, for its definitions; None if it is not read."""
        path = self._find(name)
        return None if path is None else read_text(path)

    def _find(self, name: str) -> Path | None:
        """Return the path of an included file; None if it is missing or outside the folder, which is noted."""
        if self._folder is None:
            self.notes.append(f"includes {name}, which is not read: give the file of the document, or all in one text")
            return None
        for candidate in (f"{name}.tex", name):
            path = (self._folder / candidate).resolve()
            if path.is_file() and path.is_relative_to(self._folder):
                return path
        outside = not (self._folder / name).resolve().is_relative_to(self._folder)
        reason = "is not in its folder or below" if outside else "is missing"
        self.notes.append(f"includes {name}, which {reason}: its text is not read")
        return None
