//! What happened to the state of a run that did not complete, as part of its error.

use std::fmt;
use std::path::PathBuf;

/// The state of a run that was ended by a failure outside the computation.
#[derive(Debug)]
pub struct Ending {
    /// Steps done.
    pub done: u64,
    /// Where the state was saved, or the error of saving it; `None` if no failed save was recorded.
    pub state: Result<Kept, Option<String>>,
}

/// The location of a saved state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kept {
    /// This checkpoint in the output folder.
    InOutDir(PathBuf),
    /// This checkpoint in a separate directory, because the output folder cannot be written.
    Elsewhere(PathBuf),
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { done, state } = self;
        match state {
            Ok(Kept::InOutDir(path)) => write!(
                f,
                "the state after step {done} is in {}: once this is fixed, --resume continues from there, or \
                 exports the model if no steps are left",
                path.display()
            ),
            Ok(Kept::Elsewhere(path)) => write!(
                f,
                "run.out_dir cannot be written, so the state after step {done} is in {}: resume with \
                 --resume-from and that directory (and --overwrite, or another run.out_dir)",
                path.display()
            ),
            Err(Some(failure)) => write!(f, "{failure}; nor could it be saved elsewhere"),
            Err(None) => write!(f, "the state after step {done} is lost"),
        }
    }
}
