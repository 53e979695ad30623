//! Runs thousands of worlds with faults at random times.

use std::time::Duration;

use super::check::check;
use super::faults::{Case, Fault, Random};
use super::sim::Sim;

const SEEDS: u64 = 20_000;

fn fault(random: &mut Random) -> Fault {
    match random.below(10) {
        0 => Fault::Kill,
        1 => Fault::PowerLoss,
        2 => Fault::Cut,
        3 => Fault::CutAtLeader,
        4 => Fault::Stop(random.time(20_000, 60_000)),
        5 => Fault::Fail,
        6 => Fault::Blame,
        7 => Fault::Restart,
        8 => Fault::Duplicate,
        _ => Fault::Stop(random.time(100, 4_000)),
    }
}

fn run(seed: u64, trace: bool) {
    let test = "process::protocol::tests::seeds";
    let _case = Case(format!("replay: FSDP_SEED={seed} cargo test -p fsdp-comm --lib {test} -- --nocapture"));
    let mut random = Random(seed ^ 0x5eed);
    let processes = 1 + random.below(8) as usize;
    let delay_max = [1, 100, 2_000][random.below(3) as usize];
    let start_max = [1, 1_000, 20_000][random.below(3) as usize];
    let mut sim = Sim::new(seed, processes, delay_max, start_max);
    sim.trace = trace;
    for _ in 0..random.below(4) {
        let fault = fault(&mut random);
        let (time, process) = (random.time(0, 30_000), random.below(processes as u64) as usize);
        sim.plan(time, process, fault);
        if trace {
            println!("planned: {fault:?} of process {process} at {time:?}");
        }
    }
    sim.run();
    check(&sim, delay_max);
}

#[test]
fn protocol_holds_under_random_faults() {
    match std::env::var("FSDP_SEED") {
        Ok(seed) => run(seed.parse().expect("FSDP_SEED is a number"), true),
        Err(_) => (0..SEEDS).for_each(|seed| run(seed, false)),
    }
}

#[test]
fn seeds_cover_every_outcome() {
    let mut ends = [0; 3];
    for seed in 0..300 {
        let mut random = Random(seed);
        let mut sim = Sim::new(seed, 3, 100, 1_000);
        let fault = fault(&mut random);
        sim.plan(Duration::from_millis(random.below(3_000)), 1, fault);
        sim.run();
        let leader = &sim.nodes[0];
        ends[match (&leader.go, leader.verdicts.len()) {
            (None, _) => 0,
            (Some(_), 0) => 1,
            (Some(_), _) => 2,
        }] += 1;
    }
    assert!(ends.iter().all(|&count| count > 5), "no world, peace, verdict: {ends:?}");
}
