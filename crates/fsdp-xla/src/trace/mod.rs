//! The program of a schedule in the making: what has been traced, which arguments it takes, and what it leaves behind.
//!
//! A buffer is no place here, but a name for values: an operation reads the values that its operands stand for, and makes new
//! ones. Buffers whose first use in a schedule is a read become arguments; those that hold something else at its end, and
//! still have a handle, become results, in the storage of the argument where there is one (it is *donated*). So nothing names
//! parameters or optimizer state: what outlives a step is found by what the step does.
//!
//! **Waits** of the schedule become barriers: the first operation of a queue after a wait reads its operands behind
//! everything that it waits for. Without them a compiler merges what is computed twice on purpose, recomputation and the
//! second gather of a unit, and the memory that this was to save is not. Where no gather stands between a layer and its
//! recomputation, what is read again is behind the gradient that backward continues from. Each collective is behind the one before on its queue, too,
//! so that they keep the order of the schedule.

mod module;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Weak};

use fsdp_core::Queue;
use fsdp_core::memory::{Slice, SliceMut};
use fsdp_nn::HostBuffer;

use crate::buffer::{Content, Storage, XlaBuffer};
use crate::ffi::DeviceBuffer;
use crate::hlo::{Builder, Element, Name, Shape, Value};
use crate::ops::SCORES_MAX_BYTES;

pub(crate) use module::Module;

/// Where the elements of an argument come from.
pub(crate) enum Source {
    /// From the host: elements of a buffer.
    Host(HostBuffer),
    /// From the host: numbers of this step.
    Bytes(Vec<u8>),
    /// They are zero.
    Zero,
    /// They are on the device.
    Device(Arc<DeviceBuffer>),
}

/// An argument of the program.
pub(crate) struct Argument {
    pub(crate) shape: Shape,
    pub(crate) source: Source,
    /// The storage whose elements they are.
    storage: Option<Weak<Storage>>,
}

/// What is traced.
pub(crate) struct Trace {
    pub(crate) hlo: Builder,
    /// What scores of attention may take at a time.
    pub(crate) scores_max_bytes: usize,
    arguments: Vec<Argument>,
    /// Storage that was touched, in the order of first use.
    touched: Vec<Weak<Storage>>,
    /// The last value that was made on each queue.
    last: [Option<Value>; Queue::ALL.len()],
    /// What operations of each queue wait for.
    awaited: [Awaited; Queue::ALL.len()],
    /// What the last collective of each queue has made.
    communicated: [Vec<Value>; Queue::ALL.len()],
}

/// What a queue waits for.
#[derive(Default)]
struct Awaited {
    values: Vec<Value>,
    /// An operation has waited for it.
    is_past: bool,
}

impl Default for Trace {
    fn default() -> Self {
        Self {
            hlo: Builder::default(),
            scores_max_bytes: SCORES_MAX_BYTES,
            arguments: Vec::new(),
            touched: Vec::new(),
            last: Default::default(),
            awaited: Default::default(),
            communicated: Default::default(),
        }
    }
}

impl Trace {
    /// Numbers that the host knows, as an argument. They may differ between ranks and steps.
    pub(crate) fn input(&mut self, shape: Shape, bytes: Vec<u8>) -> Value {
        self.argument(Argument { shape, source: Source::Bytes(bytes), storage: None })
    }

    /// Integers without sign, as an argument.
    pub(crate) fn input_ints(&mut self, numbers: impl IntoIterator<Item = u32>) -> Value {
        let bytes: Vec<u8> = numbers.into_iter().flat_map(u32::to_le_bytes).collect();
        self.input(Shape::new(&[bytes.len() / 4], Element::U32), bytes)
    }

