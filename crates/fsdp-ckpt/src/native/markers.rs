//! The small files by which ranks meet: `rank-R.done`, `rank-R.failed` and `commit.failed`.
//!
//! A marker appears whole: it is written under another name and renamed. What a `done` marker speaks of is
//! durable by then. Markers themselves need not outlive a crash, after which nobody reads them; a `done` marker
//! is synced all the same, so that ranks on other hosts of a network file system see its content with its name.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::seal;
use crate::{
    digest::{Digest, DigestKind},
    error::{Error, NativeFault, SaveFault},
    file_io::Files,
};

/// The longest reason that is read from a marker of failure.
const REASON_LEN_MAX: u64 = 1 << 16;

/// What a rank reports of its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Report {
    pub(super) rank: usize,
    /// The digest of the plan that it followed.
    pub(super) plan: Digest,
    pub(super) file_len: u64,
    pub(super) header: Digest,
    /// The digests of the chunks, by shard in the order of the file.
    pub(super) chunks: Vec<Vec<u64>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReportText {
    rank: usize,
    plan: u64,
    file_len: u64,
    header: u64,
    chunks: Vec<Vec<u64>>,
}

pub(super) fn done_path(dir: &Path, rank: usize) -> PathBuf {
    dir.join(format!("rank-{rank}.done"))
}

/// The rank of a `done` marker by its name.
pub(super) fn done_rank(name: &str) -> Option<usize> {
    name.strip_prefix("rank-")?.strip_suffix(".done")?.parse().ok()
}

/// Puts the `done` marker of a rank in place.
pub(super) fn write_done(files: &Files, dir: &Path, report: &Report) -> Result<(), Error> {
    let text = seal::seal(&ReportText {
        rank: report.rank,
        plan: report.plan.value,
        file_len: report.file_len,
        header: report.header.value,
        chunks: report.chunks.clone(),
    });
    let temporary = dir.join(format!("rank-{}.done.tmp", report.rank));
    let file = files.create_new(&temporary)?;
    file.write_all_at(&text, 0)?;
    file.sync()?;
    files.rename(&temporary, &done_path(dir, report.rank))
}

pub(super) fn read_done(files: &Files, dir: &Path, rank: usize) -> Result<Report, Error> {
    let path = done_path(dir, rank);
    let native = |fault| Error::Native { path: path.clone(), fault: Box::new(fault) };
    let limit = seal::SEALED_LEN_MAX;
    let text = files.read_small(&path, limit)?.ok_or_else(|| native(NativeFault::TooLong { limit }))?;
    let text = seal::unseal(text).map_err(native)?;
    let report: Result<ReportText, _> = serde_json::from_slice(&text);
    let report = report.map_err(|error| native(NativeFault::Text { detail: error.to_string() }))?;
    let crc64 = |value| Digest { kind: DigestKind::Crc64, value };
    Ok(Report {
        rank: report.rank,
        plan: crc64(report.plan),
        file_len: report.file_len,
        header: crc64(report.header),
        chunks: report.chunks,
    })
}

/// Tells the others that a rank has failed, as well as that is still possible.
pub(super) fn tell_rank_failed(files: &Files, dir: &Path, rank: usize, reason: &str) {
    tell(files, dir, &format!("rank-{rank}.failed"), reason);
}

/// Tells the others that rank 0 has given up the save, as well as that is still possible.
pub(super) fn tell_commit_failed(files: &Files, dir: &Path, reason: &str) {
    tell(files, dir, "commit.failed", reason);
}

/// The failure that the names in the directory of a save tell of, if any.
pub(super) fn failure(files: &Files, dir: &Path, names: &[String]) -> Option<SaveFault> {
    let told = names.iter().find_map(|name| Some((name, name.strip_suffix(".failed")?)));
    let (name, who) = told?;
    let reason = match files.read_small(&dir.join(name), REASON_LEN_MAX) {
        Ok(Some(text)) => String::from_utf8_lossy(&text).into_owned(),
        _ => "its reason cannot be read".to_owned(),
    };
    match who.strip_prefix("rank-").and_then(|rank| rank.parse().ok()) {
        Some(rank) => Some(SaveFault::RankFailed { rank, reason }),
        None => Some(SaveFault::CommitFailed { reason }),
    }
}

/// Best effort: who cannot even write this is found missing when the limit ends.
fn tell(files: &Files, dir: &Path, name: &str, reason: &str) {
    let temporary = dir.join(format!("{name}.tmp"));
    let written = files.create_new(&temporary).and_then(|file| file.write_all_at(reason.as_bytes(), 0));
    let _ = written.and_then(|()| files.rename(&temporary, &dir.join(name)));
}
