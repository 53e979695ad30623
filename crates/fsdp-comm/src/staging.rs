//! Access to the bytes of buffers: in place if they are in host memory, as copies otherwise.
//!
//! Bytes are little-endian in the buffer's own dtype. Host slices do not support bf16 and f16: such buffers are
//! transferred as `f32`, which is exact, and narrowed.

use std::ops::Range;

use bytemuck::Pod;
use fsdp_core::comm::{CollectiveKind, Completed, Fingerprint};
use fsdp_core::memory::{Buffer, HostSlice, HostSliceMut, Slice, SliceMut};
use fsdp_core::{DType, Error, Memory, Queue};
use half::{bf16, f16};

use crate::algorithms::Part;
use crate::sums;

#[cfg(target_endian = "big")]
compile_error!("elements are sent as they lie in memory, which is little-endian");

/// The buffers of a call, and their bytes while the call is in flight.
pub(crate) struct StagedBuffers<M: Memory> {
    buffers: Completed<M::Buffer>,
    call: Fingerprint,
    /// Copies of the data; `None` if all buffers are in host memory.
    copies: Option<Copies>,
}

struct Copies {
    moved: Wire,
    results: Wire,
}

impl<M: Memory> StagedBuffers<M> {
    /// Prepares the buffers of the rank at index `rank` of `size` for a call: its input, scaled for an average, and
    /// space for its output.
    pub(crate) fn new(
        memory: &M,
        call: Fingerprint,
        rank: usize,
        size: usize,
        mut buffers: Completed<M::Buffer>,
    ) -> Result<Self, Error> {
        // Other inputs are only read, then dropped; they may have other readers.
        let read_inputs =
            if call.kind.gives_up_inputs() { Vec::new() } else { std::mem::take(&mut buffers.inputs) };
        let is_in_host = in_host::<M>(&mut buffers.inputs)? && in_host::<M>(&mut buffers.outputs)?;
        let copies = if is_in_host { None } else { Some(Copies::new(memory, call, rank, &mut buffers)?) };
        let mut staged = Self { buffers, call, copies };
        let (mut moved, _) = staged.bytes();
        if let Some(factor) = call.kind.reduce_op().and_then(|op| op.factor(size)) {
            moved.iter_mut().for_each(|bytes| sums::scale(call.dtype, factor, bytes));
        }
        let own = match call.kind {
            CollectiveKind::AllToAll => moved,
            _ => parts(moved, size).swap_remove(rank),
        };
        for (input, bytes) in read_inputs.iter().zip(own) {
            read(memory, call.queue(), input, bytes)?;
        }
        Ok(staged)
    }

    /// The data that the algorithm works on, per buffer; and, if that is given up, where this rank's results go.
    pub(crate) fn bytes(&mut self) -> (Vec<&mut [u8]>, Vec<&mut [u8]>) {
        let host_bytes = |buffer| M::host_bytes_mut(buffer).and_then(Result::ok).expect("it was lent before");
        let Completed { outputs, inputs } = &mut self.buffers;
        match &mut self.copies {
            Some(copies) => (copies.moved.segments_mut(), copies.results.segments_mut()),
            None if self.call.kind.gives_up_inputs() => {
                (inputs.iter_mut().map(host_bytes).collect(), outputs.iter_mut().map(host_bytes).collect())
            }
            None => (outputs.iter_mut().map(host_bytes).collect(), Vec::new()),
        }
    }

    /// Returns the buffers with the results of the call, ready on `queue`.
    pub(crate) fn into_buffers(self, memory: &M, queue: Queue) -> Result<Completed<M::Buffer>, Error> {
        let mut buffers = self.buffers;
        let Some(Copies { moved, results }) = self.copies else {
            buffers.inputs.iter_mut().for_each(|input| memory.release(queue, input));
            return Ok(buffers);
        };
        let copies = if self.call.kind.gives_up_inputs() { results } else { moved };
        for (index, output) in buffers.outputs.iter_mut().enumerate() {
            write(memory, queue, copies.segment(index), output)?;
        }
        Ok(buffers)
    }
}

/// Whether all buffers are in host memory; if so, they have storage and can be written.
fn in_host<M: Memory>(buffers: &mut [M::Buffer]) -> Result<bool, Error> {
    for buffer in buffers {
        match M::host_bytes_mut(buffer) {
            Some(bytes) => drop(bytes?),
            None => return Ok(false),
        }
    }
    Ok(true)
}

impl Copies {
    fn new<M: Memory>(
        memory: &M,
        call: Fingerprint,
        rank: usize,
        buffers: &mut Completed<M::Buffer>,
    ) -> Result<Self, Error> {
        let (queue, outputs) = (call.queue(), &buffers.outputs);
        let zeroed = || Wire::new(outputs.iter().map(len_bytes));
        let empty = Wire::new(std::iter::empty());
        let copies = match call.kind {
            kind if kind.gives_up_inputs() => {
                Self { moved: Wire::read(memory, queue, &buffers.inputs)?, results: zeroed() }
            }
            CollectiveKind::AllGather | CollectiveKind::AllToAll => Self { moved: zeroed(), results: empty },
            CollectiveKind::Broadcast { root } if root as usize != rank => {
                Self { moved: zeroed(), results: empty }
            }
            _ => Self { moved: Wire::read(memory, queue, outputs)?, results: empty },
        };
        buffers.inputs.iter_mut().for_each(|input| memory.release(queue, input));
        Ok(copies)
    }
}

/// The bytes of several buffers, one after the other, each aligned for its elements.
pub(crate) struct Wire {
    /// Words of 8 bytes, so that elements of every dtype are aligned.
    words: Vec<u64>,
    segments: Vec<Range<usize>>,
}

