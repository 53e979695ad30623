//! The link: turns exchanges into requests to the MPI thread, and its answers into results.

use std::ffi::c_int;
use std::sync::Arc;

use fsdp_comm::{Alarm, Exchanged, Incoming, Link, Outgoing, place, scatter};
use fsdp_core::Rank;
use fsdp_core::comm::CommError;

use crate::engine::transport;
use crate::exchange::{Answer, CHANNELS, MESSAGE_MAX, Received, SHORT_MAX, Sent, Transfer};
use crate::ffi::lend;
use crate::preamble::preamble;
use crate::world::Shared;

/// One rank's endpoint of a group.
pub(crate) struct MpiLink {
    shared: Arc<Shared>,
    channel: u64,
    index: usize,
    members: Arc<[Rank]>,
}

impl MpiLink {
    pub(crate) fn new(shared: Arc<Shared>, channel: u64, members: Arc<[Rank]>) -> Self {
        shared.use_channel(channel);
        Self { channel, index: place(shared.rank, &members), shared, members }
    }

    fn peer(&self, member: usize) -> c_int {
        self.members[member].0 as c_int
    }

    fn tag(&self) -> Result<c_int, CommError> {
        if self.channel < CHANNELS {
            return Ok(self.channel as c_int);
        }
        let reason = format!(
            "channel {} is beyond the {CHANNELS} that MPI has tags for: make fewer groups",
            self.channel
        );
        Err(CommError::Transport { rank: self.shared.rank, reason })
    }

    fn exchanged(
        &self,
        answer: Answer,
        incoming: Option<&mut Incoming<'_, '_>>,
    ) -> Result<Exchanged, CommError> {
        match answer {
            Answer::Done(short) => {
                if let Some(incoming) = incoming.filter(|incoming| is_short(incoming.len_bytes())) {
                    scatter(&short, incoming.parts);
                }
                Ok(Exchanged::Done)
            }
            Answer::Differs { header, len_bytes } => Ok(Exchanged::Differs { header, len_bytes }),
            Answer::Late(rank) => {
                let late = (0..self.members.len()).find(|member| self.peer(*member) == rank);
                Ok(Exchanged::Late { peer: late.expect("only members are waited for") })
            }
            Answer::Alarm(error) => Err(error),
            Answer::Failed(error) => Err(transport(self.shared.rank, &error)),
        }
    }
}

fn is_short(len_bytes: u64) -> bool {
    len_bytes <= SHORT_MAX as u64
}

impl Link for MpiLink {
    fn rank(&self) -> usize {
        self.index
    }

    fn members(&self) -> &[Rank] {
        &self.members
    }

    fn exchange(
        &mut self,
        outgoing: Option<Outgoing<'_>>,
        mut incoming: Option<Incoming<'_, '_>>,
    ) -> Result<Exchanged, CommError> {
        let channel = self.tag()?;
        let (sent_long, mut first) = (outgoing.filter(|out| !is_short(out.len_bytes())), Vec::new());
        if let Some(out) = &outgoing {
            first.extend_from_slice(&preamble(out.header, out.len_bytes()));
            if sent_long.is_none() {
                out.parts.iter().for_each(|part| first.extend_from_slice(part));
            }
        }
        let to = outgoing.map(|out| self.peer(out.to));
        let expected = incoming
            .as_ref()
            .map(|incoming| (self.peer(incoming.from), preamble(incoming.header, incoming.len_bytes())));
        let received_long = incoming.as_mut().filter(|incoming| !is_short(incoming.len_bytes()));
        let sent_parts = sent_long.map_or(&[][..], |out| out.parts);
        let received_parts = received_long.map_or(&mut [][..], |incoming| &mut *incoming.parts);
        let answer = lend(sent_parts, received_parts, MESSAGE_MAX, |sent, received| {
            let sent = to.map(|to| Sent { to, first, messages: sent });
            let received =
                expected.map(|(from, preamble)| Received { from, expected: preamble, messages: received });
            self.shared.exchange(Transfer { channel, sent, received })
        })?;
        self.exchanged(answer, incoming.as_mut())
    }

    fn unused_channel(&self) -> u64 {
        self.shared.unused_channel()
    }

    fn subgroup(&self, members: Arc<[Rank]>, channel: u64) -> Box<dyn Link> {
        Box::new(Self::new(self.shared.clone(), channel, members))
    }

    fn alarm(&self) -> Arc<dyn Alarm> {
        self.shared.alarm.clone()
    }
}
