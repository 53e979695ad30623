//! Chooses how ranks in different processes communicate: over NCCL on GPUs; otherwise over MPI if `mpirun`, or `srun`
//! with PMI, has started them and a library is found; otherwise over TCP.

use std::sync::Arc;
use std::time::Duration;

use fsdp_comm::process::cluster::Cluster;
use fsdp_comm::process::place::{LaunchedBy, ProcessPlace};
use fsdp_config::{Device, RunConfig, Transport};
use fsdp_core::Rank;
use fsdp_mpi::{Family, MpiLibrary, MpiWorld};

use super::srun;
use crate::error::CliError;

/// The topic on which processes announce their transport and learn the decision.
const TOPIC: &str = "transport";

/// The announcement of a process that can use MPI.
const MPI: &str = "mpi";

/// The transport between processes.
pub(super) enum Carrier {
    /// Our own TCP connections.
    Tcp,
    /// NCCL, with a GPU per rank.
    Nccl,
    /// An MPI library and its version text.
    Mpi { world: Arc<MpiWorld>, version: String },
}

impl Carrier {
    /// The name in `run.transport`.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Carrier::Tcp => "tcp",
            Carrier::Nccl => "nccl",
            Carrier::Mpi { .. } => "mpi",
        }
    }

    /// Chooses the transport according to `run.transport`, the same in all processes, and sets up the cluster's links.
    ///
    /// # Errors
    /// [`CliError::Option`]; [`CliError::Mpi`], also if a library is named and cannot be opened;
    /// [`CliError::World`].
    pub(super) fn choose(cluster: &mut Cluster, run: &RunConfig) -> Result<Self, CliError> {
        let place = cluster.place();
        if has_nccl(run) {
            return Ok(Carrier::Nccl);
        }
        let wants_mpi = match run.transport {
            Transport::Tcp => false,
            Transport::Mpi => true,
            // Each task checks whether srun supports MPI, and all must agree.
            Transport::Auto => place.launched_by.has_mpi() || place.launched_by == LaunchedBy::Srun,
            Transport::Nccl => {
                let ranks = match run.device {
                    Device::Cuda => "share one (run.share_gpu)",
                    Device::Xla => "are connected by XLA, except for their work on the host",
                    Device::Cpu | Device::TorchCpu => "are on CPUs",
                };
                let why = format!(
                    "\"nccl\" connects GPUs, one for each rank, but these ranks {ranks}; choose \"auto\", \"mpi\" or \
                     \"tcp\""
                );
                return Err(refused(why));
            }
        };
        if !wants_mpi {
            return Ok(Carrier::Tcp);
        }
        let ranks_here = run.ranks / place.processes;
        let found = match MpiLibrary::find() {
            _ if ranks_here > 1 => {
                Err(format!("a process holds {ranks_here} ranks, but over MPI it can hold only one"))
            }
            Ok(library) if is_foreign(&place, &library) => {
                let why = foreign(
                    &place,
                    library.version(),
                    "it would treat this process as a world of one, or end it",
                );
                if run.transport == Transport::Mpi || MpiLibrary::is_named() {
                    return Err(refused(why));
                }
                Err(why)
            }
            Ok(library) => {
                let is_requested = run.transport == Transport::Mpi || place.launched_by.has_mpi();
                let usable = if is_requested {
                    Ok(())
                } else {
                    srun::expect_mpi(&place, library.family(), &super::variable)
                };
                usable.map(|()| library)
            }
            // If a library is named, no other one may be used instead.
            Err(error) if MpiLibrary::is_named() => return Err(error.into()),
            Err(error) => Err(error.to_string()),
        };
        match (agree(cluster, found.as_ref().err(), run)?, found) {
            (None, Ok(library)) => Self::open(cluster, library, run),
            (Some(why), _) if run.transport == Transport::Mpi => Err(refused(why)),
            (Some(why), _) => {
                tracing::info!("over TCP instead of MPI: {why}");
                Ok(Carrier::Tcp)
            }
            (None, Err(why)) => Err(refused(why)),
        }
    }

    fn open(cluster: &mut Cluster, library: MpiLibrary, run: &RunConfig) -> Result<Self, CliError> {
        let place = cluster.place();
        let version = library.version().to_owned();
        let world = MpiWorld::open(library, Duration::from_secs_f64(run.timeout_s), cluster.alarm())?;
        if (world.rank(), world.size()) != (Rank(place.process), place.processes) {
            let evidence = format!("it sees this process as {} of {}", world.rank(), world.size());
            return Err(refused(foreign(&place, &version, &evidence)));
        }
        let world = Arc::new(world);
        let (links, members) = (Arc::clone(&world), (0..place.processes).map(Rank).collect::<Arc<[Rank]>>());
        // A process holds one rank.
        cluster.connect_by(Arc::new(move |channel, _| links.link(channel, Arc::clone(&members))));
        Ok(Carrier::Mpi { world, version })
    }

    /// Finalizes MPI after all ranks have finished. After a failure MPI is not finalized: that would wait for ranks
    /// that may never come.
    ///
    /// # Errors
    /// [`CliError::Mpi`].
    pub(super) fn finish(self, cluster: &mut Cluster) -> Result<(), CliError> {
        let Carrier::Mpi { world, .. } = self else { return Ok(()) };
        cluster.connect_by(Arc::new(|_, _| unreachable!("no rank is started after the end")));
        match Arc::into_inner(world) {
            Some(world) => Ok(world.finalize()?),
            None => unreachable!("nobody else holds the world when all ranks have ended"),
        }
    }
}

