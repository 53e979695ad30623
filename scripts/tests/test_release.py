"""`release.sh` and its checks, in a small repository whose builds are fakes: ``python -m unittest discover scripts/tests``."""

import pathlib
import shutil
import subprocess
import tempfile
import unittest

SCRIPTS = pathlib.Path(__file__).parents[1]
MANIFEST = """[workspace]
members = ["crates/*"]

[workspace.package]
version = "{0}"

[workspace.dependencies]
fsdp-core = {{ path = "crates/fsdp-core", version = "{0}" }}
serde = {{ version = "1.0" }}
"""
LOCK = """[[package]]
name = "fsdp"
version = "{0}"

[[package]]
name = "fsdp-core"
version = "{0}"

[[package]]
name = "serde"
version = "1.0.200"
"""
CHANGELOG = """# Changelog

## [Unreleased]

## [{0}] - 2026-01-31

### Added

- Everything.

## [0.0.9] - 2026-01-01

- Less.
"""
# What the builds of a release write, for each call.
FAKES = {
    "package_crates.sh": 'touch "$1/fsdp-0.1.0.crate"',
    "binary.sh": 'touch "$1/fsdp-0.1.0-$2-unknown-linux-musl.tar.gz"',
    "wheel.sh": 'touch "$1/fsdp-0.1.0-$2.whl"',
    "sbom.sh": 'touch "$1/fsdp-0.1.0.cdx.json"',
}


