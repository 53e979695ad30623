//! What the commands on checkpoints share: long work, which shows its progress in bytes and stops at Ctrl-C without leaving
//! anything behind, and what reports say about checkpoints.

use std::fmt::{Display, Write};
use std::path::Path;

use fsdp_ckpt::checkpoint::{Checkpoint, Role};
use fsdp_ckpt::conversion::Part;
use fsdp_ckpt::formats;
use fsdp_ckpt::transfer::Options;
use serde_json::{Map, Value as Json, json};

use crate::args::{MemoryArgs, ReadArgs};
use crate::byte_progress::ByteProgress;
use crate::document::{Document, Mark};
use crate::error::CliError;
use crate::stop_signal::StopSignal;

/// Maximum names that text output lists before it gives the number of the rest; JSON lists all.
pub(super) const LISTED_MAX: usize = 20;

/// Work over many bytes: interruptible, with progress, and limited to a memory window.
pub(super) struct Work {
    signal: StopSignal,
    window_bytes: usize,
}

impl Work {
    /// Starts handling signals.
    pub(super) fn begin(memory: MemoryArgs) -> Result<Self, CliError> {
        // A window beyond the address space is no limit.
        let window_bytes = usize::try_from(memory.window_bytes).unwrap_or(usize::MAX);
        Ok(Self { signal: StopSignal::install()?, window_bytes })
    }

    /// Calls `work` and shows its progress.
    pub(super) fn run<T>(
        &self,
        work: impl FnOnce(&Options) -> Result<T, fsdp_ckpt::Error>,
    ) -> Result<T, fsdp_ckpt::Error> {
        let progress = ByteProgress::new("");
        work(&Options { window_bytes: self.window_bytes, ..Options::new(&progress, &self.signal.stop) })
    }
}

/// Opens a checkpoint according to the options.
pub(super) fn open(path: &Path, reading: &ReadArgs) -> Result<Checkpoint, fsdp_ckpt::Error> {
    let mut checkpoint = formats::open(path)?;
    if let Some(key) = &reading.from_key {
        checkpoint = checkpoint.under(key)?;
    }
    if reading.strict {
        checkpoint.refuse_opaque()?;
    }
    Ok(checkpoint)
}

/// Notes about a checkpoint for the user.
pub(super) fn notes_of(checkpoint: &Checkpoint) -> Vec<String> {
    let mut notes = checkpoint.notes.clone();
    notes.extend(checkpoint.limits.iter().map(|limit| format!("nothing in it would show {limit}")));
    notes.extend(opaque_note(checkpoint));
    notes
}

/// A note on objects that were not read because only a program knows their class.
pub(super) fn opaque_note(checkpoint: &Checkpoint) -> Option<String> {
    let opaque = checkpoint.opaque_texts();
    let note =
        || format!("objects of unknown classes are not read (--strict refuses them): {}", listed(&opaque));
    (!opaque.is_empty()).then(note)
}

/// The opaque objects of a checkpoint as JSON, from name to class.
pub(super) fn opaque_json(checkpoint: &Checkpoint) -> Json {
    checkpoint
        .opaque
        .iter()
        .map(|(name, class)| (name.clone(), json!(class.to_string())))
        .collect::<Map<_, _>>()
        .into()
}

/// A path as a JSON string; bytes that are not UTF-8 are replaced.
pub(super) fn json_path(path: &Path) -> String {
    path.display().to_string()
}

/// The name of a role in reports.
pub(super) fn role_name(role: Role) -> &'static str {
    match role {
        Role::Model => "model",
        Role::Optimizer => "optimizer",
        Role::Other => "other",
    }
}

/// Whether a part of a checkpoint includes a role.
pub(super) fn is_in(role: Role, part: Part) -> bool {
    match part {
        Part::Model => role == Role::Model,
        Part::Optimizer => role == Role::Optimizer,
        Part::All => true,
    }
}

/// Writes a line for each problem, up to a limit.
pub(super) fn list_problems(to: &mut dyn Document, problems: &[impl Display]) {
    to.each(Mark::Bad, "problem:", problems.iter().take(LISTED_MAX));
    if let Some(more @ 1..) = problems.len().checked_sub(LISTED_MAX) {
        to.marked(Mark::Bad, "problem:", &format!(" {more} more (--json lists all)"));
    }
}

/// The first of a list of names, and the number of the rest.
pub(super) fn listed(names: &[String]) -> String {
    let mut text = names[..names.len().min(LISTED_MAX)].join(", ");
    if let Some(more @ 1..) = names.len().checked_sub(LISTED_MAX) {
        let _ = write!(text, " and {more} more (--json lists all)");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_truncated_with_remaining_count() {
        let names: Vec<String> = (0..22).map(|number| format!("t{number}")).collect();
        assert_eq!(listed(&names[..2]), "t0, t1");
        assert!(listed(&names[..20]).ends_with(", t19"));
        assert!(listed(&names).ends_with(", t19 and 2 more (--json lists all)"));
    }
}
