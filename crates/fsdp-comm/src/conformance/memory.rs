//! A memory for tests, slow and obvious.
//!
//! Elements are kept as `f64` or `i64` and rounded to the dtype after every operation, work is done immediately, and
//! released storage cannot be read. It serves as a reference for the memories used in training.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fsdp_core::memory::{Arithmetic, Buffer, Category, HostSlice, HostSliceMut, Slice, SliceMut, Usage};
use fsdp_core::scalars::{GradientFactors, SCALAR_WORDS};
use fsdp_core::{DType, Error, ExactSum, Memory, Queue};

use super::values::round;

#[derive(Clone, Debug)]
enum Data {
    Released,
    Floats(Vec<f64>),
    Integers(Vec<i64>),
}

impl Data {
    /// The contents of the rest of a released buffer after a write into part of it.
    fn poison(dtype: DType, len: usize) -> Self {
        if dtype.is_float() { Data::Floats(vec![f64::NAN; len]) } else { Data::Integers(vec![i64::MIN; len]) }
    }
}

/// Elements, and the bytes they occupy: 0 once released.
#[derive(Debug)]
struct Storage {
    data: Data,
    bytes: usize,
    resident: Arc<AtomicUsize>,
}

impl Storage {
    fn new(data: Data, bytes: usize, resident: &Arc<AtomicUsize>) -> Self {
        resident.fetch_add(bytes, Ordering::SeqCst);
        Self { data, bytes, resident: resident.clone() }
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        self.resident.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

/// Counts a buffer as long as a handle to it lives.
#[derive(Debug)]
struct Counted {
    usage: Arc<Mutex<Usage>>,
    category: Category,
    bytes: usize,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut usage = self.usage.lock().unwrap_or_else(PoisonError::into_inner);
        usage.device.live_bytes[self.category as usize] -= self.bytes;
    }
}

/// A buffer of a [`PlainMemory`].
#[derive(Clone, Debug)]
pub struct PlainBuffer {
    storage: Arc<Storage>,
    dtype: DType,
    len: usize,
    _counted: Arc<Counted>,
}

impl PlainBuffer {
    /// Whether both handles refer to the same storage.
    pub fn shares_storage_with(&self, other: &PlainBuffer) -> bool {
        Arc::ptr_eq(&self.storage, &other.storage)
    }

    /// Whether the contents were released.
    pub fn is_released(&self) -> bool {
        matches!(self.storage.data, Data::Released)
    }

    fn writable(&mut self) -> Result<&mut Data, Error> {
        let (len, dtype, readers) = (self.len, self.dtype, Arc::strong_count(&self.storage) - 1);
        let storage = Arc::get_mut(&mut self.storage).ok_or(Error::Shared { len, dtype, readers })?;
        if matches!(storage.data, Data::Released) {
            *storage = Storage::new(Data::poison(dtype, len), len * dtype.size_bytes(), &storage.resident);
        }
        Ok(&mut storage.data)
    }
}

impl Buffer for PlainBuffer {
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

/// A memory for tests; see the module documentation.
#[derive(Debug)]
pub struct PlainMemory {
    can_alias: bool,
    usage: Arc<Mutex<Usage>>,
    resident: Arc<AtomicUsize>,
}

impl PlainMemory {
    /// Creates an empty memory; `can_alias` says whether its buffers can share storage.
    pub fn new(can_alias: bool) -> Self {
        Self { can_alias, usage: Arc::default(), resident: Arc::default() }
    }

    /// Bytes of storage that hold contents: shared storage counts once, released storage not at all.
    pub fn resident_bytes(&self) -> usize {
        self.resident.load(Ordering::SeqCst)
    }

