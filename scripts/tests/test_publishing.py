"""What publishes a release, with fakes of `cargo`, `docker` and `gh`: ``python -m unittest discover scripts/tests``."""

import io
import os
import pathlib
import platform
import re
import shutil
import subprocess
import tarfile
import tempfile
import unittest

ROOT = pathlib.Path(__file__).parents[2]
VERSION = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]
# What of an archive is in an image.
IN_IMAGES = ("LICENSE-APACHE", "LICENSE-MIT", "LICENSES-OF-OTHERS", "fsdp")
# Writes its arguments, its input unless that is a terminal, and what is in the folder that its last argument names.
FAKE = """#!/bin/sh
for last; do :; done
echo "$(basename "$0") $*" >>"$CALLS"
case "$*" in *--password-stdin* | *--notes-file*) sed 's/^/  < /' >>"$CALLS" ;; esac
case "$*" in "image inspect "*) echo "$IMAGE_BYTES" ;; esac
[ ! -d "$last" ] || (cd "$last" && find . -type f | LC_ALL=C sort | sed 's|^|  has |') >>"$CALLS"
"""

# Publishes nothing, and fails where there is an answer for this try with this crate. What the workspace is, the real one says.
CARGO = """#!/bin/sh
[ "$1" != metadata ] || exec "$REAL_CARGO" "$@"
echo "cargo $*" >>"$CALLS"
answer=$ANSWERS/$3.$(grep -c -- "--package $3 " "$CALLS")
[ ! -f "$answer" ] || { cat "$answer" >&2; exit 101; }
"""
LIMITED = """error: failed to publish to registry at https://crates.io

Caused by:
  the remote server responded with an error (status 429 Too Many Requests): You have published too many new crates in a short \
period of time. Please try again after Sun, 31 Jan 2027 10:00:00 GMT
"""


class Crates(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        for name, text in (("cargo", CARGO), ("sleep", '#!/bin/sh\necho "sleep $*" >>"$CALLS"\n')):
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o755)

    def answer(self, crate, text, tries=(1,)):
        for number in tries:
            (self.folder / f"{crate}.{number}").write_text(text)

    def publish(self, *arguments, code=0):
        """Runs the script, and returns the calls and what was printed."""
        calls = self.folder / "calls"
        calls.write_text("")
        path = f"{self.folder}:{os.environ['PATH']}"
        own = {"PATH": path, "CALLS": str(calls), "ANSWERS": str(self.folder), "REAL_CARGO": shutil.which("cargo")}
        command = [ROOT / "scripts/publish_crates.sh", *arguments]
        done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)
        self.assertEqual(done.returncode, code, done.stderr)
        return calls.read_text().splitlines(), done.stdout + done.stderr

    def published(self, calls):
        return [re.fullmatch("cargo publish --package (.*) --locked --no-verify", call)[1] for call in calls]

    def test_each_crate_comes_after_those_it_needs(self):
        order = self.published(self.publish()[0])
        names = sorted(path.parent.name for path in (ROOT / "crates").glob("*/Cargo.toml"))
        self.assertEqual(sorted(order), names)
        for name in names:
            manifest = (ROOT / "crates" / name / "Cargo.toml").read_text()
            for needed in re.findall(r"^(fsdp-\w+)(?:\.workspace)? *=", manifest, re.MULTILINE):
                self.assertLess(order.index(needed), order.index(name), f"{name} needs {needed}")

    def test_version_that_exists_is_passed_over(self):
        all_of_them = self.publish()[0]
        self.answer("fsdp-core", "error: crate fsdp-core@0.1.0 already exists on crates.io index\n")
        self.answer("fsdp-nn", "  the remote server responded with an error: crate version `0.1.0` is already uploaded\n")
        self.assertEqual(self.publish()[0], all_of_them)

    def test_limit_of_new_crates_is_waited_for(self):
        self.answer("fsdp-nn", LIMITED, tries=(1, 2))
        calls, _ = self.publish()
        waits = [number for number, call in enumerate(calls) if call == "sleep 610"]
        self.assertEqual(len(waits), 2)
        around = [calls[number + by] for number in waits for by in (-1, 1)]
        self.assertEqual(self.published(around), ["fsdp-nn"] * 4)
        self.assertEqual(self.published(calls[-1:]), ["fsdp-cli"])

    def test_waiting_for_the_limit_has_an_end(self):
        self.answer("fsdp-nn", LIMITED, tries=range(1, 100))
        calls, said = self.publish(code=1)
        self.assertEqual(calls.count("sleep 610"), 3)
        self.assertEqual(self.published(calls[-1:]), ["fsdp-nn"])
        self.assertIn("error: fsdp-nn is not published", said)

    def test_other_failure_ends_it_at_once(self):
        self.answer("fsdp-comm", "error: 403 Forbidden\n")
        calls, said = self.publish(code=1)
        self.assertEqual(self.published(calls)[-1], "fsdp-comm")
        self.assertIn("403 Forbidden", said)

    def test_dry_run_is_of_all_at_once(self):
        calls, _ = self.publish("--dry-run")
        self.assertEqual(calls, ["cargo publish --workspace --exclude fsdp-tests --exclude fsdp-published --exclude fsdp-gpu-bench --locked --no-verify --dry-run"])


