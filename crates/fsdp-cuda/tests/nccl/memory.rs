//! A memory with streams: every queue has its own thread, which runs its work in order, some time later.
//!
//! Elements are stored in host memory in the layout of their dtype, so that the fake NCCL can work on them. New and
//! released storage holds poison, and only events order the queues, so a missing wait shows as poison.
#![expect(unsafe_code, reason = "streams are handed through C as pointers")]

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;

use fsdp_core::memory::{Arithmetic, Buffer, Category, HostSlice, HostSliceMut, Slice, SliceMut, Usage};
use fsdp_core::{DType, Error, Memory, Queue};
use fsdp_cuda::device::{DeviceMemory, StreamHandle};
use fsdp_nn::accounting::{Account, Lease};
use half::{bf16, f16};

/// The C type of a function that runs on a stream.
pub(crate) type Work = unsafe extern "C" fn(*mut c_void);

/// The C type of a function that appends work to a stream.
pub(crate) type Enqueue = unsafe extern "C" fn(*mut c_void, Work, *mut c_void) -> c_int;

type Task = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Tasks {
    waiting: VecDeque<Task>,
    is_running: bool,
}

/// An ordered stream of work.
#[derive(Default)]
struct Stream {
    tasks: Mutex<Tasks>,
}

impl Stream {
    fn push(self: &Arc<Self>, task: Task) {
        let mut tasks = self.tasks.lock().unwrap();
        tasks.waiting.push_back(task);
        if !tasks.is_running {
            tasks.is_running = true;
            let stream = self.clone();
            thread::spawn(move || stream.work());
        }
    }

    fn work(&self) {
        loop {
            let mut tasks = self.tasks.lock().unwrap();
            let Some(task) = tasks.waiting.pop_front() else {
                tasks.is_running = false;
                return;
            };
            drop(tasks);
            thread::yield_now();
            task();
        }
    }
}

/// Appends a C function to a [`Stream`].
///
/// # Safety
/// `stream` is a handle of a living [`StreamMemory`]; `work` may be called with `argument` on any thread.
pub(crate) unsafe extern "C" fn enqueue(stream: *mut c_void, work: Work, argument: *mut c_void) -> c_int {
    let stream = stream.cast_const().cast::<Stream>();
    // SAFETY: handles are made by `Arc::as_ptr` of streams that the memory still owns.
    let stream = unsafe {
        Arc::increment_strong_count(stream);
        Arc::from_raw(stream)
    };
    let argument = argument as usize;
    // SAFETY: guaranteed by the caller.
    stream.push(Box::new(move || unsafe { work(argument as *mut c_void) }));
    0
}

/// A point in a stream's work.
#[derive(Clone, Default)]
pub(crate) struct StreamEvent {
    passed: Arc<(Mutex<bool>, Condvar)>,
}

impl StreamEvent {
    fn pass(&self) {
        *self.passed.0.lock().unwrap() = true;
        self.passed.1.notify_all();
    }

    fn wait(&self) {
        drop(self.passed.1.wait_while(self.passed.0.lock().unwrap(), |passed| !*passed).unwrap());
    }
}

const POISON: u64 = 0xfff4_dead_beef_fff4;

/// Storage of a buffer, in whole words so that elements are aligned.
struct Storage {
    words: Box<[AtomicU64]>,
}

impl Storage {
    fn new(bytes: usize) -> Self {
        Self { words: (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(POISON)).collect() }
    }

    fn poison(&self) {
        self.words.iter().for_each(|word| word.store(POISON, Ordering::SeqCst));
    }

    fn bytes(&self) -> Vec<u8> {
        self.words.iter().flat_map(|word| word.load(Ordering::SeqCst).to_ne_bytes()).collect()
    }

    /// Overwrites bytes from `start` on.
    fn write(&self, start: usize, new: &[u8]) {
        let mut bytes = self.bytes();
        bytes[start..start + new.len()].copy_from_slice(new);
        for (word, bytes) in self.words.iter().zip(bytes.chunks(8)) {
            word.store(u64::from_ne_bytes(bytes.try_into().unwrap()), Ordering::SeqCst);
        }
    }
}

/// A buffer of a [`StreamMemory`].
#[derive(Clone)]
pub(crate) struct StreamBuffer {
    lease: Arc<Lease>,
    storage: Arc<Storage>,
    dtype: DType,
    len: usize,
    is_released: bool,
}

