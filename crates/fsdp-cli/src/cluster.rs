//! This process as one of several started by a launcher: how it joins the others, and how it ends with them.
//!
//! Messages about the run are printed once, by the process of rank 0. Another process prints only if it is the one that
//! failed; its other messages go to the log (`RUST_LOG`).

mod error_file;
mod flight;
mod late;
mod srun;
mod transport;
mod watchdog;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::{Duration, Instant};
use std::{env, thread};

use fsdp_ckpt::is_url;
use fsdp_comm::process::ancestor::Ancestor;
use fsdp_comm::process::cluster::{Cluster, Joining, host};
use fsdp_comm::process::place::{ProcessPlace, is_only_one, recognize};
use fsdp_comm::process::rendezvous::NodeFolder;
use fsdp_comm::process::{ProcessEntry, Verdict};
use fsdp_config::RunConfig;
use fsdp_core::comm::CommError;
use fsdp_core::{FailureKind, Rank};
use fsdp_train::TrainError;
use fsdp_train::metrics::{ProcessInfo, ProcessTable};

use crate::args::NetworkArgs;
use crate::descriptors;
use crate::error::CliError;
use crate::exit_code::Exit;
use crate::launch::Note;
use crate::output;
pub(crate) use error_file::write_cause as report_to_torchrun;
pub(crate) use flight::LOG_DIR;
use transport::Carrier;
#[cfg(feature = "cuda")]
pub(crate) use transport::{decide, has_nccl, refused};
pub(crate) use watchdog::{LAUNCHER, watch_launcher};

/// How long a failed process waits for the first failure of the world, in addition to two heartbeats.
const VERDICT_TIMEOUT: Duration = Duration::from_secs(1);

/// How long mpirun may take to read the output of a process.
const OUTPUT_READ_DELAY: Duration = Duration::from_millis(300);

/// Longer than preparing any data takes; if a process is lost meanwhile, the world ends.
const LOAD_TIMEOUT: Duration = Duration::from_secs(7 * 24 * 3600);

/// Polling interval.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The place of this process if it is one of several. From this call on, only the first process prints.
///
/// # Errors
/// [`CliError::Place`].
pub(crate) fn place() -> Result<Option<ProcessPlace>, CliError> {
    let place = recognize(&variable)?;
    if let Some(place) = place.filter(|place| place.process > 0) {
        output::set_process_name(format!("process {} on {}", place.process, host()));
    }
    Ok(place)
}

/// How long a process waits for the first one of its node to report an error, and that one for the others to receive
/// it. On a busy node, processes start seconds apart.
const REPORT_TIMEOUT: Duration = Duration::from_secs(5);

/// Reports an error that ends this process before it has joined the others. The first process of a node prints it and
/// tells the others there, which then do not repeat the same text. Nodes may have different files and libraries, so
/// each node prints for itself; so does a process started with other arguments.
pub(crate) fn report_once(text: &str, print: impl FnOnce()) {
    let Ok(Some(place)) = recognize(&variable) else { return print() };
    let folder = NodeFolder::of(place, &variable, Ancestor::launcher(&place).pid());
    if place.local_process == 0 {
        print();
        if let Err(error) = folder.tell(text, REPORT_TIMEOUT) {
            // Then the others print it too.
            tracing::debug!("{error}");
        }
    } else if folder.hear(REPORT_TIMEOUT).is_some_and(|printed| printed == text) {
        tracing::debug!("ended: {text}");
    } else {
        print();
    }
}

/// Whether this is one of several processes, but not the first: messages that one process can print alone are left to
/// the first.
pub(crate) fn is_not_first(place: Option<ProcessPlace>) -> bool {
    place.is_some_and(|place| place.process > 0)
}

/// Whether the launcher has started no other process on this node.
pub(crate) fn is_alone_on_node(place: Option<ProcessPlace>) -> bool {
    place.map_or_else(|| is_only_one(&variable), |place| place.local_processes == 1)
}

/// Whether this process ends together with its launcher: it is one of several, or the only one of `fsdp launch`.
///
/// # Errors
/// [`CliError::Place`].
pub(crate) fn is_launched() -> Result<bool, CliError> {
    Ok(recognize(&variable)?.is_some() || variable("FSDP_PROCESS").is_some())
}

/// The processes of a run and their connection.
#[derive(Clone, Copy)]
pub(crate) struct Team<'a> {
    pub(crate) cluster: &'a Cluster,
    carrier: &'a Carrier,
}