class Release(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name, "repository")
        (self.folder / "scripts").mkdir(parents=True)
        for name in ["release.sh", "release_checks.sh", "release_notes.sh", "release_folder.sh"]:
            shutil.copy(SCRIPTS / name, self.folder / "scripts")
        shutil.copy(SCRIPTS.parent / "install.sh", self.folder)
        for name, line in FAKES.items():
            script = self.folder / "scripts" / name
            script.write_text(f'#!/bin/sh\necho "{name} $*" >>../calls\n{line}\n')
            script.chmod(0o755)
        kept = self.folder / "tests/golden/versions/0.1/trained/adamw"
        kept.mkdir(parents=True)
        (kept / "expected.json").write_text("{}")
        (self.folder / ".gitignore").write_text("/target\n")
        self.write("0.1.0")
        self.git("init", "--quiet", "--initial-branch", "main")
        self.git("config", "user.name", "Somebody")
        self.git("config", "user.email", "somebody@example.org")
        self.commit()

    def write(self, version):
        texts = {"Cargo.toml": MANIFEST, "Cargo.lock": LOCK, "fuzz/Cargo.lock": LOCK, "CHANGELOG.md": CHANGELOG}
        (self.folder / "fuzz").mkdir()
        for name, text in texts.items():
            (self.folder / name).write_text(text.format(version))

    def replace(self, name, old, new):
        """Changes the first place of a text in a file, and commits it."""
        text = (self.folder / name).read_text()
        self.assertIn(old, text)
        (self.folder / name).write_text(text.replace(old, new, 1))
        self.commit()

    def git(self, *arguments):
        done = subprocess.run(["git", *arguments], cwd=self.folder, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self):
        self.git("add", "--all")
        self.git("commit", "--quiet", "--no-gpg-sign", "--message", "Change")

    def run_script(self, *arguments):
        command = [self.folder / "scripts/release.sh", *arguments]
        return subprocess.run(command, cwd="/", capture_output=True, text=True)

    def calls(self):
        calls = self.folder.parent / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def refuses(self, expected, *arguments):
        """Refuses for this reason before anything is built, with a tag and without."""
        for more in ([], ["--dry-run"]):
            done = self.run_script(*(arguments or ["0.1.0"]), *more)
            self.assertNotEqual(done.returncode, 0, done.stdout)
            self.assertIn(expected, done.stderr)
        self.assertEqual(self.calls(), [])
        self.assertFalse((self.folder / "target/release-0.1.0").exists())

    def test_release_is_built_and_tagged(self):
        done = self.run_script("0.1.0")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("git push origin v0.1.0", done.stdout)
        self.assertEqual(self.git("rev-parse", "v0.1.0^{commit}"), self.git("rev-parse", "HEAD"))
        self.assertEqual(self.git("cat-file", "-t", "v0.1.0"), "tag")
        called = [call.split()[0] for call in self.calls()]
        self.assertEqual(
            called,
            ["package_crates.sh", "binary.sh", "wheel.sh", "binary.sh", "wheel.sh", "wheel.sh", "sbom.sh"],
        )
        folder = self.folder / "target/release-0.1.0"
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
        listed = {line[66:] for line in (folder / "SHA256SUMS").read_text().splitlines()}
        self.assertEqual(listed, {path.name for path in folder.iterdir()} - {"SHA256SUMS"})
        self.assertEqual(len([name for name in listed if name.endswith(".tar.gz")]), 2)

    def test_dry_run_builds_and_does_not_tag(self):
        done = self.run_script("0.1.0", "--dry-run")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(self.calls()), 7)
        self.assertEqual(self.git("tag"), "")

    def test_failed_build_ends_it_without_a_tag(self):
        self.replace("scripts/wheel.sh", "touch", "exit 1; touch")
        done = self.run_script("0.1.0")
        self.assertNotEqual(done.returncode, 0)
        self.assertEqual((len(self.calls()), self.git("tag")), (3, ""))

    def test_change_during_the_build_is_noticed(self):
        self.replace("scripts/sbom.sh", "touch", "echo >>CHANGELOG.md; touch")
        done = self.run_script("0.1.0")
        self.assertIn("changed while the release was built", done.stderr)
        self.assertEqual((done.returncode, self.git("tag")), (1, ""))

    def test_changed_and_new_files_are_refused(self):
        (self.folder / "new").write_text("")
        self.refuses("not committed")
        self.git("add", "new")
        self.refuses("not committed")

    def test_other_branch_is_refused(self):
        self.git("switch", "--quiet", "--create", "other")
        self.refuses("this is other")
        self.git("switch", "--quiet", "--detach", "main")
        self.refuses("this is no branch")

    def test_existing_tag_is_refused(self):
        self.git("tag", "v0.1.0")
        self.refuses("the tag v0.1.0 exists")

    def test_other_version_in_the_manifest_is_refused(self):
        self.replace("Cargo.toml", "0.1.0", "0.1.1")
        self.refuses("Cargo.toml has the version 0.1.1 instead of 0.1.0")

    def test_other_version_of_one_dependency_is_refused(self):
        self.replace("Cargo.toml", 'fsdp-core", version = "0.1.0', 'fsdp-core", version = "0.0.9')
        self.refuses("Cargo.toml has the version 0.0.9")

    def test_other_version_in_a_lock_file_is_refused(self):
        for lock in ("fuzz/Cargo.lock", "Cargo.lock"):
            self.replace(lock, 'fsdp-core"\nversion = "0.1.0', 'fsdp-core"\nversion = "0.0.9')
            self.refuses(f"{lock} has the version 0.0.9")

    def test_changelog_without_the_version_is_refused(self):
        self.replace("CHANGELOG.md", "## [0.1.0]", "## [0.1.1]")
        self.refuses('no heading "## [0.1.0] - DATE"')

    def test_changelog_without_a_date_is_refused(self):
        self.replace("CHANGELOG.md", " - 2026-01-31", "")
        self.refuses('no heading "## [0.1.0] - DATE"')

    def test_empty_section_of_the_changelog_is_refused(self):
        self.replace("CHANGELOG.md", "### Added\n\n- Everything.\n\n", "")
        self.refuses("says nothing about 0.1.0")

    def test_version_without_kept_files_is_refused(self):
        shutil.rmtree(self.folder / "tests/golden/versions")
        self.commit()
        self.refuses("no checkpoints of this version")

    def test_publishing_without_an_address_is_refused(self):
        command = [self.folder / "scripts/release_checks.sh", "0.1.0"]
        self.assertEqual(subprocess.run(command).returncode, 0)
        done = subprocess.run([*command, "--publish"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("Cargo.toml has no repository", done.stderr)
        version = 'version = "0.1.0"\n\n'
        self.replace("Cargo.toml", version, 'version = "0.1.0"\nrepository = "https://example.org/fsdp"\n\n')
        self.assertEqual(subprocess.run([*command, "--publish"]).returncode, 0)

    def test_word_that_is_no_version_is_refused(self):
        for version in ("v0.1.0", "0.1", "0.1.0-rc1", "00.1.0", "0.1.0;x"):
            self.refuses("is not a version", version)

    def test_folder_of_an_earlier_build_is_refused(self):
        folder = self.folder / "target/release-0.1.0"
        folder.mkdir(parents=True)
        done = self.run_script("0.1.0")
        self.assertIn("exists; remove it first", done.stderr)
        self.assertEqual((done.returncode, self.calls()), (1, []))

    def test_unknown_option_is_refused(self):
        self.assertEqual(self.run_script("0.1.0", "--force").returncode, 2)
        self.assertEqual(self.run_script().returncode, 1)

    def test_notes_are_the_section_of_the_version(self):
        command = [self.folder / "scripts/release_notes.sh", "0.1.0"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        self.assertEqual(done.stdout.strip(), "### Added\n\n- Everything.")


if __name__ == "__main__":
    unittest.main()
