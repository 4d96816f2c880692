"""Data sets on the Hub: which paths name one, and its files on disk."""

import re
from pathlib import Path

from data.lists import READERS
from data.video import IMAGE_SUFFIXES, VIDEO_SUFFIXES

CLIPS = VIDEO_SUFFIXES | IMAGE_SUFFIXES
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def is_hub_id(text: str, folder: Path = Path()) -> bool:
    """Whether a path that does not exist, from `folder`, reads as a data set on the Hub: owner/name."""
    path = folder / text
    named_file = path.suffix.lower() in CLIPS | {".txt", ".tar", *READERS}
    return bool(HUB_ID.fullmatch(text)) and not named_file and not path.exists() and not path.parent.exists()


def snapshot(name: str, revision: str | None, split: str | None, problems: list[str]) -> Path | None:
    """The folder of a Hub data set in the cache; what is read here (of its split) is downloaded where it is absent."""
    from huggingface_hub import constants, errors, snapshot_download

    at = f"{name} (revision {revision})" if revision else name
    starts = [f"{split}/*", f"data/{split}/*"] if split else ["*"]
    patterns = [start + _any_case(suffix) for start in starts for suffix in sorted({*CLIPS, ".txt", ".tar", *READERS})]
    patterns += ["metadata.*", "videos.txt", "prompts.txt"]  # at the top they are for all splits
    try:
        return Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except errors.GatedRepoError:
        problems.append(
            f"{at} is gated: accept its terms at {constants.ENDPOINT}/datasets/{name}, then log in with "
            "`hf auth login` (or set HF_TOKEN)"
        )
    except errors.RepositoryNotFoundError:
        problems.append(
            f"{name}: there is no such folder here and no such public data set on the Hub; for a private one log in "
            "with `hf auth login`"
        )
    except errors.RevisionNotFoundError:
        problems.append(f"{name} has no revision {revision}: give a branch, tag or commit of it")
    except errors.LocalEntryNotFoundError:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        command = f"hf download {name} --repo-type dataset{f' --revision {revision}' if revision else ''}"
        problems.append(
            f"{at}: there is no folder of that name here; {why}, and no data set of that name is in the cache "
            f"({constants.HF_HUB_CACHE}). On a machine with a network: {command}"
        )
    except (OSError, errors.HFValidationError) as error:
        problems.append(f"{at}: the download failed: {error}")
    return None


def _any_case(suffix: str) -> str:
    """A pattern of a suffix: .[mM][pP]4"""
    return "".join(f"[{c}{c.upper()}]" if c.isalpha() else c for c in suffix)
