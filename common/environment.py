"""Variables of the environment that are meant for a program of ours and are nothing to it: a misspelled one should be seen."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping

from common.config import ENV_PREFIX, variables

log = logging.getLogger(__name__)


def warn_of_strangers(cls: type, env: Mapping[str, str] | None = None) -> None:
    """One line about every PDSERVE_ variable that is none of cls's; other programs' are among them where all share a file."""
    known = variables(cls)
    strangers = sorted(name for name in (os.environ if env is None else env) if name.startswith(ENV_PREFIX))
    said = [name + _hint(name, known) for name in strangers if name not in known]
    if said:
        log.warning("environment variables that are none of this program's, and have no effect: %s", ", ".join(said))


def _hint(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), [each.removeprefix(ENV_PREFIX) for each in known], n=1)
    return f" (the nearest is {ENV_PREFIX}{nearest[0]})" if nearest else ""
