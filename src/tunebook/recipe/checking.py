"""How a check looks at the sections: asking for a key that is reported as wrong already ends the check that asks."""

from collections.abc import Callable, Mapping
from typing import Any

# Takes the dotted key that should change, what is wrong with it, and the fix.
Report = Callable[[str, str, str], None]


class Undecided(Exception):
    """A check needs a key whose own value is already reported as wrong."""


class Sections:
    """The sections as they were read; asking for a key that is reported as wrong ends the check that asks."""

    def __init__(self, sections: Mapping[str, dict[str, Any] | None], undecided: set[str]) -> None:
        self.sections, self.undecided = sections, undecided

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value at a dotted key, or the default where it isn't written."""
        section, _, name = key.partition(".")
        if {section, key} & self.undecided:
            raise Undecided(key)
        return (self.sections.get(section) or {}).get(name, default)

    def has(self, section: str) -> bool:
        """Return whether a section stands in the recipe."""
        if section in self.undecided:
            raise Undecided(section)
        return self.sections.get(section) is not None

    def written(self, section: str) -> list[str]:
        """Return the names of the keys in a section."""
        return list(self.sections.get(section) or {}) if self.has(section) else []
