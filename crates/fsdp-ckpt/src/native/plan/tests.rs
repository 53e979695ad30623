//! Plans cover every row and byte once: all small worlds, checked by counting one by one.

use proptest::prelude::*;

use super::*;
use crate::safetensors::TensorType;

fn tensor(name: &str, dtype: TensorType, shape: &[usize], rows: Vec<Range<usize>>) -> SavedTensor {
    let spec = TensorSpec { name: name.to_owned(), dtype, shape: shape.to_vec() };
    SavedTensor { spec, path: vec![Key::Name(name.to_owned())], role: Role::Model, rows }
}

fn fault(world: usize, tensors: Vec<SavedTensor>) -> String {
    match SavePlan::new(world, tensors).unwrap_err() {
        Error::Unplanned { reason, .. } => reason,
        other => panic!("{other}"),
    }
}

#[test]
fn layout_lists_tensors_of_rank_with_dcp_metadata() {
    let tensors = vec![
        tensor("a", TensorType::Bf16, &[5, 2], even_rows(5, 4)),
        tensor("b", TensorType::F64, &[], even_rows(1, 4)),
        tensor("none", TensorType::F32, &[0, 3], even_rows(0, 4)),
    ];
    let plan = SavePlan::new(4, tensors).unwrap();
    let names = |rank: usize| {
        let layout = plan.lay_out(rank).unwrap();
        layout.header.entries().iter().map(|entry| entry.name().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(
        [names(0), names(1), names(2), names(3)],
        [vec!["b", "none", "a"], vec!["a"], vec!["a"], vec![]]
    );
    let layout = plan.lay_out(2).unwrap();
    assert_eq!(layout.name, "shard-00003-model-00001-of-00001.safetensors");
    let metadata = layout.header.metadata().unwrap();
    assert_eq!(metadata["DCP_SHARDING_INFO"], r#"{"a":{"saved_offsets":[4,0]}}"#);
    assert_eq!(metadata["format"], "pt");
    assert_eq!(layout.header.entries()[0].shape(), [1, 2]);
}

#[test]
fn chunks_are_entire_rows_up_to_limit() {
    let row = 3 << 20;
    let tensors = vec![
        tensor("a", TensorType::U8, &[12, row], even_rows(12, 1)),
        tensor("long", TensorType::U8, &[2, 40 << 20], even_rows(2, 1)),
        tensor("empty", TensorType::U8, &[7, 0], even_rows(7, 1)),
    ];
    let plan = SavePlan::new(1, tensors).unwrap();
    let layout = plan.lay_out(0).unwrap();
    let rows = |shard| layout.chunks(shard).map(|(rows, _)| rows).collect::<Vec<_>>();
    assert_eq!(rows(0), [0..5, 5..10, 10..12]);
    assert_eq!(rows(1), [0..1, 1..2]);
    assert_eq!(rows(2).as_slice(), std::slice::from_ref(&(0..7)));
    let bytes: Vec<_> = layout.chunks(0).map(|(_, bytes)| bytes.end - bytes.start).collect();
    assert_eq!(bytes, [5 * row as u64, 5 * row as u64, 2 * row as u64]);
}

#[test]
fn rejects_rows_not_saved_exactly_once() {
    let w = |rows: Vec<Range<usize>>| vec![tensor("w", TensorType::F32, &[8], rows)];
    assert_eq!(fault(2, w(vec![0..4, 5..8])), "rows 4..5 of tensor `w` are saved by no rank");
    assert_eq!(fault(2, w(vec![4..8, 0..3])), "rows 3..4 of tensor `w` are saved by no rank");
    assert_eq!(fault(2, w(vec![0..4, 0..0])), "rows 4..8 of tensor `w` are saved by no rank");
    let doubled = "rows 3..4 of tensor `w` are saved by ranks 0 and 1; replicas save nothing";
    assert_eq!(fault(2, w(vec![0..4, 3..8])), doubled);
    let outside = "rank 1 is to save rows 4..9 of tensor `w`, which has 8";
    assert_eq!(fault(2, w(vec![0..4, 4..9])), outside);
    let ranks = "tensor `w` lists rows for 2 ranks, but the world has 3";
    assert_eq!(fault(3, w(vec![0..4, 4..8])), ranks);
    // The rows need not be in the order of the ranks.
    SavePlan::new(3, w(vec![4..8, 2..2, 0..4])).unwrap();
}

#[test]
fn rejects_reserved_repeated_and_oversized_tensors() {
    let laid_out = |name: &str, shape: &[usize]| {
        SavePlan::new(1, vec![tensor(name, TensorType::F32, shape, even_rows(shape[0], 1))])
    };
    assert!(matches!(laid_out("__metadata__", &[1]), Err(Error::BadRequest { .. })));
    assert!(matches!(laid_out("w", &[usize::MAX, 8]), Err(Error::BadRequest { .. })));
    let w = || tensor("w", TensorType::F32, &[1], even_rows(1, 1));
    assert!(matches!(SavePlan::new(1, vec![w(), w()]), Err(Error::BadRequest { .. })));
}

#[test]
fn different_plans_have_different_digests() {
    let of = |name: &str, dtype, shape: &[usize], rows| {
        SavePlan::new(2, vec![tensor(name, dtype, shape, rows)]).unwrap().digest()
    };
    let digests = [
        of("w", TensorType::F32, &[4], vec![0..2, 2..4]),
        of("v", TensorType::F32, &[4], vec![0..2, 2..4]),
        of("w", TensorType::I32, &[4], vec![0..2, 2..4]),
        of("w", TensorType::F32, &[4, 1], vec![0..2, 2..4]),
        of("w", TensorType::F32, &[4], vec![0..3, 3..4]),
    ];
    for (index, digest) in digests.iter().enumerate() {
        assert_eq!(digests.iter().filter(|other| *other == digest).count(), 1, "{index}");
    }
}

proptest! {
    #[test]
    fn even_rows_cover_each_row_once_in_rank_order(count in 0usize..100, world in 1usize..40) {
        let rows = even_rows(count, world);
        prop_assert_eq!(rows.len(), world);
        let flat: Vec<usize> = rows.into_iter().flatten().collect();
        prop_assert_eq!(flat, (0..count).collect::<Vec<_>>());
    }

    /// Compares with the slow way: every row of every chunk of every rank, one by one.
    #[test]
    fn chunks_of_all_ranks_cover_every_data_byte_once(
        shapes in proptest::collection::vec((0usize..9, 0usize..4), 1..5), world in 1usize..6,
    ) {
        let tensors: Vec<_> = shapes.iter().enumerate().map(|(index, &(rows, columns))| {
            tensor(&format!("t{index}"), TensorType::F32, &[rows, columns], even_rows(rows, world))
        }).collect();
        let plan = SavePlan::new(world, tensors).unwrap();
        let mut rows_seen = vec![Vec::new(); shapes.len()];
        for rank in 0..world {
            let layout = plan.lay_out(rank).unwrap();
            let mut bytes_seen = Vec::new();
            for (index, shard) in layout.shards.iter().enumerate() {
                for (rows, bytes) in layout.chunks(index) {
                    rows_seen[shard.tensor].extend(rows);
                    bytes_seen.extend(bytes);
                }
            }
            bytes_seen.sort_unstable();
            let all: Vec<u64> = (layout.header.data_start()..layout.header.file_len()).collect();
            prop_assert_eq!(bytes_seen, all);
        }
        for (mut seen, (rows, _)) in rows_seen.into_iter().zip(shapes) {
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..rows).collect::<Vec<_>>());
        }
    }
}
