//! Tests of processes as threads, over local sockets.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use fsdp_core::comm::CommError;
use fsdp_core::{FailureKind, Rank};

use super::driver::PURPOSE;
use super::*;
use crate::auth::{AuthError, Side, Token, authenticate};
use crate::process::Refusal;
use crate::process::frame::{Decoder, Frame};
use crate::process::message::Message;
use crate::process::world::Facts;

/// A test that exceeds this hangs, on any machine and under any load.
const LIMIT: Duration = Duration::from_secs(600);

fn token(byte: u8) -> Token {
    Token::from_hex(&format!("{byte:02x}").repeat(32)).unwrap()
}

/// Options of a process, which holds `process + 1` ranks.
fn options(process: usize, processes: usize) -> ControlOptions {
    let facts = Facts {
        host: format!("n{process}"),
        pid: 100 + process as u32,
        addresses: vec![SocketAddr::from(([10, 0, 0, 1], 1000 + process as u16))],
        cpu_model: "model".to_owned(),
        device: "cpu".to_owned(),
    };
    ControlOptions {
        process,
        processes,
        local_ranks: process + 1,
        facts,
        token: token(1),
        heartbeat: Duration::from_millis(200),
        dead_after: 2 * LIMIT,
        join_timeout: LIMIT,
    }
}

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

fn follow(address: SocketAddr, options: ControlOptions) -> Result<Arc<Control>, JoinError> {
    Control::follow(&|| Ok(vec![address]), options)
}

/// A world of `processes` processes.
fn world(processes: usize) -> Vec<Arc<Control>> {
    let (listener, address) = listener();
    thread::scope(|scope| {
        let leader = scope.spawn(move || Control::lead(listener, options(0, processes)));
        let others =
            (1..processes).map(|process| scope.spawn(move || follow(address, options(process, processes))));
        let others: Vec<_> = others.collect();
        [leader].into_iter().chain(others).map(|thread| thread.join().unwrap().unwrap()).collect()
    })
}

fn leave(world: &[Arc<Control>]) {
    thread::scope(|scope| world.iter().for_each(|control| drop(scope.spawn(|| control.leave()))));
}

/// Waits until a process has a verdict, and returns it.
fn verdict(control: &Control) -> Verdict {
    let (sender, receiver) = mpsc::channel();
    control.on_verdict(Box::new(move |verdict| sender.send(verdict.clone()).unwrap()));
    receiver.recv_timeout(LIMIT).expect("a verdict comes")
}

#[test]
fn processes_join_in_any_order_and_exchange_until_leaving() {
    let (listener, address) = listener();
    let known = Mutex::new(Vec::new());
    let begun = thread::scope(|scope| {
        // They start before the leader has an address.
        let leader = || Ok(known.lock().unwrap().clone());
        let mut threads: Vec<_> = [3, 1, 2]
            .map(|process| scope.spawn(move || Control::follow(&leader, options(process, 4))))
            .into();
        known.lock().unwrap().push(address);
        threads.push(scope.spawn(move || Control::lead(listener, options(0, 4))));
        let mut begun: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect();
        begun.sort_by_key(|control| control.process);
        begun
    });
    let ranks: Vec<_> = begun.iter().map(|control| control.local()).collect();
    assert_eq!(ranks, [0..1, 1..3, 3..6, 6..10]);
    for control in &begun {
        assert_eq!(control.roster(), begun[0].roster());
        assert_eq!((control.world(), control.is_leader()), (10, control.process == 0));
        control.local().for_each(|rank| control.give("save", Rank(rank), vec![rank as u8; rank]).unwrap());
    }
    assert_eq!(begun[0].roster().processes[3].facts, options(3, 4).facts);
    let expected: Vec<_> = (0..10).map(|rank| vec![rank as u8; rank]).collect();
    assert_eq!(begun[0].collect("save", 10, LIMIT).unwrap(), expected);
    begun[0].announce("saved", vec![7; 100]).unwrap();
    begun[1].announce("of process 1", vec![1; 10]).unwrap();
    assert!(begun.iter().all(|control| control.hear("saved", LIMIT).unwrap() == [7; 100]));
    assert!(begun.iter().all(|control| control.hear("of process 1", LIMIT).unwrap() == [1; 10]));
    leave(&begun);
    assert!(begun.iter().all(|control| control.verdict().is_none() && control.alarm().raised().is_none()));
}

