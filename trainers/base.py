"""The trainer all models share: the questions it asks of a model, the stages of a run, and the loop."""

import math
import signal
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from torch import Tensor

from data.batches import MicroBatches, Schedule, collate
from data.video import HashMemo
from models import adapters, context_parallel, export, memory, precision
from trainers import checkpoints, estimate, launch, network, optimizers, plan, plan_page, plan_report, publish, sharding
from trainers.config import Config, options, refuse
from trainers.contract import Contract
from trainers.objectives import Batch
from trainers.parsing import read_options, to_yaml
from trainers.precompute import Encoders, to_device
from trainers.pretrained import Pretrained
from trainers.prompts import read_prompts
from trainers.pulse import Clock, Pulse, peak_memory, seed_of
from trainers.tracking import Tracker
from trainers.tracking import check as check_trackers
from trainers.validation import Validation

TIME_LIMIT = 1  # why a rank wants to stop: this, or the number of a signal
# Shared options that change what is learned: said when a resumed run has others, as are all of the model's own.
SAID = ("optimizer.", "noise.", "loss.", "lora.dropout", "precision.", "data.caption_", "train.seed")


class Trainer(Contract):
    """Fine-tunes one video model; `Contract` says what a subclass answers."""

    # -- the run ------------------------------------------------------------------------------------------------------

    @classmethod
    def main(cls, argv: list[str] | None = None, description: str | None = None) -> None:
        """Reads the options and runs; a user's mistake ends in one message and exit code 1 (2 for options)."""
        config = read_options(cls.Config, argv, description)
        launch.quiet()
        try:
            cls(config).run()
        except launch.USER_ERRORS as error:
            raise SystemExit(f"error: {error}") from None

    def __init__(self, config: Config):
        self.config, self.output_dir = config, Path(config.output_dir)
        self.pretrained = Pretrained(config, self.pipeline_classes)
        precision.check(config, self.half_precision)
        self.accelerator = launch.accelerator(config)
        self.device, self.dtype = self.accelerator.device, precision.DTYPES[config.precision.weights]
        refuse(precision.device_problems(config.precision, self.device))
        precision.set_tf32(config.precision.allow_tf32)
        self.step, self.slots = 0, []
        self.saved: Path | None = None
        self.stop_signal, self.in_loop, self.clock = 0, False, Clock(config.train.max_hours)

    def run(self) -> None:
        """All stages, or those up to `stage`."""
        c, accelerator = self.config, self.accelerator
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.on_signal)
        check_trackers(c.report_to, self.output_dir)
        refuse(launch.useless_paths(c))
        checkpoints.refuse_leftovers(c, self.output_dir)
        refuse(network.unfit_folders(self))
        refuse([*self.unfit(), *optimizers.problems(c, self.device, accelerator.num_processes)])
        self.plan = launch.on_main(accelerator, self.make_plan)
        self.validation = Validation(self, launch.on_main(accelerator, self.read_prompts))
        resume, saved, missing = launch.main_first(accelerator, self.take_stock)
        launch.on_main(accelerator, lambda: network.check(self))
        disk = launch.on_main(accelerator, lambda: plan_report.disk(self, missing))
        about = (self.plan, self, missing, self.global_batch, disk)
        self.say(launch.on_main(accelerator, lambda: plan_report.report(*about)))
        self.say(*launch.on_main(accelerator, lambda: estimate.report(self, missing)))
        launch.on_main(accelerator, lambda: disk and disk.refuse())
        launch.on_main(accelerator, lambda: plan_page.write(self))
        if c.stage == "plan":
            return
        if accelerator.is_main_process:
            (self.output_dir / "config.yaml").write_text(to_yaml(c), encoding="utf-8")
        if c.data.precompute == "disk":
            self.encoders.fill() if c.stage in ("all", "precompute") else self.encoders.require()
        if c.stage in ("all", "train") and not c.precompute_only:
            self.train(resume, saved)

    def take_stock(self) -> tuple[Path | None, dict, dict[str, tuple[int, int]]]:
        """The checkpoint to resume from, its state, what is left to encode; sets up the encoders. Hashes weights."""
        c = self.config
        self.encoders = Encoders(self, self.plan, self.validation.prompts)
        resume, saved = self.find_checkpoint()
        fetched = c.stage != "plan" or Path(c.model).exists()  # the plan alone is not worth a download of weights
        return resume, saved, self.encoders.missing() if c.data.precompute == "disk" and fetched else {}

    def find_checkpoint(self) -> tuple[Path | None, dict]:
        """The checkpoint to resume from and its state, refused here if it does not fit; sets the batch layout."""
        c, resume, notes = self.config, None, []
        if c.checkpoint.resume:
            resume, notes = checkpoints.find(c.checkpoint.resume, self.output_dir)
        saved = checkpoints.read_state(resume) if resume else {}
        own = c.train.batch_size * c.train.gradient_accumulation_steps * self.world
        self.global_batch = saved.get("global_batch", own)
        self.accumulation = checkpoints.accumulation(c.train, self.world, self.global_batch)
        if self.accumulation != c.train.gradient_accumulation_steps:
            notes.append(f"keeping the checkpoint's global batch {self.global_batch}: accumulation {self.accumulation}")
        if c.optimizer.fused_backward and self.accumulation > 1:
            raise checkpoints.CheckpointError(
                f"{resume}: its global batch {self.global_batch} would need {self.accumulation} accumulation steps, "
                f"which optimizer.fused_backward cannot do: set train.batch_size {self.global_batch // self.world}"
            )
        self.accelerator.gradient_accumulation_steps = self.accumulation
        self.schedule = Schedule(self.plan.sizes, self.global_batch, c.train.seed)
        self.steps = self.plan.steps(c.train, self.global_batch)
        if resume:
            checkpoints.compare(resume, saved["facts"], self.facts())
            notes += checkpoints.changes(resume, saved["context"], self.context())
            if saved["step"] >= self.steps:
                notes.append(
                    f"note: {resume.name} has the {self.steps} steps of this run already, nothing is left to train: "
                    "raise train.steps to go on, or choose another output_dir for a new run"
                )
        self.say(*notes)
        return resume, saved

    def train(self, resume: Path | None, saved: dict) -> None:
        """Builds or restores the state of a run, then the loop."""
        c = self.config
        self.build()
        self.window: list[float] = []
        self.tokens_seen = 0
        if resume:
            self.restore(resume, saved)
        elif c.overwrite and self.accelerator.is_main_process:
            checkpoints.clear(self.output_dir)
        self.accelerator.wait_for_everyone()
        if not self.sees_image:
            self.unconditional = to_device(collate([self.encoders.text(plan.Text(""))]), self.device)
        self.tracker = Tracker(self.accelerator, c, self.steps, self.step)
        try:
            self.fit()
        finally:
            self.tracker.finish()

    def fit(self) -> None:
        """The loop: for each optimizer step, micro-steps of forward and backward, then clip and update."""
        c, accelerator = self.config, self.accelerator
        self.pulse, self.in_loop = Pulse(accelerator, c.memory.context_parallel), True
        self.clock.lap(self.step)
        self.validate()
        losses: list[Tensor] = []
        for batch in self.batches():
            with accelerator.accumulate(self.model):
                optimizers.set_rate(self.optimizer, optimizers.learning_rate(c.optimizer, self.step, self.steps))
                loss_B = self.loss(self.drop_captions(batch)) * batch["weight"]
                losses.append(loss_B.detach())
                if accelerator.sync_gradients:  # before backward, in which DeepSpeed updates
                    self.settle()
                    if self.pulse.stop:  # the ranks agreed with the last step: this one is not taken
                        break
                accelerator.backward(loss_B.mean())
                if accelerator.sync_gradients:
                    adapters.require_gradients(self.network, self.parameters)
                    norm = optimizers.clip(accelerator, self.optimizer, self.parameters, c.optimizer.max_grad_norm)
                    torch.manual_seed(seed_of(c.train.seed, self.step))  # ranks that round stochastically stay alike
                self.optimizer.step()
                self.optimizer.zero_grad()
            if accelerator.sync_gradients:
                self.step += 1
                self.pulse.send(losses, norm, self.stop_signal or TIME_LIMIT * self.clock.over)
                losses = []
                self.after_step()
        self.finish()

    def batches(self) -> Iterator[Batch]:
        """Micro-batches up to the last step, on the device; sets the slots that randomness is keyed by."""
        rank, start = self.accelerator.process_index, self.step * self.accumulation
        place = rank // self.config.memory.context_parallel
        micro = MicroBatches(
            self.schedule, self.encoders.reader(), self.config.train.batch_size, self.accumulation, place, self.world
        )
        loader = self.encoders.loader(micro, range(start, self.steps * self.accumulation))
        for n, (slots, bucket, picks, batch) in enumerate(loader, start):
            self.slots = slots
            # For what draws from torch's global generator all the same, such as lora.dropout.
            torch.manual_seed(seed_of(self.config.train.seed, *divmod(n, self.accumulation), rank))
            yield to_device(self.encoders.finish(batch, bucket, picks), self.device)

    def settle(self) -> None:
        """Reads what the last step sent, once; a loss or norm that is not finite ends the run here, on all ranks."""
        if not self.pulse.pending:
            return
        loss, self.grad_norm, finite = self.pulse.read()
        if not finite:
            bucket, picks = self.schedule.block(self.step - 1)
            samples = [self.plan.samples[self.plan.buckets[bucket][i]] for i in picks]
            self.pulse.refuse(self.step, [f"{s.path} [{s.where}]" for s in samples])
        self.window.append(loss)

    def after_step(self) -> None:
        c, last = self.config, self.step == self.steps
        bucket, _ = self.schedule.block(self.step - 1)
        self.tokens_seen += self.global_batch * self.tokens(*map(int, bucket.split("x")))
        if self.step % c.train.log_every == 0 or last:
            self.log()
        if last or (c.checkpoint.every and self.step % c.checkpoint.every == 0):
            self.save()
        if self.validation.due(self.step, last):
            self.validate()

    def log(self) -> None:
        c = self.config
        self.settle()
        self.tracker.log(
            self.step,
            {
                "loss": math.fsum(self.window) / len(self.window),
                "lr": optimizers.learning_rate(c.optimizer, self.step - 1, self.steps),
                "grad_norm": self.grad_norm,
                "seconds_per_step": self.clock.lap(self.step),
                "samples_seen": self.step * self.global_batch,
                "tokens_seen": self.tokens_seen,
                "epoch": self.schedule.epoch(self.step),
                "peak_memory_mb": peak_memory(self.device),
            },
        )
        self.window = []

    def validate(self) -> None:
        """Sample videos, if due before the first step, at this one or at the last."""
        if not self.validation.due(self.step, self.step == self.steps):
            return
        self.settle()
        with self.clock.paused(), optimizers.averaged(self.optimizer):
            self.validation.run(self.step, stop=lambda: bool(self.stop_signal))
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                done = [s for s in self.validation.results(self.step) if s.file]
                self.tracker.log_samples(self.step, [s.file for s in done], [s.caption for s in done])

    def save(self) -> Path:
        """checkpoint-<step>, then the removal of old ones."""
        self.settle()
        c = self.config.checkpoint
        with self.clock.paused():
            state = {
                "facts": self.facts(),
                "trained": [*adapters.trainable(self.network)],
                "global_batch": self.global_batch,
                "window": self.window,
                "tokens_seen": self.tokens_seen,
                "context": self.context(),
            }
            folder = checkpoints.save(self.accelerator, self.output_dir, self.step, self.write_checkpoint, state)
            if self.accelerator.is_main_process:
                checkpoints.prune(self.output_dir, c.keep, c.keep_exports)
        self.saved = folder
        self.say(f"saved {folder}")
        return folder

    def restore(self, folder: Path, saved: dict) -> None:
        """Weights, optimizer and step of a checkpoint that fits this run."""
        checkpoints.compare_trained(folder, saved["trained"], adapters.trainable(self.network))
        try:
            checkpoints.read_state_into(self.accelerator, self.model, self.optimizer, folder / "state")
        except (OSError, RuntimeError, EOFError, KeyError, UnpicklingError, SafetensorError) as error:
            raise checkpoints.CheckpointError(
                f"{folder}: its state is damaged ({type(error).__name__}); name an earlier checkpoint with "
                "checkpoint.resume"
            ) from error
        optimizers.apply_options(self.optimizer, self.config.optimizer)
        self.accelerator.step = 0  # its count of micro-steps; a step boundary is where ours restart
        self.step, self.saved = saved["step"], folder
        self.window, self.tokens_seen = saved["window"], saved["tokens_seen"]

    def finish(self) -> None:
        """After the last step: the export into output_dir. After a stop: a checkpoint and the signal's exit code."""
        self.settle()
        if self.step < self.steps:
            if self.step and self.saved != self.output_dir / f"checkpoint-{self.step}":
                self.save()
            stop = self.pulse.stop
            self.say(
                f"stopped at step {self.step} of {self.steps} by "
                + ("train.max_hours" if stop == TIME_LIMIT else signal.Signals(stop).name)
                + "; run the same command with checkpoint.resume: latest to go on"
            )
            raise SystemExit(0 if stop == TIME_LIMIT else 128 + stop)
        if self.accelerator.is_main_process:
            written = publish.publish(self.saved, self.output_dir)
            publish.write_card(self.output_dir, self.pretrained.pipeline_name, self.config, self.plan.buckets)
            self.say(f"done: {', '.join(str(p) for p in written)}; metrics in {self.tracker.path}")
        self.accelerator.wait_for_everyone()
        if self.config.validation.from_export:
            publish.sample(self)

    # -- building -----------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """The network with what trains of it, and its optimizer, prepared by Accelerate."""
        c = self.config
        self.network = net = network.build(self)
        # DDP would send the whole frozen base from rank 0 at start, and cannot send FP8 at all.
        net._ddp_params_and_buffers_to_ignore = [
            name for name, tensor in [*net.named_parameters(), *net.named_buffers()] if not tensor.requires_grad
        ]
        sharding.fit(self.accelerator, net, self.repeated_blocks)
        checkpoints.keep_trainable_only(self.accelerator, lambda: adapters.trainable(self.network))
        optimizer = optimizers.build(c.optimizer, adapters.trainable(net), self.device)
        # Without the list, prepare would bring to the device what a memory option keeps on the host.
        placed = [False, None] if memory.moves_weights(c.memory) else None
        self.model, self.optimizer = self.accelerator.prepare(net, optimizer, device_placement=placed)
        self.parameters = list(adapters.trainable(net).values())  # FSDP2 has put shards in their places

    def write_checkpoint(self, folder: Path) -> None:
        """The state to go on from, and the usable result, into `folder`. Called on every rank."""
        checkpoints.write_state(self.accelerator, self.model, self.optimizer, folder / "state")
        full = sharding.gathered(self.accelerator, self.network, self.config.method == "lora", self.dtype)
        if self.accelerator.is_main_process:
            with optimizers.averaged(self.optimizer):
                self.write_export(folder, full)

    def write_export(self, folder: Path, full: dict[str, Tensor] | None = None) -> None:
        """The usable result into `folder`, read back and compared. `full`: the whole weights where they are sharded."""
        if self.config.method == "lora":
            pipeline, names = self.pretrained.pipeline_type, self.comfy_names
            self.say(*export.save_lora(pipeline, self.network, folder, names, full))
            export.verify_lora(pipeline, folder, self.network, names, full)
        else:
            export.save_transformer(self.network, folder / "transformer", self.dtype, full)
            export.verify_transformer(folder / "transformer", self.network, self.dtype, full)

    def facts(self) -> dict:
        """What a checkpoint must share with the run that resumes it."""
        c = self.config
        lora = (
            {f"lora.{name}": getattr(c.lora, name) for name in ("type", "rank", "alpha")} if c.method == "lora" else {}
        )
        return {
            "trainer": type(self).__name__,
            "transformer": self.pretrained.fingerprint(("transformer",)),
            "method": c.method,
            **lora,
            "precision.trainable": c.precision.trainable,
            "optimizer.name": c.optimizer.name,
            "optimizer.cpu_offload": c.optimizer.cpu_offload,
            **sharding.facts(self.accelerator, c),
        }

    def context(self) -> dict:
        """What may change on resume, but not unsaid."""
        shared = {f.name for f in fields(Config)}
        said = {n: str(o.value) for n, o in options(self.config) if n.startswith(SAID) or n.split(".")[0] not in shared}
        return {"data": self.plan.digest(), "steps": self.steps, **said}

    # -- for validation -----------------------------------------------------------------------------------------------

    def prompt_rows(self, prompt) -> tuple[Batch, Batch]:
        """The encoded prompt and negative prompt as batches of one, on the CPU."""
        text, negative = (collate([self.encoders.text(text)]) for text in self.encoders.prompt_texts(prompt))
        return text, negative

    def read_prompts(self) -> list:
        """The prompts to sample; needs diffusers only if there are any."""
        c = self.config
        if not c.validation.prompts:
            return []
        self.pretrained.scheduler(c.validation.scheduler)  # an unknown one is told now
        call, image_call = (self.pretrained.type_named(self.sample_class(k)).__call__ for k in ({}, {"image": True}))
        rules = (*self.size_rules(), self.refuse_size)
        return read_prompts(c.validation.prompts, call, self.plan.most_used, c, image_call, *rules)

    def pipeline(self, prompt, network=None):
        """A pipeline that samples `prompt`: live network (or `network`), fresh scheduler, VAE, no text encoder."""
        name = self.sample_class({"image": prompt.image} if prompt.image else {})
        scheduler = self.config.validation.scheduler or self.sample_scheduler
        pipe = self.pretrained.sampler(name, self.network if network is None else network, scheduler)
        memory.tile_vae(pipe.vae, self.config.memory.vae_tiling, prompt.num_frames, prompt.height, prompt.width)
        return pipe

    # -- small things -------------------------------------------------------------------------------------------------

    def refuse_size(self, frames: int, height: int, width: int) -> str | None:
        """Why this run cannot train or sample at a size that the size_rules allow; None when it can."""
        size, degree = (frames, height, width), self.config.memory.context_parallel
        return self.refuse_bucket(*size) or context_parallel.indivisible(size, self.tokens(*size), degree)

    @property
    def world(self) -> int:
        """Shares that a global batch is cut into: ranks, or groups of ranks that share tokens."""
        return self.accelerator.num_processes // self.config.memory.context_parallel

    def say(self, *lines: str) -> None:
        if lines and self.accelerator.is_main_process:  # accelerator.print tells it once per node
            print(*lines, sep="\n", flush=True)

    def on_signal(self, number: int, frame) -> None:
        """In the loop: stop at the next step boundary. Elsewhere, or the second time: at once."""
        if not self.in_loop or self.stop_signal:
            raise SystemExit(128 + number)
        self.stop_signal = number
        print(f"{signal.Signals(number).name}: saving at the next step boundary", flush=True)

    def make_plan(self) -> plan.Plan:
        memo = HashMemo(self.config.memo_dir / "clips.json")
        return plan.make(self.config, *self.size_rules(), self.refuse_size, memo)
