//! The shim over libtorch, and tensors that borrow memory of ours.
//!
//! What libtorch throws comes back as text. A [`View`] owns nothing: libtorch gets an address without a deleter, and
//! the borrow of the buffer keeps it valid.

use std::ffi::{CStr, CString, c_char, c_void};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use tch::{Device, Kind, TchError, Tensor};

/// A failure that libtorch reported, in its words.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct ShimError(String);

unsafe extern "C" {
    fn fsdp_torch_free_text(text: *mut c_char);
    fn fsdp_torch_set_deterministic(deterministic: bool) -> *mut c_char;
    fn fsdp_torch_multiplies_halves() -> bool;
    fn fsdp_torch_multiply_halves(
        lhs: *const c_void,
        rhs: *const c_void,
        out: *mut c_void,
        accumulate: bool,
    ) -> *mut c_char;
    fn fsdp_torch_load_cuda(library: *const c_char) -> *mut c_char;
    fn fsdp_torch_start_cuda() -> *mut c_char;
    fn fsdp_torch_enter_stream(device: i32, stream: *mut c_void) -> *mut c_char;
    fn fsdp_torch_allocator_bytes(device: i32, bytes: *mut i64) -> *mut c_char;
    fn fsdp_torch_reset_allocator_peaks(device: i32) -> *mut c_char;
    fn fsdp_torch_empty_cache(had_any: *mut bool) -> *mut c_char;
    fn fsdp_torch_on_memory_wanted(give_back: extern "C" fn(i32) -> bool) -> *mut c_char;
    fn fsdp_torch_choose_attention(
        q: *const c_void,
        k: *const c_void,
        v: *const c_void,
        kernel: *mut i32,
    ) -> *mut c_char;
    fn fsdp_torch_attention(
        kernel: i32,
        q: *const c_void,
        k: *const c_void,
        v: *const c_void,
        y: *mut c_void,
        lse: *mut c_void,
    ) -> *mut c_char;
    fn fsdp_torch_attention_backward(
        kernel: i32,
        dy: *const c_void,
        q: *const c_void,
        k: *const c_void,
        v: *const c_void,
        y: *const c_void,
        lse: *const c_void,
        dqkv: *mut c_void,
    ) -> *mut c_char;
    fn fsdp_torch_pack_heads(
        dq: *const c_void,
        dk: *const c_void,
        dv: *const c_void,
        dqkv: *mut c_void,
    ) -> *mut c_char;
}

/// The result of a call of the shim.
fn outcome(text: *mut c_char) -> Result<(), ShimError> {
    if text.is_null() {
        return Ok(());
    }
    // SAFETY: the shim returns null or a string that it ended with a zero and that is ours now.
    let owned = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    // SAFETY: allocated by the shim, freed once; `owned` is a copy.
    unsafe { fsdp_torch_free_text(text) };
    Err(ShimError(owned))
}

fn read(tensor: &Tensor) -> *const c_void {
    tensor.as_ptr().cast()
}

fn write(tensor: &mut Tensor) -> *mut c_void {
    tensor.as_ptr().cast_mut().cast()
}

/// A tensor over memory that somebody else owns.
pub(crate) struct View<'a> {
    tensor: Tensor,
    memory: PhantomData<&'a ()>,
}

impl Deref for View<'_> {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

impl DerefMut for View<'_> {
    fn deref_mut(&mut self) -> &mut Tensor {
        &mut self.tensor
    }
}

/// Where elements lie, borrowed for as long as `'a`. Made by storages from ranges of their buffers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    address: *const u8,
    elements: usize,
    kind: Kind,
    device: Device,
    memory: PhantomData<&'a ()>,
}

