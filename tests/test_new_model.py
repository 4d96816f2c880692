"""docs/new_model.md works as written: its blocks become files, and the conformance kit holds for the model."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_page_builds_a_model(tmp_path):
    page = (ROOT / "docs" / "new_model.md").read_text(encoding="utf-8")
    subclass, script, builder = re.findall(r"```python\n(.*?)```", page, re.S)
    for package in ("trainers", "models", "data"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "mochi.py"))
    (tmp_path / "trainers" / "mochi.py").write_text(subclass, encoding="utf-8")
    (tmp_path / "train_mochi.py").write_text(script, encoding="utf-8")
    tiny = tmp_path / "models" / "tiny.py"
    before, after = tiny.read_text(encoding="utf-8").split("\n\ndef build(")
    tiny.write_text(f"{before}\n\n{builder}\n\ndef build({after}", encoding="utf-8")
    assert len(subclass.splitlines()) <= 250 and len(script.splitlines()) <= 12

    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = re.search(r"```bash\npython (-m trainers\.check trainers\.mochi:MochiTrainer)\n```", page).group(1)
    ran = [sys.executable, *command.split()]
    done = subprocess.run(ran, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAULT" not in done.stdout and re.search(r"\n(\d+) of \1 hold", done.stdout)
    assert "text-to-video, batch of 2: the clip comes back" in done.stdout

    help_ = subprocess.run(
        [sys.executable, "train_mochi.py", "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert help_.returncode == 0 and "caption_technique" in help_.stdout
