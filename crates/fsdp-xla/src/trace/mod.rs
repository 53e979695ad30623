//! Traces the program of a schedule: its operations, arguments and results.
//!
//! A buffer is not a memory location here but a name for values: an operation reads the current values of its operands
//! and produces new ones. Buffers whose first use in a schedule is a read become arguments; those that hold other
//! values at its end, and still have a handle, become results, which reuse the storage of their argument if they have
//! one (it is *donated*). So parameters and optimizer state are never named: the state that outlives a step is found
//! from what the step does.
//!
//! **Waits** of the schedule become barriers: the first operation of a queue after a wait reads its operands after
//! everything that it waits for. Without barriers a compiler merges work that is repeated on purpose (recomputation and
//! the second gather of a unit), and their memory savings are lost. If no gather separates a layer from its
//! recomputation, the values that recomputation reads are put after the gradient that backward continues from. Each
//! collective is also put after the one before on its queue, so that collectives keep the order of the schedule.

mod module;
mod sink;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Weak};

use fsdp_core::Queue;
use fsdp_core::memory::{Slice, SliceMut};

use crate::buffer::{Content, Source, Storage, XlaBuffer};
use crate::hlo::{Builder, Element, Name, Shape, Value};

pub(crate) use module::{Input, Interface, Module, Output, Traced};
pub use sink::Program;
pub(crate) use sink::TraceSink;

/// Maximum bytes of a block's scores: enough to keep a TPU's matrix units busy, and little compared with its memory.
const SCORES_MAX_BYTES: usize = 128 << 20;

/// An argument of the program.
pub(crate) struct Argument {
    pub(crate) shape: Shape,
    pub(crate) source: Source,
    /// The storage that the elements belong to, if any.
    storage: Option<Weak<Storage>>,
}

/// A trace in progress.
pub(crate) struct Trace {
    pub(crate) hlo: Builder,
    /// Maximum bytes of attention scores at a time.
    pub(crate) scores_max_bytes: usize,
    arguments: Vec<Argument>,
    /// Storage that was used, in the order of first use.
    touched: Vec<Weak<Storage>>,
    /// The last value produced on each queue.
    last: [Option<Value>; Queue::ALL.len()],
    /// The values that operations of each queue wait for.
    awaited: [Awaited; Queue::ALL.len()],
    /// The results of each queue's last collective.
    collective_results: [Vec<Value>; Queue::ALL.len()],
}

/// The values that a queue waits for.
#[derive(Default)]
struct Awaited {
    values: Vec<Value>,
    /// Whether an operation has already waited for them.
    is_consumed: bool,
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
            collective_results: Default::default(),
        }
    }
}

impl Trace {
    /// Adds host data as an argument. It may differ between ranks and steps.
    pub(crate) fn input(&mut self, shape: Shape, bytes: Vec<u8>) -> Value {
        self.argument(Argument { shape, source: Source::Bytes(bytes), storage: None })
    }

    /// Adds unsigned integers as an argument.
    pub(crate) fn input_ints(&mut self, numbers: impl IntoIterator<Item = u32>) -> Value {
        let bytes: Vec<u8> = numbers.into_iter().flat_map(u32::to_le_bytes).collect();
        self.input(Shape::new(&[bytes.len() / 4], Element::U32), bytes)
    }

    /// Adds numbers as an argument, converted to a float type.
    pub(crate) fn input_floats(&mut self, numbers: &[f64], element: Element) -> Value {
        let bytes = match element {
            Element::F64 => numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
            _ => numbers.iter().flat_map(|&number| (number as f32).to_le_bytes()).collect(),
        };
        let uploaded = if element == Element::F64 { element } else { Element::F32 };
        let input = self.input(Shape::new(&[numbers.len()], uploaded), bytes);
        self.hlo.convert(&input, element)
    }

    fn argument(&mut self, argument: Argument) -> Value {
        let value = Value { name: Name::Argument(self.arguments.len()), shape: argument.shape.clone() };
        self.arguments.push(argument);
        value
    }

    /// Takes the values of a storage, which is undefined until they are put back.
    fn open(&mut self, storage: &Arc<Storage>) -> BTreeMap<usize, Value> {
        let source = match storage.take() {
            Content::Traced(values) => return values,
            Content::Host(buffer) => Some(Source::Host(buffer)),
            Content::Device(buffer, _) => Some(Source::Device(buffer)),
            Content::Element(stack, index) => Some(Source::Element(stack, index)),
            Content::Zero => Some(Source::Zero),
            Content::Undefined => None,
        };
        self.touched.push(Arc::downgrade(storage));
        let argument =
            |source| Argument { shape: storage.shape(), source, storage: Some(Arc::downgrade(storage)) };
        source.map(|source| (0, self.argument(argument(source)))).into_iter().collect()
    }

    /// Joins all elements into one value; undefined elements become zero.
    fn assemble(&mut self, storage: &Storage, values: &BTreeMap<usize, Value>) -> Value {
        let padded_len = storage.padded_len();
        if let Some(value) = values.get(&0).filter(|value| value.len() == padded_len) {
            return value.clone();
        }
        let element = storage.dtype.into();
        let (mut parts, mut end) = (Vec::new(), 0);
        for (&start, value) in values {
            if start > end {
                parts.push(self.hlo.zeros(&[start - end], element));
            }
            parts.push(value.clone());
            end = start + value.len();
        }
        if end < padded_len || parts.is_empty() {
            parts.push(self.hlo.zeros(&[padded_len - end], element));
        }
        self.hlo.concatenate(&parts, 0)
    }

