//! Tests of single rules of the protocol, each in the smallest world that shows it.

use std::time::Duration;

use fsdp_core::{FailureKind, Rank};

use super::super::*;
use super::sim::{DEAD_AFTER, HEARTBEAT};
use crate::process::frame::Frame;
use crate::process::message::{Join, Message, Refusal};
use crate::process::world::{Facts, Failure, ProcessEntry, Roster, Verdict};

const GENERATION: u64 = 7;
const TICK: Duration = Duration::from_millis(500);

fn join(process: usize) -> Join {
    let facts = Facts {
        host: format!("n{process}"),
        pid: process as u32,
        addresses: Vec::new(),
        cpu_model: String::new(),
        device: String::new(),
    };
    Join { version: "1".to_owned(), process, processes: 3, local_ranks: 1, nonce: process as u64, facts }
}

/// A leader with connections 1 and 2, to the processes with these indices.
struct World {
    leader: Leader,
    time: Duration,
}

impl World {
    fn joining() -> Self {
        let leader = Leader::new(join(0), GENERATION, Pulse::new(HEARTBEAT, DEAD_AFTER));
        World { leader, time: Duration::ZERO }
    }

    fn begun() -> Self {
        let mut world = Self::joining();
        for process in [1, 2] {
            world.leader.opened(ConnectionId(process));
            world.receives(process, Message::Join(join(process)));
        }
        for process in [1, 2] {
            world.receives(process, Message::Ready { round: 1 });
        }
        let events = world.events();
        assert!(matches!(events.as_slice(), [Event::Go(_)]), "{events:?}");
        world
    }

    fn receives(&mut self, process: usize, message: Message) {
        let generation = if matches!(message, Message::Join(_)) { 0 } else { GENERATION };
        self.leader.received(ConnectionId(process), Frame { generation, message });
    }

    /// Lets time pass while the others stay alive.
    fn pass(&mut self, time: Duration) {
        let end = self.time + time;
        while self.time < end {
            self.time += TICK;
            [1, 2].into_iter().for_each(|process| self.receives(process, Message::Heartbeat));
            self.leader.tick(self.time);
        }
    }

    fn sent(&mut self) -> Vec<Message> {
        let sent = |output| if let Output::Send(_, frame) = output { Some(frame.message) } else { None };
        self.leader.take().into_iter().filter_map(sent).collect()
    }

    fn events(&mut self) -> Vec<Event> {
        let event = |output| if let Output::Event(event) = output { Some(event) } else { None };
        self.leader.take().into_iter().filter_map(event).collect()
    }

    fn verdicts(&mut self) -> Vec<Verdict> {
        let verdict = |event| if let Event::Verdict(verdict) = event { Some(verdict) } else { None };
        self.events().into_iter().filter_map(verdict).collect()
    }
}

fn failure(rank: usize, cause: &str) -> Failure {
    let kind = FailureKind::Permanent;
    Failure { rank: Some(Rank(rank)), cause: cause.to_owned(), kind, last_call: None }
}

#[test]
fn go_requires_all_processes_ready_for_same_roster() {
    let mut world = World::joining();
    for process in [1, 2] {
        world.leader.opened(ConnectionId(process));
        world.receives(process, Message::Join(join(process)));
    }
    world.receives(1, Message::Ready { round: 1 });
    assert_eq!(world.events(), []);
    // Process 2 reconnects: the round for which process 1 was ready is void.
    world.leader.closed(ConnectionId(2), "cut");
    world.leader.opened(ConnectionId(3));
    world.receives(3, Message::Join(join(2)));
    world.receives(3, Message::Ready { round: 2 });
    world.receives(1, Message::Ready { round: 1 });
    assert_eq!(world.events(), []);
    world.receives(1, Message::Ready { round: 2 });
    assert!(matches!(world.events().as_slice(), [Event::Go(_)]));
}

#[test]
fn verdict_prefers_blamed_process_own_report() {
    let mut world = World::begun();
    world.receives(1, Message::Failed(failure(2, "it has closed its links")));
    assert_eq!(world.verdicts(), []);
    world.receives(2, Message::Failed(failure(2, "the loss is not finite")));
    let verdicts = world.verdicts();
    assert_eq!(verdicts.len(), 1);
    assert_eq!((verdicts[0].process, verdicts[0].failure.cause.as_str()), (2, "the loss is not finite"));
    world.pass(HEARTBEAT * 5);
    assert_eq!(world.verdicts(), [], "there is one verdict");
}

#[test]
fn blame_becomes_verdict_if_blamed_process_stays_silent() {
    let mut world = World::begun();
    world.receives(1, Message::Failed(failure(2, "it has closed its links")));
    world.pass(HEARTBEAT);
    assert_eq!(world.verdicts(), []);
    world.pass(HEARTBEAT);
    let verdicts = world.verdicts();
    assert_eq!(verdicts.len(), 1);
    assert_eq!((verdicts[0].process, verdicts[0].failure.cause.as_str()), (2, "it has closed its links"));
}

#[test]
fn suspended_leader_blames_no_process() {
    let mut world = World::begun();
    world.pass(HEARTBEAT);
    // After a pause of one hour, a tick comes before the messages of the others.
    world.time += Duration::from_secs(3600);
    world.leader.tick(world.time);
    world.pass(DEAD_AFTER * 2);
    assert_eq!(world.verdicts(), []);
}

