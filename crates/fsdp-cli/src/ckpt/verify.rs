//! `fsdp ckpt verify`: reads all of a checkpoint.
//!
//! A path that does not exist or is not a checkpoint is a user error; any other failure, even on opening it, is damage
//! and part of the report.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use fsdp_ckpt::Error;
use fsdp_ckpt::checkpoint::Checkpoint;
use fsdp_ckpt::formats::{self, Unread};
use fsdp_ckpt::verify::{Unprotected, Verification, verify_all};
use serde_json::{Value as Json, json};

use super::against_model::{self, Findings};
use super::shared::{LISTED_MAX, Work, json_path, list_problems, listed, notes_of, opaque_json};
use crate::args::VerifyCkptArgs;
use crate::document::{Document, Mark, Report, print};
use crate::error::CliError;
use crate::units::{bytes, counted};

/// Verifies a checkpoint, prints the report and returns whether it is sound.
///
/// # Errors
/// [`CliError`]: the path is not a checkpoint, or the user interrupted.
pub(super) fn run(args: &VerifyCkptArgs) -> Result<bool, CliError> {
    let model = args.model.as_deref().map(against_model::model).transpose()?;
    let work = Work::begin(args.memory)?;
    let (checkpoint, mut found) = match formats::open(&args.path) {
        Ok(checkpoint) => {
            let found = work.run(|options| verify_all(&checkpoint, options))?;
            (Some(checkpoint), found)
        }
        Err(error) if is_usage_error(&error, &args.path) => return Err(error.into()),
        Err(error) => (None, Verification { problems: error.into_problems(), ..Verification::default() }),
    };
    if args.strict {
        let read = checkpoint.iter().chain(&found.beside);
        let opaque: Vec<Error> = read.filter_map(|checkpoint| checkpoint.refuse_opaque().err()).collect();
        found.problems.extend(opaque);
    }
    let of_model = match (&model, &checkpoint) {
        (Some(model), Some(checkpoint)) => {
            Some(work.run(|options| against_model::findings(checkpoint, model.description(), options))?)
        }
        _ => None,
    };
    let report = Verified { path: &args.path, checkpoint: checkpoint.as_ref(), found: &found, of_model };
    print(&report, args.json)?;
    Ok(report.problems() == 0)
}

/// Whether an error means that the user named something that is not a checkpoint or cannot be read.
fn is_usage_error(error: &Error, requested: &Path) -> bool {
    match error {
        Error::NotRegular { path, .. } => path == requested,
        Error::Io { path, cause, .. } => path == requested || cause.kind() != io::ErrorKind::NotFound,
        Error::WrongPath { .. } => true,
        _ => false,
    }
}

/// The verification to report.
struct Verified<'a> {
    path: &'a Path,
    /// `None` if it could not be opened.
    checkpoint: Option<&'a Checkpoint>,
    found: &'a Verification,
    /// What differs from the model that it was compared with, if it was.
    of_model: Option<Findings>,
}

