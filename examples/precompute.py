"""Fill a cache without a run: the same plain functions that training uses, here with an encoder of your own choice.

python examples/precompute.py MODEL_FOLDER CLIPS_FOLDER CACHE_FOLDER [FxHxW]
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from data.cache import Cache  # noqa: E402
from data.fill import Item, fill  # noqa: E402
from data.sources import Source, read_source  # noqa: E402
from data.video import content_sha256, read_frames, to_pixels  # noqa: E402
from models import latents, load  # noqa: E402
from trainers.precompute import rows, video_key  # noqa: E402


def main(model: str, clips: str, cache: str, bucket: str = "9x64x96") -> None:
    frames, height, width = map(int, bucket.split("x"))
    samples, problems = read_source(Source(clips))
    if problems:
        raise SystemExit("\n".join(problems))
    vae = load.load(Path(model), "vae", torch.float32)
    facts = {"weights": load.fingerprint(Path(model), ["vae"], Path(cache) / "weights.json")}

    def read(path: Path) -> torch.Tensor:
        return read_frames(path, 0, frames, height, width)

    def encode(clips: list[torch.Tensor]) -> list[dict]:
        moments = latents.encode_moments(vae, to_pixels(torch.stack(clips)))
        moments = latents.normalize_moments(moments, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
        return rows({"moments": moments}, torch.bfloat16, trims={})

    items = [Item(video_key(facts, content_sha256(s.path), 0, bucket), str(s.path), s.path, bucket) for s in samples]
    done = fill(
        Cache(Path(cache)),
        items,
        encode,
        batch_size=2,
        read=read,
        workers=2,
        on_item=lambda item: print("encoded", item.source),
    )
    print(f"{done} of {len(items)} clips encoded, the others were there")


if __name__ == "__main__":
    main(*sys.argv[1:])