class Publishing(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.dist = self.folder / "dist"
        (self.folder / "bin").mkdir()
        self.dist.mkdir()
        for name in ("docker", "gh"):
            (self.folder / "bin" / name).write_text(FAKE)
            (self.folder / "bin" / name).chmod(0o755)
        for processor in ("x86_64", "aarch64"):
            name = f"fsdp-{VERSION}-{processor}-unknown-linux-musl"
            with tarfile.open(self.dist / f"{name}.tar.gz", "w:gz") as tar:
                for file in (*IN_IMAGES, "README.md"):
                    tar.addfile(tarfile.TarInfo(f"{name}/{file}"), io.BytesIO())
            (self.dist / f"fsdp-{VERSION}-py3-none-manylinux_2_28_{processor}.whl").write_text("")
        (self.dist / f"fsdp_cuda-{VERSION}-py3-none-manylinux_2_34_x86_64.whl").write_text("")

    def calls(self, *command, code=0, **variables):
        calls = self.folder / "calls"
        environment = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "CALLS": str(calls), "IMAGE_BYTES": "40000000"}
        environment |= variables
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        self.assertEqual(done.returncode, code, done.stderr)
        return calls.read_text().splitlines() if calls.exists() else []

    def test_image_of_this_machine_is_built_and_run(self):
        calls = self.calls(ROOT / "scripts/images.sh", self.dist, "--try")
        processor = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
        self.assertRegex(calls[0], "^docker build --file containers/Dockerfile --tag fsdp:latest /")
        files = [f"  has ./{processor}/{file}" for file in IN_IMAGES]
        run = ["docker run --rm fsdp:latest --version", "docker image inspect --format {{.Size}} fsdp:latest"]
        self.assertEqual(calls[1:], [*files, *run])

    def test_image_that_is_too_large_is_refused(self):
        self.calls(ROOT / "scripts/images.sh", self.dist, "--try", code=1, IMAGE_BYTES="40000001")

    def test_images_are_pushed_for_their_processors(self):
        calls = self.calls(ROOT / "scripts/images.sh", self.dist, "--push", "ghcr.io/Somebody", REGISTRY_TOKEN="secret")
        self.assertEqual(calls[:2], ["docker login ghcr.io --username token --password-stdin", "  < secret"])
        builds = [call for call in calls if call.startswith("docker buildx build")]
        self.assertIn("--platform linux/amd64,linux/arm64 --file containers/Dockerfile", builds[0])
        self.assertIn("--platform linux/amd64 --file containers/cuda.Dockerfile", builds[1])
        for name, build in zip(("fsdp", "fsdp-cuda"), builds):
            for tag in (VERSION, "latest"):
                self.assertIn(f" --tag ghcr.io/somebody/{name}:{tag} ", build)
        context = [call.split()[1] for call in calls if call.startswith("  has ")]
        wheels = [f"./{path.name}" for path in sorted(self.dist.glob("*x86_64.whl"))]
        files = [f"./{processor}/{file}" for processor in ("amd64", "arm64") for file in IN_IMAGES]
        self.assertEqual(context, [*files, *files, *wheels])

    def test_login_is_left_to_the_user_without_a_token(self):
        calls = self.calls(ROOT / "scripts/images.sh", self.dist, "--push", "example.org/x", REGISTRY_TOKEN="")
        self.assertFalse([call for call in calls if "login" in call])

    def test_images_need_both_archives(self):
        next(self.dist.glob("*aarch64*.tar.gz")).unlink()
        calls = self.calls(ROOT / "scripts/images.sh", self.dist, "--push", "example.org/x", code=2, REGISTRY_TOKEN="")
        self.assertFalse([call for call in calls if "build --push" in call])

    def test_unknown_way_to_build_images_is_refused(self):
        self.assertEqual(self.calls(ROOT / "scripts/images.sh", self.dist, code=2), [])

    def test_release_without_notes_is_not_published(self):
        tag = {"GITHUB_REF_NAME": "v999.0.0"}
        calls = self.calls(ROOT / "scripts/publish_release.sh", self.dist, code=1, **tag)
        self.assertEqual(calls, [])

    def test_release_has_all_files(self):
        changelog = (ROOT / "CHANGELOG.md").read_text()
        version = next(iter(re.findall(r"^## \[([0-9.]+)\] - ", changelog, re.MULTILINE)), None)
        if version is None:
            self.skipTest("CHANGELOG.md has no version yet")
        calls = self.calls(ROOT / "scripts/publish_release.sh", self.dist, GITHUB_REF_NAME=f"v{version}")
        self.assertRegex(calls[0], f"^gh release create v{version} --verify-tag ")
        for path in self.dist.iterdir():
            self.assertIn(str(path), calls[0])
        self.assertGreater(len(calls), 1)


if __name__ == "__main__":
    unittest.main()
