use std::time::Instant;

use fsdp_comm::launch::{Launcher, Seat};
use fsdp_config::Device;
use fsdp_core::DType;
use fsdp_core::engine::{Observer, ProgramOrder};
use fsdp_core::schedule::{OpId, OpKind, Schedule};
use fsdp_nn::Backend;
use fsdp_sim::virtual_time::{Pace, Timeline, Work as Taken, simulate};
use fsdp_train::{Job, RankTrainer, TrainError};

use super::super::models::shapes;
use super::Watch;
use crate::device::clock::Clock;
use crate::device::{self, Work};
use crate::run_setup::Model;

/// Steps that are traced: in at least one of them the time outside of operations is small, however busy the machine.
const STEPS: u64 = 12;

/// Maximum fraction of a step outside of operations and the marks between them: the batch and the loss.
const OUTSIDE: f64 = 0.05;

/// A real step: for each operation, the seconds from the step's start to its begin and end; and the step's total.
#[derive(Clone, Debug)]
struct Trace {
    ops: Vec<(OpId, f64, f64)>,
    total: f64,
}

/// Records when operations begin and end, besides the marks of [`Watch`].
struct Stamps<'a, M: Clock> {
    watch: &'a mut Watch<M>,
    begin: Instant,
    ops: Vec<(OpId, f64, f64)>,
}

impl<M: Clock> Observer for Stamps<'_, M> {
    fn begin(&mut self, op: OpId, kind: &OpKind) {
        self.ops.push((op, self.begin.elapsed().as_secs_f64(), 0.0));
        self.watch.begin(op, kind);
    }

    fn issued(&mut self, op: OpId, kind: &OpKind) {
        self.watch.issued(op, kind);
        let (last, _, end) = self.ops.last_mut().expect("an operation has begun");
        assert_eq!(*last, op, "operations of a host run one after the other");
        *end = self.begin.elapsed().as_secs_f64();
    }
}

/// Traces some steps of every rank.
struct Traced<'a>(&'a Job<Model>);

impl Work for Traced<'_> {
    type Outcome = Result<Vec<Vec<Trace>>, TrainError>;

    fn on<L: Launcher>(self, launcher: &L) -> Self::Outcome
    where
        L::Memory: Backend + Clock,
    {
        let job = self.0;
        let traced = |seat: Seat<L::Memory>| -> Result<Vec<Trace>, TrainError> {
            let memory = seat.memory.clone();
            let mut trainer = RankTrainer::new(job, seat)?;
            let (mut watch, _guard) = Watch::new(&memory);
            let mut traces = Vec::new();
            for step in 0..STEPS {
                let begin = Instant::now();
                let mut stamps = Stamps { watch: &mut watch, begin, ops: Vec::new() };
                trainer.step(step, false, &mut ProgramOrder, &mut stamps)?;
                let (ops, total) = (stamps.ops, begin.elapsed().as_secs_f64());
                let seen = watch.take()?;
                // The marks of calibration are within the times recorded by this test.
                for (seen, (op, from, to)) in seen.iter().zip(&ops) {
                    assert!(seen.op == *op && seen.seconds <= to - from + 1e-9);
                }
                assert_eq!(seen.len(), ops.len());
                traces.push(Trace { ops, total });
            }
            Ok(traces)
        };
        Ok(launcher.launch(job.config.run.ranks, &traced)?)
    }
}

fn traces(ranks: usize) -> (Job<Model>, Vec<Vec<Trace>>) {
    let job = shapes(Device::Cpu)[0].job(Device::Cpu, DType::F32, ranks).unwrap();
    let traces = device::on(&job.config.run, device::Purpose::Training, None, Traced(&job)).unwrap().unwrap();
    (job, traces)
}

/// Simulates the step in virtual time; operation `i` takes `seconds(i)`.
fn replayed(schedule: &Schedule, trace: &Trace, pace: Pace, seconds: impl Fn(usize) -> f64) -> Timeline {
    let order: Vec<usize> = trace.ops.iter().map(|(op, ..)| op.0).collect();
    assert_eq!(order, (0..schedule.ops.len()).collect::<Vec<_>>(), "every operation once, in program order");
    let work: Vec<Taken> =
        order.iter().map(|&index| Taken { seconds: seconds(index), ..Taken::default() }).collect();
    simulate(schedule, &work, pace)
}

/// The smallest relative difference between virtual and real time of a traced step.
fn nearest(traces: &[Trace], virtual_seconds: impl Fn(&Trace) -> f64) -> f64 {
    let off = |trace: &Trace| {
        let seconds = virtual_seconds(trace);
        assert!(seconds <= trace.total, "operations of one thread do not take longer than their step");
        1.0 - seconds / trace.total
    };
    traces.iter().map(off).min_by(f64::total_cmp).unwrap()
}

const SERIAL: Pace = Pace { issue_seconds: 0.0, is_serial: true };

#[test]
fn replayed_step_matches_traced_times() {
    for ranks in [1, 2] {
        let (job, traces) = traces(ranks);
        let schedule = &job.plan.step;
        for rank in &traces {
            let seconds = |trace: &Trace| {
                // From one end to the next: an operation, its recording, and with several ranks the wait for the
                // others.
                let since = |op: usize| op.checked_sub(1).map_or(0.0, |before| trace.ops[before].2);
                let timeline = replayed(schedule, trace, SERIAL, |op| trace.ops[op].2 - since(op));
                for (span, (_, _, end)) in timeline.spans.iter().zip(&trace.ops) {
                    assert!(
                        (span.end - end).abs() < 1e-9 + 1e-9 * trace.total,
                        "each operation ends as in the trace"
                    );
                }
                timeline.end
            };
            let off = nearest(rank, seconds);
            assert!(off < OUTSIDE, "{ranks} ranks: {off}");
        }
    }
}

#[test]
fn op_and_issue_times_sum_to_traced_step() {
    let (job, traces) = traces(1);
    let schedule = &job.plan.step;
    let seconds = |trace: &Trace| {
        let inside: f64 = trace.ops.iter().map(|(_, begin, end)| end - begin).sum();
        let last = trace.ops.last().unwrap().2;
        // As in calibration: the same for each operation.
        let pace = Pace { issue_seconds: (last - inside) / trace.ops.len() as f64, is_serial: true };
        replayed(schedule, trace, pace, |op| trace.ops[op].2 - trace.ops[op].1).end - 1e-9
    };
    assert!(nearest(&traces[0], seconds) < OUTSIDE);
}

#[test]
fn replay_without_waits_is_shorter_by_waited_time() {
    let (job, traces) = traces(2);
    let schedule = &job.plan.step;
    for trace in traces.iter().flatten() {
        let alone = replayed(schedule, trace, SERIAL, |op| trace.ops[op].2 - trace.ops[op].1).end;
        let mut waited = 0.0;
        let mut free = 0.0;
        for (_, begin, end) in &trace.ops {
            waited += begin - free;
            free = *end;
        }
        assert!((alone + waited - free).abs() < 1e-9 + 1e-9 * free, "{alone} {waited} {free}");
        assert!(alone < trace.total);
    }
}
