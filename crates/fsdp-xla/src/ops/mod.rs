//! Lowers each operation to StableHLO, by one rule each. One file per family, as in `fsdp_nn::op`.
//!
//! As on all devices, arithmetic is done in the master dtype, and results are rounded once, to the dtype of the operand
//! that they are written to.

mod activation;
mod attention;
mod dora;
mod head;
mod linear;
mod lookup;
mod norm;
mod pointwise;
mod random;

use fsdp_core::memory::{Slice, SliceMut};
use fsdp_core::update::{SegmentShard, Stage, StepScalars};
use fsdp_core::{Error, Queue};
use fsdp_nn::HostBuffer;
use fsdp_nn::backend::{Backend, HeadChunks, Operands, Outcome, Write};
use fsdp_nn::op::Op;
use fsdp_nn::update::Part;

use crate::buffer::{Content, XlaBuffer};
use crate::hlo::Value;
use crate::memory::{In, XlaMemory, writable};
use crate::trace::Trace;

/// Operands of a call.
pub(crate) type Call<'o, 'a> = Operands<'o, 'a, XlaBuffer>;

impl Backend for XlaMemory {
    fn head_chunks(&self) -> HeadChunks {
        HeadChunks::Large
    }

    fn recompute(&self, kept: &mut XlaBuffer, gradient: &XlaBuffer) {
        if let Some(trace) = &mut *self.lock() {
            trace.delay(&kept.storage, &gradient.storage);
        }
    }

    fn execute(&self, op: &Op, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        operands.writes.iter().try_for_each(|write| writable(write.slice.buffer))?;
        let Some(trace) = &mut *self.lock() else { return self.execute_on_host(op, operands) };
        match op {
            Op::Linear(op) => trace.linear(*op, operands),
            Op::Dora(op) => trace.dora(*op, operands),
            Op::Lookup(op) => trace.lookup(*op, operands),
            Op::Norm(op) => trace.norm(*op, operands),
            Op::Attention(op) => trace.attention(op, operands),
            Op::Activation(op) => trace.activation(*op, operands),
            Op::Pointwise(op) => trace.pointwise(*op, operands),
            Op::Head(op) => trace.head(*op, operands),
            Op::Dequantize(_)
            | Op::Latent(_)
            | Op::Delta(_)
            | Op::Experts(_)
            | Op::ExpertAxis(_)
            | Op::Exchange(_) => return Ok(Outcome::Unsupported),
        }
        Ok(Outcome::Done)
    }

    fn update(
        &self,
        part: &Part,
        stage: &mut Stage<'_, XlaBuffer>,
        shard: &mut SegmentShard<'_, XlaBuffer>,
        scalars: &StepScalars<'_, XlaBuffer>,
    ) -> Result<Outcome, Error> {
        self.update_part(part, stage, shard, scalars)
    }
}

impl XlaMemory {
    /// Runs an operation outside of schedules.
    fn execute_on_host(&self, op: &Op, operands: Call<'_, '_>) -> Result<Outcome, Error> {
        let read: Vec<HostBuffer> =
            operands.reads.iter().map(|slice| self.on_host(slice.buffer)).collect::<Result<_, _>>()?;
        let reads: Vec<Slice<'_, HostBuffer>> = read
            .iter()
            .zip(operands.reads)
            .map(|(buffer, slice)| Slice::new(buffer, slice.offset, slice.len))
            .collect();
        let mut host_writes: Vec<HostBuffer> = operands
            .writes
            .iter()
            .map(|write| self.take_to_host(write.slice.buffer))
            .collect::<Result<_, _>>()?;
        let mut writes: Vec<Write<'_, HostBuffer>> = host_writes
            .iter_mut()
            .zip(&*operands.writes)
            .map(|(buffer, Write { slice, accumulate })| Write {
                slice: SliceMut::new(buffer, slice.offset, slice.len),
                accumulate: *accumulate,
            })
            .collect();
        let call = Operands { reads: &reads, writes: &mut writes, batch: operands.batch };
        let outcome = self.host().execute(op, call);
        for (write, buffer) in operands.writes.iter().zip(host_writes) {
            write.slice.buffer.storage.put(Content::Host(buffer));
        }
        outcome
    }
}

/// The queue of all operations within blocks.
const QUEUE: Queue = Queue::Compute;

impl Trace {
    /// Reads an operand as a vector.
    fn read(&mut self, slice: In<'_>) -> Value {
        self.load(QUEUE, slice)
    }

    /// Reads an operand in the type of arithmetic.
    fn read_master(&mut self, slice: In<'_>) -> Value {
        let value = self.read(slice);
        self.hlo.master(&value)
    }

    /// Reads an operand as rows of `width` elements.
    fn read_rows(&mut self, slice: In<'_>, width: usize) -> Value {
        let value = self.read(slice);
        self.hlo.reshape(&value, &[slice.len / width, width])
    }

