"""Start the final engine once and stop it: builds its native parts, so that the first real start is quick."""

from __future__ import annotations

import layout  # type: ignore[import-not-found]
import servers  # type: ignore[import-not-found]


def main() -> None:
    """Does nothing when the checkpoint is not there yet."""
    info = layout.manifest()
    if not (layout.target_dir(info) / "config.json").is_file():
        print("native parts are built when the engine first starts: run ./download_models.sh next")
        return
    with servers.started(info, ["final"]):
        print("the final engine starts on this machine")


if __name__ == "__main__":
    main()
