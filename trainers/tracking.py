"""Where numbers and samples go: metrics.jsonl always, wandb and TensorBoard through Accelerate when asked for.

A tracker may fail at any time; training goes on without it. Nothing here waits for input or for a network forever.
"""

import dataclasses
import importlib.util
import json
import math
import os
import re
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from data.video import probe, read_frames

INIT_TIMEOUT = 60.0  # seconds that a wandb server may take to answer before the run is kept offline instead
FINISH_TIMEOUT = 900.0  # seconds for the last uploads; what is left stays on disk for `wandb sync`
WANDB_MODES = ("online", "offline", "shared", "disabled", "dryrun", "run")
SECRET = re.compile(r"(^|[._])(token|api_key|password|secret)$|hf_\w{20,}|://[^/@\s]+:[^/@\s]+@", re.IGNORECASE)


class TrackerError(ValueError):
    """A tracker that was asked for cannot work."""


def check(report_to: Iterable[str], output_dir: str | Path) -> None:
    """Find out before any model loads whether the trackers can work. Every rank may call it; it prints on the first.

    wandb without an API key is put into offline mode for this process and said so. Raises TrackerError, listing all:
    a package that is not installed, a WANDB_MODE that does not exist, a mode that needs a key where there is none.
    """
    report_to = list(report_to)
    problems = [
        f"report_to: {name} is not installed; install it (pip install {name}) or leave it out of report_to"
        for name in report_to
        if importlib.util.find_spec(name) is None
    ]
    mode = os.environ.get("WANDB_MODE") or None
    if "wandb" in report_to and not problems:
        if mode is not None and mode not in WANDB_MODES:
            problems.append(f"WANDB_MODE={mode} does not exist; the modes are {', '.join(WANDB_MODES)}")
        elif int(os.environ.get("RANK") or 0) == 0 and mode not in ("offline", "disabled", "dryrun"):
            missing = _missing_login()
            if missing and mode is None:
                os.environ["WANDB_MODE"] = "offline"
                where = Path(os.environ.get("WANDB_DIR") or output_dir) / "wandb"
                print(
                    f"wandb: {missing}, so this run is recorded offline under {where}. To upload it later: "
                    f"`wandb login`, then `wandb sync {where}/offline-run-*`. WANDB_MODE=offline silences this notice.",
                    flush=True,
                )
            elif missing:
                problems.append(f"WANDB_MODE={mode} but {missing}: run `wandb login`, or set WANDB_MODE=offline")
    if problems:
        raise TrackerError("\n".join(problems))


def _missing_login() -> str:
    """Why wandb has no usable key, "" if it has one. Never asks for one."""
    import wandb

    try:
        if wandb.login(prompt=False, verify=False):
            return ""
        reason = "no API key was found"
    except wandb.Error as error:  # a key that no server can accept
        reason = f"the API key is unusable ({error})"
    wandb.teardown()  # or the session would keep the environment it was started with, without our WANDB_MODE
    return reason


def flatten(options, prefix: str = "") -> dict[str, int | float | str | bool]:
    """Nested dataclasses, mappings and lists as {"optimizer.learning_rate": 1e-4, ...}: what trackers can show.

    Lists become JSON text and None "null". Names and values that look like credentials are left out.
    """
    if dataclasses.is_dataclass(options):
        options = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    flat = {}
    for key, value in options.items():
        name = f"{prefix}{key}"
        if dataclasses.is_dataclass(value) or isinstance(value, dict):
            flat |= flatten(value, f"{name}.")
            continue
        if isinstance(value, (list, tuple)):
            value = json.dumps([flatten(v) if dataclasses.is_dataclass(v) else v for v in value], default=str)
        elif not isinstance(value, (bool, int, float)):
            value = "null" if value is None else str(value)
        if not SECRET.search(name) and not (isinstance(value, str) and SECRET.search(value)):
            flat[name] = value
    return flat


