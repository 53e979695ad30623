//! The same program linked with libtorch, which the Python package `fsdp-cuda` installs: it takes over where it is needed.
//!
//! That package has no file in common with the package `fsdp`, so both can be installed, and removed, in any order. Its program
//! is in the folder of Python's packages, next to `torch`, where its run path finds libtorch. A command that has a device is
//! executed there; all others do not wait until libtorch is loaded, which takes a quarter of a second.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::OnceLock;

use fsdp_cuda::libtorch::{self, StatedVersion, stated_version};

use crate::args::Command;
use crate::python::package_folders;

/// The program, in a folder of Python's packages.
const PROGRAM: &str = "fsdp_cuda/fsdp";

/// Why the program with libtorch, which is installed, does not take over.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unfit {
    #[error(
        "fsdp-cuda in {} is not of version {VERSION}, which this fsdp has: pip install fsdp-cuda=={VERSION}",
        packages.display()
    )]
    OtherVersion { packages: PathBuf },
    #[error(
        "fsdp-cuda needs torch {TORCH}, and there is none in {}: pip install torch=={TORCH} (or put its folder torch/lib \
         into LD_LIBRARY_PATH)",
        packages.display()
    )]
    NoTorch { packages: PathBuf },
    #[error(
        "fsdp-cuda needs torch {TORCH}, but {} says {}: pip install torch=={TORCH}",
        .0.file.display(),
        .0.version
    )]
    OtherTorch(StatedVersion),
    #[error("{} cannot be executed: {source}; install fsdp-cuda again", program.display())]
    Execute { program: PathBuf, source: io::Error },
}

const VERSION: &str = env!("CARGO_PKG_VERSION");
const TORCH: &str = libtorch::VERSION;

static UNFIT: OnceLock<Unfit> = OnceLock::new();

/// Why a program with libtorch that is installed has not taken over.
pub(crate) fn unfit() -> Option<&'static Unfit> {
    UNFIT.get()
}

/// Executes the command with libtorch. Returns if it has no device, or where that program is not installed or [`unfit`].
pub(crate) fn take_over(command: &Command) {
    if !has_device(command) {
        return;
    }
    let Ok(here) = env::current_exe() else { return };
    let Some(found) = find(&here, env::var_os("LD_LIBRARY_PATH").as_deref()) else { return };
    let unfit = match found {
        Ok(program) => {
            let mut arguments = env::args_os();
            let mut instead = process::Command::new(&program);
            arguments.next().into_iter().for_each(|name| _ = instead.arg0(name));
            let source = instead.args(arguments).exec();
            Unfit::Execute { program, source }
        }
        Err(unfit) => unfit,
    };
    // Nothing was there before.
    let _ = UNFIT.set(unfit);
}

/// Whether a command computes on `run.device`, or says something about it.
fn has_device(command: &Command) -> bool {
    match command {
        Command::Init(_)
        | Command::Train(_)
        | Command::Verify(_)
        | Command::Eval(_)
        | Command::Generate(_)
        | Command::Check(_)
        | Command::Schedule(_)
        | Command::Plan(_)
        | Command::Calibrate(_)
        | Command::Bench(_)
        | Command::Doctor(_) => true,
        // What is launched is another command, which decides for itself.
        Command::Launch(_)
        | Command::Audit(_)
        | Command::Ckpt(_)
        | Command::Report(_)
        | Command::Completions(_)
        | Command::Man(_)
        | Command::Schema(_) => false,
        #[cfg(feature = "xla")]
        Command::Compile(_) => false,
    }
}

/// The program that was installed together with the one at `here`, if any.
fn find(here: &Path, library_path: Option<&OsStr>) -> Option<Result<PathBuf, Unfit>> {
    let prefix = here.parent()?.parent()?;
    // Below ~/.local there may be several Pythons, of which one suffices.
    let mut found = package_folders(prefix)
        .into_iter()
        .filter(|packages| packages.join(PROGRAM).is_file())
        .map(|packages| examine(&packages, library_path))
        .collect::<Vec<_>>();
    let fit = found.iter().position(Result::is_ok).unwrap_or(0);
    (!found.is_empty()).then(|| found.swap_remove(fit))
}

/// Checks what the loader and the program itself would refuse with less to go by.
fn examine(packages: &Path, library_path: Option<&OsStr>) -> Result<PathBuf, Unfit> {
    if !packages.join(format!("fsdp_cuda-{VERSION}.dist-info")).is_dir() {
        return Err(Unfit::OtherVersion { packages: packages.to_owned() });
    }
    // The loader looks there first.
    let mut libraries = library_path
        .map_or_else(Vec::new, |path| env::split_paths(path).collect::<Vec<_>>())
        .into_iter()
        .chain([packages.join("torch/lib")]);
    let Some(lib) = libraries.find(|lib| lib.join("libtorch_cpu.so").is_file()) else {
        return Err(Unfit::NoTorch { packages: packages.to_owned() });
    };
    match stated_version(&lib) {
        Some(stated) if !stated.is_expected() => Err(Unfit::OtherTorch(stated)),
        _ => Ok(packages.join(PROGRAM)),
    }
}

#[cfg(test)]
mod tests;
