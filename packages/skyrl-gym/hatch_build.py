"""Ships files that live outside this package's folder: from the checkout, or from the sdist that carries them; and
writes the project's addresses into its metadata.

`[tool.hatch.build.hooks.custom.files]` maps a path relative to this folder in the checkout to its place in the sdist
and in the wheel. Editable installs get none: there the checkout itself is read.
"""

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class OutsideFiles(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds every mapped file or folder to the build; FileNotFoundError when it is in neither place."""
        if version == "editable":
            return
        for in_checkout, targets in self.config["files"].items():
            places = [Path(self.root, targets["sdist"]), Path(self.root, in_checkout)]
            found = next((place for place in places if place.exists()), None)
            if found is None:
                raise FileNotFoundError(f"{in_checkout} is missing: build from the whole repository or from an sdist.")
            build_data["force_include"][str(found.resolve())] = targets[self.target_name]


class Addresses(MetadataHookInterface):
    """The urls are those of the repository that publishes, which names itself in PROJECT_URL; a checkout knows none."""

    def update(self, metadata: dict[str, Any]) -> None:
        if home := os.environ.get("PROJECT_URL"):
            pages = {"Changelog": "CHANGELOG.md", "Documentation": "docs/"}
            metadata["urls"] = {name: f"{home}/blob/main/{path}" for name, path in pages.items()}
            metadata["urls"] |= {"Repository": home, "Issues": f"{home}/issues"}
