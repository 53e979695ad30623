//! How ranks in different processes talk: over NCCL on GPUs; else over MPI where `mpirun`, or `srun` with PMI, has started
//! them and a library is found; else over TCP.

use std::sync::Arc;
use std::time::Duration;

use fsdp_comm::process::cluster::Cluster;
use fsdp_comm::process::place::{LaunchedBy, Place};
use fsdp_core::Rank;
use fsdp_mpi::{Family, MpiLibrary, MpiWorld};
use fsdp_train::config::{Device, RunConfig, Transport};

use super::srun;
use crate::device::has_nccl;
use crate::error::CliError;

/// Where processes say what they have, and are told what is taken.
const TOPIC: &str = "transport";

/// What all processes take when they can.
const MPI: &str = "mpi";

/// What carries the data between processes.
pub(super) enum Carrier {
    /// Connections of our own.
    Tcp,
    /// NCCL, with a GPU for each rank.
    Nccl,
    /// An MPI library, which says this of itself.
    Mpi { world: Arc<MpiWorld>, version: String },
}

impl Carrier {
    /// In the words of `run.transport`.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Carrier::Tcp => "tcp",
            Carrier::Nccl => "nccl",
            Carrier::Mpi { .. } => "mpi",
        }
    }

    /// Chooses what `run.transport` asks for, the same in all processes, and makes the links of the cluster of it.
    ///
    /// # Errors
    /// [`CliError::Transport`]; [`CliError::Mpi`], also where a library is named and can not be opened; [`CliError::World`].
    pub(super) fn choose(cluster: &mut Cluster, run: &RunConfig) -> Result<Self, CliError> {
        let place = cluster.place();
        if has_nccl(run) {
            return Ok(Carrier::Nccl);
        }
        let wants_mpi = match run.transport {
            Transport::Tcp => false,
            Transport::Mpi => true,
            // Whether srun has started MPI each task finds for itself, and all agree.
            Transport::Auto => place.launched_by.has_mpi() || place.launched_by == LaunchedBy::Srun,
            Transport::Nccl => {
                let ranks = match run.device {
                    Device::Cuda => "share one (run.share_gpu)",
                    Device::Xla => "are connected by XLA, but for what they do on the host",
                    Device::Cpu | Device::TorchCpu => "are on CPUs",
                };
                let why = format!(
                    "\"nccl\" connects GPUs, one for each rank, and these ranks {ranks}; choose \"auto\", \"mpi\" or \
                     \"tcp\""
                );
                return Err(CliError::Transport { why });
            }
        };
        if !wants_mpi {
            return Ok(Carrier::Tcp);
        }
        let ranks_here = run.ranks / place.processes;
        let found = match MpiLibrary::find() {
            _ if ranks_here > 1 => {
                Err(format!("a process holds {ranks_here} ranks; over MPI it can hold one"))
            }
            Ok(library) if is_foreign(&place, &library) => {
                let why = foreign(
                    &place,
                    library.version(),
                    "it would take this process for a world of its own, or end it",
                );
                if run.transport == Transport::Mpi || MpiLibrary::is_named() {
                    return Err(CliError::Transport { why });
                }
                Err(why)
            }
            Ok(library) => {
                let is_asked_for = run.transport == Transport::Mpi || place.launched_by.has_mpi();
                let expected = if is_asked_for {
                    Ok(())
                } else {
                    srun::expect_mpi(&place, library.family(), &super::variable)
                };
                expected.map(|()| library)
            }
            // Whoever names a library wants it, and not whatever else there is.
            Err(error) if MpiLibrary::is_named() => return Err(error.into()),
            Err(error) => Err(error.to_string()),
        };
        match (agree(cluster, found.as_ref().err(), run)?, found) {
            (None, Ok(library)) => Self::open(cluster, library, run),
            (Some(why), _) if run.transport == Transport::Mpi => Err(CliError::Transport { why }),
            (Some(why), _) => {
                tracing::info!("over TCP and not MPI: {why}");
                Ok(Carrier::Tcp)
            }
            (None, Err(why)) => Err(CliError::Transport { why }),
        }
    }

    fn open(cluster: &mut Cluster, library: MpiLibrary, run: &RunConfig) -> Result<Self, CliError> {
        let place = cluster.place();
        let version = library.version().to_owned();
        let world = MpiWorld::open(library, Duration::from_secs_f64(run.timeout_s), cluster.alarm())?;
        if (world.rank(), world.size()) != (Rank(place.process), place.processes) {
            let takes = format!("it takes this process for {} of {}", world.rank(), world.size());
            return Err(CliError::Transport { why: foreign(&place, &version, &takes) });
        }
        let world = Arc::new(world);
        let (links, members) = (Arc::clone(&world), (0..place.processes).map(Rank).collect::<Arc<[Rank]>>());
        // A process holds one rank.
        cluster.connect_by(Arc::new(move |channel, _| links.link(channel, Arc::clone(&members))));
        Ok(Carrier::Mpi { world, version })
    }

    /// Ends it, when all ranks have done their work. After a failure it is not ended: that would wait for ranks that may
    /// never come.
    ///
    /// # Errors
    /// [`CliError::Mpi`].
    pub(super) fn finish(self, cluster: &mut Cluster) -> Result<(), CliError> {
        let Carrier::Mpi { world, .. } = self else { return Ok(()) };
        cluster.connect_by(Arc::new(|_, _| unreachable!("no rank is started after the end")));
        match Arc::into_inner(world) {
            Some(world) => Ok(world.finalise()?),
            None => unreachable!("nobody else holds the world when all ranks have ended"),
        }
    }
}

