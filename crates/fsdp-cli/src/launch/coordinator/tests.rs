//! Launches with nodes that come, go, fail and return, in scenarios and at random.

use std::collections::BTreeSet;

use super::*;

const WAIT: Duration = Duration::from_secs(30);

fn rules(min: usize, max: usize) -> Rules {
    Rules { min, max, max_restarts: 2, wait: WAIT }
}

/// A coordinator and the current time.
struct Launch {
    coordinator: Coordinator,
    now: Duration,
}

impl Launch {
    fn new(rules: Rules) -> Self {
        Self { coordinator: Coordinator::new(rules, Duration::ZERO), now: Duration::ZERO }
    }

    fn happens(&mut self, event: Event) -> Vec<Action> {
        let actions = self.coordinator.handle(self.now, event);
        actions.into_iter().filter(|action| !matches!(action, Action::Note(_))).collect()
    }

    fn says(&mut self, node: u64, message: Message) -> Vec<Action> {
        self.happens(Event::Received(NodeId(node), message))
    }

    fn joins(&mut self, node: u64) -> Vec<Action> {
        self.says(node, Message::Join(facts(node)))
    }

    fn ends(&mut self, node: u64, attempt: u32, exit: Exit) -> Vec<Action> {
        let because = (exit != Exit::Done).then(|| format!("a process of node {node} has failed"));
        self.says(node, ended(attempt, exit, because))
    }

    fn after(&mut self, seconds: u64) -> Vec<Action> {
        self.now += Duration::from_secs(seconds);
        self.happens(Event::Tick)
    }
}

fn facts(node: u64) -> NodeFacts {
    NodeFacts {
        host: format!("n{node}"),
        number: None,
        nproc: 2,
        address: None,
        port: 1,
        known: Known::default(),
    }
}

fn ended(attempt: u32, exit: Exit, because: Option<String>) -> Message {
    let code = exit.code();
    Message::Ended {
        attempt,
        code,
        because,
        was_killed: false,
        is_notified: false,
        is_elsewhere: false,
        port: 1,
    }
}

fn start(attempt: u32, nodes: &[u64]) -> Action {
    let nodes = nodes.iter().map(|&node| NodeId(node)).collect();
    Action::Start { attempt, nodes, is_taken_over: false }
}

fn send(node: u64, order: Order) -> Action {
    Action::Send(NodeId(node), order)
}

fn finish(node: u64, exit: Exit, because: Option<&str>) -> Action {
    send(node, Order::Finish { code: exit.code(), because: because.map(str::to_owned) })
}

#[test]
fn node_range_uses_largest_power_of_two_that_joined() {
    let sizes =
        |min, max| (0..=9).map(|present| rules(min, max).size(present).unwrap_or(0)).collect::<Vec<_>>();
    assert_eq!(sizes(1, 8), [0, 1, 2, 2, 4, 4, 4, 4, 8, 8]);
    assert_eq!(sizes(3, 6), [0, 0, 0, 0, 4, 4, 4, 4, 4, 4]);
    assert_eq!(sizes(3, 3), [0, 0, 0, 3, 3, 3, 3, 3, 3, 3]);
}

#[test]
fn single_node_restarts_until_max_restarts() {
    let mut launch = Launch::new(rules(1, 1));
    assert_eq!(launch.joins(0), [start(0, &[0])]);
    assert_eq!(launch.ends(0, 0, Exit::Temporary), [start(1, &[0])]);
    assert_eq!(launch.ends(0, 1, Exit::Temporary), [], "the second restart is after a pause");
    assert_eq!(launch.after(1), [start(2, &[0])]);
    let why = "a process of node 0 has failed; no restarts are left (--max-restarts 2)";
    assert_eq!(launch.ends(0, 2, Exit::Temporary), [finish(0, Exit::Temporary, Some(why))]);
}

#[test]
fn non_temporary_exit_finishes_all_nodes_and_spares() {
    for exit in [Exit::Input, Exit::Failed, Exit::Done] {
        let mut launch = Launch::new(rules(1, 2));
        launch.joins(0);
        assert_eq!(launch.joins(1), [start(0, &[0, 1])]);
        launch.joins(2);
        launch.ends(1, 0, exit);
        let all = [0, 1, 2].map(|node| finish(node, exit, None));
        let other = if exit == Exit::Done { Exit::Done } else { Exit::Temporary };
        assert_eq!(launch.ends(0, 0, other), all, "{exit:?}");
    }
}