impl StreamBuffer {
    fn start(&self, offset: usize) -> usize {
        offset * self.dtype.size_bytes()
    }

    fn readable(&self) -> Result<(), Error> {
        match self.is_released {
            true => Err(Error::Released { len: self.len, dtype: self.dtype }),
            false => Ok(()),
        }
    }

    fn writable(&mut self) -> Result<(), Error> {
        let (len, dtype, readers) = (self.len, self.dtype, Arc::strong_count(&self.lease) - 1);
        self.is_released = false;
        if readers > 0 { Err(Error::Shared { len, dtype, readers }) } else { Ok(()) }
    }
}

impl Buffer for StreamBuffer {
    fn len(&self) -> usize {
        self.len
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn is_exclusive(&self) -> bool {
        Arc::strong_count(&self.lease) == 1
    }
}

/// A memory with streams; see the module documentation.
#[derive(Default)]
pub(crate) struct StreamMemory {
    account: Arc<Account>,
    streams: [Arc<Stream>; Queue::ALL.len()],
    /// Keeps all storage alive, because work on a dropped buffer may be pending.
    kept: Mutex<Vec<Arc<Storage>>>,
}

impl Drop for StreamMemory {
    fn drop(&mut self) {
        for stream in &self.streams {
            let (sender, receiver) = mpsc::channel();
            stream.push(Box::new(move || sender.send(()).unwrap()));
            receiver.recv().expect("the stream does its work");
        }
    }
}

fn unsupported(what: &str) -> Error {
    Error::Device(format!("this memory only communicates: no {what}").into())
}

fn encode(dtype: DType, value: f64) -> Vec<u8> {
    match dtype {
        DType::F32 => (value as f32).to_ne_bytes().to_vec(),
        DType::F64 => value.to_ne_bytes().to_vec(),
        DType::Bf16 => bf16::from_f32(value as f32).to_ne_bytes().to_vec(),
        DType::F16 => f16::from_f32(value as f32).to_ne_bytes().to_vec(),
        DType::U8 | DType::U32 | DType::I64 => panic!("a float for {dtype}"),
    }
}

fn decode(dtype: DType, bytes: &[u8]) -> f64 {
    match dtype {
        DType::F32 => f64::from(f32::from_ne_bytes(bytes.try_into().unwrap())),
        DType::F64 => f64::from_ne_bytes(bytes.try_into().unwrap()),
        DType::Bf16 => f64::from(bf16::from_ne_bytes(bytes.try_into().unwrap())),
        DType::F16 => f64::from(f16::from_ne_bytes(bytes.try_into().unwrap())),
        DType::U8 | DType::U32 | DType::I64 => panic!("a float of {dtype}"),
    }
}

impl StreamMemory {
    fn push(&self, queue: Queue, task: impl FnOnce() + Send + 'static) {
        self.streams[queue as usize].push(Box::new(task));
    }

    /// Returns the bytes of a range at this point of the queue's work.
    fn fetch(&self, queue: Queue, src: Slice<'_, StreamBuffer>) -> Result<Vec<u8>, Error> {
        src.buffer.readable()?;
        let (start, end) = (src.buffer.start(src.offset), src.buffer.start(src.offset + src.len));
        let (storage, (sender, receiver)) = (src.buffer.storage.clone(), mpsc::channel());
        self.push(queue, move || sender.send(storage.bytes()).unwrap());
        Ok(receiver.recv().expect("the stream does its work")[start..end].to_vec())
    }
}

impl Memory for StreamMemory {
    type Buffer = StreamBuffer;
    type Event = StreamEvent;

    fn allocate(&self, category: Category, dtype: DType, len: usize) -> Result<StreamBuffer, Error> {
        let lease = self.account.open(category, dtype, len);
        let storage = Arc::new(Storage::new(len * dtype.size_bytes()));
        self.kept.lock().unwrap().push(storage.clone());
        Ok(StreamBuffer { lease, storage, dtype, len, is_released: false })
    }

    fn release(&self, queue: Queue, buffer: &mut StreamBuffer) {
        buffer.is_released = true;
        let storage = buffer.storage.clone();
        self.push(queue, move || storage.poison());
    }