#[test]
fn silent_process_is_dead_only_after_timeout() {
    let mut world = World::begun();
    world.pass(HEARTBEAT);
    let silent_since = world.time;
    let ticks = (0..40).map(|_| {
        world.time += TICK;
        world.receives(1, Message::Heartbeat);
        world.leader.tick(world.time);
        world.verdicts().pop()
    });
    let verdict = ticks.flatten().next().expect("20 s are enough");
    assert_eq!((verdict.process, verdict.failure.cause.as_str()), (2, "it was silent for 15 s"));
    let silence = world.time - silent_since;
    assert!(silence >= DEAD_AFTER - TICK && silence <= DEAD_AFTER, "after {silence:?}");
}

#[test]
fn giving_for_foreign_rank_is_rejected() {
    let mut world = World::begun();
    world.receives(1, Message::Give { topic: "save".to_owned(), rank: 2, value: Vec::new() });
    let verdict = &world.verdicts()[0];
    assert_eq!(verdict.process, 1);
    assert!(verdict.failure.cause.contains("sent an unexpected message"), "{verdict}");
}

#[test]
fn leader_leaves_last_or_after_timeout() {
    let mut world = World::begun();
    world.leader.request(Request::Leave);
    world.receives(1, Message::Goodbye);
    world.leader.closed(ConnectionId(1), "closed");
    world.pass(LEAVE_MAX - TICK);
    assert!(!world.events().contains(&Event::Left));
    world.pass(TICK);
    let outputs = world.leader.take();
    let says_goodbye = |output: &Output| matches!(output, Output::Send(to, frame) if frame.message == Message::Goodbye && *to == [ConnectionId(2)]);
    assert!(outputs.iter().any(says_goodbye), "who is there still is told");
    assert!(outputs.iter().any(|output| matches!(output, Output::Event(Event::Left))));
}

#[test]
fn departed_process_is_lost_without_verdict() {
    let mut world = World::begun();
    world.receives(1, Message::Goodbye);
    world.leader.closed(ConnectionId(1), "closed");
    world.time += DEAD_AFTER;
    world.receives(2, Message::Heartbeat);
    world.leader.tick(world.time);
    let events = world.events();
    let [Event::Lost { ranks, error }] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!(*ranks, 1..2);
    assert_eq!(error.to_string(), "rank 1 failed: process 1 (pid 1 on host n1): it has left");
}

#[test]
fn other_program_version_is_rejected() {
    let mut world = World::joining();
    world.leader.opened(ConnectionId(1));
    world.receives(1, Message::Join(Join { version: "2".to_owned(), ..join(1) }));
    let sent = world.sent();
    let [Message::Refused(refusal)] = sent.as_slice() else { panic!("{sent:?}") };
    insta::assert_snapshot!(
        refusal,
        @"its program is fsdp 2, but process 0 runs fsdp 1: start the same program everywhere"
    );
}

#[test]
fn rejoining_process_keeps_its_index_and_twin_is_rejected() {
    let mut world = World::joining();
    for connection in [1, 2] {
        world.leader.opened(ConnectionId(connection));
        world.receives(connection, Message::Join(join(1)));
        assert!(matches!(world.sent().as_slice(), [Message::Joined]));
    }
    assert_eq!(world.leader.missing(), [2]);
    world.leader.opened(ConnectionId(3));
    world.receives(3, Message::Join(Join { nonce: 9, ..join(1) }));
    assert!(matches!(world.sent().as_slice(), [Message::Refused(Refusal::Duplicate { process: 1, .. })]));
}

#[test]
fn silent_connection_is_closed() {
    let mut world = World::joining();
    world.leader.opened(ConnectionId(1));
    for second in 1..=15 {
        world.leader.tick(Duration::from_secs(second));
    }
    let outputs = world.leader.take();
    assert!(outputs.iter().any(|output| matches!(output, Output::Close(ConnectionId(1)))), "{outputs:?}");
}

#[test]
fn verdict_on_dead_process_names_last_collective() {
    let mut world = World::begun();
    for call in ["all-gather #6", "all-gather #7"] {
        world.receives(2, Message::Calling { call: call.to_owned() });
    }
    world.receives(1, Message::Calling { call: "reduce-scatter #3".to_owned() });
    world.leader.closed(ConnectionId(2), "its connection was closed");
    let verdicts = world.verdicts();
    let text = verdicts[0].to_string();
    assert!(text.ends_with(": its connection was closed; its last collective was all-gather #7"), "{text}");
}

#[test]
fn verdict_on_dead_leader_names_last_collective() {
    let mut world = World::begun();
    world.leader.request(Request::Calling { call: "all-gather #7".to_owned() });
    let calling = world.sent().pop().expect("the leader tells all");
    assert_eq!(calling, Message::Calling { call: "all-gather #7".to_owned() });
    let mut member = Member::new(join(1), Pulse::new(HEARTBEAT, DEAD_AFTER));
    let entry = |process| ProcessEntry { ranks: process..process + 1, facts: join(process).facts };
    let roster = Roster { generation: GENERATION, processes: (0..3).map(entry).collect() };
    member.opened(ConnectionId(1));
    for message in [Message::Joined, Message::Prepare { round: 1, roster }, Message::Go { round: 1 }, calling]
    {
        member.received(ConnectionId(1), Frame { generation: GENERATION, message });
    }
    member.closed(ConnectionId(1), "its connection was closed");
    let verdict =
        |output| if let Output::Event(Event::Verdict(verdict)) = output { Some(verdict) } else { None };
    let text = member.take().into_iter().find_map(verdict).expect("the world has failed").to_string();
    insta::assert_snapshot!(
        text,
        @"process 0 (pid 0 on host n0): its connection was closed; its last collective was all-gather #7"
    );
}
