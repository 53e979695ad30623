//! A memory whose queues run as late as possible: a step of a queue runs only when a read on the host requires it,
//! directly or through waits. Work that a communicator failed to order after the data it needs thus finds only poison.
//! All ranks share one device.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use fsdp_core::memory::{
    Arithmetic, Buffer, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut, Usage,
};
use fsdp_core::{DType, Error, Queue, Rank};

type Cells = Arc<Mutex<Vec<f64>>>;
type QueueId = (Rank, Queue);

/// A point in the work of a queue: the number of steps submitted to it before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Point {
    queue: QueueId,
    steps: usize,
}

enum Step {
    Work(Box<dyn FnOnce() + Send>),
    Wait(Point),
}

#[derive(Default)]
struct Stream {
    steps: VecDeque<Step>,
    issued: usize,
    done: usize,
}

/// The queues of all ranks.
#[derive(Default)]
pub(crate) struct Device {
    streams: Mutex<BTreeMap<QueueId, Stream>>,
}

impl Device {
    fn issue(&self, queue: QueueId, step: Step) {
        let mut streams = self.streams.lock().unwrap();
        let stream = streams.entry(queue).or_default();
        stream.steps.push_back(step);
        stream.issued += 1;
    }
}

/// Runs the steps that must come before a point, and no others.
fn run_until(streams: &mut BTreeMap<QueueId, Stream>, point: Point) {
    while streams.entry(point.queue).or_default().done < point.steps {
        let stream = streams.get_mut(&point.queue).unwrap();
        match stream.steps.pop_front().expect("steps that were issued are done or waiting") {
            Step::Work(work) => work(),
            Step::Wait(earlier) => run_until(streams, earlier),
        }
        streams.get_mut(&point.queue).unwrap().done += 1;
    }
}

#[derive(Clone, Debug)]
pub(crate) struct LaggingBuffer {
    cells: Cells,
    handle: Arc<()>,
    dtype: DType,
}

impl Buffer for LaggingBuffer {
    fn len(&self) -> usize {
        self.cells.lock().unwrap().len()
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn is_exclusive(&self) -> bool {
        Arc::strong_count(&self.handle) == 1
    }
}

/// One rank's view of the device.
pub(crate) struct LaggingMemory {
    pub(crate) rank: Rank,
    pub(crate) device: Arc<Device>,
}

impl LaggingMemory {
    fn work(&self, queue: Queue, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        self.device.issue((self.rank, queue), Step::Work(Box::new(work)));
        Ok(())
    }

    fn combine(
        &self,
        queue: Queue,
        src: Slice<'_, LaggingBuffer>,
        dst: SliceMut<'_, LaggingBuffer>,
        combine: impl Fn(f64, f64) -> f64 + Send + 'static,
    ) -> Result<(), Error> {
        let (from, to) = (src.buffer.cells.clone(), dst.buffer.cells.clone());
        let (start, offset, len) = (src.offset, dst.offset, dst.len);
        self.work(queue, move || {
            let src = from.lock().unwrap()[start..start + len].to_vec();
            let mut out = to.lock().unwrap();
            out[offset..offset + len].iter_mut().zip(src).for_each(|(out, x)| *out = combine(*out, x));
        })
    }
}

impl Memory for LaggingMemory {
    type Buffer = LaggingBuffer;
    type Event = Point;

    fn allocate(&self, _category: Category, dtype: DType, len: usize) -> Result<LaggingBuffer, Error> {
        let cells = Arc::new(Mutex::new(vec![f64::NAN; len]));
        Ok(LaggingBuffer { cells, handle: Arc::default(), dtype })
    }

    fn release(&self, queue: Queue, buffer: &mut LaggingBuffer) {
        let fresh = vec![f64::NAN; buffer.len()];
        let old = std::mem::replace(&mut buffer.cells, Arc::new(Mutex::new(fresh)));
        self.work(queue, move || old.lock().unwrap().fill(f64::NAN)).unwrap();
    }

    fn alias(&self, dst: &mut LaggingBuffer, src: &LaggingBuffer) -> bool {
        dst.cells = src.cells.clone();
        true
    }

    fn zero(&self, queue: Queue, dst: SliceMut<'_, LaggingBuffer>) -> Result<(), Error> {
        let (cells, range) = (dst.buffer.cells.clone(), dst.offset..dst.offset + dst.len);
        self.work(queue, move || cells.lock().unwrap()[range].fill(0.0))
    }

    fn copy(
        &self,
        queue: Queue,
        src: Slice<'_, LaggingBuffer>,
        dst: SliceMut<'_, LaggingBuffer>,
    ) -> Result<(), Error> {
        self.combine(queue, src, dst, |_, value| value)
    }

    fn compute(
        &self,
        queue: Queue,
        operation: Arithmetic<'_, Slice<'_, LaggingBuffer>>,
        dst: SliceMut<'_, LaggingBuffer>,
    ) -> Result<(), Error> {
        let round = match dst.buffer.dtype {
            DType::F32 => |value: f64| f64::from(value as f32),
            _ => |value: f64| value,
        };
        match operation {
            Arithmetic::Accumulate(src) => {
                self.combine(queue, src, dst, move |sum, value| round(sum + value))
            }
            Arithmetic::Scale(factor) => {
                let (cells, range) = (dst.buffer.cells.clone(), dst.offset..dst.offset + dst.len);
                self.work(queue, move || {
                    let factor = round(factor);
                    cells.lock().unwrap()[range].iter_mut().for_each(|value| *value = round(*value * factor));
                })
            }
            _ => unreachable!("collectives compute nothing else"),
        }
    }

    fn write(&self, queue: Queue, src: HostSlice<'_>, dst: SliceMut<'_, LaggingBuffer>) -> Result<(), Error> {
        let values: Vec<f64> = match src {
            HostSlice::F64(values) => values.to_vec(),
            HostSlice::I64(values) => values.iter().map(|&value| value as f64).collect(),
            HostSlice::U8(values) => values.iter().map(|&value| f64::from(value)).collect(),
            HostSlice::F32(_) | HostSlice::U32(_) => unreachable!("the suite writes no others"),
        };
        let (cells, offset) = (dst.buffer.cells.clone(), dst.offset);
        self.work(queue, move || {
            cells.lock().unwrap()[offset..offset + values.len()].copy_from_slice(&values)
        })
    }

    fn read(&self, queue: Queue, src: Slice<'_, LaggingBuffer>, dst: HostSliceMut<'_>) -> Result<(), Error> {
        let now = self.record(queue);
        run_until(&mut self.device.streams.lock().unwrap(), now);
        let cells = src.buffer.cells.lock().unwrap();
        let values = &cells[src.offset..src.offset + src.len];
        match dst {
            HostSliceMut::F64(out) => out.copy_from_slice(values),
            HostSliceMut::I64(out) => out.iter_mut().zip(values).for_each(|(out, &x)| *out = x as i64),
            HostSliceMut::U8(out) => out.iter_mut().zip(values).for_each(|(out, &x)| *out = x as u8),
            HostSliceMut::F32(_) | HostSliceMut::U32(_) => unreachable!("the suite reads no others"),
        }
        Ok(())
    }

    fn record(&self, queue: Queue) -> Point {
        let queue = (self.rank, queue);
        let steps = self.device.streams.lock().unwrap().entry(queue).or_default().issued;
        Point { queue, steps }
    }

    fn wait(&self, queue: Queue, event: &Point) {
        self.device.issue((self.rank, queue), Step::Wait(*event));
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}