impl Team<'_> {
    /// A description of the transport.
    pub(crate) fn transport(&self) -> String {
        self.carrier.to_string()
    }

    /// The transport, as named by `run.transport`.
    pub(crate) fn transport_name(&self) -> &'static str {
        self.carrier.name()
    }

    /// The participants, for the metrics.
    pub(crate) fn process_table(&self) -> ProcessTable {
        let participant = |ProcessEntry { ranks, facts }: &ProcessEntry| ProcessInfo {
            host: facts.host.clone(),
            pid: facts.pid,
            device: facts.device.clone(),
            cpu: facts.cpu_model.clone(),
            first_rank: ranks.start,
            ranks: ranks.len(),
        };
        let processes = self.cluster.roster().processes.iter().map(participant).collect();
        ProcessTable { transport: self.transport(), processes }
    }
}

/// Reads an environment variable. Bytes that are not UTF-8 are replaced: the value is wrong, but not absent.
pub(crate) fn variable(name: &str) -> Option<String> {
    env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Joins the other processes, does the work and ends with them; a single process only does the work. All processes end
/// in the same way, decided by the first failure among them.
///
/// # Errors
/// [`CliError`]: the work failed in a single process, or this process could not join the others. Later failures of the
/// world are reported here.
pub(crate) fn within(
    place: Option<ProcessPlace>,
    run: &RunConfig,
    network: NetworkArgs,
    work: impl FnOnce(Option<Team<'_>>) -> Result<Exit, CliError>,
) -> Result<Exit, CliError> {
    let Some(place) = place else { return work(None) };
    let mut cluster = join(place, run, network)?;
    if place.process > 0 {
        output::set_process_name(format!("{} on {}", ranks(&cluster.assembly().local()), host()));
    }
    let record = flight::Record::new(&cluster, run);
    watchdog::install(&cluster, &record);
    let outcome = Carrier::choose(&mut cluster, run).and_then(|carrier| {
        print_participants(&cluster, run, &carrier);
        let exit = work(Some(Team { cluster: &cluster, carrier: &carrier }))?;
        if cluster.verdict().is_none() {
            carrier.finish(&mut cluster)?;
        }
        Ok(exit)
    });
    if let Err(error) = &outcome
        && !is_reported(error)
    {
        // Mostly the input is wrong for all processes, and the first one reports it.
        if place.process > 0 && error.kind() == FailureKind::Input {
            wait_for_verdict(&cluster, VERDICT_TIMEOUT);
        }
        cluster.fail(error.kind(), error.to_string());
        // What others report about a process is held back for two heartbeats, so that it can report itself.
        wait_for_verdict(&cluster, VERDICT_TIMEOUT + Duration::from_secs_f64(2.0 * run.heartbeat_s));
    }
    // Some launchers kill all processes as soon as one has ended, without reading its last output: so print before
    // leaving.
    let exit = conclude(outcome, cluster.verdict(), place).unwrap_or_else(|error| {
        output::error(&error);
        error.exit()
    });
    // All processes wait: the first to end would get the others killed, and mpirun would report that instead.
    if exit != Exit::Done && place.launched_by.has_mpi() {
        thread::sleep(OUTPUT_READ_DELAY);
    }
    cluster.leave();
    if cluster.verdict().is_some() {
        record.wait();
    }
    Ok(exit)
}

/// Waits for the verdict: this process's failure may be the consequence of an earlier one elsewhere.
fn wait_for_verdict(cluster: &Cluster, limit: Duration) {
    let begin = Instant::now();
    while cluster.verdict().is_none() && begin.elapsed() < limit {
        thread::sleep(POLL_INTERVAL);
    }
}

/// Prints the participants.
fn print_participants(cluster: &Cluster, run: &RunConfig, carrier: &Carrier) {
    let processes = &cluster.roster().processes;
    let mut hosts: BTreeMap<&str, usize> = BTreeMap::new();
    processes.iter().for_each(|process| *hosts.entry(&process.facts.host).or_default() += 1);
    let hosts: Vec<String> = hosts.iter().map(|(host, count)| format!("{count} on {host}")).collect();
    output::note(&format!(
        "{} processes ({}) with {} ranks on device \"{}\", connected over {carrier}",
        processes.len(),
        hosts.join(", "),
        run.ranks,
        run.device.name()
    ));
    let models: BTreeSet<&str> = processes.iter().map(|process| &*process.facts.cpu_model).collect();
    if models.len() > 1 {
        let models: Vec<&str> = models.into_iter().collect();
        output::warning(&format!(
            "the nodes have different CPUs ({}): equal bits are promised only on CPUs of one model",
            models.join("; ")
        ));
    }
}

fn join(place: ProcessPlace, run: &RunConfig, network: NetworkArgs) -> Result<Cluster, CliError> {
    let processes = place.processes;
    if !run.ranks.is_multiple_of(processes) {
        return Err(CliError::Input(format!(
            "run.ranks = {}, but {} has started {processes} processes, which cannot hold equal numbers of ranks: start one \
             process per rank or a divisor of run.ranks, or leave run.ranks out",
            run.ranks, place.launched_by
        )));
    }
    descriptors::expect(processes)?;
    let joining = Joining {
        place,
        variable: &variable,
        // An object store cannot be used to find each other.
        shared: (!is_url(&run.out_dir)).then(|| run.out_dir.as_ref()),
        local_ranks: run.ranks / processes,
        device: run.device.name().to_owned(),
        heartbeat: Duration::from_secs_f64(run.heartbeat_s),
        timeout: Duration::from_secs_f64(run.timeout_s),
        is_insecure: network.insecure_network,
    };
    let cluster = late::said(place, || Cluster::join(&joining))?;
    Note::Met.leave();
    Ok(cluster)
}

/// Formats a range of ranks.
fn ranks(ranks: &Range<usize>) -> String {
    match ranks.len() {
        1 => Rank(ranks.start).to_string(),
        _ => format!("ranks {} to {}", ranks.start, ranks.end - 1),
    }
}

/// Loads data in turns: first in the first process, which shares what it has prepared; then in the first process of
/// each other node; then in all others. So text is tokenized once, or once per node if nodes keep their own tokens.
///
/// # Errors
/// Those of `load`; [`CliError`] of the world.
pub(crate) fn in_turns<T>(
    team: Option<Team<'_>>,
    load: impl FnOnce() -> Result<T, CliError>,
    share: impl FnOnce(&T),
) -> Result<T, CliError> {
    const FIRST: &str = "data of the first process";
    const NODES: &str = "data of the nodes";
    let Some(Team { cluster, .. }) = team else { return load() };
    let (assembly, place) = (cluster.assembly(), cluster.place());
    let failed = |error: CommError| CliError::from(fsdp_core::Error::from(error));
    let check_in = || assembly.local().try_for_each(|rank| assembly.give(NODES, Rank(rank), Vec::new()));
    if place.process == 0 {
        let loaded = load()?;
        share(&loaded);
        assembly.announce(FIRST, Vec::new()).map_err(failed)?;
        check_in().map_err(failed)?;
        assembly.collect(NODES, assembly.world(), LOAD_TIMEOUT)?;
        assembly.announce(NODES, Vec::new()).map_err(failed)?;
        return Ok(loaded);
    }
    if place.local_process == 0 {
        assembly.hear(FIRST, LOAD_TIMEOUT)?;
        let loaded = load()?;
        check_in().map_err(failed)?;
        return Ok(loaded);
    }
    check_in().map_err(failed)?;
    assembly.hear(NODES, LOAD_TIMEOUT)?;
    load()
}

/// Whether all processes know of the failure and end by themselves.
fn is_reported(error: &CliError) -> bool {
    matches!(
        error,
        CliError::Train(TrainError::Ended { .. } | TrainError::Remote { .. } | TrainError::Stopped)
    )
}

/// Decides how a process ends after its world has ended.
fn conclude(
    outcome: Result<Exit, CliError>,
    verdict: Option<Verdict>,
    place: ProcessPlace,
) -> Result<Exit, CliError> {
    match (outcome, verdict) {
        (Ok(exit), _) => Ok(exit),
        // A process reports its own failure in its own words; after divergence the first process reports where the run
        // can resume.
        (Err(error), Some(verdict)) if verdict.process == place.process => Err(error),
        (Err(error @ CliError::Train(TrainError::Diverged { .. })), _) if place.process == 0 => Err(error),
        // The first remaining process reports the verdict for all.
        (Err(_), Some(verdict))
            if place.process == usize::from(verdict.process == 0 && verdict.is_loss()) =>
        {
            Err(CliError::World { verdict: Box::new(verdict) })
        }
        (Err(error), Some(verdict)) => {
            tracing::info!("ended: {error}");
            Ok(verdict.failure.kind.into())
        }
        (Err(error), None) if place.process > 0 && is_reported(&error) => {
            tracing::info!("ended: {error}");
            Ok(error.exit())
        }
        (Err(error), None) => Err(error),
    }
}
