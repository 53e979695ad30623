"""The wheel `fsdp-cuda`, as it is installed beside `fsdp` and torch: skipped without it. No GPU is needed."""

import json
import pathlib
import subprocess
import tempfile
import unittest
from importlib import metadata

import fsdp

ROOT = pathlib.Path(__file__).parents[2]


def version_of(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def run(*arguments):
    return subprocess.run([fsdp.command(), *arguments], capture_output=True, text=True)


@unittest.skipUnless(version_of("fsdp-cuda"), "fsdp-cuda is not installed")
class WithLibtorch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.quickstart = [
            str(ROOT / "examples/quickstart.toml"),
            *("--set", 'run.device="torch-cpu"', "--set", f'run.out_dir="{folder.name}/out"'),
        ]

    def test_doctor_finds_torch_and_its_libraries_beside_it(self):
        report = json.loads(run("doctor", "--json").stdout)
        found = {finding["part"]: finding for finding in report["findings"]}
        packages = pathlib.Path(metadata.distribution("torch").locate_file("")).resolve()
        self.assertEqual(found["libtorch"]["version"].split("+")[0], version_of("torch").split("+")[0])
        self.assertEqual(found["libtorch"]["path"], str(packages / "torch/lib"))
        for part, package in {"NVRTC": "nvidia-cuda-nvrtc", "NCCL": "nvidia-nccl-cu13"}.items():
            if version_of(package):
                self.assertTrue(found[part]["path"].startswith(str(packages / "nvidia")), found[part])
        self.assertTrue({"torch-cpu": True}.items() <= {d["device"]: d["usable"] for d in report["devices"]}.items())

    def test_quickstart_trains_on_torch_cpu(self):
        ran = run("train", *self.quickstart, "--set", "train.steps=3", "--set", "run.ranks=2")
        self.assertEqual(ran.returncode, 0, ran.stderr)
        self.assertIn("step 3/3", ran.stderr)

    def test_quickstart_is_verified_on_torch_cpu(self):
        ran = run("verify", *self.quickstart, "--world-sizes", "1,2", "--steps", "2")
        self.assertEqual(ran.returncode, 0, ran.stdout + ran.stderr)

    def test_checkpoints_are_read_without_libtorch(self):
        self.assertNotIn("torch,", run("--version").stdout)
        fixture = ROOT / "crates/fsdp-ckpt/tests/fixtures/dcp_2rank"
        self.assertTrue(fsdp.inspect(fixture)["tensor_count"])


if __name__ == "__main__":
    unittest.main()
