//! What ends a process whose world has failed, if it does not end by itself.
//!
//! A rank may hang in a device, a file system or a library, and would then keep a node from being used again. It is
//! given a moment for a save that all ranks had begun.

use std::thread;
use std::time::Duration;

use fsdp_comm::process::Verdict;
use fsdp_comm::process::cluster::Cluster;

use super::error_file;
use crate::exit_code::Exit;

/// How long a process may take to end by itself.
const GRACE: Duration = Duration::from_secs(4);

/// Watches over the end of this process.
pub(super) fn install(cluster: &Cluster) {
    let process = cluster.place().process;
    cluster.on_verdict(Box::new(move |verdict| {
        error_file::write(verdict, process);
        let code = Exit::from(verdict.failure.kind).code();
        let verdict = Verdict::clone(verdict);
        let watch = move || {
            thread::sleep(GRACE);
            tracing::warn!("still here {GRACE:?} after the world has failed ({verdict}): exiting");
            std::process::exit(code.into());
        };
        // Without a thread the process has to end by itself.
        let _ = thread::Builder::new().name("watchdog".to_owned()).spawn(watch);
    }));
}
