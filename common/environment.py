"""Variables of the environment that are meant for a program of ours and are nothing to it: a misspelled one should be seen."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping

from common.config import ENV_PREFIX, variables

_OF_SERVICES = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
"""How Kubernetes tells every container of a service, which may well be named pdserve-router."""
log = logging.getLogger(__name__)


def warn_of_strangers(cls: type, env: Mapping[str, str] | None = None) -> None:
    """One line about every PDSERVE_ variable that is none of cls's, nor where a service is; other programs' are among them where
    all share a file."""
    known, found = variables(cls), dict(os.environ if env is None else env)
    ours = sorted(name for name, value in found.items() if name.startswith(ENV_PREFIX) and not _is_of_service(name, value))
    said = [name + _hint(name, known) for name in ours if name not in known]
    if said:
        log.warning("environment variables that are none of this program's, and have no effect: %s", ", ".join(said))


def _is_of_service(name: str, value: str) -> bool:
    return _OF_SERVICES.search(name) is not None or (name.endswith("_PORT") and "://" in value)


def _hint(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), [each.removeprefix(ENV_PREFIX) for each in known], n=1)
    return f" (the nearest is {ENV_PREFIX}{nearest[0]})" if nearest else ""
