//! The Python packages `fsdp` and `fsdp-cuda` in one environment: which of their programs does the work.
//!
//! The program with libtorch is a script that says how it was called.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use fsdp_cuda::libtorch::VERSION as TORCH;
use tempfile::TempDir;

use crate::support::{Ran, Sandbox};

struct Environment {
    sandbox: Sandbox,
    prefix: TempDir,
}

impl Environment {
    /// With both packages and torch of this version.
    fn new(torch: &str) -> Self {
        // In the target folder, so that the command can be hard-linked instead of copied.
        let prefix = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let environment = Self { sandbox: Sandbox::new(), prefix };
        let (packages, command) = (environment.packages(), environment.prefix.path().join("bin/fsdp"));
        for folder in
            ["fsdp_cuda", "torch/lib", concat!("fsdp_cuda-", env!("CARGO_PKG_VERSION"), ".dist-info")]
        {
            fs::create_dir_all(packages.join(folder)).unwrap();
        }
        fs::write(packages.join("torch/lib/libtorch_cpu.so"), "").unwrap();
        fs::write(packages.join("torch/version.py"), format!("__version__ = '{torch}'\n")).unwrap();
        fs::write(environment.program(), "#!/bin/sh\necho \"with libtorch: $*\"\nexit 7\n").unwrap();
        fs::set_permissions(environment.program(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::create_dir(environment.prefix.path().join("bin")).unwrap();
        if fs::hard_link(env!("CARGO_BIN_EXE_fsdp"), &command).is_err() {
            fs::copy(env!("CARGO_BIN_EXE_fsdp"), &command).unwrap();
        }
        environment
    }

    fn packages(&self) -> PathBuf {
        self.prefix.path().join("lib/python3.12/site-packages")
    }

    fn program(&self) -> PathBuf {
        self.packages().join("fsdp_cuda/fsdp")
    }

    fn fsdp(&self, args: &str) -> Ran {
        let mut command = self.sandbox.prepare(Command::new(self.prefix.path().join("bin/fsdp")));
        command.env_remove("LD_LIBRARY_PATH");
        Ran::of(command.args(args.split_whitespace()).output().unwrap())
    }
}

#[test]
fn commands_with_a_device_run_with_libtorch() {
    let environment = Environment::new(&format!("{TORCH}+cu130"));
    for args in ["train run.toml --set run.device=cuda", "verify run.toml --world-sizes 1,2", "doctor --json"]
    {
        let ran = environment.fsdp(args);
        assert_eq!(ran.code, Some(7), "its exit code: {}", ran.stderr);
        assert_eq!(ran.stdout, format!("with libtorch: {args}\n"));
    }
    let ran = environment.fsdp("launch --nproc 2 -- train run.toml");
    assert_eq!(
        ran.stdout.matches("with libtorch: train run.toml").count(),
        2,
        "{}{}",
        ran.stdout,
        ran.stderr
    );
    for args in ["--version", "schema", "completions bash", "train --help"] {
        let ran = environment.fsdp(args);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        assert!(!ran.stdout.contains("with libtorch"), "{args}: {}", ran.stdout);
    }
    let ran = environment.fsdp("ckpt inspect absent");
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{}", ran.stderr);
}

#[test]
fn unfit_torch_fails_only_devices_that_need_it() {
    let environment = Environment::new("2.10.0+cu128");
    for device in ["cuda", "torch-cpu"] {
        let ran = environment.fsdp(&format!("train run.toml --set run.device={device}"));
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        let expected =
            format!("error: device \"{device}\" cannot be used: fsdp-cuda needs torch {TORCH}, but ");
        assert!(ran.stderr.starts_with(&expected), "{}", ran.stderr);
        let way_out = format!("torch/version.py says 2.10.0+cu128: pip install torch=={TORCH}\n");
        assert!(ran.stderr.ends_with(&way_out), "{}", ran.stderr);
    }
    let ran = environment.fsdp("doctor");
    assert!(ran.stdout.contains("libtorch (unusable): fsdp-cuda needs torch"), "{}", ran.stdout);
    assert!(ran.stdout.contains("\"torch-cpu\": not usable, libtorch is not usable"), "{}", ran.stdout);
    let ran = environment.fsdp("train run.toml");
    assert_eq!(ran.code, Some(0), "its device is \"cpu\": {}", ran.stderr);
}

#[test]
fn program_that_cannot_be_executed_is_named() {
    let environment = Environment::new(TORCH);
    fs::set_permissions(environment.program(), fs::Permissions::from_mode(0o644)).unwrap();
    let ran = environment.fsdp("train run.toml --set run.device=cuda");
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    let expected = format!("{} cannot be executed: Permission denied", environment.program().display());
    assert!(ran.stderr.contains(&expected), "{}", ran.stderr);
}