#[test]
fn lost_node_is_dropped_after_wait() {
    let mut launch = Launch::new(rules(1, 4));
    for node in 0..3 {
        assert_eq!(launch.joins(node), []);
    }
    assert_eq!(launch.joins(3), [start(0, &[0, 1, 2, 3])]);
    let others = [0, 1, 3].map(|node| send(node, Order::End { is_notified: false }));
    assert_eq!(launch.happens(Event::Lost(NodeId(2))), others, "the others are told");
    launch.ends(0, 0, Exit::Temporary);
    launch.ends(1, 0, Exit::Temporary);
    assert_eq!(launch.ends(3, 0, Exit::Temporary), []);
    assert_eq!(launch.after(29), []);
    assert_eq!(launch.after(1), [start(1, &[0, 1])], "node 3 is a spare");
    assert_eq!(launch.happens(Event::Lost(NodeId(0))), [send(1, Order::End { is_notified: false })]);
    assert_eq!(launch.ends(1, 1, Exit::Temporary), []);
    assert_eq!(launch.after(30), [start(2, &[1, 3])], "the spare takes its place");
}

#[test]
fn reported_failure_implies_other_nodes_know_it() {
    let mut launch = Launch::new(rules(2, 2));
    launch.joins(0);
    assert_eq!(launch.joins(1), [start(0, &[0, 1])]);
    let because = "process 3 (pid 7 on host n1): it was silent for 15 s";
    let notified = Message::Ended {
        attempt: 0,
        code: 75,
        because: Some(because.to_owned()),
        was_killed: false,
        is_notified: true,
        is_elsewhere: false,
        port: 1,
    };
    assert_eq!(launch.says(0, notified), [send(1, Order::End { is_notified: true })]);
}

#[test]
fn returning_node_rejoins_after_next_save() {
    let mut launch = Launch::new(rules(1, 2));
    launch.joins(0);
    assert_eq!(launch.after(30), [start(0, &[0])]);
    assert_eq!(launch.joins(1), [send(0, Order::StopAtSave)]);
    assert_eq!(launch.joins(2), [], "there is no place for it");
    // This is not a failure and uses up no restart.
    assert_eq!(launch.ends(0, 0, Exit::Temporary), [start(1, &[0, 1])]);
    assert_eq!(launch.coordinator.known.restarts, 0);
    // But a process that is killed while another node waits has failed.
    launch.happens(Event::Lost(NodeId(2)));
    launch.happens(Event::Lost(NodeId(1)));
    launch.ends(0, 1, Exit::Temporary);
    assert_eq!(launch.coordinator.known.restarts, 1);
    assert_eq!(launch.after(30), [start(2, &[0])]);
    assert_eq!(launch.joins(3), [send(0, Order::StopAtSave)]);
    let killed = Message::Ended {
        attempt: 2,
        code: 75,
        because: Some("process 0 was killed by signal 9".to_owned()),
        was_killed: true,
        is_notified: false,
        is_elsewhere: false,
        port: 1,
    };
    launch.says(0, killed);
    assert_eq!(launch.coordinator.known.restarts, 2);
}

#[test]
fn numbered_node_keeps_its_position() {
    let mut launch = Launch::new(rules(3, 3));
    launch.says(5, Message::Join(NodeFacts { number: Some(1), ..facts(5) }));
    launch.joins(6);
    let first = NodeFacts { number: Some(0), address: Some([10, 0, 0, 1].into()), port: 7, ..facts(7) };
    assert_eq!(launch.says(7, Message::Join(first)), [start(0, &[7, 5, 6])]);
    assert_eq!(launch.coordinator.node(NodeId(7)).port, 7);
}

#[test]
fn leave_drops_node_and_on_coordinator_ends_launch() {
    let begun = || {
        let mut launch = Launch::new(rules(1, 2));
        launch.joins(0);
        assert_eq!(launch.joins(1), [start(0, &[0, 1])]);
        launch
    };
    let stop = [0, 1].map(|node| send(node, Order::Stop));
    let mut launch = begun();
    assert_eq!(launch.says(1, Message::Leave), stop);
    launch.ends(1, 0, Exit::Temporary);
    assert_eq!(launch.ends(0, 0, Exit::Temporary), [finish(1, Exit::Temporary, None)]);
    assert_eq!(launch.after(30), [start(1, &[0])]);
    let mut launch = begun();
    assert_eq!(launch.says(0, Message::Leave), stop);
    launch.ends(1, 0, Exit::Temporary);
    let all = [0, 1].map(|node| finish(node, Exit::Temporary, None));
    assert_eq!(launch.ends(0, 0, Exit::Temporary), all);
    // A spare leaves at once.
    let mut launch = begun();
    launch.joins(2);
    assert_eq!(launch.says(2, Message::Leave), [finish(2, Exit::Temporary, None)]);
}

#[test]
fn too_few_nodes_time_out() {
    let mut launch = Launch::new(rules(2, 4));
    launch.joins(0);
    assert_eq!(launch.after(PATIENCE.as_secs() - 1), []);
    let why = "1 of at least 2 nodes have joined after 600 s";
    assert_eq!(launch.after(1), [finish(0, Exit::Temporary, Some(why))]);
    assert_eq!(launch.joins(1), [finish(1, Exit::Temporary, Some("the launch is over"))]);
}

