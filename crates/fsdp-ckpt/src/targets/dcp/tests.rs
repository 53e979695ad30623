use super::*;
use crate::{
    checkpoint::Value,
    safetensors::TensorType,
    targets::assemble::{assemble, data_of, object, tensor},
};

fn selection() -> Selection {
    Selection {
        tensors: vec![
            tensor("model.w", TensorType::F32, &[7, 3]),
            tensor("model.scale", TensorType::Bf16, &[]),
            tensor("model.none", TensorType::F32, &[3, 0]),
        ],
        values: vec![object("extra.step", Value::Int(7))],
    }
}

fn rows_by_rank(row_count: u64, rank_count: usize) -> Vec<(String, u64, u64)> {
    let selection =
        Selection { tensors: vec![tensor("w", TensorType::U8, &[row_count, 2])], values: Vec::new() };
    let files = plan(&selection, rank_count).unwrap().files;
    let place = |file: &crate::transfer::PlannedFile| {
        let elements = file.places[0].elements.clone();
        (file.name.clone(), elements.start / 2, elements.end / 2)
    };
    files.iter().filter(|file| !file.places.is_empty()).map(place).collect()
}

#[test]
fn rows_are_split_like_torch_chunk() {
    let expected = |ends: &[u64]| -> Vec<(String, u64, u64)> {
        let starts = [0].iter().chain(ends);
        let ranges = starts.zip(ends).enumerate();
        ranges.map(|(rank, (&start, &end))| (format!("__{rank}_0.distcp"), start, end)).collect()
    };
    assert_eq!(rows_by_rank(37, 4), expected(&[10, 20, 30, 37]));
    assert_eq!(rows_by_rank(6, 4), expected(&[2, 4, 6]));
    assert_eq!(rows_by_rank(1, 4), expected(&[1]));
    assert_eq!(rows_by_rank(5, 1), expected(&[5]));
}

#[test]
fn every_rank_gets_file_and_first_holds_unsplittable_items() {
    let selection = selection();
    let files = assemble(plan(&selection, 3).unwrap(), &data_of(&selection));
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    assert_eq!(names, [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]);
    let archives = |name: &str| files[name].windows(4).filter(|bytes| bytes == b"PK\x05\x06").count();
    assert_eq!((archives("__0_0.distcp"), archives("__1_0.distcp"), archives("__2_0.distcp")), (4, 1, 1));
}

#[test]
fn tensor_data_is_aligned_to_64_bytes() {
    let plan = plan(&selection(), 3).unwrap();
    let offsets = plan.files.iter().flat_map(|file| file.places.iter().map(|place| place.offset));
    assert!(offsets.into_iter().all(|offset| offset % 64 == 0));
}

#[test]
fn rejects_zero_ranks_and_repeated_names() {
    let fault = |selection: &Selection, rank_count| match plan(selection, rank_count) {
        Err(Error::BadRequest { reason, .. }) => reason,
        _ => panic!("this must be refused"),
    };
    assert!(fault(&selection(), 0).contains("a checkpoint needs at least one rank"));
    let mut repeated = selection();
    repeated.values.push(object("model.w", Value::None));
    assert!(fault(&repeated, 2).contains("two tensors or values would be named `model.w`"));
}
