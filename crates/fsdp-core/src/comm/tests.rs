use std::sync::{Arc, Mutex};

use super::*;
use crate::dtype::DType;
use crate::error::Error;
use crate::failure::FailureKind;
use crate::memory::{Arithmetic, Buffer, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut, Usage};
use crate::rank::{Queue, Rank};
use crate::wrap::UnitId;

/// A buffer without elements: only length, dtype, and handles.
#[derive(Clone)]
pub(crate) struct Shape {
    len: usize,
    dtype: DType,
    storage: Arc<()>,
}

impl Buffer for Shape {
    fn len(&self) -> usize {
        self.len
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn is_exclusive(&self) -> bool {
        Arc::strong_count(&self.storage) == 1
    }
}

/// A memory that stores nothing.
pub(crate) struct NoMemory;

impl Memory for NoMemory {
    type Buffer = Shape;
    type Event = ();

    fn allocate(&self, _: Category, dtype: DType, len: usize) -> Result<Shape, Error> {
        Ok(Shape { len, dtype, storage: Arc::new(()) })
    }

    fn release(&self, _: Queue, _: &mut Shape) {}

    fn alias(&self, _: &mut Shape, _: &Shape) -> bool {
        false
    }

    fn zero(&self, _: Queue, _: SliceMut<'_, Shape>) -> Result<(), Error> {
        Ok(())
    }

    fn copy(&self, _: Queue, _: Slice<'_, Shape>, _: SliceMut<'_, Shape>) -> Result<(), Error> {
        Ok(())
    }

    fn compute(
        &self,
        _: Queue,
        _: Arithmetic<'_, Slice<'_, Shape>>,
        _: SliceMut<'_, Shape>,
    ) -> Result<(), Error> {
        Ok(())
    }

    fn write(&self, _: Queue, _: HostSlice<'_>, _: SliceMut<'_, Shape>) -> Result<(), Error> {
        Ok(())
    }

    fn read(&self, _: Queue, _: Slice<'_, Shape>, _: HostSliceMut<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn record(&self, _: Queue) {}

    fn wait(&self, _: Queue, (): &()) {}

    fn usage(&self) -> Usage {
        Usage::default()
    }
}

/// A call that reached the backend.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Event {
    Called(Fingerprint),
    Waited(u64, Queue),
    Abandoned(u64),
    Split(Fingerprint, usize),
    Aborted(String),
}

type Log = Arc<Mutex<Vec<Event>>>;

struct Recorder {
    size: usize,
    log: Log,
    fails: bool,
}

struct Recorded {
    call: Fingerprint,
    log: Log,
    completed: Completed<Shape>,
}

impl InFlight<NoMemory> for Recorded {
    fn is_ready(&mut self) -> bool {
        self.call.sequence.is_multiple_of(2)
    }

    fn wait_on(self: Box<Self>, _: &NoMemory, queue: Queue) -> Result<Completed<Shape>, Error> {
        self.log.lock().unwrap().push(Event::Waited(self.call.sequence, queue));
        Ok(self.completed)
    }

    fn abandon(self: Box<Self>, reason: String) {
        assert_eq!(reason, format!("{} was abandoned before it finished", self.call));
        self.log.lock().unwrap().push(Event::Abandoned(self.call.sequence));
    }
}

impl Communicator<NoMemory> for Recorder {
    fn rank(&self) -> usize {
        1
    }

    fn size(&self) -> usize {
        self.size
    }

    fn world_rank(&self) -> Rank {
        Rank(5)
    }

    fn start(
        &mut self,
        _: &NoMemory,
        call: Fingerprint,
        inputs: Vec<Shape>,
        outputs: Vec<Shape>,
    ) -> Result<Box<dyn InFlight<NoMemory>>, Error> {
        if self.fails {
            let reason = "unplugged".into();
            return Err(CommError::Transport { rank: self.world_rank(), reason }.into());
        }
        self.log.lock().unwrap().push(Event::Called(call));
        let completed = Completed { outputs, inputs };
        Ok(Box::new(Recorded { call, log: Arc::clone(&self.log), completed }))
    }