    fn add_exactly(
        &self,
        values: impl Iterator<Item = f64>,
        words: SliceMut<'_, PlainBuffer>,
    ) -> Result<(), Error> {
        let mut before = [0; ExactSum::WORDS];
        self.read(Queue::Compute, words.as_slice(), HostSliceMut::I64(&mut before))?;
        let mut sum = ExactSum::from_words(&before);
        values.for_each(|value| sum.add(value));
        self.write(Queue::Compute, HostSlice::I64(&sum.to_words()), words)
    }
}

/// Combines `src` into `dst` element by element.
fn combine(
    src: Slice<'_, PlainBuffer>,
    dst: SliceMut<'_, PlainBuffer>,
    floats: impl Fn(f64, f64) -> f64,
    integers: impl Fn(i64, i64) -> i64,
) -> Result<(), Error> {
    assert_eq!(src.len, dst.len, "lengths differ");
    let (from, to) = (src.offset..src.offset + src.len, dst.offset..dst.offset + dst.len);
    match (&src.buffer.storage.data, dst.buffer.writable()?) {
        (Data::Released, _) => Err(Error::Released { len: src.buffer.len, dtype: src.buffer.dtype }),
        (Data::Floats(src), Data::Floats(out)) => {
            out[to].iter_mut().zip(&src[from]).for_each(|(out, &value)| *out = floats(*out, value));
            Ok(())
        }
        (Data::Integers(src), Data::Integers(out)) => {
            out[to].iter_mut().zip(&src[from]).for_each(|(out, &value)| *out = integers(*out, value));
            Ok(())
        }
        _ => panic!("floats and integers do not mix"),
    }
}

impl Memory for PlainMemory {
    type Buffer = PlainBuffer;
    type Event = ();

    fn allocate(&self, category: Category, dtype: DType, len: usize) -> Result<PlainBuffer, Error> {
        let bytes = len * dtype.size_bytes();
        let mut usage = self.usage.lock().unwrap_or_else(PoisonError::into_inner);
        usage.allocations += 1;
        usage.device.live_bytes[category as usize] += bytes;
        let counted = Counted { usage: self.usage.clone(), category, bytes };
        let storage = Storage::new(Data::poison(dtype, len), bytes, &self.resident);
        Ok(PlainBuffer { storage: Arc::new(storage), dtype, len, _counted: Arc::new(counted) })
    }

    fn release(&self, _queue: Queue, buffer: &mut PlainBuffer) {
        buffer.storage = Arc::new(Storage::new(Data::Released, 0, &self.resident));
    }

    fn alias(&self, dst: &mut PlainBuffer, src: &PlainBuffer) -> bool {
        if self.can_alias {
            dst.storage = src.storage.clone();
        }
        self.can_alias
    }

    fn zero(&self, _queue: Queue, dst: SliceMut<'_, PlainBuffer>) -> Result<(), Error> {
        let range = dst.offset..dst.offset + dst.len;
        match dst.buffer.writable()? {
            Data::Floats(values) => values[range].fill(0.0),
            Data::Integers(values) => values[range].fill(0),
            Data::Released => unreachable!("released storage is replaced before it is written"),
        }
        Ok(())
    }

    fn copy(
        &self,
        _queue: Queue,
        src: Slice<'_, PlainBuffer>,
        dst: SliceMut<'_, PlainBuffer>,
    ) -> Result<(), Error> {
        let dtype = dst.buffer.dtype;
        combine(src, dst, |_, value| round(dtype, value), |_, value| value)
    }

