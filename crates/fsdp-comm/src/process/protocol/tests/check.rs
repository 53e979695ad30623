//! Invariants that hold once every process of a simulated world has ended.

use std::time::Duration;

use super::faults::Fault;
use super::sim::{DEAD_AFTER, HEARTBEAT, Node, Sim};

/// The topic that a process announces as soon as its world has begun.
pub(super) fn own_topic(process: usize) -> String {
    format!("of process {process}")
}

pub(super) fn check(sim: &Sim, delay_max: u64) {
    let delay_max = Duration::from_millis(delay_max);
    let leader = &sim.nodes[0];
    check_go(sim);
    check_gifts(sim, leader, delay_max);
    check_deaths(sim, leader, delay_max);
    for node in &sim.nodes {
        check_verdict(sim, leader, node, delay_max);
        check_loss_of_leader(leader, node);
    }
    if sim.faults.is_empty() {
        check_peace(sim);
    }
}

/// Processes that begin all begin the same world, whose processes were all alive when its roster was sent.
fn check_go(sim: &Sim) {
    let rosters: Vec<_> = sim.nodes.iter().filter_map(|node| node.go.as_ref()).collect();
    let Some(roster) = rosters.first() else {
        return;
    };
    assert!(rosters.iter().all(|other| other == roster), "rosters differ");
    assert_eq!(roster.world(), sim.world());
    for (process, entry) in roster.processes.iter().enumerate() {
        let node = &sim.nodes[entry.facts.pid as usize];
        assert_eq!(node.process, process);
        assert_eq!(entry.ranks, sim.ranks_of(process));
        assert!(node.born <= sim.last_prepare, "process {process} was not there");
        assert!(node.died.is_none_or(|died| died >= sim.last_prepare), "process {process} was dead");
    }
}

/// All values given by a process that could be heard have arrived, however the process ended.
fn check_gifts(sim: &Sim, leader: &Node, delay_max: Duration) {
    let Some(end) = leader.died.filter(|_| !leader.is_unheard) else {
        return;
    };
    for node in sim.nodes.iter().filter(|node| !node.is_unheard) {
        for (rank, given) in &node.given {
            let is_in_time = *given + delay_max * 2 + sim.stopped_for < end;
            let has_come = leader.given.contains_key(rank);
            assert!(has_come || !is_in_time, "rank {rank} gave at {given:?}, which did not come");
        }
    }
}

/// There is at most one verdict per process; it is the leader's if the leader has one, and arrives in time.
fn check_verdict(sim: &Sim, leader: &Node, node: &Node, delay_max: Duration) {
    let process = node.process;
    assert!(node.verdicts.len() <= 1, "process {process} got {} verdicts", node.verdicts.len());
    let Some((decided, verdict)) = leader.verdicts.first() else {
        return;
    };
    if node.is_cut_off || leader.is_cut_off || node.go.is_none() {
        return;
    }
    let Some((heard, own)) = node.verdicts.first() else {
        let left = node.died.expect("all have ended");
        let bound = *decided + delay_max * 2 + HEARTBEAT + sim.stopped_for;
        assert!(node.has_left && left <= bound, "process {process} was never told: {verdict}");
        return;
    };
    assert_eq!(own, verdict, "process {process} and the leader disagree");
    assert!(sim.faulty.contains(&verdict.process), "an innocent process was blamed: {verdict}");
    let fault = sim.faults.iter().rfind(|fault| *fault <= decided).expect("a verdict has a reason");
    let bound = *fault + DEAD_AFTER + HEARTBEAT * 4 + delay_max * 2 + sim.stopped_for;
    assert!(*heard <= bound, "process {process} was told at {heard:?}, after {bound:?}: {verdict}");
}

/// Every death of a process in a world is noticed.
fn check_deaths(sim: &Sim, leader: &Node, delay_max: Duration) {
    for (time, process, fault) in sim.deaths.iter().filter(|_| !leader.is_cut_off) {
        let is_noticed = match fault {
            // A process that blames another can leave normally before that one has been heard.
            Fault::Blame => {
                let heard = *time + HEARTBEAT * 3 + delay_max * 2 + sim.stopped_for;
                leader.died.is_some_and(|died| died > heard)
            }
            // A leader that was stopped too may have missed the silence.
            Fault::Stop(stop) => sim.stopped_for == *stop,
            _ => true,
        };
        let what = format!("{fault:?} of process {process} at {time:?}");
        assert!(!leader.verdicts.is_empty() || !is_noticed, "nobody was told: {what}");
    }
}

/// A process that left without the announcement it waited for knows why.
fn check_loss_of_leader(leader: &Node, node: &Node) {
    if node.has_left && !node.announced.contains("save") && !leader.has_left {
        assert_eq!(node.verdicts.len(), 1, "process {} was told nothing", node.process);
    }
}

/// Without faults, no failure is reported and all work is done.
fn check_peace(sim: &Sim) {
    for node in &sim.nodes {
        assert!(node.verdicts.is_empty(), "a false verdict: {}", node.verdicts[0].1);
        if node.go.is_some() {
            assert!(
                node.has_left && node.announced.contains("save"),
                "process {} has not ended",
                node.process
            );
            let is_heard = |process| node.announced.contains(&own_topic(process));
            let all = (0..sim.processes).all(is_heard);
            assert!(all, "process {} has not heard all others: {:?}", node.process, node.announced);
        }
    }
    let begun = sim.nodes.iter().filter(|node| node.go.is_some()).count();
    let processes = sim.nodes[0].go.as_ref().map(|roster| roster.processes.len());
    assert_eq!(Some(begun), processes, "not everybody has begun");
}
