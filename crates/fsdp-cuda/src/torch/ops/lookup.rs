//! Look-ups of table rows by id, and sums of gradients by id.

use fsdp_core::memory::{Buffer, Slice, SliceMut};
use fsdp_nn::backend::{Operands, Write};
use fsdp_nn::op::Lookup;
use tch::Tensor;

use super::experts::add_by_tree;
use super::size::int;
use crate::torch::error::{Done, Failure};
use crate::torch::memory::{Torch, arithmetic, kind};
use crate::torch::storage::TorchStorage;

impl<D: TorchStorage> Torch<D> {
    pub(in crate::torch) fn lookup(
        &self,
        op: &Lookup,
        operands: Operands<'_, '_, D::Buffer>,
    ) -> Result<(), Failure> {
        match op {
            Lookup::Embedding { width, .. } => {
                let ([ids, table], [y], _) = operands.split();
                self.aten_embedding(*width, ids, table, y.slice, y.accumulate)?;
            }
            Lookup::EmbeddingBackward { width, padding, .. } => {
                let ([ids, dy], [dtable], _) = operands.split();
                self.aten_embedding_backward((*width, *padding), ids, dy, dtable)?;
            }
            Lookup::SumRows { terms, width, .. } => {
                let ([ids, table], [y], _) = operands.split();
                self.aten_sum_rows([*terms, *width], ids, table, y.slice)?;
            }
            Lookup::Positions { .. } => unreachable!("every memory writes positions"),
        }
        Ok(())
    }

    fn aten_embedding(
        &self,
        width: usize,
        ids: Slice<'_, D::Buffer>,
        table: Slice<'_, D::Buffer>,
        y: SliceMut<'_, D::Buffer>,
        add: bool,
    ) -> Result<(), Failure> {
        let (rows, width) = (int(ids.len), int(width));
        let table = self.view(table, &[int(table.len) / width, width])?;
        let ids = self.view(ids, &[rows])?;
        let mut y = self.view_mut(y, &[rows, width])?;
        if add {
            y.f_add_(&table.f_index_select(0, &ids)?).done()?;
        } else {
            table.f_index_select_out(&y, 0, &ids).done()?;
        }
        Ok(())
    }

    fn aten_sum_rows(
        &self,
        [terms, width]: [usize; 2],
        ids: Slice<'_, D::Buffer>,
        table: Slice<'_, D::Buffer>,
        y: SliceMut<'_, D::Buffer>,
    ) -> Result<(), Failure> {
        let (rows, width) = (int(ids.len / terms), int(width));
        let table = self.view(table, &[int(table.len) / width, width])?;
        let zeros = Tensor::f_zeros([1, width], (table.f_kind()?, table.device()))?;
        // The first terms of all rows, then the second ones, and so on.
        let ids = self.view(ids, &[rows, int(terms)])?.f_tr()?.f_contiguous()?.f_view([-1])?;
        let parts = Tensor::f_cat(&[&*table, &zeros], 0)?.f_index_select(0, &ids)?;
        let sums = add_by_tree(parts, int(terms), rows * width)?;
        self.view_mut(y, &[rows, width])?.f_copy_(&sums.f_view([rows, width])?)?;
        Ok(())
    }

    fn aten_embedding_backward(
        &self,
        (width, padding): (usize, Option<usize>),
        ids: Slice<'_, D::Buffer>,
        dy: Slice<'_, D::Buffer>,
        dtable: Write<'_, D::Buffer>,
    ) -> Result<(), Failure> {
        let (rows, width) = (int(ids.len), int(width));
        let sizes = [int(dtable.slice.len) / width, width];
        let (arithmetic, slots) = (arithmetic(dy.buffer.dtype())?, kind(dtable.slice.buffer.dtype()));
        let ids = self.view(ids, &[rows])?;
        let dy = self.view(dy, &[rows, width])?;
        let mut target = self.target(dtable, &sizes)?;
        // A slot narrower than the arithmetic type takes only complete sums.
        if slots == arithmetic || slots == tch::Kind::Double {
            if !target.accumulate {
                target.slot.f_zero_().done()?;
            }
            return add_rows(&mut target.slot, padding, &ids, &dy.f_to_kind(slots)?);
        }
        let mut sums = Tensor::f_zeros(sizes, (arithmetic, dy.device()))?;
        add_rows(&mut sums, padding, &ids, &dy.f_to_kind(arithmetic)?)?;
        target.put(&sums)
    }
}

/// Adds row `i` of `dy` to row `ids[i]` of `table`. The row `padding` keeps its value, which costs less than leaving its
/// ids out: that would copy all of `dy`.
fn add_rows(table: &mut Tensor, padding: Option<usize>, ids: &Tensor, dy: &Tensor) -> Result<(), Failure> {
    let kept = padding.map(|row| table.f_narrow_copy(0, int(row), 1)).transpose()?;
    table.f_index_add_(0, ids, dy).done()?;
    if let (Some(row), Some(kept)) = (padding, kept) {
        table.f_narrow(0, int(row), 1)?.f_copy_(&kept)?;
    }
    Ok(())
}
