//! Ranges whose float type is known only at run time: conversions, and gradient targets.
//!
//! A gradient may have another dtype than the tensors it is computed from. Kernels compute it in the type of
//! arithmetic and pass it to a [`Target`], which converts and adds or overwrites; each element is rounded once per
//! call.

use half::{bf16, f16};

use super::element::{Element, Float};
use super::raw::vectorized;

/// Readable floats.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Floats<'a> {
    F32(&'a [f32]),
    F64(&'a [f64]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

/// Writable floats.
#[derive(Debug)]
pub(crate) enum FloatsMut<'a> {
    F32(&'a mut [f32]),
    F64(&'a mut [f64]),
    Bf16(&'a mut [bf16]),
    F16(&'a mut [f16]),
}

vectorized! {
    /// Converts element by element, between types with the same arithmetic.
    pub(crate) fn cast<S: Element, D: Element<Acc = S::Acc>>(src: &[S], dst: &mut [D]) {
        for (to, from) in dst.iter_mut().zip(src) {
            *to = D::store(from.load());
        }
    }
}

vectorized! {
    /// `dst += src`, between types with the same arithmetic.
    pub(crate) fn add<S: Element, D: Element<Acc = S::Acc>>(src: &[S], dst: &mut [D]) {
        for (to, from) in dst.iter_mut().zip(src) {
            *to = D::store(to.load() + from.load());
        }
    }
}

vectorized! {
    /// `elements *= factor`.
    pub(crate) fn multiply<E: Element>(elements: &mut [E], factor: E::Acc) {
        for element in elements {
            *element = E::store(element.load() * factor);
        }
    }
}

vectorized! {
    /// Converts element by element, through double precision.
    fn cast_any<S: Element, D: Element>(src: &[S], dst: &mut [D]) {
        for (to, from) in dst.iter_mut().zip(src) {
            *to = D::from_f64(from.to_f64());
        }
    }
}

vectorized! {
    /// `dst += src`, added in double precision.
    fn add_any<S: Element, D: Element>(src: &[S], dst: &mut [D]) {
        for (to, from) in dst.iter_mut().zip(src) {
            *to = D::from_f64(to.to_f64() + from.to_f64());
        }
    }
}

/// `dst = src`, or `dst += src` if `accumulate`; each element is rounded once.
///
/// # Panics
/// If the lengths differ.
pub(crate) fn transfer(src: Floats<'_>, dst: FloatsMut<'_>, accumulate: bool) {
    use {Floats as S, FloatsMut as D};
    assert_eq!(src.len(), dst.len(), "elements are converted one to one");
    macro_rules! via {
        ($cast:ident, $add:ident, $src:expr, $dst:expr) => {
            if accumulate { $add($src, $dst) } else { $cast($src, $dst) }
        };
    }
    match (src, dst) {
        (S::F32(src), D::F32(dst)) => via!(cast, add, src, dst),
        (S::F32(src), D::Bf16(dst)) => via!(cast, add, src, dst),
        (S::F32(src), D::F16(dst)) => via!(cast, add, src, dst),
        (S::Bf16(src), D::F32(dst)) => via!(cast, add, src, dst),
        (S::Bf16(src), D::Bf16(dst)) => via!(cast, add, src, dst),
        (S::Bf16(src), D::F16(dst)) => via!(cast, add, src, dst),
        (S::F16(src), D::F32(dst)) => via!(cast, add, src, dst),
        (S::F16(src), D::Bf16(dst)) => via!(cast, add, src, dst),
        (S::F16(src), D::F16(dst)) => via!(cast, add, src, dst),
        (S::F64(src), D::F64(dst)) => via!(cast, add, src, dst),
        (S::F64(src), D::F32(dst)) => via!(cast_any, add_any, src, dst),
        (S::F64(src), D::Bf16(dst)) => via!(cast_any, add_any, src, dst),
        (S::F64(src), D::F16(dst)) => via!(cast_any, add_any, src, dst),
        (S::F32(src), D::F64(dst)) => via!(cast_any, add_any, src, dst),
        (S::Bf16(src), D::F64(dst)) => via!(cast_any, add_any, src, dst),
        (S::F16(src), D::F64(dst)) => via!(cast_any, add_any, src, dst),
    }
}

impl<'a> Floats<'a> {
    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        match self {
            Floats::F32(slice) => slice.len(),
            Floats::F64(slice) => slice.len(),
            Floats::Bf16(slice) => slice.len(),
            Floats::F16(slice) => slice.len(),
        }
    }

    /// The sub-range `start .. start + len`.
    pub(crate) fn range(self, start: usize, len: usize) -> Floats<'a> {
        match self {
            Floats::F32(slice) => Floats::F32(&slice[start..start + len]),
            Floats::F64(slice) => Floats::F64(&slice[start..start + len]),
            Floats::Bf16(slice) => Floats::Bf16(&slice[start..start + len]),
            Floats::F16(slice) => Floats::F16(&slice[start..start + len]),
        }
    }
}

impl<'a> FloatsMut<'a> {
    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        match self {
            FloatsMut::F32(slice) => slice.len(),
            FloatsMut::F64(slice) => slice.len(),
            FloatsMut::Bf16(slice) => slice.len(),
            FloatsMut::F16(slice) => slice.len(),
        }
    }

    /// The sub-range `start .. start + len`.
    fn range(&mut self, start: usize, len: usize) -> FloatsMut<'_> {
        match self {
            FloatsMut::F32(slice) => FloatsMut::F32(&mut slice[start..start + len]),
            FloatsMut::F64(slice) => FloatsMut::F64(&mut slice[start..start + len]),
            FloatsMut::Bf16(slice) => FloatsMut::Bf16(&mut slice[start..start + len]),
            FloatsMut::F16(slice) => FloatsMut::F16(&mut slice[start..start + len]),
        }
    }

    /// Consecutive parts of `len` elements (the last one may be shorter).
    fn parts(self, len: usize) -> Vec<FloatsMut<'a>> {
        match self {
            FloatsMut::F32(slice) => slice.chunks_mut(len).map(FloatsMut::F32).collect(),
            FloatsMut::F64(slice) => slice.chunks_mut(len).map(FloatsMut::F64).collect(),
            FloatsMut::Bf16(slice) => slice.chunks_mut(len).map(FloatsMut::Bf16).collect(),
            FloatsMut::F16(slice) => slice.chunks_mut(len).map(FloatsMut::F16).collect(),
        }
    }
}

