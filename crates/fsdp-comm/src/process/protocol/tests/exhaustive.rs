//! Kills every process of a small world before every event.

use super::check::check;
use super::faults::{Case, Fault};
use super::sim::Sim;

const DELAY_MAX: u64 = 20;

fn world(processes: usize) -> Sim {
    Sim::new(7, processes, DELAY_MAX, 100)
}

#[test]
fn protocol_holds_with_fault_before_every_event() {
    for processes in 2..=4 {
        let mut whole = world(processes);
        whole.run();
        check(&whole, DELAY_MAX);
        assert!(whole.handled > 10 * processes, "{} events", whole.handled);
        for event in 0..whole.handled {
            for process in 0..processes {
                for fault in [Fault::Kill, Fault::PowerLoss, Fault::Cut, Fault::Restart] {
                    let _case = Case(format!(
                        "{processes} processes, {fault:?} of process {process} before event {event}"
                    ));
                    let mut sim = world(processes);
                    sim.kill_at = Some((event, process, fault));
                    sim.run();
                    check(&sim, DELAY_MAX);
                }
            }
        }
    }
}
