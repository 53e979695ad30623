"""Universal checkpoints, made by DeepSpeed's own converter of those that `deepspeed_zero.py` saved."""

import pathlib
import shutil
import subprocess
import sys
import tempfile

FIXTURES = pathlib.Path(__file__).resolve().parents[2] / "crates/fsdp-ckpt/tests/fixtures"
KINDS = ["zero1", "zero2_bf16_tied_frozen", "zero3_bf16_tied_frozen"]

for kind in KINDS:
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        shutil.copytree(FIXTURES / "deepspeed" / kind, scratch, dirs_exist_ok=True)
        # The state that is injected says only that nothing was split over ranks.
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        command += ["--input_folder", scratch / "global_step10", "--output_folder", scratch / "global_step10_universal"]
        subprocess.run(command + ["--num_extract_workers", "1", "--num_merge_workers", "1"], check=True)
        out = FIXTURES / "deepspeed_universal" / kind
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        for name in ["global_step10_universal", "latest_universal"]:
            shutil.move(scratch / name, out / name)
