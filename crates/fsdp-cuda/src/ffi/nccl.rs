//! Safe wrappers of the NCCL functions in use.
//!
//! All communicators are non-blocking (`ncclConfig_t.blocking = 0`): a call starts an operation and returns, and
//! [`RawComm::poll`] tells when it is done. So no thread stays inside NCCL for long, one lock per communicator
//! serializes its calls, and another thread can abort a communicator at any time.
//!
//! Unlike the driver, NCCL is not called through `cudarc` (0.19.10): that opens one library per process, not from a
//! chosen folder, under names that do not include `libnccl.so.2`, the name that packages and wheels install, and panics
//! if the library or a function is missing. Its result codes are a Rust `enum`, so an unknown code from a newer NCCL
//! would be undefined behavior.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;

use fsdp_core::DType;
use fsdp_core::comm::ReduceOp;

use super::library::{self, Library, table};
use super::nccl_comm::RawComm;
use crate::nccl::{Code, NcclError, Version};

/// Identifies a communicator to be created; a capability: any process that has it can join.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId(pub(crate) [u8; Self::LEN]);

impl UniqueId {
    /// Length in bytes.
    pub(crate) const LEN: usize = 128;
}

pub(super) type Handle = *mut c_void;

/// `ncclConfig_t` as of 2.18. Newer versions read only `size` bytes and use defaults for the rest.
#[repr(C)]
pub(super) struct Config {
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
    /// A non-blocking configuration; the rest is left to NCCL. Communicators created by a split share no resources with
    /// their parent: otherwise the two could not be used at the same time.
    pub(super) fn non_blocking() -> Self {
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
pub(super) type Gather =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Handle, *mut c_void) -> c_int;
/// The same with a reduction operator, or the root of a broadcast.
pub(super) type Reduce =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int;
/// A message to or from a rank of the group.
pub(super) type Send = unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int;
pub(super) type Receive =
    unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> c_int;
pub(super) type Query = unsafe extern "C" fn(Handle, *mut c_int) -> c_int;
pub(super) type End = unsafe extern "C" fn(Handle) -> c_int;

/// `ncclSum` or `ncclAvg`, for a communicator of `ranks` ranks. For floats, NCCL averages as [`ReduceOp`] specifies:
/// `hostToDevRedOp` in its `enqueue.cc` makes it a sum of products with `1 / n` in the element type. A single rank
/// never uses `ncclAvg`: before 2.29.7, NCCL then omitted the last elements of a buffer.
pub(super) fn op_code(op: ReduceOp, ranks: usize) -> c_int {
    match op.factor(ranks) {
        None => 0,
        Some(_) => 4,
    }
}

pub(super) fn dtype_code(dtype: DType) -> c_int {
    match dtype {
        DType::U8 => 1,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::Bf16 => 9,
    }
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
    broadcast: "ncclBroadcast" as Reduce,
    send: "ncclSend" as Send,
    receive: "ncclRecv" as Receive,
}

/// The NCCL library, opened, with a sufficient version.
#[derive(Debug)]
pub struct Nccl {
    pub(super) table: Table,
    version: Version,
    library: Library,
}

impl Nccl {
    /// Opens NCCL from one of `folders`, or from where the system's loader finds it.
    ///
    /// # Errors
    /// [`NcclError`] if it is not found, is another library, or is too old.
    pub fn open(folders: &[PathBuf]) -> Result<Arc<Self>, NcclError> {
        let library = Library::open(library::NCCL, folders)?;
        let mut version = 0;
        // SAFETY: the type is that of nccl.h, in every version.
        let get_version =
            unsafe { library.function::<unsafe extern "C" fn(*mut c_int) -> c_int>("ncclGetVersion") }?;
        // SAFETY: it writes one integer.
        let code = unsafe { get_version(&mut version) };
        if Code(code) != Code::SUCCESS {
            let (text, detail) = Default::default();
            return Err(NcclError::Call { call: "ncclGetVersion", code: Code(code), text, detail });
        }
        let found = Version(version.unsigned_abs());
        if found < Version::NEEDED {
            return Err(NcclError::TooOld { path: library.path().to_owned(), found });
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

    /// Creates an id, to be passed to all ranks of one communicator.
    pub(crate) fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId([0; UniqueId::LEN]);
        // SAFETY: it writes one id.
        let code = unsafe { (self.table.get_unique_id)(&mut id) };
        self.check_started("ncclGetUniqueId", code, ptr::null_mut())?;
        Ok(id)
    }

    /// Starts connecting `rank` of `ranks`, on the current device of this thread.
    pub(crate) fn init(
        self: &Arc<Self>,
        id: UniqueId,
        ranks: c_int,
        rank: c_int,
    ) -> Result<RawComm, NcclError> {
        let (mut handle, mut config) = (ptr::null_mut(), Config::non_blocking());
        // SAFETY: `config` is read before the call returns; a non-blocking call writes `handle` before it returns.
        let code = unsafe { (self.table.init_rank_config)(&mut handle, ranks, id, rank, &mut config) };
        self.check_started("ncclCommInitRankConfig", code, ptr::null_mut())?;
        Ok(RawComm::new(self.clone(), handle))
    }

    /// Success and in progress both count as success.
    pub(super) fn check_started(
        &self,
        call: &'static str,
        code: c_int,
        handle: Handle,
    ) -> Result<(), NcclError> {
        match Code(code) {
            Code::SUCCESS | Code::IN_PROGRESS => Ok(()),
            failed => Err(self.error(call, failed, handle)),
        }
    }

    /// Makes calls within one group. A started group is always ended; otherwise later calls of this thread would join
    /// it.
    pub(super) fn group(
        &self,
        handle: Handle,
        calls: impl FnOnce() -> Result<(), NcclError>,
    ) -> Result<(), NcclError> {
        // SAFETY: no arguments.
        self.check_started("ncclGroupStart", unsafe { (self.table.group_start)() }, handle)?;
        let result = calls();
        // SAFETY: no arguments.
        let ended = self.check_started("ncclGroupEnd", unsafe { (self.table.group_end)() }, handle);
        result.and(ended)
    }

    pub(super) fn error(&self, call: &'static str, code: Code, handle: Handle) -> NcclError {
        // SAFETY: both return null or a string that is valid until the next call of this thread; it is copied at once.
        // `handle` is null or a communicator that was not destroyed.
        let (text, detail) = unsafe {
            (copy_c_str((self.table.error_string)(code.0)), copy_c_str((self.table.last_error)(handle)))
        };
        NcclError::Call { call, code, text, detail }
    }
}

/// # Safety
/// `text` is null or ends with a zero byte.
unsafe fn copy_c_str(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: guaranteed by the caller.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
}