    fn alias(&self, _dst: &mut StreamBuffer, _src: &StreamBuffer) -> bool {
        false
    }

    fn zero(&self, queue: Queue, dst: SliceMut<'_, StreamBuffer>) -> Result<(), Error> {
        dst.buffer.writable()?;
        let (start, end) = (dst.buffer.start(dst.offset), dst.buffer.start(dst.offset + dst.len));
        let storage = dst.buffer.storage.clone();
        self.push(queue, move || storage.write(start, &vec![0; end - start]));
        Ok(())
    }

    fn copy(
        &self,
        _queue: Queue,
        _src: Slice<'_, StreamBuffer>,
        _dst: SliceMut<'_, StreamBuffer>,
    ) -> Result<(), Error> {
        Err(unsupported("copy"))
    }

    fn compute(
        &self,
        _queue: Queue,
        _operation: Arithmetic<'_, Slice<'_, StreamBuffer>>,
        _dst: SliceMut<'_, StreamBuffer>,
    ) -> Result<(), Error> {
        Err(unsupported("arithmetic"))
    }

    fn write(&self, queue: Queue, src: HostSlice<'_>, dst: SliceMut<'_, StreamBuffer>) -> Result<(), Error> {
        dst.buffer.writable()?;
        let dtype = dst.buffer.dtype;
        let bytes: Vec<u8> = match src {
            HostSlice::F64(values) => values.iter().flat_map(|&value| encode(dtype, value)).collect(),
            HostSlice::I64(values) => values.iter().flat_map(|value| value.to_ne_bytes()).collect(),
            HostSlice::U8(values) => values.to_vec(),
            HostSlice::F32(_) | HostSlice::U32(_) => return Err(unsupported("such write")),
        };
        assert_eq!(bytes.len(), dst.buffer.start(dst.len), "as many elements as room");
        let (start, storage) = (dst.buffer.start(dst.offset), dst.buffer.storage.clone());
        self.push(queue, move || storage.write(start, &bytes));
        Ok(())
    }

    fn read(&self, queue: Queue, src: Slice<'_, StreamBuffer>, dst: HostSliceMut<'_>) -> Result<(), Error> {
        let dtype = src.buffer.dtype;
        let bytes = self.fetch(queue, src)?;
        let elements = bytes.chunks(dtype.size_bytes());
        match dst {
            HostSliceMut::F64(out) => {
                out.iter_mut().zip(elements).for_each(|(out, bytes)| *out = decode(dtype, bytes));
            }
            HostSliceMut::I64(out) => {
                let integer = |bytes: &[u8]| i64::from_ne_bytes(bytes.try_into().unwrap());
                out.iter_mut().zip(elements).for_each(|(out, bytes)| *out = integer(bytes));
            }
            HostSliceMut::U8(out) => out.copy_from_slice(&bytes),
            HostSliceMut::F32(_) | HostSliceMut::U32(_) => return Err(unsupported("such read")),
        }
        Ok(())
    }

    fn record(&self, queue: Queue) -> StreamEvent {
        let event = StreamEvent::default();
        let passes = event.clone();
        self.push(queue, move || passes.pass());
        event
    }

    fn wait(&self, queue: Queue, event: &StreamEvent) {
        let event = event.clone();
        self.push(queue, move || event.wait());
    }

    fn usage(&self) -> Usage {
        self.account.usage()
    }
}

impl DeviceMemory for StreamMemory {
    fn pointer(&self, _queue: Queue, slice: Slice<'_, StreamBuffer>) -> Result<u64, Error> {
        slice.buffer.readable()?;
        Ok(slice.buffer.storage.words.as_ptr() as u64 + slice.buffer.start(slice.offset) as u64)
    }

    fn pointer_mut(&self, queue: Queue, slice: SliceMut<'_, StreamBuffer>) -> Result<u64, Error> {
        slice.buffer.writable()?;
        self.pointer(queue, slice.as_slice())
    }

    fn stream(&self, queue: Queue) -> StreamHandle {
        StreamHandle::new(Arc::as_ptr(&self.streams[queue as usize]).cast_mut().cast())
    }

    fn bind(&self) -> Result<(), Error> {
        Ok(())
    }

    fn is_complete(&self, event: &StreamEvent) -> Result<bool, Error> {
        Ok(*event.passed.0.lock().unwrap())
    }
}
