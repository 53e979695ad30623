//! The MPI functions in use, for both kinds of handles, and the constants of each family.
//!
//! Sources: `mpi.h` of Open MPI 4.1 and 5.0, `mpi.h` of MPICH 4.0 and 5.0 (the ABI that Intel MPI and Cray MPICH
//! share), `mpi_abi.h` of MPI 5.0.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

/// An MPI handle (communicator, type, request): an integer, or a pointer that is never dereferenced here.
pub(super) trait Handle: Copy {
    fn from_bits(bits: usize) -> Self;
    fn bits(self) -> usize;
}

impl Handle for c_int {
    fn from_bits(bits: usize) -> Self {
        bits as c_int
    }

    fn bits(self) -> usize {
        self as u32 as usize
    }
}

impl Handle for *mut c_void {
    fn from_bits(bits: usize) -> Self {
        ptr::with_exposed_provenance_mut(bits)
    }

    fn bits(self) -> usize {
        self.expose_provenance()
    }
}

/// Space for an `MPI_Status`, which is never read: its size is 20 bytes (MPICH), 24 (Open MPI) or 32 (standard ABI).
#[repr(C, align(16))]
pub(super) struct Status([u8; 64]);

impl Status {
    pub(super) fn new() -> Self {
        Self([0; 64])
    }
}

/// Declares a table of functions that all return an error code: field, symbol, parameters.
macro_rules! table {
    ($($field:ident: $symbol:literal ($($parameter:ty),*)),* $(,)?) => {
        /// Addresses of the functions. They stay valid, because the library is never closed.
        pub(super) struct Functions<H> { $(pub(super) $field: unsafe extern "C" fn($($parameter),*) -> c_int),* }

        impl<H> Functions<H> {
            /// # Safety
            /// `H` must be the type of the library's handles.
            pub(super) unsafe fn of(library: &super::library::Opened) -> Result<Self, crate::MpiError> {
                // SAFETY: the parameters are those of the MPI standard, and the caller guarantees the type of the
                // handles.
                Ok(Self { $($field: unsafe {
                    library.function::<unsafe extern "C" fn($($parameter),*) -> c_int>($symbol)
                }?),* })
            }
        }
    };
}

table! {
    init_thread: "MPI_Init_thread" (*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int),
    initialized: "MPI_Initialized" (*mut c_int),
    finalize: "MPI_Finalize" (),
    rank: "MPI_Comm_rank" (H, *mut c_int),
    size: "MPI_Comm_size" (H, *mut c_int),
    set_error_handler: "MPI_Comm_set_errhandler" (H, H),
    send: "MPI_Isend" (*const c_void, c_int, H, c_int, c_int, H, *mut H),
    receive: "MPI_Irecv" (*mut c_void, c_int, H, c_int, c_int, H, *mut H),
    type_of_blocks: "MPI_Type_create_hindexed" (c_int, *const c_int, *const isize, H, *mut H),
    commit_type: "MPI_Type_commit" (*mut H),
    free_type: "MPI_Type_free" (*mut H),
    test: "MPI_Test" (*mut H, *mut c_int, *mut Status),
    cancel: "MPI_Cancel" (*mut H),
    probe: "MPI_Iprobe" (c_int, c_int, H, *mut c_int, *mut Status),
    error_string: "MPI_Error_string" (c_int, *mut c_char, *mut c_int),
}

/// Constants whose values differ between the families. Handles are stored as their bits.
pub(super) struct Constants {
    pub(super) world: usize,
    pub(super) byte: usize,
    pub(super) errors_return: usize,
    pub(super) request_null: usize,
    pub(super) funneled: c_int,
}

/// The values in `mpi.h` of MPICH.
pub(super) const MPICH: Constants = Constants {
    world: 0x4400_0000,
    byte: 0x4c00_010d,
    errors_return: 0x5400_0001,
    request_null: 0x2c00_0000,
    funneled: 1,
};

/// The values in `mpi_abi.h`.
pub(super) const STANDARD: Constants =
    Constants { world: 0x101, byte: 0x247, errors_return: 0x143, request_null: 0x180, funneled: 1024 };

/// Returns the values of Open MPI: its `mpi.h` names variables of the library, whose addresses are the handles.
pub(super) fn open_mpi(
    address: impl Fn(&'static str) -> Result<usize, crate::MpiError>,
) -> Result<Constants, crate::MpiError> {
    Ok(Constants {
        world: address("ompi_mpi_comm_world")?,
        byte: address("ompi_mpi_byte")?,
        errors_return: address("ompi_mpi_errors_return")?,
        request_null: address("ompi_request_null")?,
        funneled: 1,
    })
}

/// The functions, by the kind of handle that they take.
pub(super) enum FunctionTable {
    Integers(Functions<c_int>),
    Pointers(Functions<*mut c_void>),
}

/// Evaluates an expression with the table of either kind.
macro_rules! with {
    ($functions:expr, $table:ident => $call:expr) => {
        match $functions {
            $crate::ffi::functions::FunctionTable::Integers($table) => $call,
            $crate::ffi::functions::FunctionTable::Pointers($table) => $call,
        }
    };
}
pub(super) use with;