    fn split(
        &mut self,
        _: &NoMemory,
        call: Fingerprint,
        color: usize,
    ) -> Result<Box<dyn Communicator<NoMemory>>, Error> {
        self.log.lock().unwrap().push(Event::Split(call, color));
        Ok(Box::new(Self { size: 2, log: Arc::clone(&self.log), fails: false }))
    }

    fn abort(&mut self, reason: &str, _kind: FailureKind) {
        self.log.lock().unwrap().push(Event::Aborted(reason.into()));
    }
}

fn comm(size: usize) -> (Comm<NoMemory>, Log) {
    let log = Log::default();
    (Comm::new(Box::new(Recorder { size, log: Arc::clone(&log), fails: false })), log)
}

fn buffers(dtype: DType, lens: &[usize]) -> Vec<Shape> {
    lens.iter().map(|&len| Shape { len, dtype, storage: Arc::new(()) }).collect()
}

fn floats(lens: &[usize]) -> Vec<Shape> {
    buffers(DType::F32, lens)
}

#[track_caller]
fn failure<T>(result: Result<T, Error>) -> CommError {
    match result.map(|_| ()) {
        Err(Error::Comm(error)) => error,
        other => panic!("not refused by a check: {other:?}"),
    }
}

fn gather(
    comm: &mut Comm<NoMemory>,
    inputs: Vec<Shape>,
    outputs: Vec<Shape>,
) -> Result<Pending<NoMemory>, Error> {
    comm.all_gather(&NoMemory, Purpose::Forward, Some(UnitId(3)), inputs, outputs)
}

fn scatter(
    comm: &mut Comm<NoMemory>,
    inputs: Vec<Shape>,
    outputs: Vec<Shape>,
) -> Result<Pending<NoMemory>, Error> {
    comm.reduce_scatter(&NoMemory, ReduceOp::Sum, Purpose::Gradient, Some(UnitId(3)), inputs, outputs)
}

#[test]
fn lengths_not_matching_group_size_are_rejected() {
    let (mut comm, log) = comm(3);
    let long = failure(gather(&mut comm, floats(&[2, 2]), floats(&[6, 7])));
    let CommError::Length { rank, segment, expected, got, call } = long else { panic!("{long}") };
    assert_eq!((rank, segment, expected, got, call.elements), (Rank(5), 1, 6, 7, 13));
    let short = failure(scatter(&mut comm, floats(&[5]), floats(&[2])));
    assert!(matches!(short, CommError::Length { segment: 0, expected: 6, got: 5, .. }), "{short}");
    assert!(log.lock().unwrap().is_empty(), "no backend is called");
    assert_eq!(comm.traffic(), Traffic::default());
}

#[test]
fn mismatched_segment_counts_are_rejected() {
    let (mut comm, log) = comm(1);
    let more = failure(gather(&mut comm, floats(&[2]), floats(&[2, 2])));
    assert!(matches!(more, CommError::Length { segment: 1, .. }), "{more}");
    let fewer = failure(scatter(&mut comm, floats(&[2]), floats(&[2, 2])));
    assert!(matches!(fewer, CommError::Length { segment: 1, .. }), "{fewer}");
    assert!(log.lock().unwrap().is_empty());
}

#[test]
fn mismatched_dtypes_are_rejected() {
    let (mut comm, log) = comm(2);
    let input = failure(gather(&mut comm, buffers(DType::Bf16, &[2]), floats(&[4])));
    let CommError::Type { expected, got, segment, rank, .. } = input else { panic!("{input}") };
    assert_eq!((expected, got, segment, rank), (DType::F32, DType::Bf16, 0, Rank(5)));
    let mut mixed = floats(&[4, 4]);
    mixed[1].dtype = DType::F64;
    let output = failure(gather(&mut comm, floats(&[2, 2]), mixed.clone()));
    assert!(matches!(output, CommError::Type { segment: 1, got: DType::F32, .. }), "{output}");
    drop(output);
    let mut mixed = floats(&[4, 4]);
    mixed[1].dtype = DType::F64;
    let reduced = comm.all_reduce(&NoMemory, ReduceOp::Sum, Purpose::Scalars, None, mixed);
    let reduced = failure(reduced);
    assert!(matches!(reduced, CommError::Type { segment: 1, got: DType::F64, .. }), "{reduced}");
    assert!(log.lock().unwrap().is_empty());
}

#[test]
fn segments_of_several_dtypes_are_moved_as_bytes() {
    let (mut comm, log) = comm(2);
    let (mut inputs, mut outputs) = (floats(&[2, 3]), floats(&[4, 6]));
    (inputs[1].dtype, outputs[1].dtype) = (DType::U8, DType::U8);
    let dtypes: Vec<DType> = outputs.iter().map(|output| output.dtype).collect();
    drop(gather(&mut comm, inputs, outputs).unwrap());
    assert_eq!(comm.traffic().all_gather_bytes, 2 * 4 + 3);
    let mut buffers = floats(&[4, 6]);
    buffers.iter_mut().zip(dtypes).for_each(|(buffer, dtype)| buffer.dtype = dtype);
    drop(comm.broadcast(&NoMemory, Purpose::Setup, None, 0, buffers).unwrap());
    let log = log.lock().unwrap();
    let started =
        log.iter().filter_map(|event| if let Event::Called(call) = event { Some(call) } else { None });
    let calls: Vec<_> = started.map(|call| (call.dtype, call.elements)).collect();
    assert_eq!(calls, [(DType::U8, 4 * 4 + 6); 2]);
}

#[test]
fn only_multi_rank_average_has_scale_factor() {
    assert_eq!([ReduceOp::Average.factor(4), ReduceOp::Average.factor(3)], [Some(0.25), Some(1.0 / 3.0)]);
    assert_eq!([ReduceOp::Average.factor(1), ReduceOp::Sum.factor(1), ReduceOp::Sum.factor(4)], [None; 3]);
}

#[test]
fn integer_averages_are_rejected() {
    let (mut comm, log) = comm(2);
    let integers = buffers(DType::I64, &[4]);
    let error = failure(comm.all_reduce(&NoMemory, ReduceOp::Average, Purpose::Scalars, None, integers));
    assert_eq!(
        error.to_string(),
        "#0 all-reduce by average (scalars, 4 x i64): integers on rank 5 cannot be averaged; sum them and divide \
         where the mean is used"
    );
    let (whole, part) = (buffers(DType::U32, &[4]), buffers(DType::U32, &[2]));
    let scattered = comm.reduce_scatter(&NoMemory, ReduceOp::Average, Purpose::Gradient, None, whole, part);
    assert!(matches!(failure(scattered), CommError::IntegerAverage { rank: Rank(5), .. }));
    assert!(log.lock().unwrap().is_empty(), "no backend is called");
    let empty_reduce = comm.all_reduce(&NoMemory, ReduceOp::Average, Purpose::Gradient, None, Vec::new());
    empty_reduce.unwrap().wait_on(&NoMemory, Queue::Reduce).unwrap();
}

#[test]
fn shared_buffers_are_rejected_except_gather_inputs() {
    let (mut comm, log) = comm(2);
    let held = floats(&[1, 4]);
    let outputs = vec![floats(&[4]).remove(0), held[1].clone()];
    let error = failure(gather(&mut comm, floats(&[2, 2]), outputs));
    assert!(matches!(error, CommError::Shared { segment: 1, rank: Rank(5), .. }), "{error}");
    let error = failure(scatter(&mut comm, vec![held[1].clone()], floats(&[2])));
    assert!(matches!(error, CommError::Shared { segment: 0, .. }), "{error}");
    let error = failure(scatter(&mut comm, floats(&[2]), vec![held[0].clone()]));
    assert!(matches!(error, CommError::Shared { segment: 0, .. }), "{error}");
    let error =
        failure(comm.all_reduce(&NoMemory, ReduceOp::Sum, Purpose::Scalars, None, vec![held[0].clone()]));
    assert!(matches!(error, CommError::Shared { segment: 0, .. }), "{error}");
    let error = failure(comm.broadcast(&NoMemory, Purpose::Setup, None, 1, vec![held[0].clone()]));
    assert!(matches!(error, CommError::Shared { segment: 0, .. }), "{error}");
    assert!(log.lock().unwrap().is_empty());
    let pending = gather(&mut comm, vec![held[0].clone()], floats(&[2])).unwrap();
    assert_eq!(pending.wait_on(&NoMemory, Queue::Compute).unwrap().outputs.len(), 1);
}

#[test]
fn calls_are_numbered_and_described() {
    let (mut comm, log) = comm(2);
    assert_eq!((comm.rank(), comm.size(), comm.world_rank()), (1, 2, Rank(5)));
    let first = gather(&mut comm, floats(&[2, 3]), floats(&[4, 6])).unwrap();
    let _ = failure(gather(&mut comm, floats(&[2]), floats(&[5])));
    let second = scatter(&mut comm, floats(&[8]), floats(&[4])).unwrap();
    let sub = comm.split(&NoMemory, 7).unwrap();
    let third =
        comm.all_reduce(&NoMemory, ReduceOp::Sum, Purpose::Scalars, None, buffers(DType::I64, &[5])).unwrap();
    let fourth = comm.broadcast(&NoMemory, Purpose::Setup, Some(UnitId(2)), 1, floats(&[3, 4])).unwrap();
    let fifth = comm.all_reduce(&NoMemory, ReduceOp::Average, Purpose::Gradient, None, floats(&[6])).unwrap();
    assert_eq!(sub.size(), 2);
    let calls: Vec<String> =
        [&first, &second, &third, &fourth, &fifth].map(|pending| pending.call().to_string()).to_vec();
    assert_eq!(
        calls,
        [
            "#0 all-gather (forward, unit 3, 10 x f32)",
            "#1 reduce-scatter (gradient, unit 3, 8 x f32)",
            "#3 all-reduce (scalars, 5 x i64)",
            "#4 broadcast from place 1 (setup, unit 2, 7 x f32)",
            "#5 all-reduce by average (gradient, 6 x f32)",
        ]
    );
    assert_eq!(format!("{second:?}"), "Pending(#1 reduce-scatter (gradient, unit 3, 8 x f32))");
    let split = |event: &Event| match event {
        Event::Split(call, color) => Some((call.to_string(), *color)),
        _ => None,
    };
    let splits: Vec<(String, usize)> = log.lock().unwrap().iter().filter_map(split).collect();
    assert_eq!(splits, [("#2 split (setup, 0 x u32)".to_string(), 7)]);
    for pending in [first, second, third, fourth, fifth] {
        pending.wait_on(&NoMemory, Queue::Reduce).unwrap();
    }
    let waits = log.lock().unwrap().iter().filter(|event| matches!(event, Event::Waited(..))).count();
    assert_eq!(waits, 5);
}

#[test]
fn dropped_collective_is_abandoned_unless_waited_for() {
    let (mut comm, log) = comm(2);
    let mut dropped = scatter(&mut comm, floats(&[4]), floats(&[2])).unwrap();
    let mut waited = scatter(&mut comm, floats(&[4]), floats(&[2])).unwrap();
    assert_eq!((dropped.is_ready(), waited.is_ready()), (true, false));
    let done = waited.wait_on(&NoMemory, Queue::Reduce).unwrap();
    assert_eq!((done.inputs[0].len(), done.outputs[0].len()), (4, 2));
    drop(dropped);
    comm.abort("enough", FailureKind::Permanent);
    let log = log.lock().unwrap();
    assert_eq!(
        log[2..],
        [Event::Waited(1, Queue::Reduce), Event::Abandoned(0), Event::Aborted("enough".into())]
    );
}

#[test]
fn traffic_counts_calls_and_bytes_sent() {
    for size in 1..6 {
        let (mut comm, _) = comm(size);
        let finish = |pending: Pending<NoMemory>| pending.wait_on(&NoMemory, Queue::Compute).map(|_| ());
        let pending =
            gather(&mut comm, buffers(DType::Bf16, &[3, 4]), buffers(DType::Bf16, &[3 * size, 4 * size]));
        finish(pending.unwrap()).unwrap();
        for _ in 0..2 {
            let pending = scatter(&mut comm, buffers(DType::F64, &[5 * size]), buffers(DType::F64, &[5]));
            finish(pending.unwrap()).unwrap();
        }
        for _ in 0..3 {
            let pending = comm.all_reduce(&NoMemory, ReduceOp::Sum, Purpose::Scalars, None, floats(&[60]));
            finish(pending.unwrap()).unwrap();
        }
        let parts = || floats(&[2 * size, 3 * size]);
        finish(comm.all_to_all(&NoMemory, Purpose::Activations, parts(), parts()).unwrap()).unwrap();
        finish(comm.broadcast(&NoMemory, Purpose::Setup, None, 0, floats(&[60, 60])).unwrap()).unwrap();
        comm.split(&NoMemory, 0).unwrap();
        let others = size as u64 - 1;
        let expected = Traffic {
            all_gathers: 1,
            all_gather_bytes: 7 * 2 * others,
            reduce_scatters: 2,
            reduce_scatter_bytes: 2 * 5 * 8 * others,
            all_reduces: 3,
            all_reduce_bytes: 3 * 2 * (60 / size as u64) * 4 * others,
            all_to_alls: 1,
            all_to_all_bytes: 5 * 4 * others,
            broadcasts: 1,
            broadcast_bytes: (120 / size as u64) * 4 * others,
        };
        assert_eq!(comm.traffic(), expected, "{size} ranks");
        let mut twice = expected;
        twice += expected;
        assert_eq!(twice.bytes(), 2 * expected.bytes());
        assert_eq!(
            expected.bytes(),
            expected.all_gather_bytes
                + expected.reduce_scatter_bytes
                + expected.all_reduce_bytes
                + expected.all_to_all_bytes
                + expected.broadcast_bytes
        );
        let calls = (twice.all_gathers, twice.reduce_scatters, twice.all_reduces, twice.broadcasts);
        assert_eq!(calls, (2, 4, 6, 2));
    }
}

#[test]
#[should_panic(expected = "place 3 is not in a group of 3 ranks")]
fn broadcast_root_outside_group_panics() {
    let (mut comm, _) = comm(3);
    drop(comm.broadcast(&NoMemory, Purpose::Setup, None, 3, floats(&[1])));
}

#[test]
fn backend_failure_is_returned_and_not_counted() {
    let log = Log::default();
    let mut comm = Comm::new(Box::new(Recorder { size: 2, log: Arc::clone(&log), fails: true }));
    let error = failure(comm.all_reduce(&NoMemory, ReduceOp::Sum, Purpose::Scalars, None, floats(&[2])));
    assert_eq!(error.to_string(), "rank 5: transport: unplugged");
    assert_eq!(comm.traffic(), Traffic::default());
}

#[test]
fn error_messages_name_ranks_and_calls() {
    let call = Fingerprint {
        sequence: 4,
        kind: CollectiveKind::AllGather,
        purpose: Purpose::Backward,
        unit: None,
        dtype: DType::F32,
        elements: 8,
    };
    let status = [RankStatus { rank: Rank(0), doing: "waits in #4".into() }].into();
    let missing = CommError::Missing { missing: [Rank(1), Rank(3)].into(), call, status };
    assert_eq!(
        missing.to_string(),
        "rank 1, rank 3 did not arrive in #4 all-gather (backward, 8 x f32)\n  rank 0: waits in #4"
    );
    let kind = CollectiveKind::AllReduce(ReduceOp::Sum);
    let expected = Fingerprint { kind, purpose: Purpose::UpdateRule, ..call };
    let mismatch = CommError::Mismatch { rank: Rank(2), got: call, peer: Rank(0), expected };
    assert_eq!(
        mismatch.to_string(),
        "collectives diverge: rank 2 called #4 all-gather (backward, 8 x f32), but rank 0 called #4 all-reduce \
         (update rule, 8 x f32)"
    );
}
