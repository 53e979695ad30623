//! Runs the conformance suite of all communicators over in-memory and TCP links.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fmt;
use std::net::Ipv4Addr;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use fsdp_comm::auth::Token;
use fsdp_comm::conformance::{self, PlainMemory, outcomes};
use fsdp_comm::launch::{FailureReason, LaunchFailure, Launcher, Seat};
use fsdp_comm::{
    Alarm, InMemoryLinks, Link, LinkComm, MakeLink, TcpAcceptor, TcpLinks, TcpWorld, local_links,
};
use fsdp_core::comm::{Comm, CommError, Purpose, ReduceOp};
use fsdp_core::memory::{Category, Memory};
use fsdp_core::{DType, Error, Queue, Rank};

/// How the ranks, which are threads, are connected.
#[derive(Clone, Copy, Debug)]
enum Transport {
    InMemory,
    Tcp,
    /// TCP, where receivers read every message from the memory of its sender.
    Direct,
    /// In-memory links within processes of this many ranks (the last may have fewer), and TCP between processes.
    Both(usize),
}

/// Launches worlds of threads that are connected by links.
struct Linked {
    transport: Transport,
    timeout: Duration,
}

/// Returns the link of a rank for a channel.
type Links = Box<dyn Fn(u64, Rank) -> Box<dyn Link> + Sync>;

impl Linked {
    fn links(&self, world: usize) -> (Links, Arc<dyn Alarm>) {
        let in_memory = InMemoryLinks::new(world, self.timeout);
        let alarm = in_memory.alarm();
        let links: Links = match self.transport {
            Transport::InMemory => Box::new(move |channel, rank| in_memory.link(channel, rank)),
            Transport::Tcp | Transport::Direct => {
                let is_direct = matches!(self.transport, Transport::Direct);
                let links = tcp_links(world, 1, self.timeout, &alarm, is_direct.then_some(1));
                Box::new(move |channel, rank| links[rank.0].link(channel, rank))
            }
            Transport::Both(each) => {
                let far = tcp_links(world, each, self.timeout, &alarm, Some(64));
                let near = |(process, far): (usize, TcpLinks)| {
                    let local = process * each..world.min((process + 1) * each);
                    let far: Arc<MakeLink> = Arc::new(move |channel, rank| far.link(channel, rank));
                    local_links(far, local, world, self.timeout, Arc::clone(&alarm))
                };
                let links: Vec<_> = far.into_iter().enumerate().map(near).collect();
                Box::new(move |channel, rank| links[rank.0 / each](channel, rank))
            }
        };
        (links, alarm)
    }
}

/// Returns the TCP links of every process, for processes of `each` ranks.
fn tcp_links(
    world: usize,
    each: usize,
    timeout: Duration,
    alarm: &Arc<dyn Alarm>,
    direct_from: Option<u64>,
) -> Vec<TcpLinks> {
    let processes = 0..world.div_ceil(each);
    let doors: Vec<_> = processes.map(|_| TcpAcceptor::bind(Ipv4Addr::LOCALHOST.into()).unwrap()).collect();
    let address = |rank: usize| vec![doors[rank / each].address().unwrap()];
    let addresses: Vec<_> = (0..world).map(address).collect();
    let open = |door: TcpAcceptor| {
        let alarm = Arc::clone(alarm);
        let world = TcpWorld { addresses: addresses.clone(), generation: 1, alarm, timeout, direct_from };
        door.open(world, Token::open()).unwrap()
    };
    doors.into_iter().map(open).collect()
}

impl Launcher for Linked {
    type Memory = PlainMemory;

    fn launch<T: Send, E: Send + fmt::Debug + fmt::Display>(
        &self,
        world: usize,
        body: &(dyn Fn(Seat<PlainMemory>) -> Result<T, E> + Sync),
    ) -> Result<Vec<T>, LaunchFailure<E>> {
        let (links, alarm) = self.links(world);
        let run = |rank| {
            let comm = |world| LinkComm::new(links(world, rank)).expect("threads can be started");
            let comm = |world| Comm::new(Box::new(comm(world)));
            let memory = Arc::new(PlainMemory::new(true));
            let outcome = body(Seat { rank, memory, gathers: comm(0), reductions: comm(1) });
            outcome.inspect_err(|error| {
                alarm.raise(CommError::PeerFailed { rank, reason: error.to_string() });
            })
        };
        thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> = (0..world).map(|rank| scope.spawn(move || run(Rank(rank)))).collect();
            let join = |(rank, thread): (usize, thread::ScopedJoinHandle<'_, _>)| {
                let outcome: Result<T, E> = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
                outcome
                    .map_err(|error| LaunchFailure { rank: Rank(rank), reason: FailureReason::Error(error) })
            };
            // Join all threads before returning the first failure.
            threads.into_iter().enumerate().map(join).collect::<Vec<_>>().into_iter().collect()
        })
    }
}

const LONG: Duration = Duration::from_secs(600);
const SIZES: [usize; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 9];

#[test]
fn in_memory_links_pass_conformance() {
    conformance::all(&Linked { transport: Transport::InMemory, timeout: LONG }, &SIZES);
}

#[test]
fn tcp_links_pass_conformance() {
    conformance::all(&Linked { transport: Transport::Tcp, timeout: LONG }, &SIZES);
    conformance::all(&Linked { transport: Transport::Direct, timeout: LONG }, &SIZES);
}

#[test]
fn links_with_several_ranks_per_process_pass_conformance() {
    conformance::all(&Linked { transport: Transport::Both(2), timeout: LONG }, &SIZES);
    conformance::all(&Linked { transport: Transport::Both(3), timeout: LONG }, &[4, 5, 7, 8]);
}

fn reduce(comm: &mut Comm<PlainMemory>, memory: &PlainMemory) -> Result<(), Error> {
    let buffer = memory.allocate(Category::CommStaging, DType::I64, 1)?;
    comm.all_reduce(memory, ReduceOp::Sum, Purpose::Setup, None, vec![buffer])?
        .wait_on(memory, Queue::Reduce)
        .map(drop)
}

#[test]
fn deadlock_times_out_and_names_missing_rank() {
    for transport in [Transport::InMemory, Transport::Tcp, Transport::Direct, Transport::Both(2)] {
        let timeout = Duration::from_millis(500);
        let outcomes = outcomes(&Linked { transport, timeout }, 2, &|mut seat| {
            let comm = if seat.gathers.rank() == 1 { &mut seat.reductions } else { &mut seat.gathers };
            reduce(comm, &seat.memory)
        });
        for outcome in outcomes {
            let Err(Error::Comm(CommError::Missing { missing, .. })) = outcome else { panic!("{outcome:?}") };
            assert_eq!(missing.len(), 1);
        }
    }
}

#[test]
fn early_returning_rank_is_named() {
    for transport in [Transport::InMemory, Transport::Tcp, Transport::Direct, Transport::Both(2)] {
        let outcomes = outcomes(&Linked { transport, timeout: LONG }, 3, &|mut seat| {
            // Over TCP, ranks notice each other only from their first collective on.
            reduce(&mut seat.gathers, &seat.memory)?;
            if seat.gathers.rank() == 1 { Ok(()) } else { reduce(&mut seat.gathers, &seat.memory) }
        });
        for (rank, outcome) in outcomes.into_iter().enumerate().filter(|(rank, _)| *rank != 1) {
            let Err(Error::Comm(CommError::PeerFailed { rank: named, .. })) = outcome else {
                panic!("rank {rank}: {outcome:?}")
            };
            assert_eq!(named, Rank(1), "{transport:?}");
        }
    }
}
