//! Messages of several blocks of memory: MPI gathers and scatters them through a datatype made for each message.

use std::ffi::{c_int, c_void};
use std::ptr;

use super::functions::{Constants, Functions, Handle};

/// The direction of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Send,
    Receive,
}

/// The blocks of a message in the form that MPI takes: addresses, and lengths in bytes.
pub(super) struct Blocks {
    starts: Vec<isize>,
    lens: Vec<c_int>,
}

impl Blocks {
    pub(super) fn of(blocks: impl Iterator<Item = (*const u8, usize)>) -> Self {
        let len = |len| c_int::try_from(len).expect("messages are cut long before 2 GiB");
        let (starts, lens) =
            blocks.map(|(start, bytes)| (start.expose_provenance().cast_signed(), len(bytes))).unzip();
        Self { starts, lens }
    }
}

/// A failed call: the name of the function and its error code.
type CallFailure = (&'static str, c_int);

fn checked(call: &'static str, code: c_int) -> Result<(), CallFailure> {
    if code == 0 { Ok(()) } else { Err((call, code)) }
}

/// Starts to send or receive a message and stores the request's handle in `request`.
///
/// # Safety
/// The functions and constants must belong to one library, which this thread has initialized. Until the request has
/// ended, the blocks must be readable and not written (when sending), or writable and not otherwise used (when
/// receiving).
pub(super) unsafe fn begin<H: Handle>(
    f: &Functions<H>,
    constants: &Constants,
    direction: Direction,
    blocks: &Blocks,
    peer: c_int,
    tag: c_int,
    request: &mut usize,
) -> Result<(), CallFailure> {
    let byte = H::from_bits(constants.byte);
    if let ([start], [len]) = (&blocks.starts[..], &blocks.lens[..]) {
        let start = ptr::with_exposed_provenance_mut(start.cast_unsigned());
        // SAFETY: guaranteed by the caller.
        return unsafe { post(f, constants, direction, (start, *len, byte), peer, tag, request) };
    }
    let mut block_type = H::from_bits(constants.request_null);
    // SAFETY: both lists have the stated number of entries, and are read before the call returns.
    let code = unsafe {
        (f.type_of_blocks)(
            blocks.lens.len() as c_int,
            blocks.lens.as_ptr(),
            blocks.starts.as_ptr(),
            byte,
            &mut block_type,
        )
    };
    checked("MPI_Type_create_hindexed", code)?;
    // SAFETY: the type was just created.
    let committed = checked("MPI_Type_commit", unsafe { (f.commit_type)(&mut block_type) });
    // Addresses are absolute: they count from `MPI_BOTTOM`, which is null in all families.
    let buffer = (ptr::null_mut(), 1, block_type);
    // SAFETY: guaranteed by the caller; the type contains the addresses of its blocks.
    let posted =
        committed.and_then(|()| unsafe { post(f, constants, direction, buffer, peer, tag, request) });
    // SAFETY: the type was created above. MPI keeps it as long as the request needs it. The result does not matter: the
    // message is posted either way.
    unsafe { (f.free_type)(&mut block_type) };
    posted
}

/// # Safety
/// As for [`begin`].
unsafe fn post<H: Handle>(
    f: &Functions<H>,
    constants: &Constants,
    direction: Direction,
    (start, count, datatype): (*mut c_void, c_int, H),
    peer: c_int,
    tag: c_int,
    request: &mut usize,
) -> Result<(), CallFailure> {
    let (world, mut handle) = (H::from_bits(constants.world), H::from_bits(constants.request_null));
    let code = match direction {
        // SAFETY: guaranteed by the caller.
        Direction::Send => unsafe {
            (f.send)(start.cast_const(), count, datatype, peer, tag, world, &mut handle)
        },
        // SAFETY: guaranteed by the caller.
        Direction::Receive => unsafe { (f.receive)(start, count, datatype, peer, tag, world, &mut handle) },
    };
    *request = handle.bits();
    checked(if direction == Direction::Send { "MPI_Isend" } else { "MPI_Irecv" }, code)
}