#[test]
fn value_given_just_before_leaving_arrives() {
    let world = world(3);
    let value = vec![5; 8 << 20];
    for control in &world[1..] {
        control.local().for_each(|rank| control.give("last", Rank(rank), value.clone()).unwrap());
    }
    world[0].give("last", Rank(0), value.clone()).unwrap();
    leave(&world);
    assert!(world[0].collect("last", 6, LIMIT).unwrap().iter().all(|given| *given == value));
}

#[test]
fn process_death_gives_all_survivors_same_verdict() {
    let mut world = world(4);
    let dead = world.remove(2);
    dead.give("before", Rank(4), vec![4]).unwrap();
    drop(dead);
    let verdicts: Vec<_> = world.iter().map(|control| verdict(control)).collect();
    assert!(verdicts.iter().all(|verdict| *verdict == verdicts[0]));
    let reason = "process 2 (pid 102 on host n2): its connection was closed".to_owned();
    let error = CommError::PeerFailed { rank: Rank(3), reason };
    for control in &world {
        assert_eq!(control.alarm().raised(), Some(error.clone()));
        assert_eq!(control.verdict(), Some(verdicts[0].clone()));
    }
    // The rest can still finish what it has begun, but waits for a dead rank fail.
    assert_eq!(world[0].given("before"), 1, "what it gave counts");
    assert_eq!(world[0].collect("none", 6, LIMIT).unwrap_err(), AssemblyError::Failed(error));
    world[0].announce("end", vec![1]).unwrap();
    assert!(world.iter().all(|control| control.hear("end", LIMIT).unwrap() == [1]));
    leave(&world);
}

#[test]
fn collect_and_hear_fail_soon_after_verdict() {
    let world = world(2);
    world[1].fail(Failure {
        rank: Some(Rank(2)),
        cause: "the loss is not finite".to_owned(),
        kind: FailureKind::Permanent,
        last_call: Some("all_reduce 7".to_owned()),
    });
    let local_error = world[1].alarm().raised().expect("it is known at once");
    assert!(local_error.to_string().contains("the loss is not finite"), "{local_error}");
    let received = verdict(&world[0]);
    assert_eq!(received.failure.kind, FailureKind::Permanent);
    let begin = Instant::now();
    let error = world[0].collect("save", 3, LIMIT).unwrap_err();
    assert!(matches!(&error, AssemblyError::Failed(_)), "{error}");
    assert_eq!(world[1].hear("saved", LIMIT).unwrap_err(), error);
    assert!(begin.elapsed() < LIMIT / 2);
    insta::assert_snapshot!(
        error,
        @"rank 2 failed: process 1 (pid 101 on host n1): the loss is not finite; its last collective was all_reduce 7"
    );
    world[1].give("late", Rank(1), Vec::new()).unwrap_err();
    leave(&world);
}

#[test]
fn blamed_process_is_named_with_host_and_pid() {
    let world = world(3);
    let error = CommError::PeerFailed { rank: Rank(4), reason: "it has closed its links".to_owned() };
    world[1].alarm().raise(error.clone());
    assert_eq!(world[1].alarm().raised(), Some(error), "it is known here at once");
    let verdicts: Vec<_> = world.iter().map(|control| verdict(control).to_string()).collect();
    assert_eq!(verdicts, vec!["process 2 (pid 102 on host n2): it has closed its links"; 3]);
    leave(&world);
}

#[test]
fn single_process_world_starts_and_leaves_without_peers() {
    let (listener, _) = listener();
    let control = Control::lead(listener, options(0, 1)).unwrap();
    control.give("save", Rank(0), vec![1]).unwrap();
    assert_eq!(control.collect("save", 1, LIMIT).unwrap(), [[1]]);
    control.announce("saved", vec![2]).unwrap();
    assert_eq!(control.hear("saved", Duration::ZERO).unwrap(), [2]);
    control.leave();
    control.leave();
}

#[test]
fn leader_death_is_reported_by_every_follower() {
    let mut world = world(3);
    drop(world.remove(0));
    let verdicts: Vec<_> = world.iter().map(|control| verdict(control)).collect();
    assert_eq!(verdicts[0], verdicts[1]);
    assert_eq!(verdicts[0].to_string(), "process 0 (pid 100 on host n0): its connection was closed");
    world[0].hear("saved", LIMIT).unwrap_err();
    world[0].give("save", Rank(1), Vec::new()).unwrap_err();
    leave(&world);
}

/// A member that sends only what the test says.
struct Puppet {
    stream: TcpStream,
    decoder: Decoder,
}

impl Puppet {
    fn new(address: SocketAddr) -> Self {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        authenticate(&mut stream, &token(1), Side::Caller, PURPOSE).unwrap();
        Puppet { stream, decoder: Decoder::default() }
    }