impl Wire {
    /// Zeros for buffers of these lengths, in bytes.
    pub(crate) fn new(lens_bytes: impl Iterator<Item = usize>) -> Self {
        let mut end = 0;
        let place = |len: usize| {
            let start = end;
            end = (start + len).next_multiple_of(size_of::<u64>());
            start..start + len
        };
        let segments = lens_bytes.map(place).collect();
        Self { words: vec![0; end / size_of::<u64>()], segments }
    }

    /// Copies the contents of buffers, after all earlier work on `queue`.
    pub(crate) fn read<M: Memory>(memory: &M, queue: Queue, buffers: &[M::Buffer]) -> Result<Self, Error> {
        let mut wire = Self::new(buffers.iter().map(len_bytes));
        for (buffer, bytes) in buffers.iter().zip(wire.segments_mut()) {
            read(memory, queue, buffer, bytes)?;
        }
        Ok(wire)
    }

    /// The bytes of one buffer.
    pub(crate) fn segment(&self, index: usize) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[self.segments[index].clone()]
    }

    /// The bytes of each buffer.
    pub(crate) fn segments_mut(&mut self) -> Vec<&mut [u8]> {
        let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        let mut start = 0;
        let cut = |segment: &Range<usize>| {
            let _padding = rest.split_off_mut(..segment.start - start);
            start = segment.end;
            rest.split_off_mut(..segment.len()).expect("segments lie in the words")
        };
        self.segments.iter().map(cut).collect()
    }
}

/// Splits each buffer into `ranks` equal shares; returns the shares of each rank.
pub(crate) fn parts(buffers: Vec<&mut [u8]>, ranks: usize) -> Vec<Part<'_>> {
    let mut parts: Vec<Part<'_>> = (0..ranks).map(|_| Vec::new()).collect();
    for bytes in buffers {
        let share = bytes.len() / ranks;
        // An empty buffer has empty shares, which `chunks` would omit.
        let mut rest = bytes;
        for part in &mut parts {
            part.push(rest.split_off_mut(..share).expect("shares are equal"));
        }
    }
    parts
}

/// Length of a buffer's elements in bytes.
pub(crate) fn len_bytes(buffer: &impl Buffer) -> usize {
    buffer.len() * buffer.dtype().size_bytes()
}

/// Copies a whole buffer into `bytes`, which must be aligned for its elements, after all earlier work on `queue`.
pub(crate) fn read<M: Memory>(
    memory: &M,
    queue: Queue,
    buffer: &M::Buffer,
    bytes: &mut [u8],
) -> Result<(), Error> {
    if let Some(elements) = M::host_bytes(buffer) {
        bytes.copy_from_slice(elements?);
        return Ok(());
    }
    let src = Slice::whole(buffer);
    match buffer.dtype() {
        DType::F32 => memory.read(queue, src, HostSliceMut::F32(bytemuck::cast_slice_mut(bytes))),
        DType::F64 => memory.read(queue, src, HostSliceMut::F64(bytemuck::cast_slice_mut(bytes))),
        DType::U8 => memory.read(queue, src, HostSliceMut::U8(bytes)),
        DType::U32 => memory.read(queue, src, HostSliceMut::U32(bytemuck::cast_slice_mut(bytes))),
        DType::I64 => memory.read(queue, src, HostSliceMut::I64(bytemuck::cast_slice_mut(bytes))),
        DType::Bf16 => read_narrow(memory, queue, src, bytes, bf16::from_f32),
        DType::F16 => read_narrow(memory, queue, src, bytes, f16::from_f32),
    }
}

/// Reads elements that host slices do not support, as `f32`, and narrows them.
fn read_narrow<M: Memory, E: Pod>(
    memory: &M,
    queue: Queue,
    src: Slice<'_, M::Buffer>,
    bytes: &mut [u8],
    narrow: impl Fn(f32) -> E,
) -> Result<(), Error> {
    let mut host = vec![0f32; src.len];
    memory.read(queue, src, HostSliceMut::F32(&mut host))?;
    let elements: &mut [E] = bytemuck::cast_slice_mut(bytes);
    elements.iter_mut().zip(&host).for_each(|(element, &value)| *element = narrow(value));
    Ok(())
}

/// The inverse of [`read_narrow`].
fn write_narrow<M: Memory, E: Pod>(
    memory: &M,
    queue: Queue,
    bytes: &[u8],
    dst: SliceMut<'_, M::Buffer>,
    widen: impl Fn(E) -> f32,
) -> Result<(), Error> {
    let elements: &[E] = bytemuck::cast_slice(bytes);
    let host: Vec<f32> = elements.iter().map(|&element| widen(element)).collect();
    memory.write(queue, HostSlice::F32(&host), dst)
}

/// Fills a whole buffer from `bytes`, which must be aligned for its elements, on `queue`.
pub(crate) fn write<M: Memory>(
    memory: &M,
    queue: Queue,
    bytes: &[u8],
    buffer: &mut M::Buffer,
) -> Result<(), Error> {
    let dtype = buffer.dtype();
    let dst = SliceMut::whole(buffer);
    match dtype {
        DType::F32 => memory.write(queue, HostSlice::F32(bytemuck::cast_slice(bytes)), dst),
        DType::F64 => memory.write(queue, HostSlice::F64(bytemuck::cast_slice(bytes)), dst),
        DType::U8 => memory.write(queue, HostSlice::U8(bytes), dst),
        DType::U32 => memory.write(queue, HostSlice::U32(bytemuck::cast_slice(bytes)), dst),
        DType::I64 => memory.write(queue, HostSlice::I64(bytemuck::cast_slice(bytes)), dst),
        DType::Bf16 => write_narrow(memory, queue, bytes, dst, bf16::to_f32),
        DType::F16 => write_narrow(memory, queue, bytes, dst, f16::to_f32),
    }
}
