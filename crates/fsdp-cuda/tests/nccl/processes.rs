//! Ranks in several processes: the conformance suite, and how all processes end when one fails.
//!
//! Each process runs this test binary; their fake NCCLs share state through files in a folder.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::{self, Child, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use fsdp_comm::conformance;
use fsdp_comm::launch::{LaunchFailure, Launcher, Seat};
use fsdp_comm::process::cluster::{Cluster, Joining};
use fsdp_comm::process::place::recognize;
use fsdp_core::comm::{Comm, Purpose, ReduceOp};
use fsdp_core::memory::{Category, HostSlice, HostSliceMut, Slice, SliceMut};
use fsdp_core::{DType, Error, Memory, Queue};
use fsdp_cuda::nccl::{GpuOptions, Gpus, Peers};

use crate::failures::PAUSE;
use crate::fake::{self, Fake, fresh};
use crate::memory::StreamMemory;
use crate::training;

/// Environment variables of a child process: its scenario, its number of ranks, and the time limit of calls in s.
const SCENARIO: &str = "FSDP_TEST_SCENARIO";
const LOCAL_RANKS: &str = "FSDP_TEST_LOCAL_RANKS";
const TIMEOUT_S: &str = "FSDP_TEST_TIMEOUT_S";

const HEARTBEAT: Duration = Duration::from_millis(500);

/// Time in which every fault must end every process, on any machine under any load. It is shorter than the time limit
/// of calls, which would end them too.
const BOUND: Duration = Duration::from_secs(NEVER / 2);

/// Time in which ranks must return once the failure is known.
const ABORT_BOUND: Duration = Duration::from_secs(NEVER / 4);

/// Prefix of the line in which a child process reports how it ended.
const SAYS: &str = "the process says: ";

/// The entry point of child processes; returns at once in an ordinary test run.
#[test]
fn child_process_entry_point() {
    let Some(scenario) = env::var(SCENARIO).ok() else { return };
    let variable = |name: &str| env::var(name).ok();
    let number = |name: &str| variable(name).unwrap().parse::<u64>().unwrap();
    let cluster = Cluster::join(&Joining {
        place: recognize(&variable).unwrap().unwrap(),
        variable: &variable,
        shared: None,
        local_ranks: number(LOCAL_RANKS) as usize,
        device: "cuda".to_owned(),
        heartbeat: HEARTBEAT,
        timeout: Duration::from_secs(NEVER),
        is_insecure: false,
    });
    let cluster = cluster.unwrap();
    let peers = Peers {
        assembly: cluster.assembly(),
        alarm: cluster.alarm(),
        recorder: cluster.recorder(),
        ranks_on_machine: cluster.ranks_on_machine(),
        heartbeat: HEARTBEAT,
    };
    if scenario == "train" {
        training::in_processes(peers);
        cluster.leave();
        return;
    }
    let fake = Fake::new();
    let options = GpuOptions { timeout: Duration::from_secs(number(TIMEOUT_S)), ..GpuOptions::new(2) };
    let gpus =
        Gpus::new(fake.nccl.clone(), options, |_, _| Ok(Arc::new(StreamMemory::default()))).among(peers);
    let world = cluster.roster().world();
    if scenario == "suite" {
        suite(&gpus, world);
    } else {
        let decided = Arc::new(OnceLock::new());
        let hook = decided.clone();
        cluster.on_verdict(Box::new(move |_| hook.set(Instant::now()).expect("there is one verdict")));
        let ended = gpus.launch(world, &|seat| faulty(&scenario, &fake, seat)).map(drop);
        // The verdict may arrive only after the launch returns.
        let took = decided.get().map(Instant::elapsed);
        assert!(took.is_none_or(|took| took < ABORT_BOUND), "it took {took:?} to abort");
        say(&cluster, ended);
    }
    cluster.leave();
    fake.assert_clean();
}