    fn send(&mut self, generation: u64, message: Message) {
        self.stream.write_all(&Frame { generation, message }.encode()).unwrap();
    }

    /// The next frame other than a heartbeat.
    fn receive(&mut self) -> Frame {
        let mut chunk = [0; 1000];
        loop {
            match self.decoder.next().unwrap() {
                Some(frame) if frame.message != Message::Heartbeat => return frame,
                Some(_) => {}
                None => {
                    let len = self.stream.read(&mut chunk).unwrap();
                    assert!(len > 0, "the connection was closed");
                    self.decoder.push(&chunk[..len]);
                }
            }
        }
    }

    /// Joins as process 1 of 2 and returns the generation.
    fn join(&mut self) -> u64 {
        self.send(0, Message::Join(options(1, 2).join(1)));
        assert_eq!(self.receive().message, Message::Joined);
        let Frame { generation, message: Message::Prepare { round, .. } } = self.receive() else {
            panic!("both are there")
        };
        self.send(generation, Message::Ready { round });
        assert_eq!(self.receive().message, Message::Go { round });
        generation
    }
}

#[test]
fn silent_process_is_declared_dead_and_notified() {
    let (listener, address) = listener();
    let dead_after = Duration::from_secs(3);
    let leader =
        thread::spawn(move || Control::lead(listener, ControlOptions { dead_after, ..options(0, 2) }));
    let mut puppet = Puppet::new(address);
    puppet.join();
    let leader = leader.join().unwrap().unwrap();
    let verdict = verdict(&leader);
    assert_eq!(verdict.to_string(), "process 1 (pid 101 on host n1): it was silent for 3 s");
    assert_eq!(puppet.receive().message, Message::Verdict(verdict));
    leader.leave();
}

#[test]
fn message_from_other_world_is_rejected() {
    let (listener, address) = listener();
    let leader = thread::spawn(move || Control::lead(listener, options(0, 2)));
    let mut puppet = Puppet::new(address);
    let generation = puppet.join();
    puppet.send(generation ^ 1, Message::Give { topic: "save".to_owned(), rank: 1, value: Vec::new() });
    let leader = leader.join().unwrap().unwrap();
    let verdict = verdict(&leader).to_string();
    assert!(
        verdict.contains("it belongs to world") && verdict.contains(&format!("{generation:016x}")),
        "{verdict}"
    );
    assert_eq!(leader.given("save"), 0);
    leader.leave();
}

/// Lets processes join after strangers; returns whether the strangers did not delay them.
fn join_behind_strangers() -> bool {
    let (listener, address) = listener();
    let mut strangers: Vec<_> = (0..40).map(|_| TcpStream::connect(address).unwrap()).collect();
    strangers[0].write_all(b"GET / HTTP/1.1\r\nHost: fsdp\r\n\r\n").unwrap();
    strangers[1].write_all(&[0xff; 10_000]).unwrap();
    strangers[2].write_all(b"fsdp").unwrap();
    // A stranger that knows the token, and then violates the protocol.
    let (mut known, took) = thread::scope(|scope| {
        let begin = Instant::now();
        let leader = scope.spawn(move || Control::lead(listener, options(0, 2)));
        let known = scope.spawn(move || {
            let mut puppet = Puppet::new(address);
            puppet.stream.write_all(&[0xff; 100]).unwrap();
            puppet
        });
        let follower = scope.spawn(move || follow(address, options(1, 2)));
        let world = [leader, follower].map(|thread| thread.join().unwrap().unwrap());
        let took = begin.elapsed();
        leave(&world);
        (known.join().unwrap(), took)
    });
    let _closed_or_reset = known.stream.read_to_end(&mut Vec::new());
    let answer = strangers[0].read(&mut [0; 10]);
    assert!(matches!(answer, Ok(0) | Err(_)), "a stranger gets no answer: {answer:?}");
    took < super::driver::PROOF_MAX
}

#[test]
fn invalid_connections_do_not_delay_joining() {
    // Under load it may take that long for another reason, but not every time.
    assert!((0..5).any(|_| join_behind_strangers()), "strangers were waited for");
}