impl<'a> Place<'a> {
    /// `elements` elements at an address of the device.
    pub(crate) fn new(address: *const u8, elements: usize, kind: Kind, device: Device) -> Place<'a> {
        Place { address, elements, kind, device, memory: PhantomData }
    }

    /// A tensor of these sizes and strides over the place.
    ///
    /// # Errors
    /// [`TchError`] when libtorch rejects it.
    ///
    /// # Panics
    /// When the tensor would reach beyond the place: shapes are checked before.
    pub(crate) fn view(self, sizes: &[i64], strides: &[i64]) -> Result<View<'a>, TchError> {
        let is_empty = sizes.contains(&0);
        let last: i64 = sizes.iter().zip(strides).map(|(size, stride)| (size - 1) * stride).sum();
        assert!(sizes.len() == strides.len() && strides.iter().all(|&stride| stride >= 0));
        assert!(
            is_empty || usize::try_from(last).is_ok_and(|last| last < self.elements),
            "a view lies within its place"
        );
        if is_empty {
            // It has no address, by which libtorch would find the device.
            let tensor = Tensor::f_empty_strided(sizes, strides, (self.kind, self.device))?;
            return Ok(View { tensor, memory: PhantomData });
        }
        // SAFETY: every element that the sizes and strides reach is one of the `elements` at `address`, by the
        // assertions above. A storage of this crate (the trait is sealed) gave the address of a range of a buffer that
        // is borrowed for `'a`, exclusively where it will be written; the view can not outlive that borrow.
        let tensor = unsafe { Tensor::f_from_blob(self.address, sizes, strides, self.kind, self.device) }?;
        Ok(View { tensor, memory: PhantomData })
    }
}

/// Whether operations must be deterministic, in the whole process.
///
/// # Errors
/// [`ShimError`] from libtorch.
pub(crate) fn set_deterministic(deterministic: bool) -> Result<(), ShimError> {
    // SAFETY: takes no pointer.
    outcome(unsafe { fsdp_torch_set_deterministic(deterministic) })
}

/// Whether [`multiply_halves`] works on this processor.
pub(crate) fn multiplies_halves() -> bool {
    // SAFETY: takes no pointer; initialised once, by C++'s rules for local statics.
    unsafe { fsdp_torch_multiplies_halves() }
}

/// `out = lhs rhs`, or added: bf16 matrices of the host into a dense f32 one.
///
/// # Errors
/// [`ShimError`] from libtorch.
pub(crate) fn multiply_halves(
    lhs: &Tensor,
    rhs: &Tensor,
    out: &mut Tensor,
    accumulate: bool,
) -> Result<(), ShimError> {
    // SAFETY: pointers to live tensors, of which the shim checks types, sizes and layout before it reads their
    // elements; `out` is borrowed exclusively.
    outcome(unsafe { fsdp_torch_multiply_halves(read(lhs), read(rhs), write(out), accumulate) })
}

/// Loads libtorch's CUDA half.
///
/// # Errors
/// [`ShimError`]: it is not there, or not loadable.
pub(crate) fn load_cuda(library: &CString) -> Result<(), ShimError> {
    // SAFETY: a string with a zero at its end.
    outcome(unsafe { fsdp_torch_load_cuda(library.as_ptr()) })
}

/// Makes libtorch's CUDA half look for the driver and its devices.
///
/// # Errors
/// [`ShimError`]: it is not loaded, or there is no driver that it can use, or no device.
pub(crate) fn start_cuda() -> Result<(), ShimError> {
    // SAFETY: takes no pointer.
    outcome(unsafe { fsdp_torch_start_cuda() })
}

/// Makes a stream of a device the current one of this thread.
///
/// # Errors
/// [`ShimError`] from libtorch: its CUDA half is not loaded, or there is no driver.
pub(crate) fn enter_stream(device: i32, stream: *mut c_void) -> Result<(), ShimError> {
    // SAFETY: libtorch only keeps the handle; who owns the stream keeps it for as long as the memory that it belongs
    // to, whose thread this is.
    outcome(unsafe { fsdp_torch_enter_stream(device, stream) })
}

/// Bytes of libtorch's allocator on a device: allocated, reserved, and their peaks.
///
/// # Errors
/// [`ShimError`] from libtorch: its CUDA half is not loaded, or there is no driver.
pub(crate) fn allocator_bytes(device: i32) -> Result<[i64; 4], ShimError> {
    let mut bytes = [0; 4];
    // SAFETY: the shim writes four numbers.
    outcome(unsafe { fsdp_torch_allocator_bytes(device, bytes.as_mut_ptr()) })?;
    Ok(bytes)
}

/// Forgets the peaks of [`allocator_bytes`].
///
/// # Errors
/// [`ShimError`] when there is no such device.
pub(crate) fn reset_allocator_peaks(device: i32) -> Result<(), ShimError> {
    // SAFETY: no pointers.
    outcome(unsafe { fsdp_torch_reset_allocator_peaks(device) })
}

