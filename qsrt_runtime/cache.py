"""Where this user's things are kept that can be made again."""

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """qsrt/NAME in the user's cache, $XDG_CACHE_HOME or ~/.cache; it need not be there yet.

    RuntimeError for a user without a home.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    home = cache if cache.is_absolute() else Path("~/.cache").expanduser()
    return home / "qsrt" / name
