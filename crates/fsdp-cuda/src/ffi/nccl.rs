//! The functions of NCCL that are used, behind safe ones.
//!
//! All communicators are non-blocking (`ncclConfig_t.blocking = 0`): a call starts something, returns, and
//! [`RawComm::poll`] says when it is done. So no thread is ever inside NCCL for long, one lock per communicator keeps
//! every call apart, and a communicator can be aborted at any time by another thread.
//!
//! Result codes are integers: a code that this file does not know is [`Code::Unknown`], not undefined behaviour.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;

use fsdp_core::comm::{CollectiveKind, Completed};
use fsdp_core::memory::{Buffer, Slice, SliceMut};
use fsdp_core::{DType, Error, Queue};

use super::library::{self, Library, LibraryError};
use crate::device::DeviceMemory;

/// A version of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32);

impl Version {
    /// The oldest that will do: the first with `ncclCommSplit`.
    pub const NEEDED: Version = Version(2_18_01);
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Up to 2.8, `ncclGetVersion` has two digits less.
        let major = if self.0 < 10_000 { 1_000 } else { 10_000 };
        write!(f, "{}.{}.{}", self.0 / major, self.0 % major / 100, self.0 % 100)
    }
}

/// What a call of NCCL returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// `ncclUnhandledCudaError`
    UnhandledCudaError,
    /// `ncclSystemError`
    SystemError,
    /// `ncclInternalError`
    InternalError,
    /// `ncclInvalidArgument`
    InvalidArgument,
    /// `ncclInvalidUsage`
    InvalidUsage,
    /// `ncclRemoteError`
    RemoteError,
    /// A code that is newer than this table.
    Unknown(i32),
}

/// What a code says: done, under way, or failed.
enum Outcome {
    Done,
    InProgress,
    Failed(Code),
}

impl Outcome {
    fn of(code: c_int) -> Self {
        Outcome::Failed(match code {
            0 => return Outcome::Done,
            7 => return Outcome::InProgress,
            1 => Code::UnhandledCudaError,
            2 => Code::SystemError,
            3 => Code::InternalError,
            4 => Code::InvalidArgument,
            5 => Code::InvalidUsage,
            6 => Code::RemoteError,
            code => Code::Unknown(code),
        })
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Code::Unknown(code) => write!(f, "unknown result {code}"),
            known => write!(f, "nccl{known:?}"),
        }
    }
}

/// NCCL is missing, does not fit, or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// The library can not be opened.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The library is too old.
    #[error("{} is NCCL {found}, but {needed} or newer is needed; {}", path.display(), library::NCCL.install)]
    TooOld {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: Version,
        /// The oldest that will do.
        needed: Version,
    },
    /// A call failed.
    #[error("{call}: {code}: {text}{}", Detail(detail))]
    Call {
        /// The function.
        call: &'static str,
        /// What it returned.
        code: Code,
        /// What NCCL says to the code.
        text: String,
        /// The last thing that NCCL noted, which may be of another call; may be empty.
        detail: String,
    },
}

struct Detail<'a>(&'a str);

impl fmt::Display for Detail<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, " (NCCL's last message: {})", self.0) }
    }
}

/// Names a communicator that is about to be made; a capability: whoever has it can join.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId {
    bytes: [c_char; 128],
}

type Handle = *mut c_void;

/// `ncclConfig_t` as of 2.18. Newer versions read what `size` says and have defaults for the rest.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Non-blocking; the rest is left to NCCL. Communicators that are split off share no resources with their parent:
    /// if they did, the two could not be used at the same time.
    fn non_blocking() -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 2_18_00,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// A collective with two buffers and a count: all-gather.
type Gather = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Handle, *mut c_void) -> c_int;
/// The same with a reduction operator.
type Reduce =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int;
type Query = unsafe extern "C" fn(Handle, *mut c_int) -> c_int;
type End = unsafe extern "C" fn(Handle) -> c_int;

/// `ncclSum`
const SUM: c_int = 0;

fn dtype_code(dtype: DType) -> c_int {
    match dtype {
        DType::U32 => 3,
        DType::I64 => 4,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::Bf16 => 9,
    }
}

macro_rules! table {
    ($($field:ident: $symbol:literal as $type:ty),* $(,)?) => {
        /// Addresses of functions, valid while the library is open.
        #[derive(Debug)]
        struct Table { $($field: $type),* }

        impl Table {
            /// # Safety
            /// The types must be those of the library's header.
            unsafe fn of(library: &Library) -> Result<Self, LibraryError> {
                // SAFETY: as of the caller.
                Ok(Self { $($field: unsafe { library.function::<$type>($symbol) }?),* })
            }
        }
    };
}

