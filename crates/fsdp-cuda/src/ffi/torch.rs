//! Operations of the shim over libtorch, and tensors that borrow this crate's memory.
//!
//! Exceptions of libtorch are returned as text, in the error type of its bindings. A [`View`] owns nothing: libtorch
//! gets an address without a deleter, and the borrow of the buffer keeps it valid.

use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use tch::{Device, Kind, TchError, Tensor};

/// The result of a shim function: null, or the text of its error.
pub(super) type ErrorText = *mut c_char;
/// A libtorch tensor to be read.
type In = *const c_void;
/// A libtorch tensor to be written.
type Out = *mut c_void;

unsafe extern "C" {
    fn fsdp_torch_free_text(text: ErrorText);
    fn fsdp_torch_multiplies_halves() -> bool;
    fn fsdp_torch_multiply_halves(lhs: In, rhs: In, out: Out, accumulate: bool) -> ErrorText;
    fn fsdp_torch_choose_attention(q: In, k: In, v: In, kernel: *mut i32) -> ErrorText;
    fn fsdp_torch_attention(kernel: i32, scale: f64, q: In, k: In, v: In, y: Out, lse: Out) -> ErrorText;
    fn fsdp_torch_attention_backward(
        kernel: i32,
        scale: f64,
        dy: In,
        q: In,
        k: In,
        v: In,
        y: In,
        lse: In,
        dqkv: Out,
    ) -> ErrorText;
    fn fsdp_torch_pack_heads(dq: In, dk: In, dv: In, dqkv: Out) -> ErrorText;
}

/// Converts the result of a shim call.
pub(super) fn check(text: ErrorText) -> Result<(), TchError> {
    if text.is_null() {
        return Ok(());
    }
    // SAFETY: the shim returns null or a zero-terminated string that this crate now owns.
    let owned = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    // SAFETY: allocated by the shim, freed once; `owned` is a copy.
    unsafe { fsdp_torch_free_text(text) };
    Err(TchError::Torch(owned))
}

fn read(tensor: &Tensor) -> In {
    tensor.as_ptr().cast()
}

fn write(tensor: &mut Tensor) -> Out {
    tensor.as_ptr().cast_mut().cast()
}

/// A tensor over borrowed memory.
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

/// Location of elements, borrowed for `'a`. Storages create it from ranges of their buffers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawSlice<'a> {
    address: *const u8,
    elements: usize,
    kind: Kind,
    device: Device,
    memory: PhantomData<&'a ()>,
}

impl<'a> RawSlice<'a> {
    /// `elements` elements at an address of the device.
    pub(crate) fn new(address: *const u8, elements: usize, kind: Kind, device: Device) -> RawSlice<'a> {
        RawSlice { address, elements, kind, device, memory: PhantomData }
    }

    /// A one-dimensional tensor of all elements.
    ///
    /// # Errors
    /// [`TchError`] if libtorch rejects it.
    pub(crate) fn flat(self) -> Result<View<'a>, TchError> {
        let len = i64::try_from(self.elements).expect("no buffer is that long");
        self.view(&[len], &[1])
    }

    /// A tensor with these sizes and strides over the elements.
    ///
    /// # Errors
    /// [`TchError`] if libtorch rejects it.
    ///
    /// # Panics
    /// Panics if the tensor would extend beyond the elements: callers check shapes first.
    pub(crate) fn view(self, sizes: &[i64], strides: &[i64]) -> Result<View<'a>, TchError> {
        let is_empty = sizes.contains(&0);
        let last: i64 = sizes.iter().zip(strides).map(|(size, stride)| (size - 1) * stride).sum();
        assert!(sizes.len() == strides.len() && strides.iter().all(|&stride| stride >= 0));
        assert!(
            is_empty || usize::try_from(last).is_ok_and(|last| last < self.elements),
            "a view lies within its place"
        );
        if is_empty {
            // It has no address from which libtorch could determine the device.
            let tensor = Tensor::f_empty_strided(sizes, strides, (self.kind, self.device))?;
            return Ok(View { tensor, memory: PhantomData });
        }
        // SAFETY: every element reachable by the sizes and strides is one of the `elements` at `address`, by the
        // assertions above. A storage of this crate (the trait is sealed) created the address from a range of a buffer
        // that is borrowed for `'a`, exclusively if it will be written; the view cannot outlive that borrow.
        let tensor = unsafe { Tensor::f_from_blob(self.address, sizes, strides, self.kind, self.device) }?;
        Ok(View { tensor, memory: PhantomData })
    }
}

