//! Machines on which a dependency of device "cuda" is missing, too old or of another version: the run is refused with
//! exit code 2 before a rank starts, and leaves nothing behind.
//!
//! A machine is a folder for `LD_LIBRARY_PATH`. It holds the stand-in for the driver, invalid files named like the
//! libraries that are to be unusable, and libtorch as hard links, so that no NVIDIA libraries are next to it.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{Ran, Sandbox};

struct Machine {
    sandbox: Sandbox,
    dir: TempDir,
    gpus: &'static str,
}

impl Machine {
    /// Creates a machine with the stand-in driver and two GPUs.
    fn new() -> Self {
        // In the target folder, so that libtorch can be hard-linked instead of copied.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let machine = Self { sandbox: Sandbox::new(), dir, gpus: "2" };
        machine.build("driver.cpp", "libcuda.so");
        machine
    }

    /// Builds a stand-in for a library.
    fn build(&self, source: &str, library: &str) {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fsdp-cuda/tests/fake_cuda").join(source);
        let mut build = Command::new(std::env::var("CXX").unwrap_or_else(|_| "g++".into()));
        build.args(["-std=c++17", "-shared", "-fPIC", &format!("-Wl,-soname,{library}"), "-o"]);
        let built = build.arg(self.dir.path().join(library)).arg(source).status();
        assert!(built.expect("a C++ compiler: install g++, or set CXX").success());
    }

    fn fsdp(&self, args: &str) -> Ran {
        self.fsdp_with(&[], args)
    }

    fn fsdp_with(&self, variables: &[(&str, &str)], args: &str) -> Ran {
        let folders = format!("{}:{}", self.torch().join("lib").display(), self.dir.path().display());
        let mut command = self.sandbox.command();
        command.env("LD_LIBRARY_PATH", folders).env("FAKE_CUDA_DEVICES", self.gpus);
        command.envs(variables.iter().copied());
        Ran::of(command.args(args.split_whitespace()).output().unwrap())
    }

    /// Returns the error message of a run that must be refused.
    fn input_error(&self, args: &str) -> String {
        let ran = self.fsdp(args);
        assert_eq!(ran.code, Some(2), "fsdp {args}: {}", ran.stderr);
        assert!(!self.sandbox.path("out").exists(), "nothing is written");
        ran.stderr
    }

    fn torch(&self) -> PathBuf {
        self.dir.path().join("torch")
    }

    /// Links the libtorch of this machine, with `version` as its reported version.
    fn link_libtorch(&self, version: &str) {
        let ran = Sandbox::new().succeed("doctor --json");
        let report: Value = serde_json::from_str(&ran.stdout).unwrap();
        let parts = report["findings"].as_array().unwrap();
        let libtorch = parts.iter().find(|found| found["part"] == "libtorch").unwrap();
        let lib = libtorch["path"].as_str().expect("these tests are built with libtorch");
        std::fs::create_dir_all(self.torch().join("lib")).unwrap();
        std::fs::write(self.torch().join("version.py"), format!("__version__ = '{version}'\n")).unwrap();
        let files = std::fs::read_dir(lib).unwrap().map(|entry| entry.unwrap().path());
        for file in files.filter(|file| file.is_file()) {
            let to = self.torch().join("lib").join(file.file_name().unwrap());
            // Hard links fail across file systems, and can fail for files of other users.
            if std::fs::hard_link(&file, &to).is_err() {
                std::fs::copy(&file, &to).unwrap();
            }
        }
        self.link_neighbors(Path::new(lib));
    }

    /// Links the libraries from wheels that libtorch needs, except those that these tests are about.
    fn link_neighbors(&self, lib: &Path) {
        let wheels = lib.ancestors().nth(2).map(fsdp_cuda::library::wheel_folders).unwrap_or_default();
        for file in wheels.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap()) {
            let file = file.unwrap().path();
            let name = file.file_name().unwrap().to_str().unwrap().to_owned();
            let spoiled = ["libnccl", "libnvrtc"].iter().any(|spoiled| name.starts_with(spoiled));
            if name.contains(".so") && !spoiled {
                std::os::unix::fs::symlink(&file, self.dir.path().join(name)).unwrap();
            }
        }
    }

    /// Creates invalid files with the names of libraries.
    fn spoil(&self, names: &[&str]) {
        names.iter().for_each(|name| std::fs::write(self.dir.path().join(name), "no library").unwrap());
    }
}

const NVRTC: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
const NCCL: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