/// Makes libtorch's allocator give the driver what it caches of CUDA devices; returns whether there was anything.
///
/// # Errors
/// [`ShimError`] from libtorch: its CUDA half is not loaded.
pub(crate) fn empty_cache() -> Result<bool, ShimError> {
    let mut had_any = false;
    // SAFETY: a pointer to a flag that outlives the call.
    outcome(unsafe { fsdp_torch_empty_cache(&raw mut had_any) })?;
    Ok(had_any)
}

/// From now on libtorch's allocator calls `give_back` with the number of a CUDA device before it asks the driver for more
/// of it; it may give memory to the driver, and must not use libtorch.
///
/// # Errors
/// [`ShimError`]: libtorch's CUDA half is not loaded.
pub(crate) fn on_memory_wanted(give_back: extern "C" fn(i32) -> bool) -> Result<(), ShimError> {
    // SAFETY: a function that lives as long as the process, and can not unwind into C++.
    outcome(unsafe { fsdp_torch_on_memory_wanted(give_back) })
}

/// Which of CUDA's attention kernels; the numbers are libtorch's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum CudaAttention {
    /// FlashAttention: 16-bit floats.
    Flash = 1,
    /// The memory-efficient kernels of xFormers: f32 too, without grouped queries.
    Efficient = 2,
    /// cuDNN's: 16-bit floats.
    Cudnn = 3,
}

impl CudaAttention {
    /// Whether several query heads may read one head of keys and values.
    pub(crate) fn takes_groups(self) -> bool {
        self != CudaAttention::Efficient
    }
}

/// The kernel that PyTorch would choose for causal attention over these operands; `None` when none of them takes them.
///
/// # Errors
/// [`ShimError`] from libtorch.
pub(crate) fn choose_attention([q, k, v]: [&Tensor; 3]) -> Result<Option<CudaAttention>, ShimError> {
    let mut kernel = 0;
    // SAFETY: pointers to live tensors, and to a number that outlives the call.
    outcome(unsafe { fsdp_torch_choose_attention(read(q), read(k), read(v), &raw mut kernel) })?;
    let all = [CudaAttention::Flash, CudaAttention::Efficient, CudaAttention::Cudnn];
    Ok(all.into_iter().find(|known| *known as i32 == kernel))
}

/// Causal attention on a CUDA device: writes the output and the log-sum-exp.
///
/// # Errors
/// [`ShimError`] from libtorch.
pub(crate) fn attention(
    which: CudaAttention,
    [q, k, v]: [&Tensor; 3],
    y: &mut Tensor,
    lse: &mut Tensor,
) -> Result<(), ShimError> {
    // SAFETY: pointers to live tensors; the two that are written are borrowed exclusively. libtorch checks the rest.
    outcome(unsafe { fsdp_torch_attention(which as i32, read(q), read(k), read(v), write(y), write(lse)) })
}

/// The gradients of [`attention`], side by side in rows of (batch, positions, all heads, elements), as [`pack_heads`] puts
/// them.
///
/// # Errors
/// [`ShimError`] from libtorch.
pub(crate) fn attention_backward(
    which: CudaAttention,
    dy: &Tensor,
    [q, k, v]: [&Tensor; 3],
    [y, lse]: [&Tensor; 2],
    dqkv: &mut Tensor,
) -> Result<(), ShimError> {
    // SAFETY: pointers to live tensors; the one that is written is borrowed exclusively. libtorch checks the rest.
    outcome(unsafe {
        fsdp_torch_attention_backward(
            which as i32,
            read(dy),
            read(q),
            read(k),
            read(v),
            read(y),
            read(lse),
            write(dqkv),
        )
    })
}

/// Puts gradients of (batch, heads, positions, elements) side by side in rows. Those of keys and values may have as many
/// heads as those of queries: what each key head was repeated for is summed.
///
/// # Errors
/// [`ShimError`] from libtorch: sizes that do not fit.
pub(crate) fn pack_heads([dq, dk, dv]: [&Tensor; 3], dqkv: &mut Tensor) -> Result<(), ShimError> {
    // SAFETY: pointers to live tensors; the one that is written is borrowed exclusively. libtorch checks the sizes.
    outcome(unsafe { fsdp_torch_pack_heads(read(dq), read(dk), read(dv), write(dqkv)) })
}
