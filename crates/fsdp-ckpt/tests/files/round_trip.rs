//! Exports of random models and dtypes, split at random among writers, are read back unchanged.

use std::{fs, thread};

use fsdp_ckpt::{
    export::ExportPlan,
    model_files::ModelReader,
    safetensors::{Metadata, SafetensorsReader, TensorSpec, TensorType},
};
use proptest::prelude::*;

use crate::{names_in, spec};

/// Returns bytes that differ by tensor and position.
fn content(tensor: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + tensor * 101 + i / 251) as u8).collect()
}

fn models() -> impl Strategy<Value = Vec<TensorSpec>> {
    let dtype = prop::sample::select(TensorType::all().collect::<Vec<_>>());
    // One value of a packed type does not fill a byte, so it cannot be stored.
    let tensor = dtype.prop_flat_map(|dtype| {
        let dimensions = usize::from(dtype.values() > 1)..4;
        (Just(dtype), prop::collection::vec(0_usize..6, dimensions))
    });
    prop::collection::vec(tensor, 0..7).prop_map(|tensors| {
        let numbered = tensors.into_iter().enumerate();
        numbered
            .map(|(number, (dtype, shape))| spec(&format!("layer.{number}\u{e9}"), dtype, &shape))
            .collect()
    })
}

/// Writer `rank` of `ranks` writes its part of the rows of every tensor.
fn write_part(
    plan: &ExportPlan,
    tensors: &[TensorSpec],
    rank: usize,
    ranks: usize,
) -> fsdp_ckpt::export::Receipt {
    let mut writer = plan.writer();
    for (number, tensor) in tensors.iter().enumerate() {
        let entry = plan.entry(&tensor.name).unwrap();
        let content = content(number, entry.len_bytes() as usize);
        let per_rank = entry.row_count().div_ceil(ranks);
        let first = (rank * per_rank).min(entry.row_count());
        let end = (first + per_rank).min(entry.row_count());
        let row = entry.row_bytes() as usize;
        writer.write_rows(&tensor.name, first, &content[first * row..end * row]).unwrap();
    }
    writer.finish().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn random_sharded_exports_read_back_unchanged(
        tensors in models(),
        ranks in 1_usize..5,
        shard_bytes_max in prop::sample::select(vec![1_u64, 40, 200, u64::MAX]),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let plan = ExportPlan::sharded(dir.path(), tensors.clone(), Metadata::new(), shard_bytes_max).unwrap();
        let export = plan.create().unwrap();
        let receipts: Vec<_> = thread::scope(|scope| {
            let writers: Vec<_> = (0..ranks).map(|rank| {
                let (plan, tensors) = (plan.clone(), &tensors);
                scope.spawn(move || write_part(&plan, tensors, rank, ranks))
            }).collect();
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        export.commit(receipts).unwrap();
        prop_assert!(names_in(dir.path()).iter().all(|name| !name.ends_with(".tmp")));

        let model = ModelReader::open(dir.path()).unwrap();
        model.check_tensors(tensors.iter().map(|tensor| (&tensor.name, &tensor.shape)), |_| false, |_| true).unwrap();
        for (number, tensor) in tensors.iter().enumerate() {
            let entry = model.entry(&tensor.name).unwrap();
            prop_assert_eq!(entry.dtype(), tensor.dtype);
            let mut out = vec![0; entry.len_bytes() as usize];
            model.read_rows(&tensor.name, 0..entry.row_count(), &mut out).unwrap();
            prop_assert_eq!(out, content(number, entry.len_bytes() as usize));
        }
    }

    #[test]
    fn exact_floats_round_trip_in_every_float_dtype(
        integers in prop::collection::vec(-256_i16..256, 1..200),
        cut in any::<prop::sample::Index>(),
    ) {
        // Integers up to 256 are exact in all four types.
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("floats.safetensors");
        let types = [TensorType::F64, TensorType::F32, TensorType::Bf16, TensorType::F16];
        let tensors = types.map(|dtype| spec(dtype.name(), dtype, &[integers.len()]));
        let plan = ExportPlan::new(&path, tensors.to_vec(), Metadata::new()).unwrap();
        let export = plan.create().unwrap();
        let cut = cut.index(integers.len());
        let double: Vec<f64> = integers.iter().map(|&i| f64::from(i)).collect();
        let mut writer = plan.writer();
        for dtype in types {
            writer.write_rows_f64(dtype.name(), cut, &double[cut..]).unwrap();
            writer.write_rows_f64(dtype.name(), 0, &double[..cut]).unwrap();
        }
        export.commit([writer.finish().unwrap()]).unwrap();

        let model = ModelReader::open(&path).unwrap();
        for dtype in types {
            let mut d = vec![0.0; integers.len()];
            model.read_rows_f64(dtype.name(), 0..integers.len(), &mut d).unwrap();
            prop_assert_eq!(&d, &double);
        }
    }
}

#[test]
fn chunked_conversion_matches_elementwise_conversion() {
    // Longer than one chunk, and not a multiple of its length.
    let values: Vec<f64> = (0..300_001).map(|i| f64::from((i as f32 - 150_000.0) * 0.37)).collect();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("long.safetensors");
    let plan =
        ExportPlan::new(&path, vec![spec("w", TensorType::Bf16, &[300_001])], Metadata::new()).unwrap();
    let export = plan.create().unwrap();
    let mut writer = plan.writer();
    writer.write_rows_f64("w", 0, &values).unwrap();
    export.commit([writer.finish().unwrap()]).unwrap();
    let model = ModelReader::open(&path).unwrap();
    let mut read = vec![0.0; values.len()];
    model.read_rows_f64("w", 0..values.len(), &mut read).unwrap();
    for (&value, &read) in values.iter().zip(&read) {
        assert_eq!(half::bf16::from_f32(value as f32).to_f64(), read);
    }
}

#[test]
fn export_is_byte_identical_for_any_writer_count() {
    let tensors = vec![spec("a", TensorType::F32, &[7, 3]), spec("b", TensorType::U8, &[5])];
    let file = |ranks: usize| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.safetensors");
        let plan = ExportPlan::new(&path, tensors.clone(), Metadata::new()).unwrap();
        let export = plan.create().unwrap();
        // The last rank writes first: the order does not matter.
        let receipts: Vec<_> =
            (0..ranks).rev().map(|rank| write_part(&plan, &tensors, rank, ranks)).collect();
        export.commit(receipts).unwrap();
        fs::read(path).unwrap()
    };
    let alone = file(1);
    assert!((2..9).all(|ranks| file(ranks) == alone));
}

#[test]
fn read_at_returns_bytes_at_offset() {
    let tensors = vec![spec("a", TensorType::U16, &[3]), spec("b", TensorType::U8, &[9])];
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.safetensors");
    let plan = ExportPlan::new(&path, tensors.clone(), Metadata::new()).unwrap();
    let export = plan.create().unwrap();
    export.commit([write_part(&plan, &tensors, 0, 1)]).unwrap();
    let file = SafetensorsReader::open(&path).unwrap();
    let mut out = [0; 4];
    file.read_at("b", 5, &mut out).unwrap();
    assert_eq!(out, content(1, 9)[5..]);
}
