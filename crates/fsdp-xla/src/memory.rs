//! A memory that traces the operations it is asked for.
//!
//! Within a schedule nothing is computed: operations add values to a program ([`Trace`]), which runs on all ranks
//! together when the schedule ends ([`World`](crate::world::World)). Outside of schedules (initial values, checkpoints,
//! queries between ranks) everything happens on the host, in [`HostMemory`], and is uploaded to the device when a
//! program reads it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fsdp_core::memory::{
    Arithmetic, Buffer, Category, HostSlice, HostSliceMut, Memory, Slice, SliceMut, Usage,
};
use fsdp_core::{DType, Error, Queue};
use fsdp_nn::accounting::Account;
use fsdp_nn::{HostBuffer, HostMemory};

use crate::arithmetic;
use crate::buffer::{Content, Storage, XlaBuffer};
use crate::error::XlaError;
use crate::ffi::DeviceBuffer;
use crate::hlo::{Shape, Value};
use crate::trace::Trace;
use crate::world::Executor;

/// The memory of a rank whose steps are compiled.
pub struct XlaMemory {
    host: HostMemory,
    account: Arc<Account>,
    /// The program being traced; `Some` while a schedule runs.
    trace: Mutex<Option<Trace>>,
    executor: Mutex<Executor>,
}

/// The last value that a queue has produced, within a schedule.
#[derive(Clone)]
pub struct TraceEvent(Option<Value>);

pub(crate) type In<'a> = Slice<'a, XlaBuffer>;
pub(crate) type Out<'a> = SliceMut<'a, XlaBuffer>;

impl XlaMemory {
    /// Creates the memory of a rank, whose programs `executor` runs. Host work happens in `host`.
    pub(crate) fn new(host: HostMemory, executor: Executor) -> Self {
        Self { host, account: Arc::default(), trace: Mutex::new(None), executor: Mutex::new(executor) }
    }

    /// The host's memory.
    pub fn host(&self) -> &HostMemory {
        &self.host
    }

    /// The program being traced; `Some` while a schedule runs.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<Trace>> {
        self.trace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a program is being traced.
    pub(crate) fn is_tracing(&self) -> bool {
        self.lock().is_some()
    }

    /// Returns the buffer's elements on the host, for reading.
    pub(crate) fn on_host(&self, buffer: &XlaBuffer) -> Result<HostBuffer, Error> {
        let storage = &buffer.storage;
        let mut content = storage.content();
        match &mut *content {
            Content::Host(buffer) | Content::Device(_, Some(buffer)) => Ok(buffer.clone()),
            Content::Device(device, copy @ None) => {
                let mut host = self.allocate_host(storage)?;
                download(device, storage, self.host.bytes_mut(SliceMut::whole(&mut host))?)?;
                Ok(copy.insert(host).clone())
            }
            Content::Element(stack, index) => {
                let mut host = self.allocate_host(storage)?;
                let elements = self.host.bytes_mut(SliceMut::whole(&mut host))?;
                // Past the end is padding, which only programs see.
                elements.copy_from_slice(&stack.element(*index)?[..elements.len()]);
                Ok(host)
            }
            Content::Zero => {
                let mut host = self.allocate_host(storage)?;
                self.host.zero(Queue::Compute, SliceMut::whole(&mut host))?;
                *content = Content::Host(host.clone());
                Ok(host)
            }
            Content::Undefined => Err(Error::Released { len: storage.len, dtype: storage.dtype }),
            Content::Traced(_) => {
                panic!("a value of a program is read on the host before the program has run")
            }
        }
    }

    fn allocate_host(&self, storage: &Storage) -> Result<HostBuffer, Error> {
        self.host.allocate(storage.category(), storage.dtype, storage.len)
    }

    /// Moves the elements of a buffer to the host, for writing; the caller has to put them back.
    pub(crate) fn take_to_host(&self, buffer: &XlaBuffer) -> Result<HostBuffer, Error> {
        writable(buffer)?;
        let storage = &buffer.storage;
        if matches!(*storage.content(), Content::Undefined) {
            return self.allocate_host(storage);
        }
        let host = self.on_host(buffer)?;
        storage.put(Content::Undefined);
        Ok(host)
    }

