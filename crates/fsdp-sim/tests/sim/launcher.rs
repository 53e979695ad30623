//! Runs the conformance suite in simulated worlds.

use std::sync::{Arc, Mutex};

use fsdp_comm::conformance::{Body, Launcher, Member, PlainMemory};
use fsdp_core::Error;
use fsdp_sim::{RankFailure, World, WorldOptions};

/// The worlds to run in.
pub(crate) struct Simulated {
    pub(crate) cores: usize,
    pub(crate) share_unsharded: bool,
    pub(crate) can_alias: bool,
}

impl Default for Simulated {
    fn default() -> Self {
        Self { cores: 4, share_unsharded: false, can_alias: true }
    }
}

impl Launcher for Simulated {
    type Memory = PlainMemory;

    fn run(&self, ranks: usize, body: &Body<'_, PlainMemory>) -> Vec<Result<(), Error>> {
        let options = WorldOptions {
            cores: self.cores,
            share_unsharded: self.share_unsharded,
            stack_bytes: 256 << 10,
            ..WorldOptions::new(ranks)
        };
        let results: Vec<_> = (0..ranks).map(|_| Mutex::new(None)).collect();
        let ended = World::run(options, |mut context| {
            let memory = Arc::new(PlainMemory::new(self.can_alias));
            let result = body(Member { memory, comm: context.comm(), second: context.comm() });
            let ends_well = result.is_ok();
            *results[context.rank().0].lock().expect("one rank writes it") = Some(result);
            if ends_well { Ok(()) } else { Err("see the results") }
        });
        if let Err(error) = ended {
            let causes = error.others.into_iter().chain([(error.rank, *error.cause)]);
            for (rank, cause) in causes {
                assert!(!matches!(cause, RankFailure::Panic(_)), "{rank}: {cause}");
            }
        }
        let result = |result: Mutex<Option<_>>| result.into_inner().ok().flatten();
        results.into_iter().map(|slot| result(slot).expect("every body has returned")).collect()
    }
}
