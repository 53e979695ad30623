//! Checkpoint fixtures in the folder of a test.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::{Ran, Sandbox};

/// Checkpoints of other tools: the paths to pass to `fsdp ckpt`, relative to the fixtures.
pub(crate) const FIXTURES: [&str; 20] = [
    "dcp_2rank",
    "dcp_2rank_zstd",
    "dcp_hsdp_2x2",
    "deepspeed_layout/zero2",
    "deepspeed_layout/zero3",
    "dtensor_mesh_rank_pth/model_world_size_4_rank_0.pt",
    "fsdp1/sharded",
    "fsdp1/sharded_dt",
    "fsdp2_rank_pth/model_world_size_2_rank_0.pt",
    "full.pth",
    "full.safetensors",
    "model_only.pth",
    "hf_dcp_shards",
    "hf_sharded",
    "kinds.pth",
    "kinds.safetensors",
    "xla_fsdp_2rank/dim0_rank-00000000-of-00000002.pth",
    "xla_fsdp_2rank/flat_rank-00000000-of-00000002.pth",
    "xla_fsdp_2rank/nested_rank-00000000-of-00000002.pth",
    "xla_fsdp_2rank/trained_rank-00000000-of-00000002.pth",
];

/// The directory of all fixtures.
pub(crate) fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fsdp-ckpt/tests/fixtures")
}

impl Sandbox {
    /// Creates a sandbox with copies of fixtures, which tests may damage.
    pub(crate) fn with_fixtures(names: &[&str]) -> Self {
        let sandbox = Self::new();
        for name in names {
            copy(&fixtures().join(name), &sandbox.path(name));
        }
        sandbox
    }

    /// Creates a sandbox with a symlink to all fixtures, for reading only.
    pub(crate) fn with_all_fixtures() -> Self {
        let sandbox = Self::new();
        std::os::unix::fs::symlink(fixtures(), sandbox.path("fixtures")).unwrap();
        sandbox
    }

    /// Runs a command that must report damage or a difference.
    pub(crate) fn find_fault(&self, args: &str) -> Ran {
        let ran = self.fsdp(args);
        assert_eq!(ran.code, Some(1), "fsdp {args}: {}{}", ran.stdout, ran.stderr);
        assert_eq!(ran.stderr, "", "a report is not an error");
        ran
    }

    /// Returns the JSON report of a command that must succeed.
    pub(crate) fn json(&self, args: &str) -> Value {
        serde_json::from_str(&self.succeed(&format!("{args} --json")).stdout).unwrap()
    }

    /// Inverts the byte at an offset; a negative offset counts from the end.
    pub(crate) fn flip(&self, name: &str, offset: isize) {
        let mut bytes = fs::read(self.path(name)).unwrap();
        let at = if offset < 0 { bytes.len() - offset.unsigned_abs() } else { offset.unsigned_abs() };
        bytes[at] ^= 0xff;
        self.write(name, bytes);
    }

    /// Returns the sorted names in a directory, including hidden ones.
    pub(crate) fn names(&self, dir: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(dir)).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn copy(from: &Path, to: &Path) {
    if from.is_dir() {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let name = entry.unwrap().file_name();
            copy(&from.join(&name), &to.join(&name));
        }
    } else {
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(from, to).unwrap();
    }
}
