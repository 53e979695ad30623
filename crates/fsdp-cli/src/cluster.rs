//! This process among those that a launcher has started: how it joins the others, and how it ends with them.
//!
//! What concerns the run is said once, by the process of rank 0. Another one speaks up only when it is the one that failed;
//! what else it has to say goes to the log (`RUST_LOG`).

mod error_file;
mod flight;
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
use fsdp_comm::process::place::{Place, is_only_one, recognise};
use fsdp_comm::process::rendezvous::NodeFolder;
use fsdp_comm::process::{ProcessEntry, Verdict};
use fsdp_core::Rank;
use fsdp_core::comm::CommError;
use fsdp_train::TrainError;
use fsdp_train::config::RunConfig;
use fsdp_train::metrics::{Census, Participant};

use crate::args::NetworkArgs;
use crate::error::CliError;
use crate::exit_code::Exit;
use crate::output;
pub(crate) use error_file::write_own as tell_torchrun;
pub(crate) use flight::LOG_DIR;
use transport::Carrier;
#[cfg(feature = "cuda")]
pub(crate) use transport::decide;
pub(crate) use watchdog::{LAUNCHER, watch_launcher};

/// How long the first failure of the world is waited for by who has failed, beside two heartbeats.
const VERDICT_WITHIN: Duration = Duration::from_secs(1);

/// How long mpirun may take to read what a process says.
const READ_WITHIN: Duration = Duration::from_millis(300);

/// Longer than any text takes; whoever is lost meanwhile ends the world.
const PATIENCE: Duration = Duration::from_secs(7 * 24 * 3600);

/// Between two looks.
const LOOK: Duration = Duration::from_millis(5);

/// The place of this process, if it is one of several. From here on only the first one speaks.
///
/// # Errors
/// [`CliError::Place`].
pub(crate) fn place() -> Result<Option<Place>, CliError> {
    let place = recognise(&variable)?;
    if let Some(place) = place.filter(|place| place.process > 0) {
        output::speak_as(format!("process {} on {}", place.process, host()));
    }
    Ok(place)
}

/// How long a process waits for the first one of its node to say what is wrong, and that one for the others to hear it. On a
/// node with other work they start seconds apart.
const SAID_WITHIN: Duration = Duration::from_secs(5);

/// Says what ends this process before it has met the others. The first process of a node says it, and tells the others
/// there, which then need not say the same, word by word. Nodes may have different files and libraries, so each of them speaks
/// for itself; and so does a process that was started with other arguments.
pub(crate) fn say_once(text: &str, say: impl FnOnce()) {
    let Ok(Some(place)) = recognise(&variable) else { return say() };
    let folder = NodeFolder::of(place, &variable, Ancestor::launcher(&place).pid());
    if place.local_process == 0 {
        say();
        if let Err(error) = folder.tell(text, SAID_WITHIN) {
            // Then they say it too.
            tracing::debug!("{error}");
        }
    } else if folder.hear(SAID_WITHIN).is_some_and(|said| said == text) {
        tracing::debug!("ended: {text}");
    } else {
        say();
    }
}

/// Whether a process is another one than the first of several: what one can say alone, it need not say too.
pub(crate) fn is_another(place: Option<Place>) -> bool {
    place.is_some_and(|place| place.process > 0)
}

/// Whether this process has its node to itself: a launcher has started no other one there.
pub(crate) fn has_its_node(place: Option<Place>) -> bool {
    place.map_or_else(|| is_only_one(&variable), |place| place.local_processes == 1)
}

/// Whether this process ends with the one that has started it: one of several, or the only one of `fsdp launch`.
///
/// # Errors
/// [`CliError::Place`].
pub(crate) fn is_launched() -> Result<bool, CliError> {
    Ok(variable("FSDP_PROCESS").is_some() || recognise(&variable)?.is_some())
}

/// The processes that work together, and what connects them.
#[derive(Clone, Copy)]
pub(crate) struct Team<'a> {
    pub(crate) cluster: &'a Cluster,
    carrier: &'a Carrier,
}

impl Team<'_> {
    /// What carries the data.
    pub(crate) fn transport(&self) -> String {
        self.carrier.to_string()
    }

    /// What carries the data, in the words of `run.transport`.
    pub(crate) fn carrier(&self) -> &'static str {
        self.carrier.name()
    }

    /// Who they are, for the metrics.
    pub(crate) fn census(&self) -> Census {
        let participant = |ProcessEntry { ranks, facts }: &ProcessEntry| Participant {
            host: facts.host.clone(),
            pid: facts.pid,
            device: facts.device.clone(),
            cpu: facts.cpu_model.clone(),
            first_rank: ranks.start,
            ranks: ranks.len(),
        };
        let processes = self.cluster.roster().processes.iter().map(participant).collect();
        Census { transport: self.transport(), processes }
    }
}

/// A variable of the environment.
pub(crate) fn variable(name: &str) -> Option<String> {
    env::var(name).ok()
}