/// Whether a library ends the processes of this launcher as soon as it begins: those of MPICH look for what Hydra and PMI2
/// say, and Open MPI's `mpirun` says nothing of it.
fn is_foreign(place: &Place, library: &MpiLibrary) -> bool {
    place.launched_by == LaunchedBy::OpenMpi && library.family() == Family::Mpich
}

/// That a library is another launcher's, and by what it shows.
fn foreign(place: &Place, version: &str, shown_by: &str) -> String {
    let Place { launched_by, process, processes, .. } = place;
    format!(
        "{launched_by} has started this process as number {process} of {processes}, and the MPI library ({version}) is not \
         that launcher's: {shown_by}; name the right one in FSDP_MPI_LIBRARY, or set run.transport = \"tcp\""
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

/// Why some process can not take MPI; none if all can.
fn agree(cluster: &Cluster, missing: Option<&String>, run: &RunConfig) -> Result<Option<String>, CliError> {
    let said = missing.map_or(MPI, String::as_str);
    decide(cluster, run, TOPIC, &|_| said.to_owned(), &|all| {
        let found = all.iter().position(|said| said != MPI)?;
        Some(format!("{}: {}", Rank(found), all[found]))
    })
}

/// What process 0 finds to be in the way, in all processes, by what is `said` of every rank; none if nothing is.
///
/// # Errors
/// [`CliError`]: somebody has said nothing, or the world has failed.
pub(crate) fn decide(
    cluster: &Cluster,
    run: &RunConfig,
    topic: &str,
    said: &dyn Fn(Rank) -> String,
    rule: &dyn Fn(&[String]) -> Option<String>,
) -> Result<Option<String>, CliError> {
    let assembly = cluster.assembly();
    let limit = Duration::from_secs_f64(run.timeout_s);
    let failed = |error: fsdp_core::comm::CommError| CliError::from(fsdp_core::Error::from(error));
    for rank in assembly.local().map(Rank) {
        assembly.give(topic, rank, said(rank).into_bytes()).map_err(failed)?;
    }
    if assembly.is_leader() {
        let all = assembly.collect(topic, assembly.world(), limit)?;
        let all: Vec<String> = all.iter().map(|said| String::from_utf8_lossy(said).into_owned()).collect();
        assembly.announce(topic, rule(&all).unwrap_or_default().into_bytes()).map_err(failed)?;
    }
    let decided = assembly.hear(topic, limit)?;
    let decided = String::from_utf8_lossy(&decided).into_owned();
    Ok((!decided.is_empty()).then_some(decided))
}