    /// Calls `body` with a range of a buffer on the host, for writing.
    pub(crate) fn write_on_host<T>(
        &self,
        dst: Out<'_>,
        body: impl FnOnce(SliceMut<'_, HostBuffer>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut buffer = self.take_to_host(dst.buffer)?;
        let result = body(SliceMut::new(&mut buffer, dst.offset, dst.len));
        dst.buffer.storage.put(Content::Host(buffer));
        result
    }

    /// What runs the rank's programs.
    pub(crate) fn executor(&self) -> MutexGuard<'_, Executor> {
        self.executor.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Copies the rank's own elements of a storage from the device, without the padding that programs see.
fn download(device: &DeviceBuffer, storage: &Storage, elements: &mut [u8]) -> Result<(), XlaError> {
    let byte_len = storage.shape().byte_len();
    if byte_len == elements.len() {
        return device.download(elements);
    }
    let mut bytes = vec![0; byte_len];
    device.download(&mut bytes)?;
    elements.copy_from_slice(&bytes[..elements.len()]);
    Ok(())
}

/// Checks that a buffer may be written.
pub(crate) fn writable(buffer: &XlaBuffer) -> Result<(), Error> {
    let readers = Arc::strong_count(&buffer.storage) - 1;
    match readers {
        0 => Ok(()),
        _ => Err(Error::Shared { len: buffer.len(), dtype: buffer.dtype(), readers }),
    }
}

impl Memory for XlaMemory {
    type Buffer = XlaBuffer;
    type Event = TraceEvent;

    fn allocate(&self, category: Category, dtype: DType, len: usize) -> Result<XlaBuffer, Error> {
        Ok(XlaBuffer::new(&self.account, category, dtype, len))
    }

    fn release(&self, _queue: Queue, buffer: &mut XlaBuffer) {
        match &mut *self.lock() {
            Some(trace) => trace.release(&buffer.storage),
            None => buffer.storage.put(Content::Undefined),
        }
    }

    fn alias(&self, _dst: &mut XlaBuffer, _src: &XlaBuffer) -> bool {
        false
    }

    fn zero(&self, queue: Queue, dst: Out<'_>) -> Result<(), Error> {
        writable(dst.buffer)?;
        if let Some(trace) = &mut *self.lock() {
            let zeros = trace.hlo.zeros(&[dst.len], dst.buffer.storage.dtype.into());
            trace.store(queue, &dst, &zeros);
            return Ok(());
        }
        if dst.len == dst.buffer.len() {
            dst.buffer.storage.put(Content::Zero);
            return Ok(());
        }
        self.write_on_host(dst, |dst| self.host.zero(queue, dst))
    }

    fn copy(&self, queue: Queue, src: In<'_>, dst: Out<'_>) -> Result<(), Error> {
        writable(dst.buffer)?;
        if let Some(trace) = &mut *self.lock() {
            let value = trace.load(queue, src);
            trace.store(queue, &dst, &value);
            return Ok(());
        }
        let from = self.on_host(src.buffer)?;
        self.write_on_host(dst, |dst| self.host.copy(queue, Slice::new(&from, src.offset, src.len), dst))
    }

    fn copy_part(
        &self,
        queue: Queue,
        src: &XlaBuffer,
        part: usize,
        dst: &mut XlaBuffer,
    ) -> Result<(), Error> {
        writable(dst)?;
        let len = dst.len();
        if let Some(trace) = &mut *self.lock() {
            let source = trace.load(queue, Slice::whole(src));
            let start = i64::try_from(part * len).expect("buffers have fewer than 2^63 elements");
            let start = trace.input(Shape::new(&[], DType::I64.into()), start.to_le_bytes().to_vec());
            let value = trace.hlo.dynamic_slice(&source, &[(0, &start)], &[len]);
            trace.store(queue, &SliceMut::whole(dst), &value);
            return Ok(());
        }
        self.copy(queue, Slice::new(src, part * len, len), SliceMut::whole(dst))
    }

    fn compute(&self, queue: Queue, operation: Arithmetic<'_, In<'_>>, dst: Out<'_>) -> Result<(), Error> {
        writable(dst.buffer)?;
        if let Some(trace) = &mut *self.lock() {
            arithmetic::trace(trace, queue, operation, &dst);
            return Ok(());
        }
        let mut src = None;
        let from = &mut src;
        let operation = operation.try_map(move |src| -> Result<_, Error> {
            Ok(Slice::new(from.insert(self.on_host(src.buffer)?), src.offset, src.len))
        })?;
        self.write_on_host(dst, |dst| self.host.compute(queue, operation, dst))
    }

    fn write(&self, queue: Queue, src: HostSlice<'_>, mut dst: Out<'_>) -> Result<(), Error> {
        writable(dst.buffer)?;
        if let Some(trace) = &mut *self.lock() {
            let dtype = dst.buffer.dtype();
            let mut staged = self.host.allocate(Category::Workspace, dtype, dst.len)?;
            self.host.write(queue, src, SliceMut::whole(&mut staged))?;
            let bytes = self.host.bytes(Slice::whole(&staged))?.to_vec();
            let value = trace.input(Shape::new(&[dst.len], dtype.into()), bytes);
            trace.store(queue, &dst.reborrow(), &value);
            return Ok(());
        }
        self.write_on_host(dst, |dst| self.host.write(queue, src, dst))
    }

    fn read(&self, queue: Queue, src: In<'_>, dst: HostSliceMut<'_>) -> Result<(), Error> {
        assert!(!self.is_tracing(), "the host reads nothing within a schedule");
        let from = self.on_host(src.buffer)?;
        self.host.read(queue, Slice::new(&from, src.offset, src.len), dst)
    }

    fn record(&self, queue: Queue) -> TraceEvent {
        TraceEvent(self.lock().as_ref().and_then(|trace| trace.last(queue)))
    }

    fn wait(&self, queue: Queue, event: &TraceEvent) {
        if let (Some(trace), Some(value)) = (&mut *self.lock(), &event.0) {
            trace.wait(queue, value);
        }
    }

    fn begin_schedule(&self) {
        *self.lock() = Some(Trace::default());
    }

    fn end_schedule(&self) -> Result<(), Error> {
        let trace = self.lock().take().expect("a schedule has begun");
        self.executor().run(&self.host, trace)
    }

    fn is_asynchronous(&self) -> bool {
        self.executor().is_asynchronous()
    }

    fn usage(&self) -> Usage {
        self.account.usage()
    }
}
