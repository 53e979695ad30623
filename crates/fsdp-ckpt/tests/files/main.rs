//! Tests on real files: fixtures made by PyTorch and Hugging Face, and files in temporary directories.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

/// Files written by other tools are read to their expected values.
mod fixtures;

/// Damaged or mismatched files and models are refused with an error that names the problem.
mod refusals;

/// A reader returns what an export wrote, for any number of writers in any order.
mod round_trip;

/// Failed exports leave nothing behind.
mod failures;

/// Weights that files hold in 4 bits.
mod bitsandbytes;
mod mxfp4;

/// Native checkpoints: several ranks save, one commits, any number of ranks read.
mod native;

/// A saving process is killed at random moments.
mod native_kill;

/// Nodes whose network file system clients have stale caches.
mod stale_caches;

use std::{
    fs,
    path::{Path, PathBuf},
};

use fsdp_ckpt::safetensors::{TensorSpec, TensorType};

/// A file or directory of `tests/fixtures`.
fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn spec(name: &str, dtype: TensorType, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: name.to_owned(), dtype, shape: shape.to_owned() }
}

/// Returns the names in a directory, sorted.
fn names_in(dir: &Path) -> Vec<String> {
    let files = fs::read_dir(dir).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = files.collect();
    names.sort();
    names
}

/// Writes a safetensors file from the text of its header and its data.
fn write_raw(path: &Path, header: &str, data: &[u8]) {
    let len = (header.len() as u64).to_le_bytes();
    fs::write(path, [&len, header.as_bytes(), data].concat()).unwrap();
}
