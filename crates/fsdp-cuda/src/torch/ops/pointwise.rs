//! Sums, copies, scaling and dropout, in the arithmetic type.

use fsdp_core::memory::{Buffer, Slice, SliceMut};
use fsdp_nn::backend::Operands;
use fsdp_nn::op::{Dropout, Pointwise};
use fsdp_nn::random;
use tch::{Kind, Tensor};

use super::size::int;
use crate::torch::error::{Done, Failure};
use crate::torch::memory::{Torch, arithmetic};
use crate::torch::storage::TorchStorage;

type In<'a, D> = Slice<'a, <D as fsdp_core::Memory>::Buffer>;
type Out<'a, D> = SliceMut<'a, <D as fsdp_core::Memory>::Buffer>;

impl<D: TorchStorage> Torch<D> {
    pub(in crate::torch) fn pointwise(
        &self,
        op: &Pointwise,
        operands: Operands<'_, '_, D::Buffer>,
    ) -> Result<(), Failure> {
        let keys = operands.batch.keys;
        match op {
            Pointwise::Add { .. } => {
                let ([a, b], [y], _) = operands.split();
                self.aten_add(a, b, y.slice)?;
            }
            Pointwise::CopyColumns { rows, columns, from, to } => {
                let ([x], [y], _) = operands.split();
                let sizes = [*rows, *columns].map(int);
                let x = self.view_strided(x, &sizes, &[int(*from), 1])?;
                let (add, mut y) = (y.accumulate, self.view_mut_strided(y.slice, &sizes, &[int(*to), 1])?);
                match add {
                    true => drop(y.f_add_(&x)?),
                    false => y.f_copy_(&x)?,
                }
            }
            Pointwise::Regroup { rows, groups, parts, width } => {
                let ([x], [y], _) = operands.split();
                let x = self.view(x, &[*rows, *groups, *parts, *width].map(int))?.f_transpose(1, 2)?;
                self.view_mut(y.slice, &[*rows, *parts, *groups, *width].map(int))?.f_copy_(&x)?;
            }
            Pointwise::Repeat { rows, width } => {
                let ([x], [y], _) = operands.split();
                let x = self.view(x, &[1, int(*width)])?;
                self.view_mut(y.slice, &[*rows, *width].map(int))?.f_copy_(&x)?;
            }
            Pointwise::Scale { len, factor } => {
                let ([], [x], _) = operands.split();
                let mut x = self.view_mut(x.slice, &[int(*len)])?;
                if matches!(x.f_kind()?, Kind::BFloat16 | Kind::Half) {
                    // For 16-bit floats, libtorch would round the factor too.
                    let scaled = x.f_to_kind(Kind::Float)?.f_mul_scalar(*factor)?;
                    x.f_copy_(&scaled)?;
                } else {
                    x.f_mul_scalar_(*factor).done()?;
                }
            }
            Pointwise::Dropout { p, .. } => {
                let ([], [x], _) = operands.split();
                self.aten_dropout(Dropout { p: *p, keys }, x.slice)?;
            }
            Pointwise::Accumulate { .. } | Pointwise::Copy { .. } | Pointwise::Convert { .. } => {
                unreachable!("every memory copies and adds")
            }
        }
        Ok(())
    }

    fn aten_add(&self, a: In<'_, D>, b: In<'_, D>, y: Out<'_, D>) -> Result<(), Failure> {
        let len = int(y.len);
        let (a, b) = (self.view(a, &[len])?, self.view(b, &[len])?);
        a.f_add_out(&*self.view_mut(y, &[len])?, &b).done()?;
        Ok(())
    }

    fn aten_dropout(&self, dropout: Dropout<'_>, x: Out<'_, D>) -> Result<(), Failure> {
        let kind = arithmetic(x.buffer.dtype())?;
        let len = x.len;
        let factors = factors(dropout, &vec![0; dropout.keys.len()], len / dropout.keys.len())?;
        let mut x = self.view_mut(x, &[int(len)])?;
        let factors = factors.f_to_kind(kind)?.f_to_device(x.device())?;
        x.f_mul_(&factors).done()?;
        Ok(())
    }
}

/// Dropout factors of runs of `run_len` elements, one after the other, on the host: 0 where dropped. Run `i` has the
/// elements from `firsts[i]` on of the sample whose key is `runs.keys[i]`.
pub(in crate::torch) fn factors(
    runs: Dropout<'_>,
    firsts: &[u64],
    run_len: usize,
) -> Result<Tensor, Failure> {
    let (threshold, kept) = (runs.threshold(), runs.kept());
    let mut words = vec![0; run_len];
    let mut factors = Vec::with_capacity(run_len * runs.keys.len());
    for (&key, &first) in runs.keys.iter().zip(firsts) {
        random::words(key, first, &mut words);
        factors.extend(words.iter().map(|&word| if word < threshold { 0.0 } else { kept }));
    }
    Ok(Tensor::f_from_slice::<f64>(&factors)?)
}
