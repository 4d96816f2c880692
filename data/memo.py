"""Facts about files (content hash, probe) that cost a full read, remembered while the file stays what it was."""

import hashlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data import tars

logger = logging.getLogger(__name__)


class HashMemo:
    """A JSON file of facts about files, each true while path, size and mtime_ns stay what they were.

    Saved under a temporary name and renamed, on leaving the `with` block and every half minute before that. Processes
    that share the file add to each other's facts; a damaged file is started anew.
    """

    VERSION = 2  # raise it when probe() or what it means changes

    def __init__(self, path: Path):
        self.path = Path(path)
        self._files = self._load()
        self._lock = threading.Lock()
        self._saved, self._dirty = time.monotonic(), False

    def __enter__(self) -> "HashMemo":
        return self

    def __exit__(self, *exception) -> None:
        self.save()

    def recall(self, path: Path, fact: str, compute: Callable[[], Any]) -> Any:
        """The JSON-able value of `fact` for the file as it is now, computed if it is not known yet."""
        stamp = self.stamp(path)  # before the file is read: a change meanwhile must not be remembered as this file
        if stamp is None:
            os.stat(path)  # says why
        known = self.known(path, stamp)
        if fact in known:
            return known[fact]
        value = compute()
        self.remember(path, stamp, {fact: value})
        return value

    def stamp(self, path: Path) -> list[int] | None:
        """What tells that a file is still the same: size and mtime_ns, of a member its tar's; None if there is none."""
        try:
            stat = tars.stat(path)
        except OSError:
            return None
        return [stat.st_size, stat.st_mtime_ns]

    def known(self, path: Path, stamp: list[int] | None) -> dict[str, Any]:
        """The facts that are known of the file with this stamp."""
        entry = self._files.get(os.path.abspath(path))
        return entry if entry and entry["stamp"] == stamp else {}

    def remember(self, path: Path, stamp: list[int] | None, facts: dict[str, Any]) -> None:
        """Adds facts of the file that had this stamp before it was read."""
        if stamp is None:
            return
        with self._lock:
            known = self.known(path, stamp) or {"stamp": stamp}
            self._files[os.path.abspath(path)] = known | facts
            self._dirty = True
        if time.monotonic() - self._saved > 30:
            self.save()

    def save(self) -> None:
        with self._lock:
            if not self._dirty:
                return
            for name, theirs in self._load().items():
                mine = self._files.setdefault(name, theirs)
                if mine["stamp"] == theirs["stamp"]:
                    self._files[name] = theirs | mine
            temp = self.path.with_name(f".{self.path.name}.{os.getpid()}.{secrets.token_hex(4)}")
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                temp.write_text(json.dumps({"version": self.VERSION, "files": self._files}), encoding="utf-8")
                temp.replace(self.path)
            except OSError as error:  # a cache that can only be read, a full disk: no reason to stop
                logger.warning(
                    "%s cannot be written (%s): files are hashed and probed again", self.path, error.strerror
                )
            finally:
                temp.unlink(missing_ok=True)
            self._saved, self._dirty = time.monotonic(), False

    def _load(self) -> dict[str, dict]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["version"] != self.VERSION:
                return {}
            return {name: entry for name, entry in content["files"].items() if isinstance(entry["stamp"], list)}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError, AttributeError):
            logger.warning("%s is damaged: starting it anew, so files are hashed and probed again", self.path)
            return {}


def content_sha256(path: Path, memo: HashMemo | None = None) -> str:
    """SHA-256 of the bytes of a file, from `memo` if path, size and mtime are known there."""
    if memo is not None:
        return memo.recall(path, "sha256", lambda: content_sha256(path))
    digest = hashlib.sha256()
    with tars.open_bytes(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