#[test]
fn more_ranks_than_gpus_is_rejected() {
    let machine = Machine::new();
    let message = machine.input_error("train run.toml --set run.device=cuda --set run.ranks=4");
    assert!(message.contains("4 ranks need 4 GPUs, but this process sees 2"), "{message}");
    assert!(message.contains("use fewer ranks") && message.contains("CUDA_VISIBLE_DEVICES"), "{message}");
    let message = machine.input_error("verify run.toml --world-sizes 1,4 --set run.device=cuda");
    assert!(message.contains("4 ranks need 4 GPUs"), "the worlds count, not run.ranks: {message}");
    let message =
        machine.input_error("bench train --device cuda --ranks 3 --global-batch 6 --steps 2 --warmup 0");
    assert!(message.contains("3 ranks need 3 GPUs"), "{message}");
    let message = machine.input_error("calibrate --device cuda --like h100-sxm --ranks 4 --out mine.toml");
    assert!(message.contains("4 ranks need 4 GPUs, but this process sees 2"), "{message}");
    let message = machine.input_error("calibrate --device cuda --out mine.toml");
    assert!(message.contains("--like: name a cluster with such GPUs"), "{message}");
    let none = Machine { gpus: "0", ..machine };
    for set in ["", "--set run.share_gpu=true"] {
        let message = none.input_error(&format!("train run.toml --set run.device=cuda {set}"));
        assert!(message.contains("the driver shows 0; check nvidia-smi"), "{message}");
    }
}

#[test]
fn more_processes_than_gpus_is_rejected() {
    let machine = Machine::new();
    let train = "-- train run.toml --set run.device=cuda";
    let ran = machine.fsdp(&format!("launch --nproc 4 {train} --set run.ranks=4"));
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("4 ranks need 4 GPUs, but this process sees 2"), "{}", ran.stderr);
    let one = Machine { gpus: "1", ..machine };
    let ran = one.fsdp_with(&[("CUDA_VISIBLE_DEVICES", "0")], &format!("launch --nproc 2 {train}"));
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    let expected = "rank 0 and rank 1 would both use GPU-00000000-0000-0000-0000-000000000000 of host ";
    assert!(ran.stderr.contains(expected), "{}", ran.stderr);
    let ran =
        one.fsdp(&format!("launch --nproc 2 {train} --set run.share_gpu=true --set run.transport=nccl"));
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("but these ranks share one (run.share_gpu)"), "{}", ran.stderr);
}

#[test]
fn unusable_nvrtc_is_rejected() {
    let machine = Machine::new();
    machine.link_libtorch("2.11.0+cu130");
    machine.spoil(&NVRTC);
    for share in ["false", "true"] {
        let set = format!("--set run.device=cuda --set run.share_gpu={share}");
        let message = machine.input_error(&format!("train run.toml {set}"));
        assert!(message.contains("NVRTC was not found; install"), "{message}");
        assert!(message.contains("fsdp doctor"), "{message}");
    }
    let report: Value = serde_json::from_str(&machine.fsdp("doctor --json").stdout).unwrap();
    let parts = report["findings"].as_array().unwrap();
    let nvrtc = parts.iter().find(|found| found["part"] == "NVRTC").unwrap();
    assert_eq!(nvrtc["status"], "unusable", "there are files of that name: {nvrtc}");
}

#[test]
fn unusable_nccl_is_rejected() {
    let machine = Machine::new();
    machine.link_libtorch("2.11.0+cu130");
    machine.build("nvrtc.cpp", "libnvrtc.so.13");
    machine.spoil(&NCCL);
    let message = machine.input_error("train run.toml --set run.device=cuda");
    assert!(message.contains("NCCL was not found; install"), "{message}");
    assert!(message.contains("run.share_gpu"), "{message}");
}

#[test]
fn libtorch_version_mismatch_is_rejected() {
    let machine = Machine::new();
    machine.link_libtorch("2.4.1+cu121");
    let file = machine.torch().join("version.py").display().to_string();
    for command in ["train run.toml", "verify run.toml --world-sizes 1"] {
        for device in ["torch-cpu", "cuda"] {
            let message = machine.input_error(&format!("{command} --set run.device={device}"));
            for part in [&file, "2.4.1+cu121", "2.11.0", "LD_LIBRARY_PATH"] {
                assert!(message.contains(part), "{part}: {message}");
            }
        }
    }
    let message = machine.input_error("bench train --steps 4 --device torch-cpu");
    assert!(message.contains("2.4.1+cu121"), "{message}");
    let text = machine.fsdp("doctor").stdout;
    assert!(text.contains("libtorch (unusable)") && text.contains(&file), "{text}");
    assert!(text.contains("run.device = \"torch-cpu\": not usable"), "{text}");
}
