//! Ranks that communicate over TCP, like those of several processes: threads, with a listener per simulated process.

use std::fmt;
use std::net::Ipv4Addr;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use fsdp_comm::auth::Token;
use fsdp_comm::conformance;
use fsdp_comm::launch::{FailureReason, LaunchFailure, Launcher, Seat};
use fsdp_comm::{InMemoryLinks, LinkComm, MakeLink, TcpAcceptor, TcpLinks, TcpWorld, local_links};
use fsdp_core::Rank;
use fsdp_core::comm::{Comm, CommError};
use fsdp_nn::{HostMemory, HostOptions};

/// A world that takes longer than this, on any machine, hangs.
const HANGS_AFTER: Duration = Duration::from_secs(600);

/// Launches worlds whose processes hold the given number of ranks each, the last one perhaps fewer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OverTcp {
    pub(crate) ranks_per_process: usize,
}

impl OverTcp {
    /// Returns, for each process, the function that makes the links of its ranks.
    fn links(self, world: usize, alarm: &InMemoryLinks) -> Vec<Arc<MakeLink>> {
        let each = self.ranks_per_process;
        let processes = 0..world.div_ceil(each);
        let doors: Vec<_> =
            processes.map(|_| TcpAcceptor::bind(Ipv4Addr::LOCALHOST.into()).unwrap()).collect();
        let address = |rank: usize| vec![doors[rank / each].address().unwrap()];
        let addresses: Vec<_> = (0..world).map(address).collect();
        let open = |(process, door): (usize, TcpAcceptor)| {
            let (addresses, alarm, timeout) = (addresses.clone(), alarm.alarm(), HANGS_AFTER);
            let tcp = TcpWorld {
                addresses,
                generation: 1,
                alarm: Arc::clone(&alarm),
                timeout,
                direct_from: Some(1 << 10),
            };
            let links: TcpLinks = door.open(tcp, Token::open()).unwrap();
            let far: Arc<MakeLink> = Arc::new(move |channel, rank| links.link(channel, rank));
            local_links(far, process * each..world.min((process + 1) * each), world, timeout, alarm)
        };
        doors.into_iter().enumerate().map(open).collect()
    }
}

impl Launcher for OverTcp {
    type Memory = HostMemory;

    fn launch<T: Send, E: Send + fmt::Debug + fmt::Display>(
        &self,
        world: usize,
        body: &(dyn Fn(Seat<HostMemory>) -> Result<T, E> + Sync),
    ) -> Result<Vec<T>, LaunchFailure<E>> {
        // Only its alarm is used: an error raised by one of these processes reaches all.
        let alarm = InMemoryLinks::new(world, HANGS_AFTER);
        let links = self.links(world, &alarm);
        let run = |rank: Rank| {
            let links = &links[rank.0 / self.ranks_per_process];
            let comm = |channel| Comm::new(Box::new(LinkComm::new(links(channel, rank)).unwrap()));
            let options = HostOptions { poison: true, resident: true, ..HostOptions::default() };
            let memory = Arc::new(HostMemory::new(options).unwrap());
            body(Seat { rank, memory, gathers: comm(0), reductions: comm(1) }).inspect_err(|error| {
                alarm.alarm().raise(CommError::PeerFailed { rank, reason: error.to_string() });
            })
        };
        thread::scope(|scope| {
            let run = &run;
            let ranks: Vec<_> = (0..world).map(|rank| scope.spawn(move || run(Rank(rank)))).collect();
            // Joins all ranks before it returns the first failure.
            let outcomes: Vec<_> = ranks.into_iter().map(|rank| rank.join()).collect();
            let outcome = |(rank, outcome): (usize, thread::Result<Result<T, E>>)| {
                let outcome = outcome.unwrap_or_else(|panic| resume_unwind(panic));
                outcome
                    .map_err(|error| LaunchFailure { rank: Rank(rank), reason: FailureReason::Error(error) })
            };
            outcomes.into_iter().enumerate().map(outcome).collect()
        })
    }
}

#[test]
fn training_memory_collectives_pass_conformance_over_tcp() {
    conformance::all(&OverTcp { ranks_per_process: 1 }, &[1, 2, 3, 4, 5, 8]);
    conformance::all(&OverTcp { ranks_per_process: 2 }, &[4, 5]);
}