table! {
    get_unique_id: "ncclGetUniqueId" as unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init_rank_config: "ncclCommInitRankConfig"
        as unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int, *mut Config) -> c_int,
    split: "ncclCommSplit" as unsafe extern "C" fn(Handle, c_int, c_int, *mut Handle, *mut Config) -> c_int,
    finalize: "ncclCommFinalize" as End,
    destroy: "ncclCommDestroy" as End,
    abort: "ncclCommAbort" as End,
    async_error: "ncclCommGetAsyncError" as Query,
    count: "ncclCommCount" as Query,
    device: "ncclCommCuDevice" as Query,
    user_rank: "ncclCommUserRank" as Query,
    error_string: "ncclGetErrorString" as unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: "ncclGetLastError" as unsafe extern "C" fn(Handle) -> *const c_char,
    group_start: "ncclGroupStart" as unsafe extern "C" fn() -> c_int,
    group_end: "ncclGroupEnd" as unsafe extern "C" fn() -> c_int,
    all_gather: "ncclAllGather" as Gather,
    reduce_scatter: "ncclReduceScatter" as Reduce,
    all_reduce: "ncclAllReduce" as Reduce,
}

/// The library, open and new enough.
#[derive(Debug)]
pub struct Nccl {
    table: Table,
    version: Version,
    library: Library,
}

impl Nccl {
    /// Opens NCCL, in one of `folders` or where the system's loader finds it.
    ///
    /// # Errors
    /// [`NcclError`]: not found, not NCCL, or too old.
    pub fn open(folders: &[PathBuf]) -> Result<Arc<Self>, NcclError> {
        let library = Library::open(library::NCCL, folders)?;
        let mut version = 0;
        // SAFETY: the type is that of nccl.h, of every version.
        let get_version =
            unsafe { library.function::<unsafe extern "C" fn(*mut c_int) -> c_int>("ncclGetVersion") }?;
        // SAFETY: it writes one integer.
        let code = unsafe { get_version(&mut version) };
        if let Outcome::Failed(code) = Outcome::of(code) {
            let (text, detail) = Default::default();
            return Err(NcclError::Call { call: "ncclGetVersion", code, text, detail });
        }
        let (found, needed) = (Version(version.unsigned_abs()), Version::NEEDED);
        if found < needed {
            return Err(NcclError::TooOld { path: library.path().to_owned(), found, needed });
        }
        // SAFETY: the types are those of nccl.h 2.18 to 2.30, and the version is not older.
        let table = unsafe { Table::of(&library) }?;
        Ok(Arc::new(Self { table, version: found, library }))
    }

    /// The version of the library.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The file of the library.
    pub fn path(&self) -> &Path {
        self.library.path()
    }

    /// A new id, to be given to all ranks of one communicator.
    pub(crate) fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId { bytes: [0; 128] };
        // SAFETY: it writes one id.
        let code = unsafe { (self.table.get_unique_id)(&mut id) };
        self.started("ncclGetUniqueId", code, ptr::null_mut())?;
        Ok(id)
    }

    /// Begins to connect `rank` of `ranks`, on the current device of this thread.
    pub(crate) fn init(
        self: &Arc<Self>,
        id: UniqueId,
        ranks: c_int,
        rank: c_int,
    ) -> Result<RawComm, NcclError> {
        let (mut handle, mut config) = (ptr::null_mut(), Config::non_blocking());
        // SAFETY: `config` is read before the call returns; a non-blocking call writes `handle` before it returns.
        let code = unsafe { (self.table.init_rank_config)(&mut handle, ranks, id, rank, &mut config) };
        self.started("ncclCommInitRankConfig", code, ptr::null_mut())?;
        Ok(RawComm { nccl: self.clone(), handle: handle as usize })
    }

    /// Done and under way are both well.
    fn started(&self, call: &'static str, code: c_int, handle: Handle) -> Result<(), NcclError> {
        match Outcome::of(code) {
            Outcome::Done | Outcome::InProgress => Ok(()),
            Outcome::Failed(known) => Err(self.error(call, known, code, handle)),
        }
    }

    fn error(&self, call: &'static str, code: Code, number: c_int, handle: Handle) -> NcclError {
        // SAFETY: both return null or a string that is not freed before the next call of this thread; it is copied
        // at once. `handle` is null or a communicator that was not destroyed.
        let (text, detail) =
            unsafe { (copied((self.table.error_string)(number)), copied((self.table.last_error)(handle))) };
        NcclError::Call { call, code, text, detail }
    }
}

/// # Safety
/// `text` is null or ends with a zero byte.
unsafe fn copied(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: as of the caller.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
}

/// Whether a communicator has done what was started on it.
#[derive(Debug)]
pub(crate) enum Progress {
    Ready,
    InProgress,
}