/// The destination of a gradient.
#[derive(Debug)]
pub(crate) struct Target<'a> {
    /// The range to write.
    pub(crate) data: FloatsMut<'a>,
    /// Whether to add to the current contents.
    pub(crate) accumulate: bool,
}

impl<'a> Target<'a> {
    /// Writes or adds `values` at `start`.
    pub(crate) fn put<A: Float>(&mut self, start: usize, values: &[A]) {
        transfer(A::floats(values), self.data.range(start, values.len()), self.accumulate);
    }

    /// Reborrows the target for a shorter lifetime.
    pub(crate) fn reborrow(&mut self) -> Target<'_> {
        let len = self.data.len();
        Target { data: self.data.range(0, len), accumulate: self.accumulate }
    }

    /// Consecutive parts of `len` elements (the last one may be shorter).
    pub(crate) fn parts(self, len: usize) -> impl Iterator<Item = Target<'a>> {
        let accumulate = self.accumulate;
        self.data.parts(len).into_iter().map(move |data| Target { data, accumulate })
    }

    /// Returns the range itself if it has the type of arithmetic.
    pub(crate) fn direct<A: Float>(&mut self) -> Option<&mut [A]> {
        A::from_floats_mut(&mut self.data)
    }

    /// Sets all elements to zero.
    pub(crate) fn clear(&mut self) {
        match &mut self.data {
            FloatsMut::F32(slice) => slice.fill(0.0),
            FloatsMut::F64(slice) => slice.fill(0.0),
            FloatsMut::Bf16(slice) => slice.fill(bf16::ZERO),
            FloatsMut::F16(slice) => slice.fill(f16::ZERO),
        }
    }
}
