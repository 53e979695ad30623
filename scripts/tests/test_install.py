"""`install.sh`, with releases on a server of this machine: ``python -m unittest discover scripts/tests``."""

import contextlib
import hashlib
import http.server
import io
import os
import pathlib
import platform
import shutil
import subprocess
import tarfile
import tempfile
import threading
import unittest

ROOT = pathlib.Path(__file__).parents[2]
TARGET = f"{platform.machine()}-unknown-linux-musl"
NAME = f"fsdp-1.2.3-{TARGET}"
# What the script uses beside a program that downloads.
TOOLS = ["cat", "chmod", "cp", "grep", "gzip", "mkdir", "mktemp", "mv", "rm", "sh", "sha256sum", "tar", "uname", "wc"]


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder. What `cut` names ends in the middle; with `announced`, its whole length is announced."""

    cut, announced = "", False

    def do_GET(self):
        path = pathlib.Path(self.directory, self.path.lstrip("/"))
        if not self.cut or not self.path.endswith(self.cut):
            return super().do_GET()
        content = path.read_bytes()
        self.send_response(200)
        if self.announced:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.close_connection = True

    def log_message(self, *_):
        pass


def archive(script):
    """An archive of a release, whose binary is a script of the shell."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        entry = tarfile.TarInfo(f"{NAME}/fsdp")
        entry.size, entry.mode = len(script), 0o755
        tar.addfile(entry, io.BytesIO(script.encode()))
    return content.getvalue()


