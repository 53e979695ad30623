//! Buffers as bytes on the host, and back.
//!
//! Bytes are little-endian in the buffer's own dtype. Host slices have no bf16: such buffers are read as
//! `f32`, which is exact, and the lower halves, all zero, are left away.

use std::ops::Range;

use fsdp_core::memory::{Buffer, HostSlice, HostSliceMut, Slice, SliceMut};
use fsdp_core::{DType, Error, Memory, Queue};
use half::bf16;

use crate::algorithms::Part;

#[cfg(target_endian = "big")]
compile_error!("elements are sent as they lie in memory, which is little-endian");

/// The bytes of several buffers, one after the other, each aligned for its elements.
pub(crate) struct Wire {
    /// Words, so that elements of every dtype are aligned.
    words: Vec<u64>,
    segments: Vec<Range<usize>>,
}

impl Wire {
    /// Zeros for buffers of these lengths in bytes.
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

    /// The bytes of buffers, after all earlier work of `queue`.
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

    /// What belongs to each of `ranks` ranks: an equal share of each buffer.
    pub(crate) fn parts(&mut self, ranks: usize) -> Vec<Part<'_>> {
        let mut parts: Vec<Part<'_>> = (0..ranks).map(|_| Vec::new()).collect();
        for bytes in self.segments_mut() {
            let share = bytes.len() / ranks;
            // An empty buffer has empty shares, which `chunks` would leave out.
            let mut rest = bytes;
            for part in &mut parts {
                part.push(rest.split_off_mut(..share).expect("shares are equal"));
            }
        }
        parts
    }
}

/// Bytes of a buffer's elements.
pub(crate) fn len_bytes(buffer: &impl Buffer) -> usize {
    buffer.len() * buffer.dtype().size_bytes()
}

/// Writes the elements of a whole buffer to `bytes`, which are aligned for them, after all earlier work of `queue`.
pub(crate) fn read<M: Memory>(
    memory: &M,
    queue: Queue,
    buffer: &M::Buffer,
    bytes: &mut [u8],
) -> Result<(), Error> {
    let src = Slice::whole(buffer);
    match buffer.dtype() {
        DType::F32 => memory.read(queue, src, HostSliceMut::F32(bytemuck::cast_slice_mut(bytes))),
        DType::F64 => memory.read(queue, src, HostSliceMut::F64(bytemuck::cast_slice_mut(bytes))),
        DType::U8 => memory.read(queue, src, HostSliceMut::U8(bytes)),
        DType::I64 => memory.read(queue, src, HostSliceMut::I64(bytemuck::cast_slice_mut(bytes))),
        DType::Bf16 => {
            let mut host = vec![0f32; buffer.len()];
            memory.read(queue, src, HostSliceMut::F32(&mut host))?;
            let elements: &mut [bf16] = bytemuck::cast_slice_mut(bytes);
            elements.iter_mut().zip(&host).for_each(|(element, &value)| *element = bf16::from_f32(value));
            Ok(())
        }
        DType::U32 => panic!("token ids can not be read back, so they are not communicated"),
    }
}

/// Fills a whole buffer from bytes, which are aligned for its elements, on `queue`.
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
        DType::I64 => memory.write(queue, HostSlice::I64(bytemuck::cast_slice(bytes)), dst),
        DType::Bf16 => {
            let elements: &[bf16] = bytemuck::cast_slice(bytes);
            let host: Vec<f32> = elements.iter().map(|element| element.to_f32()).collect();
            memory.write(queue, HostSlice::F32(&host), dst)
        }
        DType::U32 => panic!("token ids can not be read back, so they are not communicated"),
    }
}