#[test]
fn wrong_token_is_rejected_and_reported_by_both_sides() {
    let (listener, address) = listener();
    let short = Duration::from_secs(5);
    let leader = thread::spawn(move || {
        Control::lead(listener, ControlOptions { join_timeout: short, ..options(0, 2) })
    });
    let (heartbeat, dead_after) = (Duration::from_millis(10), Duration::from_millis(50));
    let other = ControlOptions { token: token(2), heartbeat, dead_after, ..options(1, 2) };
    let refused = follow(address, other).err().expect("it has another token");
    assert!(
        matches!(
            &refused,
            JoinError::Follow { obstacle: Obstacle::Auth { source: AuthError::Token, .. }, .. }
        ),
        "{refused}"
    );
    assert_eq!(refused.kind(), FailureKind::Input);
    let error = leader.join().unwrap().err().expect("nobody has joined");
    insta::assert_snapshot!(
        error,
        @"process 0 has waited 5 s for process 1: check their output, or allow more time; a connection was refused: the other end has another token: start all processes of a run with the same one"
    );
}

#[test]
fn duplicate_process_index_is_rejected_and_first_kept() {
    let (listener, address) = listener();
    let leader = thread::spawn(move || Control::lead(listener, options(0, 3)));
    let first = thread::spawn(move || follow(address, options(1, 3)));
    let mut puppet = Puppet::new(address);
    let mut twin = Puppet::new(address);
    puppet.send(0, Message::Join(options(2, 3).join(1)));
    assert_eq!(puppet.receive().message, Message::Joined);
    twin.send(0, Message::Join(options(2, 3).join(2)));
    let refusal = Refusal::Duplicate { process: 2, host: "n2".to_owned(), pid: 102 };
    assert_eq!(twin.receive().message, Message::Refused(refusal));
    // A process that has lost its connection may return.
    drop(puppet);
    let third = thread::spawn(move || follow(address, options(2, 3)));
    let world = [leader, first, third].map(|thread| thread.join().unwrap().unwrap());
    let error = follow(address, ControlOptions { join_timeout: Duration::from_secs(4), ..options(1, 3) });
    let error = error.err().expect("the world has begun");
    assert!(
        matches!(&error, JoinError::Follow { obstacle: Obstacle::Refused(Refusal::Started), .. }),
        "{error}"
    );
    leave(&world);
}

#[test]
fn join_that_contradicts_leader_is_rejected_with_reason() {
    let (listener, address) = listener();
    let leader = thread::spawn(move || Control::lead(listener, options(0, 2)));
    let messages = [(1, 3), (5, 2), (0, 2)].map(|(process, processes)| {
        let join = options(process, processes);
        if process == 0 {
            let mut puppet = Puppet::new(address);
            puppet.send(0, Message::Join(join.join(1)));
            return match puppet.receive().message {
                Message::Refused(refusal) => refusal.to_string(),
                other => panic!("{other:?}"),
            };
        }
        let error = follow(address, join).err().expect("it is refused");
        let JoinError::Follow { obstacle, .. } = error else { panic!("{error}") };
        obstacle.to_string()
    });
    insta::assert_snapshot!(messages.join("\n"), @r"
    process 0 refuses it: it expects 3 processes, but process 0 expects 2: give every process the same number
    process 0 refuses it: its index is 5, but there are 2 processes, counted from 0
    process 0 has already joined (pid 100 on host n0): give every process its own index
    ");
    // None of them holds the missing index.
    let other = thread::spawn(move || follow(address, options(1, 2)));
    leave(&[leader, other].map(|thread| thread.join().unwrap().unwrap()));
}

#[test]
fn leader_serves_48_processes() {
    let begin = Instant::now();
    let world = world(48);
    // One second for each of them would be longer.
    assert!(begin.elapsed() < Duration::from_secs(40), "joined in {:?}", begin.elapsed());
    let ranks = world[0].world();
    for control in &world {
        control.local().for_each(|rank| control.give("save", Rank(rank), vec![1]).unwrap());
    }
    assert_eq!(world[0].collect("save", ranks, LIMIT).unwrap().len(), ranks);
    leave(&world);
}

#[test]
fn temporary_rendezvous_error_is_retried() {
    let (listener, address) = listener();
    let left = std::cell::Cell::new(3);
    let find = |kind: ErrorKind| {
        left.set(left.get() - 1);
        match left.get() {
            0 => Ok(vec![address]),
            _ => Err(RendezvousError::Io { action: "read", path: "store".into(), source: kind.into() }),
        }
    };
    let wrong = Control::follow(&|| find(ErrorKind::NotFound), options(1, 2));
    assert_eq!(wrong.err().map(|error| error.kind()), Some(FailureKind::Input));
    thread::scope(|scope| {
        let leader = scope.spawn(|| Control::lead(listener, options(0, 2)).unwrap());
        let other = Control::follow(&|| find(ErrorKind::TimedOut), options(1, 2)).unwrap();
        assert_eq!(left.get(), 0);
        leave(&[leader.join().unwrap(), other]);
    });
}