/// Runs the conformance suite without its failures, because a world of processes can fail only once.
fn suite(gpus: &Gpus<StreamMemory>, ranks: usize) {
    for dtype in [DType::F32, DType::F64, DType::Bf16, DType::F16, DType::I64] {
        for lens in [&[][..], &[3, 0, 5, 1], &[64, 129]] {
            conformance::all_gather(gpus, ranks, dtype, lens);
            conformance::reduce_scatter(gpus, ranks, dtype, lens);
            conformance::all_reduce(gpus, ranks, dtype, lens);
            conformance::broadcast(gpus, ranks, dtype, lens);
        }
    }
    conformance::all_gather(gpus, ranks, DType::U8, &[3, 0, 5, 1]);
    conformance::broadcast(gpus, ranks, DType::U8, &[3, 0, 5, 1]);
    conformance::traffic_matches_formulas(gpus, ranks);
    conformance::buffers_come_back_to_their_rank(gpus, ranks);
    conformance::arguments_are_checked(gpus, ranks);
    conformance::many_in_flight(gpus, ranks);
    conformance::communicators_are_independent(gpus, ranks);
    conformance::groups_of_groups(gpus, ranks);
    for replicas in (1..=ranks).filter(|&replicas| ranks.is_multiple_of(replicas)) {
        conformance::rows_and_columns_of_a_mesh(gpus, replicas, ranks / replicas);
    }
}

/// Sums a value over all ranks, and checks the sum.
fn sum(
    memory: &StreamMemory,
    comm: &mut Comm<StreamMemory>,
    purpose: Purpose,
    len: usize,
) -> Result<(), Error> {
    let mut buffer = memory.allocate(Category::CommStaging, DType::I64, len)?;
    memory.write(Queue::Reduce, HostSlice::I64(&vec![1; len]), SliceMut::whole(&mut buffer))?;
    let pending = comm.all_reduce(memory, ReduceOp::Sum, purpose, None, vec![buffer])?;
    let summed = pending.wait_on(memory, Queue::Download)?.outputs.remove(0);
    let mut out = vec![0; len];
    memory.read(Queue::Download, Slice::whole(&summed), HostSliceMut::I64(&mut out))?;
    comm.check()?;
    assert_eq!(out, vec![comm.size() as i64; len], "a sum that was cut off is not trusted");
    Ok(())
}

/// Returns the folder through which the fake NCCLs of all processes share state.
fn cliques() -> PathBuf {
    env::var_os("FAKE_NCCL_DIR").unwrap().into()
}

/// Prefix of files in that folder with which ranks tell the last rank that NCCL has failed.
const NOTE: &str = "failed-";

fn is_note(file: &fs::DirEntry) -> bool {
    file.file_name().to_string_lossy().starts_with(NOTE)
}

/// Runs a rank of a world with a fault: usually in the last rank or its calls.
fn faulty(scenario: &str, fake: &Fake, mut seat: Seat<StreamMemory>) -> Result<(), Error> {
    let (memory, comm) = (&*seat.memory, &mut seat.reductions);
    let is_culprit = comm.rank() == comm.size() - 1;
    let mut pairs = seat.gathers.split(memory, comm.rank() / 2)?;
    for _ in 0..3 {
        sum(memory, comm, Purpose::Scalars, 2)?;
    }
    match scenario {
        "longer" if is_culprit => sum(memory, comm, Purpose::Scalars, 3)?,
        // NCCL does not see purposes, so it goes on.
        "other purpose" => {
            let purpose = if is_culprit { Purpose::UpdateRule } else { Purpose::Scalars };
            sum(memory, comm, purpose, 2)?;
            (0..500).try_for_each(|_| sum(memory, comm, Purpose::Scalars, 2))?;
            return until_failed(comm);
        }
        "longer in a group" => sum(memory, &mut pairs, Purpose::Scalars, 2 + usize::from(is_culprit))?,
        "killed" if is_culprit => process::abort(),
        "killed, and NCCL knows" if is_culprit => {
            while fs::read_dir(cliques()).unwrap().flatten().filter(is_note).count() < comm.size() - 1 {
                std::thread::sleep(PAUSE);
            }
            process::abort()
        }
        "killed, and NCCL knows" => {
            fake.async_error(comm.rank(), 6);
            fs::write(cliques().join(format!("{NOTE}{}", comm.rank())), "").unwrap();
        }
        "stopped" if is_culprit => {
            Command::new("sh").args(["-c", "kill -STOP $PPID"]).status().unwrap();
        }
        "leader killed" if comm.rank() == 0 => process::abort(),
        "returns" if is_culprit => return Ok(()),
        "fails" if is_culprit => {
            return Err(Error::Device("planted".into()));
        }
        "late" if is_culprit => return until_failed(comm),
        _ => {}
    }
    // The other ranks carry on as usual.
    loop {
        sum(memory, comm, Purpose::Scalars, 2)?;
    }
}