/// Joins the other processes, does work, and ends with them; alone, it only does the work. How it ends is the same in all
/// processes, and the first failure of any of them decides it.
///
/// # Errors
/// [`CliError`]: of the work when there is one process; or this one could not join the others. What happens to the world
/// afterwards is told here.
pub(crate) fn within(
    place: Option<Place>,
    run: &RunConfig,
    network: NetworkArgs,
    work: impl FnOnce(Option<Team<'_>>) -> Result<Exit, CliError>,
) -> Result<Exit, CliError> {
    let Some(place) = place else { return work(None) };
    let mut cluster = join(place, run, network)?;
    if place.process > 0 {
        output::speak_as(format!("{} on {}", ranks(&cluster.assembly().local()), host()));
    }
    let record = flight::Record::new(&cluster, run);
    watchdog::install(&cluster, &record);
    let outcome = Carrier::choose(&mut cluster, run).and_then(|carrier| {
        introduce(&cluster, run, &carrier);
        let exit = work(Some(Team { cluster: &cluster, carrier: &carrier }))?;
        if cluster.verdict().is_none() {
            carrier.finish(&mut cluster)?;
        }
        Ok(exit)
    });
    if let Err(error) = &outcome
        && !is_told(error)
    {
        cluster.fail(error.kind(), error.to_string());
        // What others say of a process is held back for two heartbeats, so that it can speak for itself.
        wait_for_verdict(&cluster, VERDICT_WITHIN + Duration::from_secs_f64(2.0 * run.heartbeat_s));
    }
    // Some launchers kill all processes as soon as one has ended, and do not read what was said just before: whoever has
    // something to say says it first.
    let exit = conclude(outcome, cluster.verdict(), place).unwrap_or_else(|error| {
        output::error(&error);
        error.exit()
    });
    // All of them wait: the first that ends would have the others killed, and mpirun would pass on that they were.
    if exit != Exit::Done && place.launched_by.has_mpi() {
        thread::sleep(READ_WITHIN);
    }
    cluster.leave();
    if cluster.verdict().is_some() {
        record.wait();
    }
    Ok(exit)
}

/// What a process says of its failure may be the consequence of another one that was first.
fn wait_for_verdict(cluster: &Cluster, limit: Duration) {
    let begin = Instant::now();
    while cluster.verdict().is_none() && begin.elapsed() < limit {
        thread::sleep(LOOK);
    }
}

/// Says who takes part.
fn introduce(cluster: &Cluster, run: &RunConfig, carrier: &Carrier) {
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
            "the nodes have different CPUs ({}): the bits of a run are promised on one model",
            models.join("; ")
        ));
    }
}

fn join(place: Place, run: &RunConfig, network: NetworkArgs) -> Result<Cluster, CliError> {
    let processes = place.processes;
    if !run.ranks.is_multiple_of(processes) {
        return Err(CliError::Processes { place, ranks: run.ranks });
    }
    let joining = Joining {
        place,
        variable: &variable,
        // In an object store nobody can find each other.
        shared: (!is_url(&run.out_dir)).then(|| run.out_dir.as_ref()),
        local_ranks: run.ranks / processes,
        device: run.device.name().to_owned(),
        heartbeat: Duration::from_secs_f64(run.heartbeat_s),
        timeout: Duration::from_secs_f64(run.timeout_s),
        is_insecure: network.insecure_network,
    };
    Ok(Cluster::join(&joining)?)
}

/// Ranks that follow each other, in words.
fn ranks(ranks: &Range<usize>) -> String {
    match ranks.len() {
        1 => Rank(ranks.start).to_string(),
        _ => format!("ranks {} to {}", ranks.start, ranks.end - 1),
    }
}

/// Loads data in turns: in the first process, which lets the others find what it has made; in the first one of each other node;
/// in all others. So text is tokenized once, or once per node where nodes keep tokens of their own.
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
    let give = || assembly.local().try_for_each(|rank| assembly.give(NODES, Rank(rank), Vec::new()));
    if place.process == 0 {
        let loaded = load()?;
        share(&loaded);
        assembly.announce(FIRST, Vec::new()).map_err(failed)?;
        give().map_err(failed)?;
        assembly.collect(NODES, assembly.world(), PATIENCE)?;
        assembly.announce(NODES, Vec::new()).map_err(failed)?;
        return Ok(loaded);
    }
    if place.local_process == 0 {
        assembly.hear(FIRST, PATIENCE)?;
        let loaded = load()?;
        give().map_err(failed)?;
        return Ok(loaded);
    }
    give().map_err(failed)?;
    assembly.hear(NODES, PATIENCE)?;
    load()
}

/// Whether all processes know of a failure, and come to an end of their own.
fn is_told(error: &CliError) -> bool {
    matches!(error, CliError::Train(TrainError::Ended { .. } | TrainError::Told { .. } | TrainError::Stopped))
}

/// How a process ends whose world has ended.
fn conclude(
    outcome: Result<Exit, CliError>,
    verdict: Option<Verdict>,
    place: Place,
) -> Result<Exit, CliError> {
    match (outcome, verdict) {
        (Ok(exit), _) => Ok(exit),
        // Its own failure it tells itself, in its own words; and the first one where the run can go on that has diverged.
        (Err(error), Some(verdict)) if verdict.process == place.process => Err(error),
        (Err(error @ CliError::Train(TrainError::Diverged { .. })), _) if place.process == 0 => Err(error),
        // The first one that is left tells it for all.
        (Err(_), Some(verdict))
            if place.process == usize::from(verdict.process == 0 && verdict.is_loss()) =>
        {
            Err(CliError::World { verdict: Box::new(verdict) })
        }
        (Err(error), Some(verdict)) => {
            tracing::info!("ended: {error}");
            Ok(verdict.failure.kind.into())
        }
        (Err(error), None) if place.process > 0 && is_told(&error) => {
            tracing::info!("ended: {error}");
            Ok(error.exit())
        }
        (Err(error), None) => Err(error),
    }
}