/// Buffers of a collective that was issued. They are leaked unless [`Flying::land`] takes them out: as long as the
/// device may work on them, they must not be freed.
pub(crate) struct Flying<B> {
    inputs: ManuallyDrop<Vec<B>>,
    outputs: ManuallyDrop<Vec<B>>,
}

impl<B> Flying<B> {
    /// Buffers that are about to be given to NCCL.
    pub(crate) fn new(inputs: Vec<B>, outputs: Vec<B>) -> Self {
        Self { inputs: ManuallyDrop::new(inputs), outputs: ManuallyDrop::new(outputs) }
    }

    /// The buffers, when whoever gets them is ordered behind the collective.
    pub(crate) fn land(self) -> Completed<B> {
        Completed {
            inputs: ManuallyDrop::into_inner(self.inputs),
            outputs: ManuallyDrop::into_inner(self.outputs),
        }
    }
}

/// One call of a group: addresses and elements.
struct Segment {
    from: u64,
    to: u64,
    count: usize,
}

/// A communicator, for as long as it is neither destroyed nor aborted. Its methods take `&mut self`: one call at a time.
#[derive(Debug)]
pub(crate) struct RawComm {
    nccl: Arc<Nccl>,
    handle: usize,
}

/// A communicator that is being split off. If it is dropped before [`RawComm::finish_split`], its slot leaks: NCCL may
/// still write it.
pub(crate) struct Splitting {
    slot: ManuallyDrop<Box<Handle>>,
}

// SAFETY: the slot is a place on the heap that NCCL writes once and this crate reads afterwards; no thread is special.
unsafe impl Send for Splitting {}

impl RawComm {
    fn raw(&self) -> Handle {
        self.handle as Handle
    }

    /// Whether what was started has finished.
    ///
    /// # Errors
    /// What failed in the background, on this rank or another.
    pub(crate) fn poll(&mut self) -> Result<Progress, NcclError> {
        let mut state = 0;
        // SAFETY: the communicator exists (`destroy` and `abort` take it), and one integer is written.
        let code = unsafe { (self.nccl.table.async_error)(self.raw(), &mut state) };
        self.nccl.started("ncclCommGetAsyncError", code, self.raw())?;
        match Outcome::of(state) {
            Outcome::Done => Ok(Progress::Ready),
            Outcome::InProgress => Ok(Progress::InProgress),
            Outcome::Failed(known) => Err(self.nccl.error("asynchronous error", known, state, self.raw())),
        }
    }

    fn query(&mut self, call: &'static str, function: Query) -> Result<usize, NcclError> {
        let mut value = 0;
        // SAFETY: the communicator exists, and one integer is written.
        let code = unsafe { function(self.raw(), &mut value) };
        self.nccl.started(call, code, self.raw())?;
        Ok(usize::try_from(value).unwrap_or(usize::MAX))
    }

    /// Number of ranks, own rank and device, as NCCL sees them.
    pub(crate) fn facts(&mut self) -> Result<(usize, usize, usize), NcclError> {
        let (count, user_rank, device) =
            (self.nccl.table.count, self.nccl.table.user_rank, self.nccl.table.device);
        Ok((
            self.query("ncclCommCount", count)?,
            self.query("ncclCommUserRank", user_rank)?,
            self.query("ncclCommCuDevice", device)?,
        ))
    }

    /// Begins to split off a communicator; [`RawComm::poll`] of this one says when it is there.
    pub(crate) fn split(&mut self, color: c_int, key: c_int) -> Result<Splitting, NcclError> {
        let mut config = Config::non_blocking();
        let mut slot = ManuallyDrop::new(Box::new(ptr::null_mut()));
        // SAFETY: the communicator exists; the configuration is copied; the slot stays where it is until the split is
        // finished, and for ever if nobody finishes it.
        let code = unsafe {
            (self.nccl.table.split)(self.raw(), color, key, ptr::from_mut(&mut **slot), &mut config)
        };
        self.nccl.started("ncclCommSplit", code, self.raw())?;
        Ok(Splitting { slot })
    }

    /// Takes the new communicator, after [`RawComm::poll`] said that this one is ready.
    pub(crate) fn finish_split(&mut self, splitting: Splitting) -> Result<RawComm, NcclError> {
        let slot = ManuallyDrop::into_inner(splitting.slot);
        // SAFETY: the slot was initialised, and NCCL is done with it. (Volatile: NCCL wrote it from another thread; its
        // acquire load of the state came before.)
        let handle = unsafe { ptr::read_volatile(&*slot) };
        if handle.is_null() {
            let code = Code::InternalError;
            return Err(self.nccl.error("ncclCommSplit", code, 3, self.raw()));
        }
        Ok(RawComm { nccl: self.nccl.clone(), handle: handle as usize })
    }