/// Whether NCCL connects the ranks of different processes, which requires a GPU per rank.
pub(crate) fn has_nccl(run: &RunConfig) -> bool {
    let is_nccl_allowed = matches!(run.transport, Transport::Auto | Transport::Nccl);
    is_nccl_allowed && run.device == Device::Cuda && !run.share_gpu
}

/// Ranks cannot be connected as `run.transport` requires.
pub(crate) fn refused(what: String) -> CliError {
    CliError::Option { option: "run.transport", what }
}

/// Whether a library would end this launcher's processes as soon as it starts: MPICH libraries expect variables of
/// Hydra or PMI2, which Open MPI's `mpirun` does not set.
fn is_foreign(place: &ProcessPlace, library: &MpiLibrary) -> bool {
    place.launched_by == LaunchedBy::OpenMpi && library.family() == Family::Mpich
}

/// The message that a library belongs to another launcher, with the evidence.
fn foreign(place: &ProcessPlace, version: &str, evidence: &str) -> String {
    let ProcessPlace { launched_by, process, processes, .. } = place;
    format!(
        "{launched_by} has started this process as number {process} of {processes}, but the MPI library ({version}) is not \
         that launcher's: {evidence}; name the right one in FSDP_MPI_LIBRARY, or set run.transport = \"tcp\""
    )
}

impl std::fmt::Display for Carrier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Carrier::Tcp => f.write_str("TCP"),
            Carrier::Nccl => f.write_str("NCCL"),
            Carrier::Mpi { version, .. } => write!(f, "MPI ({version})"),
        }
    }
}

/// Why some process cannot use MPI; `None` if all can.
fn agree(cluster: &Cluster, obstacle: Option<&String>, run: &RunConfig) -> Result<Option<String>, CliError> {
    let answer = obstacle.map_or(MPI, String::as_str);
    decide(cluster, run, TOPIC, &|_| answer.to_owned(), &|all| {
        let found = all.iter().position(|answer| answer != MPI)?;
        Some(format!("{}: {}", Rank(found), all[found]))
    })
}

/// Process 0 applies `rule` to `answer_of` every rank; all processes return its objection, `None` if there is none.
///
/// # Errors
/// [`CliError`]: a process did not answer, or the world has failed.
pub(crate) fn decide(
    cluster: &Cluster,
    run: &RunConfig,
    topic: &str,
    answer_of: &dyn Fn(Rank) -> String,
    rule: &dyn Fn(&[String]) -> Option<String>,
) -> Result<Option<String>, CliError> {
    let assembly = cluster.assembly();
    let limit = Duration::from_secs_f64(run.timeout_s);
    let failed = |error: fsdp_core::comm::CommError| CliError::from(fsdp_core::Error::from(error));
    for rank in assembly.local().map(Rank) {
        assembly.give(topic, rank, answer_of(rank).into_bytes()).map_err(failed)?;
    }
    if assembly.is_leader() {
        let all = assembly.collect(topic, assembly.world(), limit)?;
        let all: Vec<String> =
            all.iter().map(|answer| String::from_utf8_lossy(answer).into_owned()).collect();
        assembly.announce(topic, rule(&all).unwrap_or_default().into_bytes()).map_err(failed)?;
    }
    let objection = assembly.hear(topic, limit)?;
    let objection = String::from_utf8_lossy(&objection).into_owned();
    Ok((!objection.is_empty()).then_some(objection))
}