/// Waits until the world has failed.
fn until_failed(comm: &Comm<StreamMemory>) -> Result<(), Error> {
    while comm.check().is_ok() {
        std::thread::sleep(PAUSE);
    }
    comm.check()
}

/// Waits for the verdict on the failure, and prints it.
fn say(cluster: &Cluster, ended: Result<(), LaunchFailure<Error>>) {
    let begin = Instant::now();
    while cluster.verdict().is_none() {
        assert!(begin.elapsed() < BOUND, "nobody knows of a failure");
        std::thread::sleep(PAUSE);
    }
    let own = match ended {
        Ok(()) => "well".to_owned(),
        Err(LaunchFailure { rank, reason }) => format!("{rank}: {reason}"),
    };
    let verdict = cluster.verdict().unwrap();
    let told = (verdict.failure.rank.map(|rank| rank.0), verdict.failure.kind, verdict.failure.cause);
    let last = verdict.failure.last_call;
    println!("{SAYS}{}", format!("{told:?}, last {last:?} | {own}").replace('\n', " "));
}

/// The child processes of a test.
pub(crate) struct Processes {
    children: Vec<Child>,
    begin: Instant,
    _folder: tempfile::TempDir,
}

impl Processes {
    pub(crate) fn start(scenario: &str, processes: usize, local_ranks: usize, timeout_s: u64) -> Self {
        Self::start_with(scenario, processes, local_ranks, timeout_s, &[])
    }

    /// Like [`Processes::start`], with additional environment variables.
    pub(crate) fn start_with(
        scenario: &str,
        processes: usize,
        local_ranks: usize,
        timeout_s: u64,
        variables: &[(&str, &str)],
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let [meeting, cliques] = ["meeting", "cliques"].map(|name| folder.path().join(name));
        fs::create_dir(&cliques).unwrap();
        let stand_in = fresh(&[]);
        let start = |process: usize| {
            Command::new(env::current_exe().unwrap())
                .args(["--exact", "processes::child_process_entry_point", "--nocapture"])
                .envs([(SCENARIO, scenario), ("RUST_BACKTRACE", "0")])
                .envs(
                    [(LOCAL_RANKS, local_ranks), (TIMEOUT_S, timeout_s as usize)]
                        .map(|(k, v)| (k, v.to_string())),
                )
                .envs(["FSDP_PROCESS", "FSDP_LOCAL_PROCESS"].map(|name| (name, process.to_string())))
                .envs(["FSDP_PROCESSES", "FSDP_LOCAL_PROCESSES"].map(|name| (name, processes.to_string())))
                .envs([("FSDP_RENDEZVOUS_DIR", &meeting), ("FAKE_NCCL_DIR", &cliques)])
                .env(fake::FOLDER, &stand_in)
                .envs(variables.iter().copied())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        };
        let children = (0..processes).map(start).collect();
        Self { children, begin: Instant::now(), _folder: folder }
    }

    /// Waits for each process, and returns whether it succeeded and what it reported.
    pub(crate) fn ends(self) -> Vec<(bool, String)> {
        let end = |child: Child| {
            let output = child.wait_with_output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            let said = text.lines().find_map(|line| Some(line.split_once(SAYS)?.1.to_owned()));
            let errors = String::from_utf8_lossy(&output.stderr);
            (output.status.success(), said.unwrap_or_else(|| format!("{text}{errors}")))
        };
        self.children.into_iter().map(end).collect()
    }

    /// Like [`Processes::ends`], and checks that the processes ended within [`BOUND`] of the start.
    fn fail(self) -> Vec<(bool, String)> {
        let begin = self.begin;
        let ends = self.ends();
        assert!(begin.elapsed() < BOUND, "took {:?}: {ends:?}", begin.elapsed());
        ends
    }
}