    /// Issues one collective over all segments, in one group, on the stream of `queue`; segments without elements are
    /// left out, and a call without any issues nothing. Lengths and dtypes were checked by [`fsdp_core::comm::Comm`].
    ///
    /// # Errors
    /// The memory's or NCCL's; what was issued until then may run.
    pub(crate) fn issue<M: DeviceMemory>(
        &mut self,
        memory: &M,
        queue: Queue,
        kind: CollectiveKind,
        dtype: DType,
        buffers: &mut Flying<M::Buffer>,
    ) -> Result<(), IssueError> {
        let segments = segments(memory, kind, buffers)?;
        if segments.is_empty() {
            return Ok(());
        }
        let (table, stream, dtype) = (&self.nccl.table, memory.stream(queue).as_ptr(), dtype_code(dtype));
        // SAFETY: no arguments.
        self.nccl.started("ncclGroupStart", unsafe { (table.group_start)() }, self.raw())?;
        let mut failed = None;
        for &Segment { from, to, count } in &segments {
            let (from, to) = (from as *const c_void, to as *mut c_void);
            // SAFETY: the addresses are those of live buffers of at least the lengths that NCCL derives from `count`
            // (`segments` takes it from the shorter side; `Comm` checked that the longer one is `size` times as long);
            // `Flying` keeps them from being freed; the stream is the memory's, which outlives its collectives.
            let code = unsafe {
                match kind {
                    CollectiveKind::AllGather => {
                        (table.all_gather)(from, to, count, dtype, self.raw(), stream)
                    }
                    CollectiveKind::ReduceScatter => {
                        (table.reduce_scatter)(from, to, count, dtype, SUM, self.raw(), stream)
                    }
                    _ => (table.all_reduce)(from, to, count, dtype, SUM, self.raw(), stream),
                }
            };
            failed = failed.or(self.nccl.started(name(kind), code, self.raw()).err());
        }
        // A group that was started is always ended, or later calls of this thread would join it.
        // SAFETY: no arguments.
        let ended = self.nccl.started("ncclGroupEnd", unsafe { (table.group_end)() }, self.raw());
        failed.map_or(ended, Err).map_err(IssueError::Nccl)
    }

    /// Begins to flush and close.
    pub(crate) fn finalize(&mut self) -> Result<(), NcclError> {
        // SAFETY: the communicator exists.
        let code = unsafe { (self.nccl.table.finalize)(self.raw()) };
        self.nccl.started("ncclCommFinalize", code, self.raw())
    }

    /// Frees what is left, after [`RawComm::poll`] said that it is finalized.
    pub(crate) fn destroy(self) -> Result<(), NcclError> {
        // SAFETY: the communicator exists, and nobody can use it afterwards.
        let code = unsafe { (self.nccl.table.destroy)(self.raw()) };
        self.nccl.started("ncclCommDestroy", code, ptr::null_mut())
    }

    /// Ends everything that is running on it, and frees it.
    pub(crate) fn abort(self) -> Result<(), NcclError> {
        // SAFETY: the communicator exists, and nobody can use it afterwards.
        let code = unsafe { (self.nccl.table.abort)(self.raw()) };
        self.nccl.started("ncclCommAbort", code, ptr::null_mut())
    }
}

/// Why a collective could not be issued.
#[derive(Debug)]
pub(crate) enum IssueError {
    /// A buffer has no address.
    Memory(Error),
    /// NCCL refused.
    Nccl(NcclError),
}

impl From<Error> for IssueError {
    fn from(error: Error) -> Self {
        IssueError::Memory(error)
    }
}

impl From<NcclError> for IssueError {
    fn from(error: NcclError) -> Self {
        IssueError::Nccl(error)
    }
}

fn name(kind: CollectiveKind) -> &'static str {
    match kind {
        CollectiveKind::AllGather => "ncclAllGather",
        CollectiveKind::ReduceScatter => "ncclReduceScatter",
        _ => "ncclAllReduce",
    }
}

/// Addresses and counts of the segments that have elements. The count is of the shorter side, as NCCL wants it.
fn segments<M: DeviceMemory>(
    memory: &M,
    kind: CollectiveKind,
    buffers: &mut Flying<M::Buffer>,
) -> Result<Vec<Segment>, Error> {
    let mut segments = Vec::with_capacity(buffers.outputs.len());
    for (index, output) in buffers.outputs.iter_mut().enumerate().filter(|(_, output)| !output.is_empty()) {
        let len = output.len();
        let to = memory.pointer_mut(SliceMut::whole(output))?;
        segments.push(match kind {
            CollectiveKind::AllGather | CollectiveKind::ReduceScatter => {
                let input = &buffers.inputs[index];
                let from = memory.pointer(Slice::whole(input))?;
                Segment { from, to, count: len.min(input.len()) }
            }
            _ => Segment { from: to, to, count: len },
        });
    }
    Ok(segments)
}
