"""``file.py:callable`` and ``package.module:callable``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import InputError
from pipeline.core.files import sha256_bytes

__all__ = ["CodeSpec", "parse_code"]

_FILE = re.compile(r"(?P<file>.+\.py):(?P<attribute>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)")
_MODULE = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<attribute>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)")


@dataclass(frozen=True)
class CodeSpec:
    """Where a callable of the user's lies."""

    text: str
    """As the user wrote it."""
    directory: Path
    """First on ``sys.path`` of the child: the file's folder, or the current one for a module."""
    file: Path | None
    module: str | None
    attribute: str
    """Dotted name inside the module."""

    @property
    def display(self) -> str:
        """The text without the folders of the file."""
        return self.text if self.file is None else f"{self.file.name}:{self.attribute}"

    def source_sha256(self) -> str:
        """Hash of the file with the callable; of the spec's text when the module's file is not in :attr:`directory`."""
        file = self.file or self._module_file()
        return sha256_bytes(file.read_bytes() if file is not None else self.text.encode())

    def _module_file(self) -> Path | None:
        stem = self.directory.joinpath(*(self.module or "").split("."))
        return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


def parse_code(text: str) -> CodeSpec | None:
    """``text`` as a :class:`CodeSpec`, or None when it has neither form.

    Raises:
        InputError: the file does not exist.
    """
    if match := _FILE.fullmatch(text):
        file = Path(match["file"]).expanduser().resolve()
        if not file.is_file():
            raise InputError(f"{match['file']} does not exist, named in {text!r}")
        return CodeSpec(text, file.parent, file, None, match["attribute"])
    if match := _MODULE.fullmatch(text):
        return CodeSpec(text, Path.cwd(), None, match["module"], match["attribute"])
    return None
