//! Links for a process that holds several ranks: they communicate through memory among themselves, and over another
//! transport with the ranks of other processes.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use fsdp_core::Rank;
use fsdp_core::comm::CommError;

use crate::in_memory::InMemoryLinks;
use crate::link::{Alarm, Exchanged, Incoming, Link, Outgoing};

/// Creates the link of a rank of this process on a channel.
pub type MakeLink = dyn Fn(u64, Rank) -> Box<dyn Link> + Send + Sync;

/// Links of a world in which this process holds the ranks `local`; `far` connects all ranks. No receive waits longer
/// than `timeout`.
pub fn local_links(
    far: Arc<MakeLink>,
    local: Range<usize>,
    world: usize,
    timeout: Duration,
    alarm: Arc<dyn Alarm>,
) -> Arc<MakeLink> {
    if local.len() < 2 {
        return far;
    }
    let near = InMemoryLinks::within(world, timeout, Some(alarm));
    Arc::new(move |channel, rank| {
        let (near, far) = (near.link(channel, rank), far(channel, rank));
        Box::new(HybridLink { near, far, local: local.clone() })
    })
}

struct HybridLink {
    near: Box<dyn Link>,
    far: Box<dyn Link>,
    local: Range<usize>,
}

impl HybridLink {
    fn is_near(&self, member: usize) -> bool {
        self.local.contains(&self.far.members()[member].0)
    }
}

impl Link for HybridLink {
    fn rank(&self) -> usize {
        self.far.rank()
    }

    fn members(&self) -> &[Rank] {
        self.far.members()
    }

    fn exchange(
        &mut self,
        outgoing: Option<Outgoing<'_>>,
        incoming: Option<Incoming<'_, '_>>,
    ) -> Result<Exchanged, CommError> {
        let (near_out, far_out) = outgoing.map_or((None, None), |message| match self.is_near(message.to) {
            true => (Some(message), None),
            false => (None, Some(message)),
        });
        let (near_in, far_in) = incoming.map_or((None, None), |message| match self.is_near(message.from) {
            true => (Some(message), None),
            false => (None, Some(message)),
        });
        // This order avoids deadlock: sending through memory never blocks, and every rank finishes its exchange over
        // the far link before it waits for memory.
        let done = || Ok(Exchanged::Done);
        near_out.map_or_else(done, |message| self.near.exchange(Some(message), None))?;
        if far_out.is_some() || far_in.is_some() {
            let exchanged = self.far.exchange(far_out, far_in)?;
            if exchanged != Exchanged::Done {
                return Ok(exchanged);
            }
        }
        near_in.map_or_else(done, |message| self.near.exchange(None, Some(message)))
    }

    fn unused_channel(&self) -> u64 {
        self.near.unused_channel().max(self.far.unused_channel())
    }

    fn subgroup(&self, members: Arc<[Rank]>, channel: u64) -> Box<dyn Link> {
        let (near, far) = (self.near.subgroup(members.clone(), channel), self.far.subgroup(members, channel));
        Box::new(Self { near, far, local: self.local.clone() })
    }

    fn alarm(&self) -> Arc<dyn Alarm> {
        self.far.alarm()
    }
}