    /// Reads rows in the type of arithmetic.
    fn read_rows_master(&mut self, slice: In<'_>, width: usize) -> Value {
        let rows = self.read_rows(slice, width);
        self.hlo.master(&rows)
    }

    /// Writes an operand, or accumulates into it.
    fn write(&mut self, write: &Write<'_, XlaBuffer>, value: &Value) {
        let mut value = value.clone();
        if write.accumulate {
            let old = self.read_master(write.slice.as_slice());
            let old = self.hlo.reshape(&old, value.dims());
            let new = self.hlo.convert(&value, old.element());
            value = self.hlo.add(&old, &new);
        }
        self.store(QUEUE, &write.slice, &value);
    }

    /// Reads rows of `columns` elements with a stride of `stride`, starting at the first element of the operand.
    fn read_columns(&mut self, slice: In<'_>, [rows, columns, stride]: [usize; 3]) -> Value {
        if columns == stride {
            let rows_slice = Slice::new(slice.buffer, slice.offset, rows * columns);
            return self.read_rows(rows_slice, columns);
        }
        let (table, offset) = match table_offset(slice, columns, stride) {
            Some(offset) => (Slice::whole(slice.buffer), offset),
            None => (slice, [0, 0]),
        };
        let table = self.read(table);
        let table = self.padded_rows(&table, stride);
        self.hlo.slice(&table, &[offset[0]..offset[0] + rows, offset[1]..offset[1] + columns])
    }

    /// Writes rows laid out as in [`Trace::read_columns`]; elements between them are unchanged.
    fn write_columns(&mut self, write: &mut Write<'_, XlaBuffer>, value: &Value, stride: usize) {
        let [rows, columns] = value.dims()[..] else { panic!("rows are written, not {}", value.shape) };
        if columns == stride {
            return self.write(write, value);
        }
        let mut value = value.clone();
        if write.accumulate {
            let old = self.read_columns(write.slice.as_slice(), [rows, columns, stride]);
            let (old, new) = (self.hlo.master(&old), self.hlo.master(&value));
            value = self.hlo.add(&old, &new);
        }
        let offset = table_offset(write.slice.as_slice(), columns, stride);
        let slice = match offset {
            Some(_) => SliceMut::whole(write.slice.buffer),
            None => write.slice.reborrow(),
        };
        let old = self.load(QUEUE, slice.as_slice());
        let table = self.padded_rows(&old, stride);
        let value = self.hlo.convert(&value, table.element());
        let table = self.hlo.update(&table, &value, &offset.unwrap_or_default());
        let flat = self.hlo.reshape(&table, &[table.len()]);
        let flat = self.hlo.range(&flat, 0..slice.len);
        self.store(QUEUE, &slice, &flat);
    }

    /// Reshapes a vector to rows; zeros pad an incomplete last row.
    fn padded_rows(&mut self, x: &Value, width: usize) -> Value {
        let rows = x.len().div_ceil(width);
        let missing = rows * width - x.len();
        let full = match missing {
            0 => x.clone(),
            _ => {
                let zeros = self.hlo.zeros(&[missing], x.element());
                self.hlo.concatenate(&[x.clone(), zeros], 0)
            }
        };
        self.hlo.reshape(&full, &[rows, width])
    }

    /// Broadcasts a vector to `rows` rows.
    fn in_rows(&mut self, x: &Value, rows: usize) -> Value {
        self.hlo.broadcast(x, &[1], &[rows, x.len()])
    }

    /// Broadcasts one number per row to all of its columns.
    pub(crate) fn in_columns(&mut self, x: &Value, columns: usize) -> Value {
        self.hlo.broadcast(x, &[0], &[x.len(), columns])
    }

    /// The mean of each row.
    fn row_means(&mut self, x: &Value) -> Value {
        let sums = self.hlo.sum(x, &[1]);
        self.hlo.with("multiply", &sums, 1.0 / x.dims()[1] as f64)
    }

    /// `cap * tanh(x / cap)` and its slope.
    fn capped(&mut self, x: &Value, cap: f64) -> [Value; 2] {
        let ratio = self.hlo.with("divide", x, cap);
        let tanh = self.hlo.unary("tanh", &ratio);
        let value = self.hlo.with("multiply", &tanh, cap);
        let one = self.hlo.float(1.0, tanh.dims(), tanh.element());
        let square = self.hlo.multiply(&tanh, &tanh);
        [value, self.hlo.subtract(&one, &square)]
    }
}

/// Row and column of an operand in its buffer, if the buffer is a matrix with row stride `stride`.
fn table_offset(slice: In<'_>, columns: usize, stride: usize) -> Option<[usize; 2]> {
    let offset = [slice.offset / stride, slice.offset % stride];
    let len = fsdp_core::memory::Buffer::len(slice.buffer);
    (len.is_multiple_of(stride) && offset[1] + columns <= stride).then_some(offset)
}