    fn compute(
        &self,
        queue: Queue,
        operation: Arithmetic<'_, Slice<'_, PlainBuffer>>,
        dst: SliceMut<'_, PlainBuffer>,
    ) -> Result<(), Error> {
        operation.check(&dst);
        let dtype = dst.buffer.dtype;
        let numbers = |src: Slice<'_, PlainBuffer>| {
            let mut values = vec![0.0; src.len];
            self.read(queue, src, HostSliceMut::F64(&mut values)).map(|()| values)
        };
        match operation {
            Arithmetic::Accumulate(src) => {
                combine(src, dst, |sum, value| round(dtype, sum + value), i64::wrapping_add)
            }
            Arithmetic::Scale(factor) => {
                let factor = round(dtype, factor);
                let scaled = numbers(dst.as_slice())?
                    .iter()
                    .map(|value| round(dtype, value * factor))
                    .collect::<Vec<_>>();
                self.write(queue, HostSlice::F64(&scaled), dst)
            }
            Arithmetic::SquareSum(src, rows) => {
                let values = numbers(src)?;
                let squares = rows.iter().flat_map(|rows| {
                    let rows_of = values[rows.offset..][..rows.len].chunks(rows.row_len);
                    rows_of.map(|row| row.iter().fold(0.0, |sum, x| x * x + sum))
                });
                self.add_exactly(squares, dst)
            }
            Arithmetic::ExactSum(src) => self.add_exactly(numbers(src)?.into_iter(), dst),
            Arithmetic::AddCounts(src) => {
                let mut sums = vec![0; src.len];
                self.read(queue, dst.as_slice(), HostSliceMut::I64(&mut sums))?;
                sums.iter_mut().zip(numbers(src)?).for_each(|(sum, value)| *sum += value as i64);
                self.write(queue, HostSlice::I64(&sums), dst)
            }
            Arithmetic::GradientFactors { scalars, divisor, grad_clip } => {
                let mut words = [0; SCALAR_WORDS];
                self.read(queue, scalars, HostSliceMut::I64(&mut words))?;
                let was_finite = numbers(dst.as_slice())?[2] != 0.0;
                let after = GradientFactors::of(&words, divisor, grad_clip, was_finite);
                self.write(queue, HostSlice::F64(&after.to_array()), dst)
            }
        }
    }

    fn write(&self, _queue: Queue, src: HostSlice<'_>, dst: SliceMut<'_, PlainBuffer>) -> Result<(), Error> {
        let (dtype, range) = (dst.buffer.dtype, dst.offset..dst.offset + dst.len);
        match (src, dst.buffer.writable()?) {
            (HostSlice::F32(src), Data::Floats(out)) if src.len() == range.len() => {
                out[range].iter_mut().zip(src).for_each(|(out, &x)| *out = round(dtype, f64::from(x)));
            }
            (HostSlice::F64(src), Data::Floats(out)) if src.len() == range.len() => {
                out[range].iter_mut().zip(src).for_each(|(out, &x)| *out = round(dtype, x));
            }
            (HostSlice::I64(src), Data::Integers(out)) if src.len() == range.len() => {
                out[range].copy_from_slice(src);
            }
            (HostSlice::U8(src), Data::Integers(out)) if src.len() == range.len() => {
                out[range].iter_mut().zip(src).for_each(|(out, &x)| *out = i64::from(x));
            }
            (HostSlice::U32(src), Data::Integers(out)) if src.len() == range.len() => {
                out[range].iter_mut().zip(src).for_each(|(out, &x)| *out = i64::from(x));
            }
            _ => panic!("lengths or kinds differ"),
        }
        Ok(())
    }

    fn read(&self, _queue: Queue, src: Slice<'_, PlainBuffer>, dst: HostSliceMut<'_>) -> Result<(), Error> {
        let range = src.offset..src.offset + src.len;
        match (&src.buffer.storage.data, dst) {
            (Data::Released, _) => {
                return Err(Error::Released { len: src.buffer.len, dtype: src.buffer.dtype });
            }
            (Data::Floats(values), HostSliceMut::F32(out)) if out.len() == range.len() => {
                out.iter_mut().zip(&values[range]).for_each(|(out, &x)| *out = x as f32);
            }
            (Data::Floats(values), HostSliceMut::F64(out)) if out.len() == range.len() => {
                out.copy_from_slice(&values[range]);
            }
            (Data::Integers(values), HostSliceMut::I64(out)) if out.len() == range.len() => {
                out.copy_from_slice(&values[range]);
            }
            (Data::Integers(values), HostSliceMut::U32(out)) if out.len() == range.len() => {
                out.iter_mut().zip(&values[range]).for_each(|(out, &x)| *out = x as u32);
            }
            (Data::Integers(values), HostSliceMut::U8(out)) if out.len() == range.len() => {
                out.iter_mut().zip(&values[range]).for_each(|(out, &x)| *out = x as u8);
            }
            _ => panic!("lengths or kinds differ"),
        }
        Ok(())
    }

    fn record(&self, _queue: Queue) {}

    fn wait(&self, _queue: Queue, _event: &()) {}

    fn usage(&self) -> Usage {
        *self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