def progress_line(step: int, steps: int, values: dict) -> str:
    """`step 120/2000  loss 0.1234  lr 1.0e-04  grad_norm 0.52  1.3 s/step  eta 41 min`, of what `values` has."""
    parts = [f"step {step}/{steps}"]
    for name, form in (("loss", ".4f"), ("lr", ".1e"), ("grad_norm", ".2f")):
        if values.get(name) is not None:
            parts.append(f"{name} {values[name]:{form}}")
    seconds = values.get("seconds_per_step")
    if seconds is not None:
        parts.append(f"{seconds:.1f} s/step" if seconds >= 1 else f"{seconds:.2g} s/step")
        parts.append(f"eta {_duration(seconds * (steps - step))}")
    return "  ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


class Tracker:
    """The numbers of one run. Only the main process writes; on the others every method does nothing.

    `accelerator` must have been made with log_with=config.report_to and a logging_dir. `config` gives output_dir,
    report_to, project, run_name and what else there is to show. `steps` is the length of the run; `step` where it
    begins: at 0 metrics.jsonl and TensorBoard start empty, at k (resume) both continue after their rows of step k.
    """

    def __init__(self, accelerator, config, steps: int, step: int = 0):
        self.accelerator, self.steps = accelerator, steps
        self.main = accelerator.is_main_process
        self.folder = Path(config.output_dir)
        self.path = self.folder / "metrics.jsonl"
        self._warned: set[str] = set()
        if not self.main:
            return
        absent = set(config.report_to) - {str(name) for name in accelerator.log_with}
        if absent:
            raise TrackerError(f"the Accelerator was made without log_with={sorted(absent)}")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._continue_metrics(step)
        if config.report_to:
            self._start(config, step)

    def log(self, step: int, values: dict[str, int | float | str]) -> None:
        """One row of numbers for optimizer step `step`: to metrics.jsonl and the trackers; with a loss also printed."""
        if not self.main:
            return
        row = {"step": step, **values}
        for key, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                row[key] = None  # NaN is no JSON
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        if "loss" in values:
            print(progress_line(step, self.steps, values), flush=True)
        for tracker in self.accelerator.trackers:
            self._try(tracker.name, lambda t=tracker: t.log(dict(values), step=step))

    def log_samples(self, step: int, files: list[Path], captions: list[str]) -> None:
        """Show sample files (.mp4, .png) as samples/NAME: wandb gets the files, TensorBoard a contact sheet of each."""
        if not self.main:
            return
        for tracker in self.accelerator.trackers:
            show = {"wandb": self._show_wandb, "tensorboard": self._show_tensorboard}[tracker.name]
            self._try(tracker.name, lambda t=tracker, show=show: show(t, step, files, captions))

    def finish(self) -> None:
        """Flush and close. Waits for uploads only so long; call it once, also after an error."""
        if not self.main:
            return
        for tracker in self.accelerator.trackers:
            self._try(tracker.name, tracker.finish)
        self.accelerator.trackers = []

    # -- metrics.jsonl ----------------------------------------------------------------------------------------------

    def _continue_metrics(self, step: int) -> None:
        """Drop rows after the checkpoint, which come again, and a line that was cut short by a kill."""
        kept = []
        if step and self.path.exists():
            for line in self.path.read_text(encoding="utf-8", errors="replace").split("\n"):
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] <= step:
                    kept.append(line + "\n")
        _write_whole(self.path, "".join(kept))

    # -- wandb and TensorBoard --------------------------------------------------------------------------------------

    def _start(self, config, step: int) -> None:
        options = flatten(config)
        kwargs = {}
        if "tensorboard" in config.report_to:  # of a run that was overwritten nothing is shown
            kwargs["tensorboard"] = {"purge_step": step + 1 if step else 0}
        if "wandb" in config.report_to:
            kwargs["wandb"] = self._wandb_kwargs(config, step)
        try:
            self.accelerator.init_trackers(config.project, options, kwargs)
        except _wandb_errors(config.report_to) as error:
            import wandb

            # No network, a withdrawn key, a server that is down: keep the run on disk rather than stop or wait.
            where = Path(kwargs["wandb"]["dir"]) / "wandb"
            print(
                f"wandb: could not start online ({error}). The run is recorded offline under {where}; "
                f"`wandb sync {where}/offline-run-*` uploads it later.",
                flush=True,
            )
            for tracker in self.accelerator.trackers:
                if hasattr(tracker, "writer"):
                    tracker.finish()
            self.accelerator.trackers = []
            wandb.teardown()  # the failed start still holds the run's id
            kwargs["wandb"] |= {"mode": "offline", "resume": None}
            self.accelerator.init_trackers(config.project, options, kwargs)

    def _wandb_kwargs(self, config, step: int) -> dict:
        import wandb

        stamp = self.folder / "wandb_id.txt"
        known = stamp.read_text(encoding="utf-8").strip() if step and stamp.exists() else ""
        run_id = known if re.fullmatch(r"[a-z0-9]{8,32}", known) else uuid.uuid4().hex[:8]
        if run_id != known:
            _write_whole(stamp, run_id + "\n")
        mode = os.environ.get("WANDB_MODE") or None
        return {
            "id": run_id,
            "name": config.run_name,
            "dir": os.environ.get("WANDB_DIR") or str(self.folder.resolve()),
            "mode": mode,
            "resume": None if mode in ("offline", "dryrun", "disabled") else "allow",
            "settings": wandb.Settings(
                init_timeout=INIT_TIMEOUT, login_timeout=INIT_TIMEOUT, finish_timeout=FINISH_TIMEOUT
            ),
        }

    def _show_wandb(self, tracker, step: int, files: list[Path], captions: list[str]) -> None:
        import wandb

        media = {}
        for file, caption in zip(files, captions, strict=True):
            if file.suffix == ".png":
                media[f"samples/{file.stem}"] = wandb.Image(str(file), caption=caption)
            else:  # the file as it is: arrays would need moviepy
                media[f"samples/{file.stem}"] = wandb.Video(str(file), caption=caption, format="mp4")
        if media:
            tracker.log(media, step=step)

    def _show_tensorboard(self, tracker, step: int, files: list[Path], captions: list[str]) -> None:
        for file, caption in zip(files, captions, strict=True):
            tracker.log_images({f"samples/{file.stem}": contact_sheet(file)[None]}, step=step, dataformats="NHWC")
            tracker.log({f"samples/{file.stem}/caption": caption}, step=step)

    def _try(self, name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except (OSError, ValueError, TypeError, RuntimeError, *_wandb_errors([name])) as error:
            if name not in self._warned:
                self._warned.add(name)
                print(
                    f"warning: {name} failed ({type(error).__name__}: {error}); training goes on and metrics.jsonl is "
                    "complete. Further failures of it are not shown.",
                    flush=True,
                )


def contact_sheet(path: Path, frames: int = 8, height: int = 160):
    """Up to `frames` evenly spaced frames of a video or still side by side: uint8 array [height, W, 3]."""
    found = probe(path)
    height = min(height, found.height)
    width = max(1, round(found.width * height / found.height))
    pixels = read_frames(path, 0, found.frames, height, width)  # [3, F, H, W]
    count = min(frames, found.frames)
    chosen = [round(i * (found.frames - 1) / max(1, count - 1)) for i in range(count)]
    return pixels[:, chosen].permute(2, 1, 3, 0).reshape(height, count * width, 3).numpy()


def _wandb_errors(names: Iterable[str]) -> tuple[type[Exception], ...]:
    if "wandb" not in names:
        return ()
    import wandb

    return (wandb.Error,)


def _write_whole(path: Path, text: str) -> None:
    """Write a small file so that a kill leaves the old one or the new one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
