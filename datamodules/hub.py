"""A data set on the hub: its configurations, splits and rows. Without a network what is cached still works."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from gtpo_lightning.datamodules.files import VALID_SOURCES, Row, plain_rows

__all__ = ["HubSource"]

T = TypeVar("T")

_TIMEOUT = 5  # seconds that the hub has for a first answer


class HubSource:
    """A data set of the hub by its id, such as "openai/gsm8k".

    Args:
        location: The id.

    Raises:
        ValueError: (in each method) The data set cannot be loaded.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self._names: dict[str | None, list[str]] = {}

    def configs(self) -> list[str]:
        """Names of the configurations."""
        import datasets

        def names() -> list[str]:
            # Offline the library answers "default" whatever is there.
            cached = _cached_configs(self.location) if datasets.config.HF_HUB_OFFLINE else []
            return cached or datasets.get_dataset_config_names(self.location)

        if None not in self._names:
            self._names[None] = self._ask(names, "list the configurations of")
        return self._names[None]

    def splits(self, config: str) -> list[str]:
        """Names of the splits of a configuration; "" is the only or default one."""
        import datasets

        if config not in self._names:
            self._names[config] = self._ask(
                lambda: datasets.get_dataset_split_names(self.location, config or None),
                f"list the splits of config {config!r} of" if config else "list the splits of",
            )
        return self._names[config]

    def rows(self, config: str, split: str) -> list[Row]:
        """All rows of a split."""
        import datasets

        place = f"load split {split!r} of config {config!r} of" if config else f"load split {split!r} of"
        return self._ask(lambda: plain_rows(datasets.load_dataset(self.location, config or None, split=split)), place)

    def _ask(self, call: Callable[[], T], what: str) -> T:
        with _offline_without_hub() as unreachable:
            try:
                return call()
            except Exception as error:  # the hub's client raises a dozen kinds
                reason = f"{type(error).__name__}: {error}"
                if unreachable:
                    reason = f"the hub cannot be reached, {unreachable}; of what is cached: {reason}"
                raise ValueError(
                    f"source: could not {what} {self.location!r} from the hub ({reason}); valid: {VALID_SOURCES}"
                ) from error


@contextmanager
def _offline_without_hub() -> Iterator[str]:
    """Within it the hub's libraries are offline where the hub cannot be reached; gives the reason, or "".

    Left alone they try for 20 seconds and more before every single file before they turn to their cache.
    """
    import datasets
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    reason = "" if any(before) else _unreachable(constants.ENDPOINT, int(time.monotonic() // 60))
    if reason:
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield reason
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


@lru_cache(maxsize=1)
def _unreachable(endpoint: str, minute: int) -> str:
    """Why the hub gives no answer at all; "" if it gives any. Kept for the minute, to ask once for many files."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=_TIMEOUT)
    except Exception as error:  # a dozen kinds: names, proxies, certificates, timeouts
        return f"{type(error).__name__}: {error}"
    return ""


def _cached_configs(location: str) -> list[str]:
    """Configurations of a data set in the library's cache, by its layout of folders."""
    import datasets
    from datasets.naming import camelcase_to_snakecase

    *owner, name = location.split("/")
    root = Path(datasets.config.HF_DATASETS_CACHE).expanduser() / "___".join([*owner, camelcase_to_snakecase(name)])
    found = set()
    for path in root.glob("*/*/*/dataset_info.json"):
        config = path.parts[-4]
        # Other folders hold what was loaded with arguments of its own.
        if json.loads(path.read_text(encoding="utf-8"))["config_name"] == config:
            found.add(config)
    return sorted(found)
