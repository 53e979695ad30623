//! Tests the MPI libraries and launchers of this machine: those on `PATH`, and those that `FSDP_TEST_MPIRUN` names
//! (paths of `mpirun`, separated by colons). The ranks are processes: the launcher starts this test binary again.

use std::collections::BTreeSet;
use std::env;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fsdp_comm::conformance::{self, PlainMemory};
use fsdp_comm::launch::{FailureReason, LaunchFailure, Launcher, Seat};
use fsdp_comm::{Alarm, Exchanged, LinkComm};
use fsdp_core::comm::{Comm, CommError};
use fsdp_core::{DType, FailureKind, Rank};
use fsdp_mpi::{MpiError, MpiLibrary, MpiWorld};

use crate::exchanges::{receive, send};
use crate::fake::{LONG, SharedAlarm};

/// Tells a process that it is a rank, and the number of ranks.
const RANKS: &str = "FSDP_TEST_MPI_RANKS";

/// Channels reserved per launch: two to begin with, and more for nested groups.
const CHANNELS_PER_LAUNCH: u64 = 64;

/// The rank of this process in a sequence of launches, all over one MPI world.
struct ThisRank {
    world: MpiWorld,
    channel: AtomicU64,
}

impl Launcher for ThisRank {
    type Memory = PlainMemory;

    fn launch<T: Send, E: Send + fmt::Debug + fmt::Display>(
        &self,
        ranks: usize,
        body: &(dyn Fn(Seat<PlainMemory>) -> Result<T, E> + Sync),
    ) -> Result<Vec<T>, LaunchFailure<E>> {
        assert_eq!(ranks, self.world.size());
        let first = self.channel.fetch_add(CHANNELS_PER_LAUNCH, Ordering::Relaxed);
        let comm = |channel| {
            let link = self.world.link(channel, (0..ranks).map(Rank).collect());
            Comm::new(Box::new(LinkComm::new(link).expect("threads can be started")))
        };
        let rank = self.world.rank();
        let memory = Arc::new(PlainMemory::new(true));
        let seat = Seat { rank, memory, gathers: comm(first), reductions: comm(first + 1) };
        match body(seat) {
            Ok(result) => Ok(vec![result]),
            Err(error) => Err(LaunchFailure { rank, reason: FailureReason::Error(error) }),
        }
    }
}

/// Runs all checks in which no rank fails. (A failing world of processes is not ended by MPI.)
fn suite(launcher: &ThisRank, ranks: usize) {
    for lens in [&[][..], &[1], &[3, 0, 5, 1], &[64, 129], &[20_000, 3, 9_001]] {
        for dtype in [DType::F32, DType::Bf16] {
            conformance::all_gather(launcher, ranks, dtype, lens);
            conformance::reduce_scatter(launcher, ranks, dtype, lens);
            conformance::all_reduce(launcher, ranks, dtype, lens);
            conformance::broadcast(launcher, ranks, dtype, lens);
        }
    }
    conformance::traffic_matches_formulas(launcher, ranks);
    conformance::buffers_come_back_to_their_rank(launcher, ranks);
    conformance::arguments_are_checked(launcher, ranks);
    conformance::many_in_flight(launcher, ranks);
    conformance::communicators_are_independent(launcher, ranks);
    conformance::groups_of_groups(launcher, ranks);
    for replicas in (1..=ranks).filter(|&replicas| ranks.is_multiple_of(replicas)) {
        conformance::rows_and_columns_of_a_mesh(launcher, replicas, ranks / replicas);
    }
}

#[test]
fn launched_rank_passes_conformance() {
    let Some(ranks) = env::var(RANKS).ok().and_then(|ranks| ranks.parse().ok()) else {
        println!("this process is not a rank: see the test of libraries that are installed");
        return;
    };
    let library = MpiLibrary::find().unwrap();
    let about = format!("{}, {}: {}", library.family(), library.path().display(), library.version());
    let open = |library| MpiWorld::open(library, LONG, Arc::new(SharedAlarm::default()));
    let world = open(library).unwrap();
    assert_eq!(world.size(), ranks, "{about}");
    let second = open(MpiLibrary::find().unwrap());
    assert!(matches!(second, Err(MpiError::Initialized)), "one process, one world");
    let launcher = ThisRank { world, channel: AtomicU64::new(0) };
    suite(&launcher, ranks);
    println!("rank passed with {about}");
    launcher.world.finalize().unwrap();
}