    /// Numbers in a float type, as an argument.
    pub(crate) fn input_floats(&mut self, numbers: &[f64], element: Element) -> Value {
        let bytes = match element {
            Element::F64 => numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
            _ => numbers.iter().flat_map(|&number| (number as f32).to_le_bytes()).collect(),
        };
        let given = if element == Element::F64 { element } else { Element::F32 };
        let input = self.input(Shape::new(&[numbers.len()], given), bytes);
        self.hlo.convert(&input, element)
    }

    fn argument(&mut self, argument: Argument) -> Value {
        let value = Value { name: Name::Argument(self.arguments.len()), shape: argument.shape.clone() };
        self.arguments.push(argument);
        value
    }

    /// The values that storage holds; it holds nothing until they are put back.
    fn open(&mut self, storage: &Arc<Storage>) -> BTreeMap<usize, Value> {
        let source = match storage.take() {
            Content::Traced(values) => return values,
            Content::Host(buffer) => Some(Source::Host(buffer)),
            Content::Device(buffer, _) => Some(Source::Device(buffer)),
            Content::Zero => Some(Source::Zero),
            Content::Undefined => None,
        };
        self.touched.push(Arc::downgrade(storage));
        let argument =
            |source| Argument { shape: storage.shape(), source, storage: Some(Arc::downgrade(storage)) };
        source.map(|source| (0, self.argument(argument(source)))).into_iter().collect()
    }

    /// All elements as one value; what is undefined is zero.
    fn whole(&mut self, storage: &Storage, values: &BTreeMap<usize, Value>) -> Value {
        let room = storage.room();
        if let Some(value) = values.get(&0).filter(|value| value.len() == room) {
            return value.clone();
        }
        let element = storage.dtype.into();
        let (mut parts, mut at) = (Vec::new(), 0);
        for (&start, value) in values {
            if start > at {
                parts.push(self.hlo.zeros(&[start - at], element));
            }
            parts.push(value.clone());
            at = start + value.len();
        }
        if at < room || parts.is_empty() {
            parts.push(self.hlo.zeros(&[room - at], element));
        }
        self.hlo.concatenate(&parts, 0)
    }

    /// The elements of a range, as a vector, for an operation of a queue.
    pub(crate) fn load(&mut self, queue: Queue, slice: Slice<'_, XlaBuffer>) -> Value {
        self.load_range(queue, &slice.buffer.storage, slice.offset..slice.offset + slice.len)
    }

    /// All elements that a buffer has in programs: at least as many as it has itself.
    pub(crate) fn load_room(&mut self, queue: Queue, buffer: &XlaBuffer) -> Value {
        self.load_range(queue, &buffer.storage, 0..buffer.storage.room())
    }

    fn load_range(&mut self, queue: Queue, storage: &Arc<Storage>, range: Range<usize>) -> Value {
        let mut values = self.open(storage);
        let found = values.range(..=range.start).next_back().map(|(&start, value)| (start, value.clone()));
        let end = range.end;
        let (start, mut value) = match found.filter(|(start, value)| start + value.len() >= end) {
            Some(found) => found,
            None => {
                let whole = self.whole(storage, &values);
                values = BTreeMap::from([(0, whole.clone())]);
                (0, whole)
            }
        };
        let awaited = &self.awaited[queue as usize];
        let mut behind = vec![value.clone()];
        if !awaited.is_past {
            behind.extend(awaited.values.iter().filter(|other| other.name != value.name).cloned());
        }
        if behind.len() > 1 {
            value = self.hlo.barrier(&behind).swap_remove(0);
            values.insert(start, value.clone());
        }
        storage.put(Content::Traced(values));
        self.hlo.range(&value, range.start - start..end - start)
    }

    /// Lets a range hold a value of as many elements, converted to the buffer's type. It ends an operation of the queue.
    pub(crate) fn store(&mut self, queue: Queue, slice: &SliceMut<'_, XlaBuffer>, value: &Value) {
        self.store_range(queue, &slice.buffer.storage, slice.offset..slice.offset + slice.len, value);
    }

