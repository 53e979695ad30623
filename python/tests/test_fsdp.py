"""The wheel, as it is installed: ``python -m unittest discover python/tests`` with a Python that has it.

Fixtures are those of the checkpoint tests. What needs torch is skipped without it."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
from contextlib import redirect_stderr
from importlib import metadata, util
from io import StringIO
from unittest import mock

import fsdp

ROOT = pathlib.Path(__file__).parents[2]
FIXTURES = ROOT / "crates/fsdp-ckpt/tests/fixtures"


class Command(unittest.TestCase):
    def test_module_and_command_have_the_version_of_the_package(self):
        for command in ([fsdp.command()], [sys.executable, "-m", "fsdp"]):
            printed = subprocess.run([*command, "--version"], check=True, capture_output=True, text=True).stdout
            self.assertTrue(printed.startswith(f"fsdp {metadata.version('fsdp')} ("), printed)

    def test_exit_code_of_the_command_is_that_of_the_module(self):
        code = subprocess.run([sys.executable, "-m", "fsdp", "ckpt", "inspect", "absent"], capture_output=True).returncode
        self.assertEqual(code, 2)

    def test_command_of_the_same_installation_is_found(self):
        of_python = f"lib/python3.{sys.version_info.minor}/site-packages"
        # By `--target`, and by `--user` or `--prefix`.
        for packages in ("", of_python):
            with self.subTest(packages), tempfile.TemporaryDirectory() as folder:
                copy = pathlib.Path(folder, packages, "fsdp")
                shutil.copytree(pathlib.Path(fsdp.__file__).parent, copy)
                command = pathlib.Path(folder, "bin", "fsdp")
                command.parent.mkdir()
                command.write_text("#!/bin/sh\necho of this installation\n")
                command.chmod(0o755)
                environment = {**os.environ, "PYTHONPATH": str(copy.parent)}
                found = subprocess.run([sys.executable, "-m", "fsdp"], env=environment, check=True, capture_output=True, text=True)
                self.assertEqual(found.stdout, "of this installation\n")

    def test_missing_command_is_named(self):
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(fsdp, "__file__", f"{folder}/lib/python3/site-packages/fsdp/__init__.py"),
            mock.patch.object(fsdp.sysconfig, "get_path", lambda _: folder),
            mock.patch.dict(os.environ, PATH=folder),
            self.assertRaisesRegex(FileNotFoundError, "pip install fsdp"),
        ):
            fsdp.command()


class Checkpoints(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def test_dcp_becomes_safetensors(self):
        with redirect_stderr(StringIO()):
            report = fsdp.convert(FIXTURES / "dcp_2rank", self.folder / "model.safetensors", dtype="bf16")
        content = fsdp.inspect(self.folder / "model.safetensors", tensors=True)
        self.assertEqual(report["tensors"], content["tensor_count"])
        self.assertEqual({tensor["dtype"] for tensor in content["tensors"]} - {"I64", "BF16"}, set())

    def test_sound_checkpoint_is_sound_and_a_damaged_one_is_not(self):
        self.assertTrue(fsdp.verify_checkpoint(FIXTURES / "full.pth")["sound"])
        damaged = bytearray((FIXTURES / "full.pth").read_bytes())
        del damaged[len(damaged) // 2]
        (self.folder / "damaged.pth").write_bytes(damaged)
        report = fsdp.verify_checkpoint(self.folder / "damaged.pth")
        self.assertFalse(report["sound"])
        self.assertTrue(report["problems"])

    def test_error_has_the_text_and_code_of_the_command(self):
        with self.assertRaises(fsdp.FsdpError) as caught:
            fsdp.convert("absent", self.folder / "model")
        self.assertEqual(caught.exception.code, 2)
        self.assertIn("failed to open absent: No such file", str(caught.exception))
        self.assertEqual(list(self.folder.iterdir()), [])

    @unittest.skipUnless(util.find_spec("torch") and util.find_spec("safetensors"), "torch or safetensors is missing")
    def test_load_returns_tensors_equal_to_those_of_torch(self):
        import torch

        expected = torch.load(FIXTURES / "model_only.pth", map_location="cpu", weights_only=True)
        with redirect_stderr(StringIO()):
            loaded = fsdp.load(FIXTURES / "model_only.pth")
        self.assertEqual(loaded.keys(), expected.keys())
        for name, tensor in expected.items():
            self.assertTrue(torch.equal(loaded[name], tensor), name)


class WithoutTorch(unittest.TestCase):
    def test_load_names_the_packages_it_needs(self):
        with mock.patch.dict(sys.modules, {"safetensors.torch": None}), self.assertRaisesRegex(ImportError, r"'fsdp\[torch\]'"):
            fsdp.load(FIXTURES / "model_only.pth")


class Licenses(unittest.TestCase):
    def test_wheels_have_the_licenses_of_all_that_is_in_them(self):
        of_both = ["clap", "object_store", "prost", "tokenizers", "zstd-sys"]
        for package, crates in (("fsdp", of_both), ("fsdp-cuda", [*of_both, "tch"])):
            with self.subTest(package):
                if package == "fsdp-cuda" and not list(metadata.distributions(name=package)):
                    self.skipTest("fsdp-cuda is not installed")
                wheel = metadata.distribution(package)
                files = wheel.metadata.get_all("License-File")
                self.assertEqual(files, ["LICENSE-APACHE", "LICENSE-MIT", "LICENSES-OF-OTHERS"])
                texts = [wheel.read_text(f"licenses/{file}") for file in files]
                self.assertTrue(all(texts), files)
                for crate in crates:
                    self.assertRegex(texts[2], rf"(?m)^{crate} [0-9.]+.*: ")
                for text in ("Meta Platforms", "fiat-crypto authors", "The Rust Project Developers"):
                    self.assertIn(text, texts[2])


class RunFiles(unittest.TestCase):
    def test_findings_name_the_fault(self):
        with tempfile.TemporaryDirectory() as folder:
            run_file = pathlib.Path(folder, "run.toml")
            run_file.write_text("modle = 1\n")
            findings = fsdp.check(run_file)["findings"]
        self.assertIn("modle", json.dumps(findings))
        self.assertIn("error", {finding["verdict"] for finding in findings})

    def test_set_changes_keys(self):
        run_file = ROOT / "examples/quickstart.toml"
        findings = fsdp.check(run_file, set={"run.device": "nonsense"})["findings"]
        self.assertIn("nonsense", json.dumps(findings))


if __name__ == "__main__":
    unittest.main()