/// Whether [`multiply_halves`] is supported on this CPU.
pub(crate) fn multiplies_halves() -> bool {
    // SAFETY: takes no pointer; the C++ local static is initialized once.
    unsafe { fsdp_torch_multiplies_halves() }
}

/// Computes `out = lhs rhs`, or `out += lhs rhs` if `accumulate`: bf16 matrices on the host, into a dense f32 matrix.
///
/// # Errors
/// [`TchError`] from libtorch.
pub(crate) fn multiply_halves(
    lhs: &Tensor,
    rhs: &Tensor,
    out: &mut Tensor,
    accumulate: bool,
) -> Result<(), TchError> {
    // SAFETY: the pointers are to live tensors; the shim checks their types, sizes and layouts before it reads
    // elements; `out` is borrowed exclusively.
    check(unsafe { fsdp_torch_multiply_halves(read(lhs), read(rhs), write(out), accumulate) })
}

/// CUDA's attention kernels; the numbers are libtorch's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum CudaAttention {
    /// FlashAttention; 16-bit floats only.
    Flash = 1,
    /// The memory-efficient kernels of xFormers; also f32, but no grouped queries.
    Efficient = 2,
    /// cuDNN's attention; 16-bit floats only.
    Cudnn = 3,
}

impl CudaAttention {
    /// Whether several query heads may share one head of keys and values.
    pub(crate) fn takes_groups(self) -> bool {
        self != CudaAttention::Efficient
    }
}

/// The kernel that PyTorch would choose for causal attention over these operands; `None` if none of them supports the
/// operands.
///
/// # Errors
/// [`TchError`] from libtorch.
pub(crate) fn choose_attention([q, k, v]: [&Tensor; 3]) -> Result<Option<CudaAttention>, TchError> {
    let mut kernel = 0;
    // SAFETY: the pointers are to live tensors, and to an integer that outlives the call.
    check(unsafe { fsdp_torch_choose_attention(read(q), read(k), read(v), &raw mut kernel) })?;
    let all = [CudaAttention::Flash, CudaAttention::Efficient, CudaAttention::Cudnn];
    Ok(all.into_iter().find(|known| *known as i32 == kernel))
}

/// Causal attention on a CUDA device, with scores multiplied by `scale`: writes the output and the log-sum-exp.
///
/// # Errors
/// [`TchError`] from libtorch.
pub(crate) fn attention(
    kernel: CudaAttention,
    scale: f64,
    [q, k, v]: [&Tensor; 3],
    y: &mut Tensor,
    lse: &mut Tensor,
) -> Result<(), TchError> {
    // SAFETY: the pointers are to live tensors; the two that are written are borrowed exclusively. libtorch checks the
    // rest.
    check(unsafe {
        fsdp_torch_attention(kernel as i32, scale, read(q), read(k), read(v), write(y), write(lse))
    })
}

/// Writes the gradients of [`attention`] as rows of (batch, positions, all heads, elements), in the layout of
/// [`pack_heads`].
///
/// # Errors
/// [`TchError`] from libtorch.
pub(crate) fn attention_backward(
    kernel: CudaAttention,
    scale: f64,
    dy: &Tensor,
    [q, k, v]: [&Tensor; 3],
    [y, lse]: [&Tensor; 2],
    dqkv: &mut Tensor,
) -> Result<(), TchError> {
    // SAFETY: the pointers are to live tensors; the one that is written is borrowed exclusively. libtorch checks the
    // rest.
    check(unsafe {
        fsdp_torch_attention_backward(
            kernel as i32,
            scale,
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

/// Concatenates gradients of (batch, heads, positions, elements) into rows. The gradients of keys and values may have
/// as many heads as the queries: then they are summed over the repetitions of each key head.
///
/// # Errors
/// [`TchError`] from libtorch if the sizes do not fit.
pub(crate) fn pack_heads([dq, dk, dv]: [&Tensor; 3], dqkv: &mut Tensor) -> Result<(), TchError> {
    // SAFETY: the pointers are to live tensors; the one that is written is borrowed exclusively. libtorch checks the
    // sizes.
    check(unsafe { fsdp_torch_pack_heads(read(dq), read(dk), read(dv), write(dqkv)) })
}
