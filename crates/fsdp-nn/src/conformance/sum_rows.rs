//! Checks sums of rows by index, which bring the parts of a mixture's sums together.

use fsdp_core::memory::Arithmetic;
use fsdp_core::{DType, Queue};

use super::Subject;
use super::calls::Calls;
use super::kit::{Kit, Operand, numbers};
use crate::backend::Backend;
use crate::op::{Lookup, Op};

const TABLE_ROWS: usize = 7;
const WIDTH: usize = 5;

/// Checks that sums of rows have the bits of additions in the order of the tree, and that missing rows are zeros.
///
/// # Panics
/// If a bit differs.
pub fn rows_are_summed_by_the_tree<M: Backend>(subject: &Subject<'_, M>) {
    for (dtype, terms) in [DType::F32, DType::F64, DType::Bf16, DType::F16]
        .into_iter()
        .flat_map(|dtype| [(dtype, 1), (dtype, 2), (dtype, 8)])
    {
        let kit = Kit::new((subject.memory)(), dtype);
        let rows = 30;
        let table = numbers(1, TABLE_ROWS * WIDTH);
        // Some ids are that of no row.
        let ids: Vec<u32> = (0..rows * terms).map(|index| (index * 5 + index / 9) as u32 % 8).collect();
        let op = Op::Lookup(Lookup::SumRows { rows, terms, width: WIDTH, table_rows: TABLE_ROWS });
        let mut y = kit.result(rows * WIDTH);
        kit.memory.call(op, &[kit.ids(&ids).read(), kit.put(&table).read()], [y.write()]).unwrap();
        let row = |id: &u32| {
            let row = table.get(*id as usize * WIDTH..(*id as usize + 1) * WIDTH);
            kit.put(row.unwrap_or(&[0.0; WIDTH]))
        };
        let expected = ids.chunks(terms).flat_map(|ids| kit.get(&add(&kit, ids.iter().map(row).collect())));
        let bits = |values: Vec<f64>| values.into_iter().map(f64::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(kit.get(&y)), bits(expected.collect()), "{terms} terms, {dtype}");
    }
}

/// Adds parts in the order of the tree.
pub(crate) fn add<M: Backend>(kit: &Kit<M>, mut parts: Vec<Operand<M::Buffer>>) -> Operand<M::Buffer> {
    while parts.len() > 1 {
        let mut rest = parts.into_iter();
        parts = Vec::new();
        while let (Some(mut left), Some(right)) = (rest.next(), rest.next()) {
            kit.memory.compute(Queue::Compute, Arithmetic::Accumulate(right.read()), left.write()).unwrap();
            parts.push(left);
        }
    }
    parts.remove(0)
}