#[test]
fn wait_for_more_nodes_begins_at_minimum() {
    let mut launch = Launch::new(rules(2, 4));
    launch.joins(0);
    launch.after(40);
    assert_eq!(launch.joins(1), []);
    launch.after(1);
    assert_eq!(launch.joins(2), []);
    assert_eq!(launch.joins(3), [start(0, &[0, 1, 2, 3])]);
}

#[test]
fn mismatched_nproc_is_rejected() {
    let mut launch = Launch::new(rules(1, 2));
    launch.joins(0);
    let why = "node n1 has --nproc 3, but the others have 2: give all nodes the same";
    let other = Message::Join(NodeFacts { nproc: 3, ..facts(1) });
    assert_eq!(launch.says(1, other), [finish(1, Exit::Input, Some(why))]);
}

#[test]
fn new_coordinator_keeps_attempt_and_restart_counts() {
    let mut launch = Launch::new(rules(1, 1));
    let known = NodeFacts { known: Known { attempts: 3, restarts: 2, is_taken_over: true }, ..facts(0) };
    let goes_on = Action::Start { attempt: 3, nodes: vec![NodeId(0)], is_taken_over: true };
    assert_eq!(launch.says(0, Message::Join(known)), [goes_on]);
    let why = "a process of node 0 has failed; no restarts are left (--max-restarts 2)";
    assert_eq!(launch.ends(0, 3, Exit::Temporary), [finish(0, Exit::Temporary, Some(why))]);
}

/// Random numbers from a seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        // SplitMix64, by Steele et al.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides
    }
}

/// Simulates real nodes: an agent runs one attempt at a time, and reports its end.
#[derive(Default)]
struct Cluster {
    /// The nodes that are present, and the attempt that runs on each.
    nodes: BTreeMap<NodeId, Option<u32>>,
    finished: BTreeSet<NodeId>,
    started: u32,
}

impl Cluster {
    fn obey(&mut self, action: Action, rules: Rules) {
        match action {
            Action::Start { attempt, nodes, .. } => {
                assert_eq!(attempt, self.started, "attempts are counted");
                self.started += 1;
                assert_eq!(rules.size(nodes.len()), Some(nodes.len()), "an allowed number of nodes");
                for id in nodes {
                    let running = self.nodes.get_mut(&id).expect("a node that is there");
                    assert_eq!(running.replace(attempt), None, "no attempt begins before another has ended");
                }
            }
            Action::Send(id, Order::Finish { .. }) => {
                assert_eq!(self.nodes.remove(&id), Some(None), "nothing is cut off");
                self.finished.insert(id);
            }
            Action::Send(..) | Action::Note(_) => {}
        }
    }
}

#[test]
fn random_events_never_overlap_attempts_and_launch_ends() {
    for seed in 0..3000 {
        let mut dice = Dice(seed);
        let min = 1 + dice.roll(3) as usize;
        let max = min.next_power_of_two() + dice.roll(3) as usize;
        let rules = Rules { min, max, max_restarts: 50, wait: WAIT };
        let (mut coordinator, mut cluster) = (Coordinator::new(rules, Duration::ZERO), Cluster::default());
        let (mut now, mut next) = (Duration::ZERO, 0);
        for turn in 0..400 {
            // In the end nothing fails any more, and nodes come until there are enough.
            let is_calm = turn > 200;
            now += Duration::from_secs(dice.roll(20));
            let ids: Vec<NodeId> = cluster.nodes.keys().copied().collect();
            let any = (!ids.is_empty()).then(|| ids[dice.roll(ids.len() as u64) as usize]);
            let event = match (dice.roll(if is_calm { 4 } else { 8 }), any) {
                (0, _) if next == 0 || ids.len() < max => {
                    next += 1;
                    cluster.nodes.insert(NodeId(next), None);
                    Event::Received(NodeId(next), Message::Join(facts(next)))
                }
                (1..=3, Some(id)) if cluster.nodes[&id].is_some() => {
                    let attempt = cluster.nodes.insert(id, None).flatten().unwrap();
                    let exit = if is_calm { Exit::Done } else { Exit::Temporary };
                    Event::Received(id, ended(attempt, exit, None))
                }
                (4, Some(id)) => {
                    cluster.nodes.remove(&id);
                    Event::Lost(id)
                }
                (5, Some(id)) if min < max => Event::Received(id, Message::Leave),
                _ => Event::Tick,
            };
            for action in coordinator.handle(now, event) {
                cluster.obey(action, rules);
            }
            if coordinator.is_over() {
                break;
            }
        }
        assert!(coordinator.is_over(), "seed {seed}: {coordinator:?}");
    }
}