/// Checks that all processes ended normally and reported `expected`.
#[track_caller]
fn assert_told(ends: &[(bool, String)], expected: &str) {
    for (process, (is_well, said)) in ends.iter().enumerate() {
        assert!(*is_well && said.contains(expected), "process {process} of {ends:#?}");
    }
}

#[test]
fn conformance_suite_passes_across_processes() {
    for (processes, local_ranks) in [(2, 1), (3, 1), (2, 2), (4, 1)] {
        let ends = Processes::start("suite", processes, local_ranks, NEVER).ends();
        assert!(ends.iter().all(|(is_well, _)| *is_well), "{processes} x {local_ranks}: {ends:#?}");
    }
}

/// Checks that `processes` processes with one rank each all report `expected` for a fault.
fn told_of(scenario: &str, processes: usize, timeout_s: u64, expected: &str) {
    assert_told(&Processes::start(scenario, processes, 1, timeout_s).fail(), expected);
}

/// Seconds; longer than any of these tests may take.
const NEVER: u64 = 600;

#[test]
fn hanging_mismatched_call_names_both_calls_and_ranks() {
    let expected = "(Some(2), Permanent, \"collectives diverge: rank 2 called #3 all-reduce (scalars, 3 x i64), but rank 0 \
                    called #3 all-reduce (scalars, 2 x i64)\")";
    told_of("longer", 3, NEVER, expected);
}

#[test]
fn divergence_in_group_without_leader_is_reported() {
    let expected = "(Some(3), Permanent, \"collectives diverge: rank 3 called #0 all-reduce (scalars, 3 x i64), but rank 2 \
                    called #0 all-reduce (scalars, 2 x i64)\")";
    told_of("longer in a group", 4, NEVER, expected);
}

#[test]
fn divergent_purpose_is_detected_by_digest() {
    let expected = "(Some(2), Permanent, \"collectives diverge: rank 2 called #3 all-reduce (update rule, 2 x i64), but \
                    rank 0 called #3 all-reduce (scalars, 2 x i64)\")";
    told_of("other purpose", 3, NEVER, expected);
}

#[test]
fn absent_rank_is_named_after_timeout() {
    let expected = "(Some(2), Temporary, \"rank 0 has waited 5 s in #3 all-reduce (scalars, 2 x i64): rank 2 did not enter \
                    it";
    told_of("late", 3, 5, expected);
}

#[test]
fn returned_rank_is_reported_immediately() {
    told_of(
        "returns",
        3,
        NEVER,
        "(Some(2), Temporary, \"rank 2 did not arrive in #3 all-reduce (scalars, 2 x i64)",
    );
}

#[test]
fn failing_rank_ends_others_with_its_error() {
    let expected = "(Some(2), Temporary, \"planted\"), last Some(\"#2 all-reduce (scalars, 2 x i64)\")";
    told_of("fails", 3, NEVER, expected);
}

#[test]
fn process_killed_in_collective_ends_all_others() {
    for processes in [2, 3] {
        let mut ends = Processes::start("killed", processes, 2, NEVER).fail();
        let (is_well, said) = ends.pop().unwrap();
        assert!(!is_well, "{said}");
        assert_told(&ends, "(None, Temporary, \"its connection was closed\")");
    }
}

#[test]
fn death_noticed_first_by_nccl_is_reported_as_lost_connection() {
    let mut ends = Processes::start("killed, and NCCL knows", 3, 1, NEVER).fail();
    ends.pop().unwrap();
    assert_told(&ends, "(None, Temporary, \"its connection was closed\")");
}

#[test]
fn process_stopped_in_collective_ends_all_others() {
    let mut processes = Processes::start("stopped", 3, 1, NEVER);
    let mut stopped = processes.children.pop().unwrap();
    let ends = processes.fail();
    stopped.kill().unwrap();
    stopped.wait().unwrap();
    assert_told(&ends, "(None, Temporary, \"it was silent for 7.5 s");
}

#[test]
fn killed_leader_ends_all_others() {
    let mut ends = Processes::start("leader killed", 3, 1, NEVER).fail();
    assert!(!ends.remove(0).0);
    assert_told(&ends, "(None, Temporary, \"its connection was closed\")");
}