    /// Reads a range as a vector, for an operation of a queue.
    pub(crate) fn load(&mut self, queue: Queue, slice: Slice<'_, XlaBuffer>) -> Value {
        self.load_range(queue, &slice.buffer.storage, slice.offset..slice.offset + slice.len)
    }

    /// Reads all elements that a buffer has in programs, padding included.
    pub(crate) fn load_padded(&mut self, queue: Queue, buffer: &XlaBuffer) -> Value {
        self.load_range(queue, &buffer.storage, 0..buffer.storage.padded_len())
    }

    fn load_range(&mut self, queue: Queue, storage: &Arc<Storage>, range: Range<usize>) -> Value {
        let mut values = self.open(storage);
        let found = values.range(..=range.start).next_back().map(|(&start, value)| (start, value.clone()));
        let end = range.end;
        let (start, mut value) = match found.filter(|(start, value)| start + value.len() >= end) {
            Some(found) => found,
            None => {
                let all = self.assemble(storage, &values);
                values = BTreeMap::from([(0, all.clone())]);
                (0, all)
            }
        };
        let awaited = &self.awaited[queue as usize];
        let mut operands = vec![value.clone()];
        if !awaited.is_consumed {
            operands.extend(awaited.values.iter().filter(|other| other.name != value.name).cloned());
        }
        if operands.len() > 1 {
            let is_argument = self.is_stored(&value);
            value = self.hlo.barrier(&operands).swap_remove(0);
            // Later operations read what is stored from an argument, so that loops find it in a stack of arguments.
            if !is_argument {
                values.insert(start, value.clone());
            }
        }
        storage.put(Content::Traced(values));
        self.hlo.range(&value, range.start - start..end - start)
    }

    /// Whether a value is the argument of a storage.
    fn is_stored(&self, value: &Value) -> bool {
        matches!(value.name, Name::Argument(number) if self.arguments[number].storage.is_some())
    }

    /// Sets a range to a value of the same length, converted to the buffer's dtype. It completes an operation of the
    /// queue.
    pub(crate) fn store(&mut self, queue: Queue, slice: &SliceMut<'_, XlaBuffer>, value: &Value) {
        self.store_range(queue, &slice.buffer.storage, slice.offset..slice.offset + slice.len, value);
    }

    /// Sets all elements that a buffer has in programs, padding included.
    pub(crate) fn store_padded(&mut self, queue: Queue, buffer: &mut XlaBuffer, value: &Value) {
        self.store_range(queue, &buffer.storage, 0..buffer.storage.padded_len(), value);
    }

    fn store_range(&mut self, queue: Queue, storage: &Arc<Storage>, range: Range<usize>, value: &Value) {
        let value = self.hlo.convert(value, storage.dtype.into());
        let value = self.hlo.reshape(&value, &[range.len()]);
        let Range { start: from, end: to } = range;
        if range.len() == storage.padded_len()
            && matches!(
                *storage.content(),
                Content::Host(_) | Content::Device(..) | Content::Element(..) | Content::Zero
            )
        {
            // The old contents are overwritten completely: no argument is needed.
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
        self.awaited[queue as usize].is_consumed = true;
        self.last[queue as usize] = Some(value);
    }

    /// Puts the contents of `storage` after those of `other`.
    pub(crate) fn delay(&mut self, storage: &Arc<Storage>, other: &Arc<Storage>) {
        let [value, other] = [storage, other].map(|storage| {
            let values = self.open(storage);
            let all = self.assemble(storage, &values);
            storage.put(Content::Traced(BTreeMap::from([(0, all.clone())])));
            all
        });
        let value = self.hlo.after(&value, &other);
        storage.put(Content::Traced(BTreeMap::from([(0, value)])));
    }

    /// Discards the contents of a storage.
    pub(crate) fn release(&mut self, storage: &Arc<Storage>) {
        storage.put(Content::Undefined);
    }

    /// The last value produced on a queue.
    pub(crate) fn last(&self, queue: Queue) -> Option<Value> {
        self.last[queue as usize].clone()
    }

    /// Puts the next operation of a queue after a value.
    pub(crate) fn wait(&mut self, queue: Queue, value: &Value) {
        let Awaited { values, is_consumed } = &mut self.awaited[queue as usize];
        if std::mem::take(is_consumed) {
            values.clear();
        }
        if values.iter().all(|other| other.name != value.name) {
            values.push(value.clone());
        }
    }

    /// Prepares a collective as the next operation of a queue: it is put after the queue's last collective, as on all
    /// ranks.
    pub(crate) fn begin_collective(&mut self, queue: Queue) {
        for value in std::mem::take(&mut self.collective_results[queue as usize]) {
            self.wait(queue, &value);
        }
    }

    /// Records the results of a queue's newest collective.
    pub(crate) fn end_collective(&mut self, queue: Queue, results: &[Value]) {
        self.collective_results[queue as usize] = results.to_vec();
    }

    /// Adds a loop of `rounds` iterations: the first starts with the values `first`, each other one with the results of
    /// the one before. An iteration must not touch buffers, since their contents would become values of the loop.
    pub(crate) fn repeat<const N: usize>(
        &mut self,
        rounds: usize,
        first: [Value; N],
        round: impl FnOnce(&mut Self, &Value, [Value; N]) -> [Value; N],
    ) -> [Value; N] {
        let open = self.hlo.begin_loop(rounds, &first);
        let values = std::array::from_fn(|part| open.values()[part].clone());
        let ends = round(self, open.index(), values);
        let results = self.hlo.end_loop(open, &ends);
        std::array::from_fn(|part| results[part].clone())
    }
}