#[test]
fn launched_rank_reports_late_peer() {
    if env::var(RANKS).is_err() {
        println!("this process is not a rank: see the test of libraries that are installed");
        return;
    }
    let alarm = Arc::new(SharedAlarm::default());
    let timeout = Duration::from_secs(2);
    let world = MpiWorld::open(MpiLibrary::find().unwrap(), timeout, alarm.clone()).unwrap();
    let link = |channel| world.link(channel, [Rank(0), Rank(1)].into());
    let peer = 1 - world.rank().0;
    let mut memory = vec![1; 1 << 20];
    assert_eq!(receive(&mut *link(0), peer, &mut memory), Ok(Exchanged::Late { peer }));
    assert_eq!(send(&mut *link(1), peer, &memory), Ok(Exchanged::Late { peer }));
    println!("rank passed with Late");
    // Launchers end all processes when one ends without MPI_Finalize, so wait until both are here.
    let mut last = link(2);
    assert_eq!(send(&mut *last, peer, &[1]), Ok(Exchanged::Done));
    while receive(&mut *last, peer, &mut [0]) == Ok(Exchanged::Late { peer }) {}
    alarm.raise(CommError::Aborted {
        rank: Rank(0),
        reason: "it was late".to_owned(),
        kind: FailureKind::Temporary,
    });
    assert!(matches!(world.finalize(), Err(MpiError::Failed(_))));
}

/// Returns the launchers by their canonical paths, without duplicates.
fn launchers() -> BTreeSet<PathBuf> {
    let named = env::var_os("FSDP_TEST_MPIRUN").unwrap_or_default();
    let path = env::var_os("PATH").unwrap_or_default();
    let names = ["mpirun", "mpirun.openmpi", "mpirun.mpich", "mpiexec.hydra"];
    let on_path = env::split_paths(&path).flat_map(|folder| names.map(|name| folder.join(name)));
    env::split_paths(&named).chain(on_path).filter_map(|file| file.canonicalize().ok()).collect()
}

/// Runs a test of this module in `ranks` processes. Returns whether the launcher reported success.
fn run(launcher: &Path, test: &str, ranks: usize, library: Option<&Path>) -> bool {
    let mut command = Command::new(launcher);
    command.arg("-n").arg(ranks.to_string()).arg(env::current_exe().unwrap());
    command.args(["--exact", &format!("real::{test}"), "--nocapture"]);
    command.env(RANKS, ranks.to_string());
    library.map(|library| command.env("FSDP_MPI_LIBRARY", library));
    // For Open MPI: allow more ranks than cores, and root in a container.
    for variable in
        ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"]
    {
        command.env(variable, "1");
    }
    command.env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let passed: Vec<&str> = said.lines().filter(|line| line.contains("rank passed with")).collect();
    let all = format!("{}: {said}\n{}", launcher.display(), String::from_utf8_lossy(&output.stderr));
    assert_eq!(passed.len(), ranks, "{all}");
    println!("{} with {ranks} ranks: {}", launcher.display(), passed[0]);
    output.status.success()
}

#[test]
fn installed_mpi_libraries_pass() {
    let launchers = launchers();
    if launchers.is_empty() {
        println!("skipped: no mpirun is on PATH or in FSDP_TEST_MPIRUN");
    }
    const PASSES: &str = "launched_rank_passes_conformance";
    for launcher in launchers {
        for ranks in [1, 2, 3, 4, 9] {
            assert!(run(&launcher, PASSES, ranks, None), "{}", launcher.display());
        }
        // Without MPI_Finalize every launcher reports failure.
        run(&launcher, "launched_rank_reports_late_peer", 2, None);
        let standard = launcher.with_file_name("../lib/libmpi_abi.so.1");
        if standard.exists() {
            assert!(run(&launcher, PASSES, 3, Some(&standard)), "{}", standard.display());
        }
    }
}