impl Verified<'_> {
    /// Notes on everything that was read; those on other files in the folder are preceded by the file's path.
    fn notes(&self) -> Vec<String> {
        let mut notes = self.checkpoint.map_or_else(Vec::new, notes_of);
        for beside in &self.found.beside {
            let path = self.relative_path(&beside.path);
            notes.extend(notes_of(beside).into_iter().map(|note| format!("{path}: {note}")));
        }
        notes
    }

    fn limits(&self) -> Vec<&String> {
        let read = self.checkpoint.into_iter().chain(&self.found.beside);
        read.flat_map(|checkpoint| &checkpoint.limits).collect()
    }

    /// Opaque objects by name; those of other files in the folder are preceded by the file's path.
    fn opaque(&self) -> Json {
        let mut opaque = self.checkpoint.map_or_else(|| json!({}), opaque_json);
        for beside in &self.found.beside {
            for (name, class) in &beside.opaque {
                opaque[format!("{}: {name}", self.relative_path(&beside.path))] = json!(class.to_string());
            }
        }
        opaque
    }

    /// A path relative to the verified one.
    fn relative_path(&self, path: &Path) -> String {
        path.strip_prefix(self.path).unwrap_or(path).display().to_string()
    }

    /// The rest of the folder: other files that were read, and those that were not and why.
    fn write_folder(&self, to: &mut dyn Document) {
        if !self.found.beside.is_empty() {
            let paths: Vec<String> =
                self.found.beside.iter().map(|beside| self.relative_path(&beside.path)).collect();
            to.pair("also read", listed(&paths));
        }
        let mut unread: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for file in &self.found.unread {
            unread.entry(file.reason).or_default().push(self.relative_path(&file.path));
        }
        for (reason, paths) in unread {
            to.pair("not read", format!("{} ({reason})", listed(&paths)));
        }
    }

    fn problems(&self) -> usize {
        self.found.problems.len() + self.of_model.as_ref().map_or(0, |findings| findings.problems.len())
    }

    fn verdict(&self) -> (Mark, String) {
        let good = |text: &str| (Mark::Good, text.to_owned());
        match (self.problems(), self.found.unprotected_bytes()) {
            (problems @ 1.., _) => (Mark::Bad, format!("not sound: {}", counted(problems, "problem"))),
            _ if !self.limits().is_empty() => good("sound, as far as its format can show: see the notes"),
            (_, 0) => good("sound, and every byte is protected by a checksum"),
            _ => good("sound, as far as the checksums of its format reach"),
        }
    }
}

impl Report for Verified<'_> {
    fn json(&self) -> Json {
        let file = |file: &Unprotected| {
            let ranges: Vec<[u64; 2]> = file.ranges.iter().map(|range| [range.start, range.end]).collect();
            json!({"path": json_path(&file.path), "bytes": file.bytes(), "ranges": ranges})
        };
        let unread = |file: &Unread| json!({"path": json_path(&file.path), "reason": file.reason});
        json!({
            "path": json_path(self.path),
            "format": self.checkpoint.map(|checkpoint| &checkpoint.format),
            "sound": self.problems() == 0,
            "tensors": self.found.tensors,
            "read_bytes": self.found.read_bytes,
            "checksums": self.found.checksums,
            "unprotected_bytes": self.found.unprotected_bytes(),
            "unprotected": self.found.unprotected.iter().map(file).collect::<Vec<_>>(),
            "also_read": self.found.beside.iter().map(|beside| json_path(&beside.path)).collect::<Vec<_>>(),
            "not_read": self.found.unread.iter().map(unread).collect::<Vec<_>>(),
            "cannot_show": self.limits(),
            "problems": self.found.problems.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "model": self.of_model.as_ref().map(|found| json!({"problems": found.problems, "doubts": found.doubts})),
            "opaque": self.opaque(),
            "notes": self.notes(),
        })
    }

    fn write(&self, to: &mut dyn Document) {
        let Verification { tensors, read_bytes, checksums, unprotected, problems, .. } = self.found;
        to.pair("path", self.path.display());
        if let Some(checkpoint) = self.checkpoint {
            to.pair("format", &checkpoint.format);
            to.pair(
                "checked",
                format!("{}, {}", counted(*tensors, "tensor"), counted(*checksums, "checksum")),
            );
            to.pair("read", bytes(*read_bytes));
            let files = match unprotected.len() {
                0 => String::new(),
                files => format!(" in {}", counted(files, "file")),
            };
            to.pair("unprotected", format!("{}{files}", bytes(self.found.unprotected_bytes())));
            self.write_folder(to);
        }
        to.each(Mark::Warning, "note:", self.notes());
        list_problems(to, problems);
        if let Some(findings) = &self.of_model {
            list_problems(to, &findings.problems);
            to.each(Mark::Warning, "doubt:", findings.doubts.iter().take(LISTED_MAX));
            if let Some(more @ 1..) = findings.doubts.len().checked_sub(LISTED_MAX) {
                to.marked(Mark::Warning, "doubt:", &format!(" {more} more (--json lists all)"));
            }
        }
        to.gap();
        let (mark, verdict) = self.verdict();
        to.marked(mark, &verdict, "");
    }
}