    /// Lets a buffer hold as many elements as it has in programs.
    pub(crate) fn store_room(&mut self, queue: Queue, buffer: &mut XlaBuffer, value: &Value) {
        self.store_range(queue, &buffer.storage, 0..buffer.storage.room(), value);
    }

    fn store_range(&mut self, queue: Queue, storage: &Arc<Storage>, range: Range<usize>, value: &Value) {
        let value = self.hlo.convert(value, storage.dtype.into());
        let value = self.hlo.reshape(&value, &[range.len()]);
        let Range { start: from, end: to } = range;
        if range.len() == storage.room()
            && matches!(*storage.content(), Content::Host(_) | Content::Device(..) | Content::Zero)
        {
            // Nobody reads what is there: it needs no argument.
            storage.put(Content::Undefined);
        }
        let mut values = self.open(storage);
        let overlapping: Vec<(usize, Value)> = values
            .iter()
            .filter(|(start, old)| **start < to && *start + old.len() > from)
            .map(|(&start, old)| (start, old.clone()))
            .collect();
        for (start, old) in overlapping {
            values.remove(&start);
            let end = start + old.len();
            if start < from {
                let left = self.hlo.range(&old, 0..from - start);
                values.insert(start, left);
            }
            if end > to {
                let right = self.hlo.range(&old, to - start..end - start);
                values.insert(to, right);
            }
        }
        values.insert(from, value.clone());
        storage.put(Content::Traced(values));
        self.awaited[queue as usize].is_past = true;
        self.last[queue as usize] = Some(value);
    }

    /// What storage holds is not there before what the other one holds.
    pub(crate) fn delay(&mut self, storage: &Arc<Storage>, other: &Arc<Storage>) {
        let [value, other] = [storage, other].map(|storage| {
            let values = self.open(storage);
            let whole = self.whole(storage, &values);
            storage.put(Content::Traced(BTreeMap::from([(0, whole.clone())])));
            whole
        });
        let value = self.hlo.behind(&value, &other);
        storage.put(Content::Traced(BTreeMap::from([(0, value)])));
    }

    /// Forgets what storage holds.
    pub(crate) fn release(&mut self, storage: &Arc<Storage>) {
        storage.put(Content::Undefined);
    }

    /// What a queue has made last.
    pub(crate) fn last(&self, queue: Queue) -> Option<Value> {
        self.last[queue as usize].clone()
    }

    /// The next operation of a queue comes after a value.
    pub(crate) fn wait(&mut self, queue: Queue, value: &Value) {
        let Awaited { values, is_past } = &mut self.awaited[queue as usize];
        if std::mem::take(is_past) {
            values.clear();
        }
        if values.iter().all(|other| other.name != value.name) {
            values.push(value.clone());
        }
    }

    /// The next operation of a queue is a collective: it comes after the one before, as on all ranks.
    pub(crate) fn begin_collective(&mut self, queue: Queue) {
        for value in std::mem::take(&mut self.communicated[queue as usize]) {
            self.wait(queue, &value);
        }
    }

    /// What the collective of a queue has made that is written now.
    pub(crate) fn end_collective(&mut self, queue: Queue, made: &[Value]) {
        self.communicated[queue as usize] = made.to_vec();
    }

    /// So many rounds, the first of which begins with these values and each other one with what the one before has made. Buffers
    /// are not touched in a round, since what they held would be values of the loop.
    pub(crate) fn repeat<const N: usize>(
        &mut self,
        rounds: usize,
        first: [Value; N],
        round: impl FnOnce(&mut Self, &Value, [Value; N]) -> [Value; N],
    ) -> [Value; N] {
        let open = self.hlo.begin_loop(rounds, &first);
        let own = std::array::from_fn(|part| open.values()[part].clone());
        let ends = round(self, open.index(), own);
        let results = self.hlo.end_loop(open, &ends);
        std::array::from_fn(|part| results[part].clone())
    }
}
