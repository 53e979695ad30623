//! Ends a process whose world has failed, or whose launcher has exited, if it does not end by itself.
//!
//! A rank may hang in a device, a file system or a library, and would then block its node. It gets a moment to finish a
//! save that all ranks have begun. A launcher that was killed cannot end its processes, and a restarted run would find
//! them still writing.

use std::os::unix::process::parent_id;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use fsdp_comm::process::Verdict;
use fsdp_comm::process::ancestor::Ancestor;
use fsdp_comm::process::cluster::Cluster;

use super::flight::Record;
use super::{error_file, recognize, variable};
use crate::error::CliError;
use crate::exit_code::Exit;
use crate::launch::leave_verdict;
use crate::output;

/// How long a process may take to end by itself.
const GRACE: Duration = Duration::from_secs(4);

/// How often a process checks whether its launcher is alive.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The flight record of this process, set once it has joined others.
static RECORD: OnceLock<Record> = OnceLock::new();

/// Installs the watchdog for a failed world.
pub(super) fn install(cluster: &Cluster, record: &Record) {
    let record = RECORD.get_or_init(|| record.clone());
    let process = cluster.place().process;
    cluster.on_verdict(Box::new(move |verdict| {
        error_file::write(verdict, process);
        leave_verdict(verdict, process);
        record.write(&verdict.to_string());
        let code = Exit::from(verdict.failure.kind).code();
        let verdict = Verdict::clone(verdict);
        let watch = move || {
            thread::sleep(GRACE);
            output::error(&Hung { verdict });
            std::process::exit(code.into());
        };
        // Without a thread the process has to end by itself.
        let _ = thread::Builder::new().name("watchdog".to_owned()).spawn(watch);
    }));
}

/// The variable with the process ID of `fsdp launch`, which may exit before its processes look for it.
pub(crate) const LAUNCHER: &str = "FSDP_LAUNCHER";

/// Ends this process when its parent exits (it then gets another parent), or when the launcher exits, if there is a
/// script between them. Must be called before anything that takes long.
///
/// # Errors
/// [`CliError::Place`].
pub(crate) fn watch_launcher() -> Result<(), CliError> {
    let launcher_pid = std::env::var(LAUNCHER).ok().and_then(|launcher| launcher.parse().ok());
    let parent = launcher_pid.unwrap_or_else(parent_id);
    let launcher = recognize(&variable)?.map(|place| Ancestor::launcher(&place));
    let watch = move || {
        let is_launcher_alive =
            || parent_id() == parent && launcher.is_none_or(|launcher| launcher.is_alive());
        while is_launcher_alive() {
            thread::sleep(POLL_INTERVAL);
        }
        let orphaned = Orphaned { launcher: launcher.map_or(parent, |launcher| launcher.pid()) };
        output::error(&orphaned);
        if let Some(record) = RECORD.get() {
            record.write(&orphaned.to_string());
            record.wait();
        }
        std::process::exit(Exit::Temporary.code().into());
    };
    // Without a thread the launcher's exit goes unnoticed.
    let _ = thread::Builder::new().name("launcher watch".to_owned()).spawn(watch);
    Ok(())
}

/// This process hangs and cannot be interrupted.
#[derive(Debug, thiserror::Error)]
#[error("this process was still running {GRACE:?} after the run failed: exiting ({verdict})")]
struct Hung {
    verdict: Verdict,
}

/// The launcher has exited.
#[derive(Debug, thiserror::Error)]
#[error("the process that started this one ({launcher}) has ended: exiting")]
struct Orphaned {
    launcher: u32,
}