@unittest.skipUnless(TARGET.split("-")[0] in ("x86_64", "aarch64"), "there is no binary for this machine")
class Installing(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.served, self.bin, self.tools = (self.folder / name for name in ("served", "bin", "tools"))
        for made in (self.served, self.bin, self.tools):
            made.mkdir()
        self.use(TOOLS + ["curl"])
        (self.bin / "fsdp").write_text("the one before")
        self.release(archive("#!/bin/sh\necho fsdp 1.2.3\n"))

    def use(self, tools):
        """Makes these programs all that is on PATH."""
        for tool in self.tools.iterdir():
            tool.unlink()
        for tool in tools:
            if not shutil.which(tool):
                self.skipTest(f"there is no {tool}")
            (self.tools / tool).symlink_to(shutil.which(tool))

    def replace(self, tool, script):
        (self.tools / tool).unlink()
        (self.tools / tool).write_text("#!/bin/sh\n" + script)
        (self.tools / tool).chmod(0o755)

    def release(self, content, checksum=None):
        (self.served / f"{NAME}.tar.gz").write_bytes(content)
        checksum = checksum or hashlib.sha256(content).hexdigest()
        other = f"{'0' * 64}  fsdp-1.2.3-sparc64-unknown-linux-musl.tar.gz\n"
        (self.served / "SHA256SUMS").write_text(f"{other}{checksum}  {NAME}.tar.gz\n")

    def install(self, **variables):
        handler = type("Served", (Handler,), {"cut": variables.pop("cut", ""), "announced": variables.pop("announced", False)})
        server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), lambda *arguments: handler(*arguments, directory=str(self.served))
        )
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {
            "PATH": str(self.tools),
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder),
            "FSDP_BASE_URL": f"http://127.0.0.1:{server.server_port}/",
            "FSDP_INSTALL_DIR": str(self.bin),
        }
        environment = {key: value for key, value in {**environment, **variables}.items() if value is not None}
        with contextlib.closing(server.socket):
            done = subprocess.run(["sh", ROOT / "install.sh"], env=environment, capture_output=True, text=True)
            server.shutdown()
        left = {path.name for path in self.folder.iterdir()} - {"served", "bin", "tools", ".local"}
        self.assertEqual(left, set(), "temporary files were left")
        return done

    def refuses(self, expected, **variables):
        """Installing fails for this reason, and changes nothing."""
        done = self.install(**variables)
        self.assertNotEqual(done.returncode, 0, done.stdout)
        self.assertIn(expected, done.stderr)
        self.assertEqual(sum(line.startswith("error: ") for line in done.stderr.splitlines()), 1, done.stderr)
        self.assertEqual({path.name for path in self.bin.iterdir()}, {"fsdp"})
        self.assertEqual((self.bin / "fsdp").read_text(), "the one before")

    def installs(self, **variables):
        done = self.install(**variables)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("installed fsdp 1.2.3 in ", done.stdout)
        return done.stdout

    def installed(self, folder):
        self.assertEqual([path.name for path in folder.iterdir()], ["fsdp"])
        self.assertEqual(subprocess.run([folder / "fsdp"], check=True, capture_output=True).stdout, b"fsdp 1.2.3\n")

    def test_binary_replaces_the_one_before(self):
        said = self.installs()
        self.installed(self.bin)
        self.assertIn(f'export PATH="{self.bin}:$PATH"', said)

    def test_folder_on_path_needs_no_advice(self):
        said = self.installs(PATH=f"{self.tools}:{self.bin}")
        self.assertNotIn("PATH", said)

    def test_other_fsdp_on_path_is_named(self):
        other = self.folder / "tools/fsdp"
        other.write_text("")
        other.chmod(0o755)
        self.assertIn(f"`fsdp` is {other} on your PATH", self.installs(PATH=f"{self.tools}:{self.bin}"))

    def test_folder_is_made_in_the_home_by_default(self):
        self.installs(FSDP_INSTALL_DIR=None)
        self.installed(self.folder / ".local/bin")

    def test_wget_is_used_without_curl(self):
        self.use(TOOLS + ["wget"])
        self.installs()
        self.installed(self.bin)

    def test_neither_curl_nor_wget_is_an_error(self):
        self.use(TOOLS)
        self.refuses("curl or wget is needed")

    def test_missing_checksum_program_is_an_error(self):
        self.use([tool for tool in TOOLS if tool != "sha256sum"] + ["curl"])
        self.refuses("sha256sum or shasum is needed")

    def test_wrong_checksum_is_refused(self):
        self.release(archive("#!/bin/sh\necho evil\n"), checksum="ab" * 32)
        self.refuses("nothing was installed")

    def test_truncated_download_is_refused(self):
        self.refuses("could not be downloaded", cut=".tar.gz", announced=True)

    def test_truncated_download_of_unknown_length_is_refused(self):
        self.refuses("has the SHA-256", cut=".tar.gz")

    def test_truncated_list_of_checksums_is_refused(self):
        self.refuses("has no file for", cut="SHA256SUMS")

    def test_absent_release_is_an_error(self):
        (self.served / "SHA256SUMS").unlink()
        self.refuses("SHA256SUMS could not be downloaded")

    def test_absent_archive_is_an_error(self):
        (self.served / f"{NAME}.tar.gz").unlink()
        self.refuses(f"{NAME}.tar.gz could not be downloaded")

    def test_archive_that_is_none_is_refused(self):
        self.release(b"not an archive")
        self.refuses("could not be unpacked")

    def test_binary_that_does_not_run_is_not_installed(self):
        self.release(archive("#!/bin/sh\nexit 1\n"))
        self.refuses("does not run on this machine")

    def test_two_versions_in_one_release_are_refused(self):
        with open(self.served / "SHA256SUMS", "a") as file:
            file.write(f"{'1' * 64}  fsdp-1.2.4-{TARGET}.tar.gz\n")
        self.refuses("several files")

    def test_unknown_processor_is_refused(self):
        self.replace("uname", '[ "$1" = -s ] && echo Linux || echo riscv64\n')
        self.refuses("no binary for Linux on riscv64")

    def test_other_system_is_refused(self):
        self.replace("uname", "echo Darwin\n")
        self.refuses("no binary for Darwin")

    def test_folder_that_cannot_be_made_is_an_error(self):
        (self.served / "file").write_text("")
        self.refuses("set FSDP_INSTALL_DIR", FSDP_INSTALL_DIR=str(self.served / "file/bin"))

    def test_folder_in_place_of_the_command_is_an_error(self):
        (self.served / "bin/fsdp").mkdir(parents=True)
        self.refuses("is a folder", FSDP_INSTALL_DIR=str(self.served / "bin"))
        self.assertEqual(list((self.served / "bin").rglob("*")), [self.served / "bin/fsdp"])

    def test_folder_on_path_by_another_name_needs_no_advice(self):
        said = self.installs(PATH=f"{self.tools}:{self.bin}", FSDP_INSTALL_DIR=f"{self.bin}/../{self.bin.name}/")
        self.assertNotIn("PATH", said)

    def test_folder_that_is_not_writable_is_an_error(self):
        # Root may write wherever the file system lets it.
        folder = "/proc/self" if os.geteuid() == 0 else str(self.bin)
        self.bin.chmod(0o555)
        self.addCleanup(self.bin.chmod, 0o755)
        self.refuses("is not writable", FSDP_INSTALL_DIR=folder)

    def test_full_disk_leaves_the_one_before(self):
        self.replace("cp", 'printf half >"$2"\nexit 1\n')
        self.refuses("could not be written to")

    def test_copy_without_an_address_says_so(self):
        self.refuses("set FSDP_BASE_URL", FSDP_BASE_URL=None)

    def test_half_of_the_script_does_nothing(self):
        script = (ROOT / "install.sh").read_text()
        for length in range(0, len(script) - len('main "$@"\n') + 1, 97):
            done = subprocess.run(
                ["sh"], input=script[:length], text=True, capture_output=True, env={"PATH": str(self.tools), "HOME": str(self.folder)}
            )
            self.assertEqual(done.stdout, "")
        self.assertFalse((self.folder / ".local").exists())


class Folder(unittest.TestCase):
    def test_release_folder_gets_address_and_checksums(self):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "a b.whl").write_text("x")
            for address in ("", "https://example.org/v1.2.3"):
                subprocess.run([ROOT / "scripts/release_folder.sh", folder, address], check=True)
                script = pathlib.Path(folder, "install.sh").read_text()
                self.assertIn(f"\ndefault_base_url={address}\n", script)
                subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
                names = [line[66:] for line in pathlib.Path(folder, "SHA256SUMS").read_text().splitlines()]
                self.assertEqual(names, ["a b.whl", "install.sh"])

    def test_address_with_a_command_in_it_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            command = [ROOT / "scripts/release_folder.sh", folder, "https://example.org/$(reboot)"]
            self.assertEqual(subprocess.run(command, capture_output=True).returncode, 2)


if __name__ == "__main__":
    unittest.main()
